"""Files that appear under their name when they are whole."""

import contextlib
import os
from collections.abc import Iterator


def require_free(path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuses a path where something stands that is not to be replaced.

    Raises:
      FileExistsError: There is a directory; or a file, and `overwrite` is False.
    """
    if os.path.isdir(path):
        raise FileExistsError(f"{path}: expected the path of a file, got a directory.")
    if os.path.lexists(path) and not overwrite:
        raise FileExistsError(
            f"{path}: expected no such file, got one. Choose another path, or pass overwrite=True."
        )


@contextlib.contextmanager
def written(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields where to write a file, which gets its name at the end; an error leaves nothing."""
    target = os.path.realpath(path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    new = f"{target}.{os.urandom(4).hex()}.functrain-new"
    try:
        yield new
        with open(new, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(new, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(new)
