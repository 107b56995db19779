"""Files that get their name only when they are complete."""

import contextlib
import os
from collections.abc import Iterator


def require_free(path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Raises FileExistsError if a path is a directory; or a file, unless `overwrite` is True."""
    if os.path.isdir(path):
        raise FileExistsError(
            f"{path}: expected the path of a file, got a directory. Add the name of a file."
        )
    if os.path.lexists(path) and not overwrite:
        raise FileExistsError(
            f"{path}: expected no such file, got one. Choose another path, or pass overwrite=True."
        )


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields a temporary path to write to, which is renamed at the end, or removed on an error."""
    target = os.path.realpath(path)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = f"{target}.{os.urandom(4).hex()}.functrain-new"
    try:
        yield temporary
        # Otherwise a power loss could leave the name without the bytes.
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
