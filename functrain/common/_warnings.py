"""Warnings that show the user's source line."""

import sys
import warnings

# Frames of these modules are between a warning and the user's line: jax traces steps, Keras calls
# the callbacks of `bridge.fit`, and both loops enter context managers.
_INTERNAL_MODULES = ("functrain", "bridge", "jax", "keras", "contextlib")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns with the source line that called functrain or bridge, however deep the call is."""
    # From Python 3.12 on, `warnings.warn(skip_file_prefixes=...)` does this.
    frame, stacklevel = sys._getframe(1), 2
    while frame.f_back is not None and _is_internal(frame.f_globals.get("__name__", "")):
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(message, category, stacklevel=stacklevel)


def _is_internal(module: str) -> bool:
    return module.partition(".")[0] in _INTERNAL_MODULES
