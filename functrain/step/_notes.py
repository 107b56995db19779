"""Notes on errors of a step: the shapes of its batch."""

import contextlib
from collections.abc import Iterator

from functrain.common import _tree
from functrain.common._types import PyTree

_START = "Shapes of the batch:"


@contextlib.contextmanager
def error_notes(batch: PyTree) -> Iterator[None]:
    """Context manager: adds the shapes of a batch to an exception that a step raises for it."""
    try:
        yield
    except Exception as error:
        # An error passes through a loss, the loop and `bridge`, which all want to add them.
        notes = getattr(error, "__notes__", [])
        if not any(note.startswith(_START) for note in notes):
            # A note must never hide the error of the user's own code.
            with contextlib.suppress(Exception):
                error.add_note(f"{_START}\n{_tree.format_leaves(batch) or '  no arrays'}")
        raise
