"""Arguments that are paths."""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

from functrain.common._checks import require

PathArg: TypeAlias = str | os.PathLike[str]


def path_text(path: Any, name: str = "path", advice: str = "") -> str:
    """Returns a path as the user gave it, as text, with a leading `~` expanded.

    URLs are returned as they are.

    Args:
      path: The argument.
      name: Its name, for errors.
      advice: What to do instead, as full sentences.

    Raises:
      TypeError: It is neither a text nor a `pathlib.Path`.
      ValueError: It is empty, or has a null character.

    Examples:
      >>> path_text("runs/first")
      'runs/first'
      >>> path_text("~/runs") == os.path.join(os.path.expanduser("~"), "runs")
      True
    """
    is_path = isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str)
    require(is_path, name, "a path, such as 'runs/first'", path, advice, error=TypeError)
    text: str = os.fspath(path)
    expected = "a path that is not empty and has no null character"
    require(text and "\0" not in text, name, expected, text, advice)
    return os.path.expanduser(text)


def absolute_path(path: Any, name: str = "path", advice: str = "") -> pathlib.Path:
    """Returns a path on this machine that stays the same if the working directory changes.

    The arguments and errors are those of `path_text`; a URL is a ValueError. Links are not
    followed.
    """
    text = path_text(path, name, advice)
    is_url, expected = re.match(r"\w\w+:/", text), "a path on this machine, such as 'runs/first'"
    require(not is_url, name, expected, text, "Only checkpoints can be written to URLs.")
    return pathlib.Path(text).absolute()


@contextlib.contextmanager
def errors_name_path(path: str) -> Iterator[None]:
    """Context manager: an OSError of a write, such as of a full disk, names the path."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename is None:
            raise OSError(error.errno, error.strerror, path) from None
        raise
