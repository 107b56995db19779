"""Notes on errors of a step: the shapes of its batch."""

import contextlib
from collections.abc import Iterator

import jax

from functrain.common import _tree
from functrain.common._types import PyTree

_MAX_LEAVES = 12


@contextlib.contextmanager
def error_notes(batch: PyTree) -> Iterator[None]:
    """Context manager: adds the shapes of a batch to an exception that a step raises for it."""
    try:
        yield
    except Exception as error:
        # An error passes through a loss, the loop and `bridge`, which all want to add them.
        notes = getattr(error, "__notes__", [])
        if not any(note.startswith("Shapes: ") for note in notes):
            # A note must never hide the error of the user's own code.
            with contextlib.suppress(Exception):
                error.add_note(f"Shapes: {_describe(batch)}.")
        raise


def _describe(batch: PyTree) -> str:
    """Returns the paths, dtypes and shapes of the first leaves of a batch."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    texts = [f"batch{jax.tree_util.keystr(p)} {_tree.spec(x)}" for p, x in leaves[:_MAX_LEAVES]]
    if len(leaves) > _MAX_LEAVES:
        texts.append(f"{len(leaves) - _MAX_LEAVES} more leaves")
    return ", ".join(texts) or "a batch without leaves"
