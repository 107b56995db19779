"""One distribution, two packages: they must come from the same one."""

import pathlib
from types import ModuleType

__version__ = "0.2.0"


def require_same(functrain: ModuleType) -> None:
    """Refuses a `functrain` of another version than this `bridge`.

    `bridge` is a common name, and a stale copy of either package on `sys.path` would otherwise
    fail much later, somewhere else.

    Args:
      functrain: The imported package.

    Raises:
      ImportError: The versions differ; the message has both, and where each was imported from.

    Examples:
      >>> import functrain
      >>> require_same(functrain)
    """
    found = getattr(functrain, "__version__", None)
    if found != __version__:
        raise ImportError(
            "bridge and functrain are two packages of one distribution and must be of one "
            "version, got\n"
            f"  bridge {__version__} from {pathlib.Path(__file__).parent}\n"
            f"  functrain {found} from {getattr(functrain, '__file__', None)}\n"
            "One of them is stale, or is another package of that name. Install both again: "
            "pip install --force-reinstall --no-deps functrain"
        )
