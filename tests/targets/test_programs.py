"""Fused programs as the compilers of TPUs and GPUs make them, beside scans written by hand."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft
from benchmarks.workloads import WORKLOADS
from functrain.common import _hlo
from functrain.inspect._fit_program import lower_fit
from tests.workload_parts import parts

K = 4
MEMBERS = 3
WIDTH, ROWS = 256, 512
TX = optax.adam(1e-2)


class Compiled(NamedTuple):
    """A program for a target, as functrain makes it and as one would by hand."""

    carry: Any
    fused: jax.stages.Compiled
    by_hand: jax.stages.Compiled


def compiled(target: ft.Target, state: Any, step: Any, batch: Any, mesh: Any = None) -> Compiled:
    """Compiles K steps for a target, from the shapes of a state and of a batch."""
    program = lower_fit(state, step, batch, fuse=K, target=target, sharding=mesh)
    places = None if mesh is None else jax.tree.map(lambda x: x.sharding, program.carry)
    by_hand = jax.jit(
        lambda state, chunk: jax.lax.scan(step, state, chunk),
        donate_argnums=0,
        out_shardings=(places, None),
    )
    scan = by_hand.lower(program.carry, program.chunk).compile()
    return Compiled(program.carry, program.lowered.compile(), scan)


# --- workloads -----------------------------------------------------------------------------------


def population() -> tuple[Any, Any, Any]:
    """Returns a few members of a population, their step, and a batch for all of them."""
    state, step, batch = parts("digits-mlp")
    members = ft.population.stack([state.state] * MEMBERS)
    step = ft.population.step(step)
    return step.start(members), step, batch


def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
    x, y = batch
    for kernel in params["kernels"]:
        x = jax.nn.relu(x @ kernel)
    return jnp.mean((x + params["bias"] - y) ** 2), ft.Aux(model_state)


def fsdp(target: ft.Target) -> Compiled:
    """Returns an MLP whose kernels are divided over the chips, as are the examples."""
    mesh = target.mesh({"data": -1})

    def create() -> ft.TrainState:
        kernels = [jnp.ones((WIDTH, WIDTH))] * 3
        return ft.TrainState.create(params={"kernels": kernels, "bias": jnp.ones(WIDTH)}, tx=TX)

    state = jax.eval_shape(create)
    state = target.shapes(state, ft.sharding.shardings(state, mesh, ft.sharding.fsdp()))
    batch = (jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32),) * 2
    return compiled(target, state, ft.train_step(loss_fn, TX), batch, mesh)


QUICK = ["digits-mlp", "mnist-mlp", "keras: digits-mlp", "population"]
MORE = [*(name for name in WORKLOADS if name not in QUICK), "keras: mnist-convnet"]
MARKS = {"tpu:v5e": pytest.mark.tpu, "cuda:h100": pytest.mark.cuda}


def case(target: str, name: str) -> Any:
    """Returns the parameters of a fixture that compiles a workload for a target."""
    long = [pytest.mark.long] if name in MORE else []
    return pytest.param((target, name), marks=[MARKS[target[:9]], *long], id=f"{target} {name}")


CASES = [case(target, name) for target in MARKS for name in (*QUICK, *MORE)]
FSDP = ("tpu:v5e:2x2", "fsdp")


@pytest.fixture(scope="module", params=[*CASES, pytest.param(FSDP, marks=pytest.mark.tpu)])
def program(request: pytest.FixtureRequest) -> Compiled:
    """Compiles a workload once for all tests of this file."""
    target, name = ft.target(request.param[0]), request.param[1]
    if name == "fsdp":
        return fsdp(target)
    return compiled(target, *(population() if name == "population" else parts(name)))


# --- the programs --------------------------------------------------------------------------------

HOST = {"infeed", "outfeed", "send", "send-done", "recv", "recv-done"}


def executions(program: jax.stages.Compiled) -> list[tuple[_hlo.Instruction, int]]:
    return list(_hlo.instructions(program.as_text() or ""))


def kernels(program: jax.stages.Compiled) -> tuple[int, int]:
    """Returns the kernels that a program runs in its loop, and those outside of it."""
    times = [n for x, n in executions(program) if x.opcode in _hlo.KERNELS]
    return sum(n for n in times if n > 1), times.count(1)


def is_product(instruction: _hlo.Instruction) -> bool:
    names = f"{instruction.name} {instruction.op_name}"
    return bool(re.search(r"dot|conv_general|convolution|gemm", names))


def test_one_loop_of_known_length_takes_all_steps(program: Compiled) -> None:
    found = executions(program.fused)
    assert sum(x.opcode == "while" and n == 1 for x, n in found) == 1
    times = {n for _, n in found}
    assert K in times
    assert all(n == 1 or n % K == 0 for n in times), "other loops are within that of the steps"


def test_the_whole_state_is_updated_in_place(program: Compiled) -> None:
    (aliases,) = re.findall(r"input_output_alias={ (.*?) }, \w+=", program.fused.as_text() or "")
    pairs = re.findall(r"\{(\d+)\}: \((\d+), \{\}", aliases)
    leaves = range(len(jax.tree.leaves(program.carry)))
    assert pairs == [(str(i), str(i)) for i in leaves], "each leaf takes the place of its own"
    bytes_on_each = sum(
        np.prod(x.sharding.shard_shape(x.shape), dtype=int) * getattr(x.dtype, "itemsize", 0)
        for x in jax.tree.leaves(program.carry)
    )
    fused, by_hand = (x.memory_analysis() for x in (program.fused, program.by_hand))
    # A TPU fills its tiles, so that small leaves take more.
    assert fused.alias_size_in_bytes == by_hand.alias_size_in_bytes >= bytes_on_each


def test_nothing_is_sent_to_the_host_or_fetched_from_it(program: Compiled) -> None:
    for instruction, _ in executions(program.fused):
        assert instruction.opcode not in HOST
        assert not re.search(r"callback|MoveToHost|is_host_transfer=true", instruction.text)
    # The compilers' mark of arrays in the memory of the host.
    assert "S(5)" not in (program.fused.as_text() or "")


def test_temporaries_are_no_more_than_those_of_a_scan_by_hand(program: Compiled) -> None:
    fused, by_hand = (x.memory_analysis() for x in (program.fused, program.by_hand))
    # Of two equal loops, libtpu 0.0.50 copies the labels of a chunk into the fast memory for one.
    chunk = fused.argument_size_in_bytes - fused.alias_size_in_bytes
    assert fused.temp_size_in_bytes <= by_hand.temp_size_in_bytes + chunk


def test_a_step_has_no_more_kernels_than_that_of_a_scan_by_hand(program: Compiled) -> None:
    (in_loop, outside), (by_hand, outside_by_hand) = map(kernels, program[1:])
    assert 0 < in_loop <= by_hand
    # The argument that says how many steps to take is copied to the result that says all is done.
    assert in_loop + outside <= by_hand + outside_by_hand + 2


def test_a_step_has_the_operations_of_a_scan_by_hand(program: Compiled) -> None:
    fused, by_hand = (x.cost_analysis() for x in (program.fused, program.by_hand))
    # The compiler for GPUs does not count them.
    if by_hand is not None:
        assert 0 < fused["flops"] <= 1.1 * by_hand["flops"]
    products = [
        sum(n for x, n in executions(p) if x.opcode in _hlo.KERNELS and is_product(x))
        for p in program[1:]
    ]
    assert products[0] == products[1] > 0


@pytest.mark.parametrize("program", [pytest.param(FSDP, marks=pytest.mark.tpu)], indirect=True)
def test_divided_kernels_are_gathered_and_their_gradients_scattered(program: Compiled) -> None:
    found = ft.sharding.collectives(program.fused)
    kernels, bias, loss = 3 * WIDTH * WIDTH, WIDTH, 1
    # Products take bfloat16, and so the kernels are gathered as such. Sums are of float32.
    assert found["all-gather"].bytes == K * 2 * kernels
    assert found["reduce-scatter"].bytes == K * 4 * kernels // 4
    assert found["all-reduce"].bytes == K * 4 * (bias + loss)
    assert set(found) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert found == ft.sharding.collectives(program.by_hand)
