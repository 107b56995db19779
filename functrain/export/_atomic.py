"""Files that get their name only when they are complete."""

import contextlib
import os
from collections.abc import Iterator
from typing import IO

from functrain.checkpoint._files import Disk
from functrain.common._paths import absolute_path, errors_name_path


def require_free(path: str | os.PathLike[str], *, overwrite: bool) -> str:
    """Returns the path to write to, with links followed.

    Raises FileExistsError if it is a directory or a device; or a file, unless `overwrite` is True.
    """
    advice = "The path comes first: export.params(path, params), export.predict(path, state, ...)."
    path = absolute_path(path, advice=advice)
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileExistsError(f"{path}: expected the path of a file, got a directory or a device.")
    if os.path.lexists(path) and not overwrite:
        raise FileExistsError(
            f"{path}: expected no such file, got one. Choose another path, or pass overwrite=True."
        )
    return os.path.realpath(path)


@contextlib.contextmanager
def atomic_write(target: str) -> Iterator[IO[bytes]]:
    """Yields a new file to write to, which gets its name at the end, or is removed on an error."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = f"{target}.{os.urandom(4).hex()}.functrain-new"
    try:
        # On disk before it has its name: a power loss could leave the name without the bytes.
        with errors_name_path(target), Disk().create(temporary) as file:
            yield file
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
