"""Compares the training time of functrain with that of its alternatives.

The options and the results are described in benchmarks/README.md.

python -m benchmarks --quick
python -m benchmarks --workloads mnist-convnet --ways functrain-fit,keras-fit --rounds 5
python -m benchmarks --python torch=.venv-torch/bin/python
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console

# The workloads import Keras, which reads the backend when it is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")

from benchmarks import report
from benchmarks.driver import Backends, measure
from benchmarks.ways import WAYS, Way
from benchmarks.workloads import WORKLOADS, Workload

BIG_ROUNDS = 3


class Suite(NamedTuple):
    """The ways and workloads that a command can measure.

    Attributes:
      name: The name of the command.
      description: The description of the command for `--help`.
      ways: The ways, by name.
      workloads: The workloads that are measured by default, by name.
      results: The name of its files, without suffix.
    """

    name: str
    description: str | None
    ways: Mapping[str, Way]
    workloads: Mapping[str, Workload]
    results: str


TRAINING = Suite("benchmarks", __doc__, WAYS, WORKLOADS, "results")
# The kernels of different ways round differently, so the losses of equal work may differ, but only
# little in a first epoch. Larger relative differences than this one are reported.
DISAGREE = 0.02


def main(arguments: Sequence[str] | None = None, suite: Suite | None = None) -> int:
    """Runs the command line; returns the exit status."""
    suite = suite or TRAINING
    args = parse(arguments, suite)
    console = report.console()
    args.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {**report.about(), "versions": {}}
    results |= {"rounds": args.rounds, "results": []}
    with Backends(args.pythons) as backends, console.status("starting") as status:
        for workload in args.workloads:
            ways = [way for way in args.ways if way.can(workload)]
            rounds = min(args.rounds, BIG_ROUNDS) if workload.big else args.rounds
            measured = measure(
                backends, workload, ways, rounds=rounds, steps=args.steps, say=status.update
            )
            results["results"].append(row(workload, args.steps, measured))
            results["versions"] = backends.versions
            console.print(report.table(results["results"][-1]))
            warn(console, results["results"][-1])
            # The files are written after each workload, so an interrupt loses only one of them.
            write(results, args.output / suite.results)
    console.print(f"wrote {suite.results}.json, .md and .png to {args.output}")
    return int(any(way["error"] for r in results["results"] for way in r["ways"].values()))


def row(workload: Workload, steps: int | None, measured: dict[str, Any]) -> dict[str, Any]:
    """Returns one workload's part of results.json."""
    ways = {n: {"median": m.median, **dataclasses.asdict(m)} for n, m in measured.items()}
    header = {"workload": workload.name, "batch": workload.batch}
    return {**header, "steps": steps or workload.steps, "ways": ways}


def warn(console: Console, result: dict[str, Any]) -> None:
    """Prints a warning for each way whose loss differs from the reference."""
    for name, difference in report.disagreement(result["ways"]).items():
        if not difference <= DISAGREE:
            other = report.reference(result["ways"])
            console.print(f"{name}: mean loss {difference:.1%} off {other}'s. {why(result)}")


def why(result: dict[str, Any]) -> str:
    """Returns a likely reason why the mean losses of a workload differ."""
    if WORKLOADS[result["workload"]].sensitive and result["steps"] > 1:
        return (
            "That may be rounding: changing the inputs by one rounding moved it by up to 5 % after "
            "equal first steps. --steps 1 compares the loss of the first step."
        )
    return "Is it equal work?"


def write(results: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the results as JSON, as a table and as a picture, to the path with a suffix each."""
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(report.markdown(results))
    report.draw(results, path.with_suffix(".png"))


def parse(arguments: Sequence[str] | None, suite: Suite = TRAINING) -> argparse.Namespace:
    """Parses the command line, and replaces names by workloads and ways."""
    ways = "\n".join(f"  {way.name:27}  {way.label}" for way in suite.ways.values())
    parser = report.parser(suite.name, suite.description, f"ways:\n{ways}")
    parser.add_argument("--quick", action="store_true", help="small workloads, 3 rounds")
    parser.add_argument("--workloads", help=f"comma-separated, of {', '.join(WORKLOADS)}")
    parser.add_argument("--ways", help="comma-separated; see below")
    parser.add_argument("--rounds", type=int, help="default 5; 3 with --quick and for big nets")
    parser.add_argument("--steps", type=int, help="per call, in place of each workload's own")
    report.add_output(parser)
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ENVIRONMENT=PATH",
        help="the interpreter of another environment: tensorflow, torch or keras-head",
    )
    args = parser.parse_args(arguments)
    args.pythons = {"jax": sys.executable, **dict(item.split("=", 1) for item in args.python)}
    args.rounds = args.rounds or (3 if args.quick else 5)
    small = [name for name, workload in suite.workloads.items() if workload.quick]
    default = small if args.quick else list(suite.workloads)
    args.workloads = _chosen(parser, WORKLOADS, args.workloads, default)
    runnable = [name for name, way in suite.ways.items() if way.environment in args.pythons]
    args.ways = _chosen(parser, suite.ways, args.ways, runnable)
    _require_pythons(parser, args.ways, args.pythons)
    return args


def _chosen(
    parser: argparse.ArgumentParser,
    choices: Mapping[str, Any],
    names: str | None,
    default: list[str],
) -> list[Any]:
    chosen_names = names.split(",") if names else default
    unknown = sorted(set(chosen_names) - set(choices))
    if unknown:
        parser.error(f"expected names out of {', '.join(choices)}; got {', '.join(unknown)}")
    return [choices[name] for name in chosen_names]


def _require_pythons(
    parser: argparse.ArgumentParser, ways: list[Way], pythons: dict[str, str]
) -> None:
    missing = {way.environment for way in ways} - set(pythons)
    if missing:
        parser.error(f"name the interpreter of {', '.join(missing)} with --python ENVIRONMENT=PATH")


if __name__ == "__main__":
    sys.exit(main())
