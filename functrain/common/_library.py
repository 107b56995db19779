"""Libraries that not everybody has."""

import importlib
from typing import Any


def import_optional(name: str, to_install: str) -> Any:
    """Returns a module, or says how to install it.

    Raises:
      ImportError: It is not there.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(to_install) from error
