"""Notes on errors of a step: the shapes of its batch, and traced values."""

import contextlib
from collections.abc import Iterator

import jax

from functrain.common import _tree
from functrain.common._types import PyTree

_SHAPES_PREFIX = "Shapes: "
_TRACED_VALUE_ADVICE = (
    "A traced value has no truth value, so a Python `if`, `while`, `and` or `assert` cannot depend "
    "on it. Choose between arrays with jnp.where(condition, a, b), between computations with "
    "jax.lax.cond. To see values while debugging, run uncompiled: functrain.fit(..., jit=False); a "
    "Keras model after model.compile(..., run_eagerly=True); your own loop within "
    "jax.disable_jit()."
)


@contextlib.contextmanager
def error_notes(batch: PyTree) -> Iterator[None]:
    """Context manager: adds notes to an exception that a step raises for a batch."""
    try:
        yield
    except Exception as error:
        # Advice must never hide the error of the user's own code.
        with contextlib.suppress(Exception):
            add_notes(error, _describe(batch))
        raise


def add_notes(error: Exception, batch: str) -> None:
    """Adds the shapes of the batch to an error, and advice if a traced value was used as a bool.

    Args:
      error: The exception that a step raised.
      batch: The leaves of the batch, with their dtypes and shapes.
    """
    # Notes are nested: an error passes through a loss, the loop and `bridge`, which all add them.
    notes = getattr(error, "__notes__", [])
    if not any(note.startswith(_SHAPES_PREFIX) for note in notes):
        error.add_note(f"{_SHAPES_PREFIX}{batch}.")
    is_bool_of_tracer = isinstance(error, jax.errors.TracerBoolConversionError)
    if is_bool_of_tracer and _TRACED_VALUE_ADVICE not in notes:
        error.add_note(_TRACED_VALUE_ADVICE)


def _describe(batch: PyTree, max_leaves: int = 12) -> str:
    """Returns the paths, dtypes and shapes of the first leaves of a batch."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    texts = [f"batch{jax.tree_util.keystr(p)} {_tree.spec(x)}" for p, x in leaves[:max_leaves]]
    if len(leaves) > max_leaves:
        texts.append(f"{len(leaves) - max_leaves} more leaves")
    return ", ".join(texts) or "a batch without leaves"
