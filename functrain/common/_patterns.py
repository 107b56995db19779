"""Leaves chosen by patterns over their paths."""

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Sequence


def matches(pattern: str, path: str) -> bool:
    """Whether a path is one that a pattern means.

    Args:
      pattern: As for files: `*`, `?` and `[...]` stand within one part of a path, `**` for any
        number of parts, none as well.
      path: Such as ``params/dense/kernel``.

    Examples:
      >>> [matches("params/**", path) for path in ("params", "params/dense/kernel", "step")]
      [True, True, False]
      >>> matches("**/kernel", "params/dense/kernel"), matches("*/kernel", "params/dense/kernel")
      (True, False)
    """
    return _matches(pattern.split("/"), path.split("/"))


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(pattern[1:], parts[i:]) for i in range(len(parts) + 1))
    first = bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0])
    return first and _matches(pattern[1:], parts[1:])


def any_matches(patterns: Iterable[str], path: str) -> bool:
    """Whether one of some patterns means a path."""
    return any(matches(pattern, path) for pattern in patterns)


def require_match(name: str, pattern: str, paths: Collection[str]) -> None:
    """Raises ValueError unless a pattern means at least one of some paths."""
    if not any(matches(pattern, path) for path in paths):
        raise ValueError(
            f"{name}: expected a pattern of paths, got {pattern!r}, which means none. Near it: "
            f"{', '.join(closest_patterns(pattern, paths))}"
        )


def closest_patterns(pattern: str, paths: Collection[str], most: int = 3) -> list[str]:
    """Returns what is closest to a pattern that means none of some paths: patterns, or paths.

    Examples:
      >>> paths = ["params/dense/kernel", "params/head/kernel", "step"]
      >>> closest_patterns("params/dens/**", paths)[0]
      'params/dense/**'
      >>> closest_patterns("params/dense", ["params/dense/kernel", "params/dense/bias"])
      ['params/dense/**']
    """
    if any(matches(f"{pattern}/**", path) for path in paths):
        return [f"{pattern}/**"]
    parts = {path: path.split("/") for path in paths}
    folders = {"/".join(x[:n]) for x in parts.values() for n in range(1, len(x))}
    wanted = pattern.removesuffix("/**")
    close = difflib.get_close_matches(wanted, sorted(folders | set(paths)), most, cutoff=0.3)
    return [f"{x}/**" if x in folders else x for x in close] or sorted(paths)[:most]
