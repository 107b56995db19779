"""Notes on errors of a step: the batch it was given, and what a traced value cannot do."""

import contextlib
from collections.abc import Iterator

import jax

from functrain.common import _tree
from functrain.common._types import PyTree

_SHAPES = "Shapes: "
_TRACED = (
    "A traced value has no truth value, so a Python `if`, `while`, `and` or `assert` cannot depend "
    "on it. Choose between arrays with jnp.where(condition, a, b), between computations with "
    "jax.lax.cond. To see values while debugging, run uncompiled: functrain.fit(..., jit=False); a "
    "Keras model after model.compile(..., run_eagerly=True)."
)


@contextlib.contextmanager
def error_notes(batch: PyTree) -> Iterator[None]:
    """Context manager: adds notes to an exception that a step raises for a batch."""
    try:
        yield
    except Exception as error:
        add_notes(error, _listed(batch))
        raise


def add_notes(error: Exception, batch: str) -> None:
    """Notes once what the batch was, and how to do without the truth of a traced value.

    Args:
      error: What a step raised.
      batch: The leaves of the batch, with their dtypes and shapes.
    """
    notes = getattr(error, "__notes__", [])
    if not any(note.startswith(_SHAPES) for note in notes):
        error.add_note(f"{_SHAPES}{batch}.")
    if isinstance(error, jax.errors.TracerBoolConversionError) and _TRACED not in notes:
        error.add_note(_TRACED)


def _listed(batch: PyTree, most: int = 12) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    named = [f"batch{jax.tree_util.keystr(path)} {_tree.spec(x)}" for path, x in leaves[:most]]
    more = [f"{len(leaves) - most} more leaves"] * (len(leaves) > most)
    return ", ".join([*named, *more]) or "a batch without leaves"
