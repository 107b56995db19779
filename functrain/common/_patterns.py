"""Selection of leaves by patterns over their paths."""

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Sequence

from functrain.common._checks import require, require_no_problems


def matches(pattern: str, path: str) -> bool:
    """Returns True if a pattern matches a path.

    Args:
      pattern: As for files: `*`, `?` and `[...]` match within one part of a path, `**` matches any
        number of parts, including none.
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
    # `fnmatch` alone cannot do this: its `*` also matches slashes.
    if pattern[0] == "**":
        return any(_matches(pattern[1:], parts[i:]) for i in range(len(parts) + 1))
    first = bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0])
    return first and _matches(pattern[1:], parts[1:])


def as_patterns(name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """Returns an argument of one or more patterns as a tuple; raises TypeError for anything else.

    Args:
      name: The name of the argument.
      value: A pattern, or a sequence of them.

    Examples:
      >>> as_patterns("take", "params/**"), as_patterns("take", ["a", "b"])
      (('params/**',), ('a', 'b'))
    """
    patterns = (value,) if isinstance(value, str) else value
    is_valid = isinstance(patterns, Collection) and all(isinstance(x, str) for x in patterns)
    require(is_valid, name, "patterns, such as 'params/**'", value, error=TypeError)
    return tuple(patterns)


def any_matches(patterns: Iterable[str], path: str) -> bool:
    """Returns True if at least one of the patterns matches a path."""
    return any(matches(pattern, path) for pattern in patterns)


def require_match(name: str, pattern: str, paths: Collection[str]) -> None:
    """Raises ValueError unless a pattern matches at least one of the paths."""
    if not any(matches(pattern, path) for path in paths):
        raise ValueError(
            f"{name}: expected a pattern that matches a path, got {pattern!r}, which matches none. "
            f"Similar patterns: {', '.join(closest_patterns(pattern, paths))}"
        )


def closest_patterns(pattern: str, paths: Collection[str]) -> list[str]:
    """Returns suggestions for a pattern that matches no path: similar patterns, or paths.

    Examples:
      >>> paths = ["params/dense/kernel", "params/head/kernel", "step"]
      >>> closest_patterns("params/dens/**", paths)[0]
      'params/dense/**'
      >>> closest_patterns("params/dense", ["params/dense/kernel", "params/dense/bias"])[0]
      'params/dense/**'
    """
    candidates = set(paths)
    for path in paths:
        parts = path.split("/")
        candidates |= {"/".join([*parts[:n], "**"]) for n in range(1, len(parts))}
    close = difflib.get_close_matches(pattern, sorted(candidates), cutoff=0.3)
    return close or sorted(paths)[:3]


def first_match(patterns: Iterable[str], path: str) -> str | None:
    """Returns the first of the patterns that matches a path; None if none does."""
    return next((pattern for pattern in patterns if matches(pattern, path)), None)


def group_paths(
    name: str, patterns: Collection[str], paths: Collection[str]
) -> dict[str, list[str]]:
    """Returns the paths that each pattern is the first one to match.

    Raises ValueError if a pattern other than `**`, which takes what is left, has none.
    """
    groups = {
        pattern: [path for path in paths if first_match(patterns, path) == pattern]
        for pattern in patterns
    }
    # Most likely a misspelled path, or a pattern behind a wider one.
    unused = [pattern for pattern in patterns if not groups[pattern] and pattern != "**"]
    lines = [f"{x}: perhaps {', '.join(closest_patterns(x, paths))}" for x in unused]
    expected = "each pattern to be the first one that matches at least one leaf"
    advice = "The first matching pattern counts: put narrower patterns first."
    require_no_problems(name, lines, expected, advice)
    return groups
