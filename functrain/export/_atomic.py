"""Files that get their name only when they are complete."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import IO, TypeAlias

from functrain.checkpoint._files import Disk
from functrain.common._paths import absolute_path, errors_name_path

Create: TypeAlias = Callable[[str], AbstractContextManager[IO[bytes]]]


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
    with write_together() as create, create(target) as file:
        yield file


@contextlib.contextmanager
def write_together(mark: str | None = None) -> Iterator[Create]:
    """Yields a function that opens new files, which get their names, in their order, at the end.

    On an error all of them are removed, and the old ones stay. While some of them have their names
    and others have not, there is no file `mark`, without which nobody takes them for a whole.
    """
    temporaries: dict[str, str] = {}

    @contextlib.contextmanager
    def create(target: str) -> Iterator[IO[bytes]]:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        temporaries[target] = f"{target}.{os.urandom(4).hex()}.functrain-new"
        # On disk before it has its name: a power loss could leave the name without the bytes.
        with errors_name_path(target), Disk().create(temporaries[target]) as file:
            yield file

    try:
        yield create
        remove([mark] if mark else [])
        for target, temporary in temporaries.items():
            os.replace(temporary, target)
    finally:
        remove(temporaries.values())


def remove(files: Iterable[str]) -> None:
    """Removes files that are there."""
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            os.remove(file)
