"""Results, errors and warnings of programs that run in two processes, by name."""

import json
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any


def report(name: str, work: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Prints the result of a function, or its error, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = work(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            result = f"{type(error).__name__}: {error}"
    texts = [str(warning.message) for warning in caught]
    sys.stdout.write(json.dumps({name: [result, texts]}) + "\n")
    sys.stdout.flush()


def reports(program: str, *arguments: str) -> list[dict[str, Any]]:
    """Runs a program of this folder in two processes; returns what each of them reported."""
    from tests.several_processes import outputs, start

    path = pathlib.Path(__file__).parent / program
    printed = outputs(start(2, [str(path)], *arguments))
    lines = ([json.loads(x) for x in own if x.startswith("{")] for own in printed)
    return [{name: x for line in own for name, x in line.items()} for own in lines]
