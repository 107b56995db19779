"""Draws the chart of the front page from the stored results.

python -m benchmarks.chart    # writes docs/_static/speed.svg
"""

import pathlib
import xml.sax.saxutils
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.figures import by_workload, load

CHART = pathlib.Path(__file__).parents[1] / "docs" / "_static" / "speed.svg"
WORKLOAD = "mnist-convnet"
# By their names in the results, in the order of the chart.
ON_CPU = {
    "bridge-fit": "bridge.fit",
    "torch-eager": "PyTorch",
    "keras-fit@tensorflow": "Keras on TensorFlow",
    "keras-fit": "Keras on JAX",
}
ON_GPU = {
    "bridge.fit": "bridge.fit",
    "Keras fit, steps_per_execution=32": "Keras, 32 steps at a time",
    "Keras fit": "Keras on JAX",
}
WIDTH, LEFT, LINE = 560, 215, 26
# On white and on black.
TEXT, OURS, OTHERS = "#7a828c", "#2f7fd0", "#9aa4b0"


class Panel(NamedTuple):
    """The bars of a machine: times by name, and the unit of these."""

    title: str
    times: dict[str, float]
    unit: str


def panels() -> list[Panel]:
    """Returns the figures of the chart."""
    ways = by_workload(load("results.json"))[WORKLOAD]
    on_cpu = {name: 1e3 * ways[way]["median"] for way, name in ON_CPU.items()}
    table = load("gpu.json")["tables"][0]
    (row,) = (row for row in table["rows"] if row[0].startswith(f"{WORKLOAD} "))
    cells = dict(zip(table["columns"], row, strict=True))
    on_gpu = {name: float(cells[way].replace(",", "")) / 1e3 for way, name in ON_GPU.items()}
    return [
        Panel("A training step of an MNIST convnet, two CPU cores", on_cpu, "ms"),
        Panel("The same on an NVIDIA H100", on_gpu, "ms"),
    ]


def drawn(figures: Iterable[Panel]) -> str:
    """Returns the chart as SVG."""
    y, parts = 20, []
    for title, times, unit in figures:
        parts.append(_text(0, y, title, weight=600))
        y += LINE
        for name, time in times.items():
            width = (WIDTH - LEFT - 80) * time / max(times.values())
            color = OURS if name == "bridge.fit" else OTHERS
            parts.append(_text(LEFT - 10, y, name, anchor="end"))
            parts.append(
                f'<rect x="{LEFT}" y="{y - 14}" width="{width:.0f}" height="18" fill="{color}"/>'
            )
            parts.append(_text(LEFT + round(width) + 8, y, f"{time:.2g} {unit}"))
            y += LINE
        y += LINE // 2
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - LINE}"'
    style = f'font-family="system-ui, sans-serif" font-size="15" fill="{TEXT}"'
    return "\n".join([f'{head} width="{WIDTH}" {style}>', *parts, "</svg>", ""])


def _text(x: int, y: int, text: str, anchor: str = "start", weight: int = 400) -> str:
    words = xml.sax.saxutils.escape(text)
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>'


if __name__ == "__main__":
    CHART.write_text(drawn(panels()))
