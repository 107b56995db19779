"""Fused programs as accelerators get them: lowered here, without one, and looked at."""

import collections
import re
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import functrain as ft
from functrain.common._platform import compiling_for
from tests.workload_parts import parts

K = 4
BACKENDS = {"cuda": "gpu", "tpu": "tpu"}
SOME = ["lstm", "mnist-convnet", "keras: digits-mlp"]
MORE = ["digits-mlp", "mnist-mlp", "tabular-mlp", "transformer", "dcgan"]
NAMES = [*SOME, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)]


class Lowered(NamedTuple):
    """A program for a platform, as functrain makes it and as one would by hand."""

    state: Any
    fused: jax.stages.Lowered
    by_hand: jax.stages.Lowered
    platform: str


def lowered(state: Any, step: Any, batch: Any, platform: str, rewrites: Any = "off") -> Lowered:
    """Lowers K steps for a platform, with what functrain would decide there."""
    chunk = jax.tree.map(lambda x: jax.ShapeDtypeStruct((K, *x.shape), x.dtype), batch)
    by_hand = jax.jit(lambda state, chunk: jax.lax.scan(step, state, chunk), donate_argnums=0)
    with compiling_for(BACKENDS.get(platform, platform)):
        fused = ft.fuse(step, K, rewrites=rewrites).trace(state, chunk, np.int32(K))
        return Lowered(
            state,
            fused.lower(lowering_platforms=(platform,)),
            by_hand.trace(state, chunk).lower(lowering_platforms=(platform,)),
            platform,
        )


@pytest.fixture(scope="module", params=NAMES)
def workload(request: pytest.FixtureRequest) -> Any:
    return parts(request.param)


@pytest.fixture(scope="module", params=BACKENDS)
def program(workload: Any, request: pytest.FixtureRequest) -> Lowered:
    return lowered(*workload, request.param)


def trip_counts(text: str) -> list[int | None]:
    """Returns how often each loop runs, None where the compiler cannot know."""
    found: list[int | None] = []
    constants: dict[str, int] = {}
    inside = False
    for line in map(str.strip, text.splitlines()):
        if line.startswith("func.func"):
            constants = {}
        if made := re.search(r"(%\w+) = stablehlo.constant dense<(\d+)>", line):
            constants[made[1]] = int(made[2])  # until another region gives the name again
        inside = line == "cond {" or (inside and not line.startswith("}"))
        if inside and (limit := re.search(r"compare\s+LT, %\w+, (%\w+)", line)):
            found.append(constants.get(limit[1]))
    assert len(found) == text.count("stablehlo.while")
    return found


def operations(text: str) -> collections.Counter[str]:
    found = collections.Counter(re.findall(r"= \"?(\w+\.\w+)", text))
    del found["stablehlo.constant"]
    # A call is no operation: which functions are called, and under which name, is jax's choice.
    found.pop("func.call", None)
    return found


def element_types(text: str) -> set[str]:
    return set(re.findall(r"tensor<(?:\d+x)*(\w+)>", text))


def test_the_compiler_knows_how_often_every_loop_runs(program: Lowered) -> None:
    counts = trip_counts(program.fused.as_text())
    assert K in counts
    assert None not in counts


def test_the_whole_state_is_donated(program: Lowered) -> None:
    (arguments,) = re.findall(r"func.func public @main\((.*)\) ->", program.fused.as_text())
    donated = re.findall(r"%arg(\d+): [^%]*tf.aliasing_output = (\d+)", arguments)
    leaves = range(len(jax.tree.leaves(program.state)))
    assert donated == [(str(i), str(i)) for i in leaves]  # each to what takes its place


def test_the_host_is_not_called_back(program: Lowered) -> None:
    text = program.fused.as_text()
    assert not re.findall(r"callback|infeed|outfeed|stablehlo\.(?:send|recv)", text)


def test_every_operation_is_that_of_the_step_by_hand(program: Lowered) -> None:
    fused, by_hand = (operations(x.as_text()) for x in (program.fused, program.by_hand))
    assert fused == by_hand


def test_types_are_those_of_the_step_by_hand(program: Lowered) -> None:
    fused, by_hand = (element_types(x.as_text()) for x in (program.fused, program.by_hand))
    assert fused == by_hand
    pairs = zip(*map(jax.tree.leaves, (program.state, program.fused.out_info[0])), strict=True)
    assert all((old.shape, old.dtype) == (new.shape, new.dtype) for old, new in pairs)


def test_on_cpu_the_length_is_not_known_and_slow_operations_are_rewritten() -> None:
    found = lowered(*parts("mnist-convnet"), "cpu", "auto")
    assert trip_counts(found.fused.as_text()) == [None]
    pooling = "stablehlo.select_and_scatter"
    assert operations(found.by_hand.as_text())[pooling]
    assert not operations(found.fused.as_text())[pooling]
