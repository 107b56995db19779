"""The comparison of rewrites compiles what it says. Nothing here looks at a clock."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from benchmarks import rewrites
from benchmarks.regret import draw, equations, summarize
from benchmarks.rewrites import leave_one_out
from functrain.rewrites import _optimize


def test_each_rewrite_of_a_step_is_left_out_once() -> None:
    compiled: list[str] = []

    def compile_without(left_out: str, *args: Any) -> Any:
        compiled.append(left_out)
        return lambda: None

    with mock.patch.object(rewrites, "_compile_without", compile_without):
        rewritten = [gain.rewrite for gain in leave_one_out("thousand-classes")]
    assert "argmax" in rewritten
    # The first program says how many steps fill a measurement.
    assert compiled == ["", "", *rewritten]


def test_a_program_lacks_the_rewrite_that_is_left_out() -> None:
    step, state, batch = rewrites.EXAMPLES["thousand-classes"]()
    seen: list[set[str]] = []

    def rewrite(closed: Any, rules: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        seen.append({rule.name for rule in rules})
        return closed

    with mock.patch.object(_optimize, "_rewrite", rewrite):
        rewrites._compile_without("argmax", step, state, batch, 2)
    assert seen
    assert all("argmax" not in names and "dot_conv" in names for names in seen)


@pytest.mark.parametrize("seed", range(20))
def test_a_drawn_layer_has_three_convolutions(seed: int) -> None:
    layer = draw(seed)
    assert layer == draw(seed)
    assert len(equations(layer)) == 3


def test_the_summary_is_about_the_fastest_program() -> None:
    names = ("as jax writes it", "canonical", "all rules", "patches")
    measured = [dict(zip(names, times, strict=True)) for times in ((4, 2, 1, 2), (9, 8, 4, 2))]
    values = list(summarize(measured).columns[1].cells)
    assert values == ["1.50", "1.95", "0.0%", "2.00", "2.00"]
