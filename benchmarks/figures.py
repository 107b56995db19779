"""Compares the figures of the pages with the results of the benchmarks.

python -m benchmarks.figures           # lists the rows and sentences that must change
python -m benchmarks.figures --write   # changes them in the pages

A table that follows a line such as `<!-- figures: results.json -->` consists of figures of that
file in `benchmarks/results`. Its header names the ways, and its first column the workloads. If the
file consists of tables, as that of `python -m benchmarks.population` does, every number must be in
one of them. The sentences are listed in `SENTENCES`. A sentence without numbers, such as one that
names the fastest way, is for the author to check. The command prints the fastest ways for that.
"""

import datetime
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.report import RESULTS, Results, cell, milliseconds, parser

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ("README.md", "docs/performance.md", "docs/comparison.md")
MARK = re.compile(r"<!-- figures: (\S+) -->")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
ROW = re.compile(r"\| (\S+) \((\d+)\) \|")
CONVOLUTIONS = (
    *("mnist-convnet", "residual", "separable", "dcgan"),
    *("mobilenet-v2", "efficientnet-b0", "convnext-tiny", "resnet50"),
)
# Networks of dense layers and embeddings, in which little is rewritten.
DENSE = ("digits-mlp", "mnist-mlp", "tabular-mlp", "tabular-embeddings", "bag-of-words")

# The ways of a workload, by name.
Ways = dict[str, Any]


class Sentence(NamedTuple):
    """A part of a sentence whose numbers are figures of the benchmarks.

    Attributes:
      pages: The pages that have it.
      text: The text, with `{}` for each number.
      numbers: Returns the numbers as they are written, from the ways of each workload in
        `results.json`.
    """

    pages: tuple[str, ...]
    text: str
    numbers: Callable[[dict[str, Ways]], Sequence[str]]


class Finding(NamedTuple):
    """A place where a page differs from the results. `new` is None if the author must write it."""

    page: str
    old: str
    new: str | None


def times(ways: Ways, slower: str, faster: str) -> float:
    """Returns how many times as long one way takes as another: the median of the rounds' ratios."""
    rounds = zip(ways[slower]["seconds"], ways[faster]["seconds"], strict=True)
    return statistics.median(a / b for a, b in rounds)


def _convnet(results: dict[str, Ways]) -> list[str]:
    ways = results["mnist-convnet"]
    functrain_and_keras = ("bridge-fit", "keras-fit", "keras-fit@tensorflow")
    others = ("keras-fit-32@tensorflow", "torch-eager")
    return [f"{1e3 * ways[name]['median']:.1f}" for name in functrain_and_keras + others]


def _beside_scan(results: dict[str, Ways]) -> list[str]:
    """Returns the percents that the slowest dense network takes beyond a scan, fused and in fit."""
    return [
        f"{100 * (max(times(results[name], way, 'scan') for name in DENSE) - 1):.0f}"
        for way in ("functrain-fused", "functrain-fit")
    ]


def _slow_fits(results: dict[str, Ways]) -> list[str]:
    names = ("digits-mlp", "mnist-mlp")
    return [f"{times(results[name], 'functrain-fit', 'scan'):.2f}" for name in names]


def _slow_scans(results: dict[str, Ways]) -> list[str]:
    ratios = [times(results[name], "scan", "functrain-fused") for name in CONVOLUTIONS]
    return [f"{min(ratios):.0f}", f"{max(ratios):.0f}"]


def _with_bars(results: dict[str, Ways]) -> list[str]:
    names = ("digits-mlp", "mnist-mlp", "mnist-convnet")
    return [f"{times(results[name], 'keras-fit-bar', 'bridge-fit-bar'):.1f}" for name in names]


def _beside_fused(results: dict[str, Ways], name: str, *others: str) -> list[str]:
    return [f"{times(results[name], way, 'functrain-fused'):.2f}" for way in others]


README = ("README.md",)
PERFORMANCE = ("docs/performance.md",)
SENTENCES = [
    Sentence(
        README,
        "small MNIST convnet takes {} ms in `bridge.fit`, {} ms in Keras's `fit` on JAX, {} ms on "
        "TensorFlow ({} ms with `steps_per_execution=32`) and {} ms in plain PyTorch",
        _convnet,
    ),
    Sentence(PERFORMANCE, "it takes {} to {} times as long as functrain-fused", _slow_scans),
    Sentence(
        PERFORMANCE,
        "The transformer reaches {} times the speed of `jit-loop` and {} times that of `scan`",
        lambda results: _beside_fused(results, "transformer", "jit-loop", "scan"),
    ),
    Sentence(
        PERFORMANCE,
        "The fused program takes up to {} % longer than `scan`, and `fit`, which also cuts batches "
        "and records metrics, up to {} % longer.",
        _beside_scan,
    ),
    Sentence(
        PERFORMANCE,
        "`bridge.fit` was {} times as fast as Keras's `fit` for the digits MLP, {} times for the "
        "MNIST MLP and {} times for the MNIST convnet.",
        _with_bars,
    ),
    Sentence(
        PERFORMANCE,
        "PyTorch takes {} of the time of functrain-fused as it is, and {} compiled",
        lambda results: _beside_fused(results, "residual", "torch-eager", "torch-compile"),
    ),
    Sentence(
        PERFORMANCE,
        "| {} times as long for the digits MLP, {} for the MNIST MLP.",
        _slow_fits,
    ),
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if a page differs from the results."""
    command = parser("benchmarks.figures", __doc__)
    command.add_argument("--write", action="store_true", help="change the pages")
    args = command.parse_args(arguments)
    differences = findings()
    for page, old, new in differences:
        print(f"{page}\n  - {old}\n  + {new or 'must be written by hand'}")
    if args.write:
        write(differences)
    for file in sorted({mark for page in PAGES for mark in MARK.findall(_text(page))}):
        if not (RESULTS / file).exists():
            print(f"{file}: not measured since its table was written, so the table is not checked")
        elif "results" in (results := load(file)):
            print(f"{file}: " + ", ".join(f"{name} {way}" for name, way in fastest(results)))
    by_hand = [finding for finding in differences if finding.new is None]
    return int(bool(by_hand if args.write else differences))


def findings() -> list[Finding]:
    """Returns the places where the pages differ from the results."""
    differences = [finding for page in PAGES for finding in rows(page, _text(page))]
    training = by_workload(load("results.json"))
    for sentence in SENTENCES:
        numbers = sentence.numbers(training)
        for page in sentence.pages:
            differences += compared(page, _text(page), sentence.text, numbers)
    return differences


def rows(page: str, text: str) -> Iterator[Finding]:
    """Yields the rows of marked tables that differ from the results, and missing dates."""
    for mark in MARK.finditer(text):
        if not (RESULTS / mark[1]).exists():
            continue
        results = load(mark[1])
        section = text[text.rindex("\n#", 0, mark.start()) : mark.start()]
        if written_date(results) not in " ".join(section.split()):
            missing = f"{written_date(results)} (not found above the table of {mark[1]})"
            yield Finding(page, missing, None)
        header, _, *lines = text[mark.end() :].strip().split("\n\n")[0].splitlines()
        names = [name.strip() for name in header.strip("| ").split("|")][1:]
        if "tables" in results:
            known = set(NUMBER.findall(json.dumps(results["tables"])))
            yield from (
                Finding(page, line, None) for line in lines if not figures_of(line) <= known
            )
            continue
        for line in lines:
            row = ROW.match(line)
            ways = by_workload(results).get(row[1]) if row else None
            if row is None or ways is None:
                yield Finding(page, line, None)
                continue
            cells = " | ".join(cell(ways, name) for name in names)
            expected = f"{row[0]} {cells} |"
            if line != expected:
                yield Finding(page, line, expected)


def compared(page: str, text: str, template: str, numbers: Sequence[str]) -> list[Finding]:
    """Returns the differences between a page and a sentence with its numbers."""
    words = re.escape(template).replace(r"\{\}", r"([\d.,]+)").replace(r"\ ", r"\s+")
    match = re.search(words, text)
    if match is None:
        return [Finding(page, f"{template} (not found)", None)]
    if list(match.groups()) == list(numbers):
        return []
    new, end = "", match.start()
    for group, number in enumerate(numbers, 1):
        new += text[end : match.start(group)] + number
        end = match.end(group)
    return [Finding(page, match[0], new + text[end : match.end()])]


def write(differences: list[Finding]) -> None:
    """Replaces the old text by the new one in the pages."""
    for page, old, new in differences:
        text = _text(page)
        if new is not None and old in text:
            (ROOT / page).write_text(text.replace(old, new))


def figures_of(line: str) -> set[str]:
    """Returns the numbers of a row of a page, without those in its first column."""
    return set(NUMBER.findall(line.strip("| ").partition("|")[2]))


def load(file: str) -> Results:
    """Returns the contents of a file in `benchmarks/results`."""
    return json.loads((RESULTS / file).read_text())


def by_workload(results: Results) -> dict[str, Ways]:
    """Returns the ways of each workload."""
    return {result["workload"]: result["ways"] for result in results["results"]}


def fastest(results: Results) -> Iterator[tuple[str, str]]:
    """Yields each workload with its fastest way and the time of that way."""
    for name, ways in by_workload(results).items():
        measured = {way: numbers for way, numbers in ways.items() if numbers["seconds"]}
        best = min(measured, key=lambda way: measured[way]["median"])
        yield name, f"{best} {milliseconds(measured[best]['median'])} ms"


def written_date(results: Results) -> str:
    """Returns the date of a measurement as the pages write it, such as 24 November 2026."""
    date = datetime.date.fromisoformat(results["date"])
    return f"{date.day} {date:%B %Y}"


def _text(page: str) -> str:
    return (ROOT / page).read_text()


if __name__ == "__main__":
    sys.exit(main())
