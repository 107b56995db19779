"""Reports of the results: tables, files and a plot."""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = pathlib.Path(__file__).parent
OUTPUT, RESULTS = ROOT / "output", ROOT / "results"

# The contents of results.json; see README.md.
Results = dict[str, Any]


def about() -> dict[str, Any]:
    """Returns the date, the version of functrain, and the machine of a measurement."""
    return {
        "date": datetime.date.today().isoformat(),
        "functrain": importlib.metadata.version("functrain"),
        "machine": machine(),
        "jax": importlib.metadata.version("jax"),
    }


def parser(name: str, description: str | None, epilog: str = "") -> argparse.ArgumentParser:
    """Returns the parser of a command, whose `--help` keeps the lines of the description."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
        name, description=description, epilog=epilog, formatter_class=raw
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose the folder of the results."""
    folder: dict[str, Any] = {"dest": "output", "default": OUTPUT}
    parser.add_argument("--output", type=pathlib.Path, help="the folder of the results", **folder)
    parser.add_argument(
        "--update",
        action="store_const",
        const=RESULTS,
        help="write into benchmarks/results, whose figures the pages quote",
        **folder,
    )


def publish(name: str, tables: Sequence[Table], folder: pathlib.Path) -> None:
    """Prints tables, and writes their cells into `name`.json."""
    written = []
    for table in tables:
        console().print(table)
        columns = [list(column.cells) for column in table.columns]
        header = [str(column.header) for column in table.columns]
        rows = [list(row) for row in zip(*columns, strict=True)]
        written.append({"title": str(table.title or ""), "columns": header, "rows": rows})
    folder.mkdir(parents=True, exist_ok=True)
    results = {**about(), "tables": written}
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")


def console() -> Console:
    """Returns a console that is wide enough for the tables."""
    console = Console()
    # In a log file rich assumes 80 columns.
    return console if console.is_terminal else Console(width=110)


def machine() -> dict[str, Any]:
    """Returns a description of the machine and its software."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _cpu() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def reference(ways: dict[str, Any]) -> str:
    """Returns the way that others are compared with: Keras on JAX, if it was measured."""
    names = ("keras-fit", "keras-predict", "jit-loop")
    references = [name for name in names if ways.get(name, {}).get("seconds")]
    measured = [name for name, way in ways.items() if way["seconds"]]
    return (references or measured or [""])[0]


def speed(ways: dict[str, Any], name: str) -> float:
    """Returns the speed relative to the reference: the median of the rounds' ratios.

    Both times of a ratio come from the same round, so a slow moment of the machine affects both.
    """
    ours, theirs = ways[name]["seconds"], ways.get(reference(ways), {"seconds": []})["seconds"]
    ratios = [b / a for a, b in zip(ours, theirs, strict=False)]
    return statistics.median(ratios) if ratios else math.nan


def disagreement(ways: dict[str, Any]) -> dict[str, float]:
    """Returns the relative difference between each way's first loss and the reference's."""
    expected = ways.get(reference(ways), {}).get("losses", [])
    return {
        name: abs(way["losses"][0] - expected[0]) / max(1e-12, abs(expected[0]))
        for name, way in ways.items()
        if way["losses"] and expected
    }


def table(result: dict[str, Any]) -> Table:
    """Returns the table of a workload, with the fastest way first."""
    ways = result["ways"]
    title = f"{result['workload']}, batch {result['batch']}, {result['steps']} steps a call"
    table = Table(title=title, title_justify="left")
    table.add_column("way", no_wrap=True)
    columns = "ms a step", "min – max", f"speed / {reference(ways)}", "compile s", "peak MiB"
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    # Those that failed come last: their median is NaN.
    ordered = sorted(ways.items(), key=lambda item: (bool(item[1]["error"]), item[1]["median"]))
    for name, way in ordered:
        if way["error"]:
            table.add_row(name, f"failed: {way['error']}")
            continue
        low, high = (f"{1e3 * f(way['seconds']):.4g}" for f in (min, max))
        table.add_row(
            name,
            f"{1e3 * way['median']:.4g}",
            f"{low} – {high}",
            f"{speed(ways, name):.2f}",
            f"{way['compile_seconds']:.1f}",
            f"{way['peak_bytes'] / 2**20:.0f}",
        )
    return table


def markdown(results: Results) -> str:
    """Returns a markdown table of ms per step, and of the speed relative to the reference."""
    names = list(dict.fromkeys(name for r in results["results"] for name in r["ways"]))
    lines = [
        _sentence(results),
        "",
        f"| workload (batch) | {' | '.join(names)} |",
        "|---|" + "---:|" * len(names),
    ]
    for result in results["results"]:
        cells = [cell(result["ways"], name) for name in names]
        lines.append(f"| {result['workload']} ({result['batch']}) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _sentence(results: Results) -> str:
    m = results["machine"]
    listed = ", ".join(_versions(results["versions"]))
    return (
        f"ms a step, median of {results['rounds']} rounds (big nets: fewer), in brackets the speed "
        f"relative to Keras on JAX (or jit-loop). {results['date']}, {m['cpu']}, {m['cores']} "
        f"cores, {m['system']}, Python {m['python']}, functrain {results['functrain']}, {listed}."
    )


def _versions(environments: dict[str, dict[str, str]]) -> list[str]:
    """Returns each version once; where two environments differ, the second one is named."""
    first: dict[str, str] = {}
    others = []
    for environment, installed in environments.items():
        for name, version in installed.items():
            if first.setdefault(name, version) != version:
                others.append(f"{name}@{environment} {version}")
    return [*(f"{name} {version}" for name, version in first.items()), *others]


def cell(ways: dict[str, Any], name: str) -> str:
    """Returns the milliseconds and the relative speed of a way, in bold if it is the fastest."""
    if name not in ways:
        return ""
    if ways[name]["error"]:
        return "failed"
    best = min(way["median"] for way in ways.values() if way["seconds"])
    text = f"{milliseconds(ways[name]['median'])} ({speed(ways, name):.2g}×)"
    return f"**{text}**" if ways[name]["median"] == best else text


def draw(results: Results, path: pathlib.Path) -> None:
    """Saves a bar chart on a log scale for each workload; lines show the minimum and maximum."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(results["results"])
    columns = min(3, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for index, result in enumerate(results["results"]):
        _panel(figure.add_subplot(rows, columns, index + 1), result)
    m = results["machine"]
    figure.suptitle(f"ms a step, less is better ({m['cpu']}, {m['cores']} cores)")
    figure.savefig(path, dpi=120)


def _panel(axes: Any, result: dict[str, Any]) -> None:
    from matplotlib.ticker import LogLocator

    measured = {name: way for name, way in result["ways"].items() if way["seconds"]}
    names = sorted(measured, key=lambda name: measured[name]["median"], reverse=True)
    medians = [1e3 * measured[name]["median"] for name in names]
    low = [a - 1e3 * min(measured[n]["seconds"]) for a, n in zip(medians, names, strict=True)]
    high = [1e3 * max(measured[n]["seconds"]) - a for a, n in zip(medians, names, strict=True)]
    ours = ("functrain", "bridge")
    colors = ["tab:blue" if name.startswith(ours) else "tab:gray" for name in names]
    axes.barh(names, medians, xerr=[low, high], color=colors, error_kw={"elinewidth": 1})
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter("")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(f"{result['workload']} (batch {result['batch']})")
    axes.tick_params(labelsize=8)


def milliseconds(seconds: float) -> str:
    """Formats with three significant digits, or as a whole number from 1000 ms on."""
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
