"""What is read out of the text of compiled programs, held to short texts whose answer is plain."""

import collections

import pytest

import functrain as ft
from functrain.common import _hlo

# The TPU compiler's: no count in the text, and a fusion in the condition that compares.
TPU = """
HloModule jit_run, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%fused_add (param_0: f32[8,3]) -> f32[8,3] {
  %param_0 = f32[8,3]{1,0:T(8,128)S(1)} parameter(0)
  %dot.1 = f32[8,3]{1,0} dot(%param_0, %param_0), lhs_contracting_dims={1}
  ROOT %add.1 = f32[8,3]{1,0} add(%dot.1, %dot.1), metadata={op_name="jit(run)/while/body/mlp/add"}
}

%fused_compare (param_0: s32[]) -> pred[] {
  %param_0 = s32[]{:T(128)} parameter(0)
  %constant.1 = s32[]{:T(128)} constant(5)
  ROOT %compare.1 = pred[] compare(%param_0, %constant.1), direction=LT
}

%body (arg: (s32[], f32[8,3])) -> (s32[], /*index=1*/f32[8,3]) {
  %arg = (s32[]{:T(128)}, f32[8,3]{1,0}) parameter(0)
  %fusion.1 = f32[8,3]{1,0} fusion(%x), calls=%fused_add, config={"estimated_cycles":"99"}
  %copy.1 = bf16[8,3]{1,0:T(8,128)(2,1)} copy(%fusion.1), backend_config={"estimated_cycles":"20"}
  ROOT %tuple.1 = (s32[], f32[8,3]) tuple(%i, %fusion.1)
}

%condition (arg: (s32[], f32[8,3])) -> pred[] {
  %arg = (s32[], f32[8,3]) parameter(0)
  ROOT %fusion.2 = pred[] fusion(%i), kind=kLoop, calls=%fused_compare
}

ENTRY %main (x: f32[8,3]) -> f32[8,3] {
  %x = f32[8,3]{1,0} parameter(0)
  %while.1 = (s32[]{:T(128)}, /*index=1*/f32[8,3]{1,0}) while(%t), condition=%condition, body=%body
  ROOT %copy.2 = f32[8,3]{1,0} copy(%g), metadata={op_name="jit(run)/copy"}
}
"""


def counts(text: str) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    for instruction, times in _hlo.instructions(text):
        found[instruction.name] += times
    return dict(found)


def kernels(text: str) -> int:
    return sum(n for x, n in _hlo.instructions(text) if x.opcode in _hlo.KERNELS)


def program(entry: str, *others: str) -> str:
    return "\n\n".join([*others, f"ENTRY %main (x: f32[2]) -> f32[2] {{\n{entry}\n}}\n"])


def test_the_rounds_of_a_loop_are_what_its_condition_compares_with() -> None:
    found = counts(TPU)
    assert (found["fusion.1"], found["copy.1"], found["copy.2"]) == (5, 5, 1)
    assert kernels(TPU) == 11


def test_rounds_that_the_compiler_states_come_first_and_unknown_ones_count_once() -> None:
    known = 'body=%body, backend_config={"known_trip_count":{"n":"7"},"n":"5"}'
    assert counts(TPU.replace("body=%body", known))["fusion.1"] == 7
    assert counts(TPU.replace("constant(5)", "parameter(1)"))["fusion.1"] == 1


def test_loops_within_loops_multiply() -> None:
    known = 'backend_config={"known_trip_count":{"n":"3"}}'
    loop = f"  %w = f32[2] while(%a), condition=%c, body=%inner, {known}"
    outer = f"%outer (a: f32[2]) -> f32[2] {{\n{loop}\n}}"
    inner = "%inner (a: f32[2]) -> f32[2] {\n  ROOT %f = f32[2] copy(%a)\n}"
    text = program(f"  %w.2 = f32[2] while(%x), condition=%c, body=%outer, {known}", outer, inner)
    assert counts(text) == {"w.2": 1, "w": 3, "f": 9}


def test_a_fusion_is_one_kernel_and_named_after_its_last_operation() -> None:
    found = {x.name: x for x, _ in _hlo.instructions(TPU)}
    assert "dot.1" not in found
    assert "compare.1" not in found
    assert found["fusion.1"].op_name == "jit(run)/while/body/mlp/add"
    assert found["copy.2"].op_name == "jit(run)/copy"
    assert (found["fusion.1"].cycles, found["copy.2"].cycles) == (99, 0)


@pytest.mark.parametrize(
    "branches",
    [
        "conditional(%p, %x, %x), true_computation=%one, false_computation=%two",
        "conditional(%p, %x, %x), branch_computations={%one, %two}",
    ],
)
def test_all_branches_of_a_conditional_count(branches: str) -> None:
    one, two = (
        f"%{n} (a: f32[2]) -> f32[2] {{\n  ROOT %{n}.1 = f32[2] copy(%a)\n}}"
        for n in ("one", "two")
    )
    assert counts(program(f"  %c = f32[2] {branches}", one, two)) == {
        "c": 1,
        "one.1": 1,
        "two.1": 1,
    }


def test_calls_are_entered_and_the_sums_of_reductions_are_not() -> None:
    add = "%add (a: f32[], b: f32[]) -> f32[] {\n  ROOT %sum = f32[] add(%a, %b)\n}"
    called = "%called (a: f32[2]) -> f32[] {\n  ROOT %r = f32[] reduce(%a), to_apply=%add\n}"
    text = program("  %c = f32[] call(%x), to_apply=%called", add, called)
    assert counts(text) == {"c": 1, "r": 1}
    assert kernels(text) == 1


# How the TPU compiler overlaps a gather with a product, and scatters a sum.
FUSED_COLLECTIVES = (
    """%start (p: bf16[8,2]) -> (bf16[8,2], u32[]) {
  %all-gather.1 = bf16[8,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=1, dimensions={1}
  ROOT %c.1 = u32[] custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}""",
    """%async_collective_fusion.9 (p: bf16[8,2]) -> (f32[8,8], bf16[8,8], u32[]) {
  %all-gather.2 = bf16[8,8]{1,0} all-gather(%p), channel_id=1, dimensions={1}
  ROOT %tuple.1 = (f32[8,8], bf16[8,8], u32[]) tuple(%convolution.1, %all-gather.2, %u)
}""",
    """%done (p: bf16[8,2], q: bf16[8,8]) -> bf16[8,8] {
  %all-gather.3 = bf16[8,8]{1,0} all-gather(%p), channel_id=1, dimensions={1}
  ROOT %c.2 = bf16[8,8] custom-call(%q, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}""",
    """%all-reduce-scatter.3.clone (p: f32[8,8]) -> f32[8,2] {
  %all-reduce.1 = f32[8,8]{1,0} all-reduce(%p), channel_id=2, to_apply=%add
  ROOT %dynamic-slice.1 = f32[8,2]{1,0} dynamic-slice(%all-reduce.1, %zero, %i)
}""",
)
FUSIONS = """  %start.1 = (bf16[8,2], u32[]) fusion(%x), calls=%start
  %fusion.90 = (f32[8,8], bf16[8,8], u32[]) fusion(%x), calls=%async_collective_fusion.9
  %done.1 = bf16[8,8] fusion(%g, %h), calls=%done
  %fusion.88 = f32[8,2]{1,0} fusion(%y), calls=%all-reduce-scatter.3.clone"""


def test_collectives_that_the_tpu_compiler_puts_into_fusions_count_once() -> None:
    text = program(FUSIONS, *FUSED_COLLECTIVES)
    found = [x.opcode for x, _ in _hlo.instructions(text) if x.opcode != "fusion"]
    assert found == ["all-gather", "reduce-scatter"]
    traffic = {"all-gather": (1, 2 * 64), "reduce-scatter": (1, 4 * 16)}
    assert ft.sharding.collectives(text) == traffic
    assert kernels(text) == 4


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ("f32[]", 4),
        ("f32[8,3]{1,0:T(8,128)}", 96),
        ("bf16[8,3]{1,0:T(8,128)(2,1)S(1)}", 48),
        ("pred[5]", 5),
        ("(f32[2,2]{1,0}, pred[], /*index=2*/s8[3])", 20),
        ("s4[8]", 4),  # packed
        ("f32[0,7]", 0),
        ("token[]", 0),
    ],
)
def test_bytes_are_those_of_all_results(shapes: str, size: int) -> None:
    assert _hlo.count_bytes(shapes) == size
