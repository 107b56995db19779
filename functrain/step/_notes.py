"""Notes on errors of a step: the shapes of its batch, or of its data."""

import contextlib
from collections.abc import Iterator

from functrain.common import _tree
from functrain.common._types import PyTree

_START = "Shapes of the"


@contextlib.contextmanager
def error_notes(arrays: PyTree, name: str = "batch") -> Iterator[None]:
    """Context manager: adds the shapes of a batch, or of all data, to an exception for it."""
    try:
        yield
    except Exception as error:
        # An error passes through a loss, the loop and `bridge`, which all want to add them.
        notes = getattr(error, "__notes__", [])
        if not any(note.startswith(_START) for note in notes):
            # A note must never hide the error of the user's own code.
            with contextlib.suppress(Exception):
                shapes = _tree.format_leaves(arrays) or "  no arrays"
                error.add_note(f"{_START} {name}:\n{shapes}")
        raise
