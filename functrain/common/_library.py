"""Optional dependencies."""

import importlib
from typing import Any


def import_optional(name: str, install_hint: str) -> Any:
    """Returns an imported module.

    Raises:
      ImportError: It is not installed; the message is `install_hint`.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(install_hint) from error
