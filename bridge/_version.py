"""The version, and the check that functrain has the same one."""

import pathlib
from types import ModuleType

__version__ = "0.4.0.dev0"


def require_same(functrain: ModuleType) -> None:
    """Raises ImportError if `functrain` has another version than this `bridge`.

    `bridge` is a common name, and a stale copy of either package on `sys.path` would otherwise
    fail much later, somewhere else.

    Args:
      functrain: The imported package.

    Raises:
      ImportError: The versions differ. The message has both, and where each was imported from.

    Examples:
      >>> import functrain
      >>> require_same(functrain)
    """
    # An empty namespace package named functrain has no version.
    version = getattr(functrain, "__version__", None)
    if version == __version__:
        return
    raise ImportError(
        "expected bridge and functrain of one version, since one distribution contains both, got\n"
        f"  bridge {__version__} from {pathlib.Path(__file__).parent}\n"
        f"  functrain {version} from {getattr(functrain, '__file__', None)}\n"
        "One of them is stale, or is another package of that name. Install both again: "
        "pip install --force-reinstall --no-deps functrain"
    )
