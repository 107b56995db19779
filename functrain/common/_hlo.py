"""Reads the text of compiled programs (HLO): instructions, and how often each of them runs."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
# `name = shapes opcode(operands), attributes`. The shapes of a tuple contain brackets and comments.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\(")
_CALLED = re.compile(
    r"(?:body|calls|to_apply|condition|true_computation|false_computation)=%?([\w.-]+)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
# The digits in the name of a dtype are its bits: f32, bf16, f8e4m3fn. `pred` has none.
_SHAPE = re.compile(r"([a-z]+)(\d+)?\w*\[([\d,]*)\]")

# The opcodes of the instructions that a TPU or a GPU runs as kernels, if no fusion contains them.
_KERNELS = (
    "cholesky convolution copy custom-call dot fft fusion gather reduce reduce-window "
    "rng-bit-generator scatter select-and-scatter sort triangular-solve"
)
KERNELS = set(_KERNELS.split())
COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}


class Instruction(NamedTuple):
    """An instruction of a compiled program.

    Attributes:
      name: Its unique name.
      shapes: The dtype, shape and layout of its result, or of several in brackets.
      opcode: The operation, such as ``fusion``.
      op_name: The names of the JAX functions and scopes that it comes from; "" if unknown.
      text: The whole line.
    """

    name: str
    shapes: str
    opcode: str
    op_name: str
    text: str

    @property
    def cycles(self) -> int:
        """The TPU compiler's estimate of the cycles that it takes; 0 if there is none."""
        return int(_find(r'"estimated_cycles":"(\d+)"', self.text) or 0)

    @property
    def bytes(self) -> int:
        """The bytes of its results."""
        return count_bytes(self.shapes)


def count_bytes(shapes: str) -> int:
    """Returns the bytes of a shape such as ``f32[8,3]{1,0}``, or of several in brackets."""
    total = 0
    for kind, digits, axes in _SHAPE.findall(shapes):
        # A token has no bits.
        bits = 8 if kind == "pred" else int(digits or 0)
        # A scalar, f32[], has no axes, and the product of none is 1.
        count = math.prod(map(int, filter(None, axes.split(","))))
        total += math.ceil(bits * count / 8)
    return total


def instructions(text: str) -> Iterator[tuple[Instruction, int]]:
    """Yields each instruction that runs on its own, and how often it runs.

    Instructions within a fusion are part of it, but for collectives. Those of a loop's body run as
    often as the loop, if the compiler knows the number of rounds, else once. All branches of a
    conditional are counted.

    Args:
      text: The text of a compiled program.
    """
    computations = {name: body for _, name, body in _COMPUTATION.findall(text)}
    parsed: dict[str, list[Instruction]] = {}

    def walk(name: str, times: int) -> Iterator[tuple[Instruction, int]]:
        if name not in parsed:
            parsed[name] = list(_parse(name, computations))
        for instruction in parsed[name]:
            yield instruction, times
            for collective in _fused_collectives(instruction, computations):
                yield collective, times
            if instruction.opcode == "while":
                body = _find(r"body=%?([\w.-]+)", instruction.text)
                yield from walk(body, times * _rounds(instruction.text, computations))
            for called in _called_computations(instruction):
                yield from walk(called, times)

    for is_entry, name, _ in _COMPUTATION.findall(text):
        if is_entry:
            yield from walk(name, 1)


def _parse(name: str, computations: dict[str, str]) -> Iterator[Instruction]:
    for line in computations.get(name, "").splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            op_name = _find(_OP_NAME, line)
            # Some fusions have no name of their own: that of the last operation in them.
            for called in _CALLED.findall(line) if not op_name else ():
                op_name = "".join(_OP_NAME.findall(computations.get(called, ""))[-1:])
            yield Instruction(match[1], match[2], match[3], op_name, line)


def _fused_collectives(fusion: Instruction, computations: dict[str, str]) -> Iterator[Instruction]:
    """Yields the collectives that the TPU compiler has put into a fusion.

    Those that overlap with computing are in several fusions: one that starts the collective, others
    that compute meanwhile, and one that ends it. They are yielded for the last one only.
    """
    name = _find(_CALLED, fusion.text) if fusion.opcode == "fusion" else ""
    body = computations.get(name, "")
    is_early = name.startswith("async_collective_fusion") or '"AsyncCollectiveStart"' in body
    # Most fusions have none: a search takes less time than reading their instructions.
    if is_early or not any(f" {kind}(" in body for kind in COLLECTIVES):
        return
    for instruction in _parse(name, computations):
        opcode = instruction.opcode
        if opcode == "all-reduce" and name.startswith("all-reduce-scatter"):
            # It sums the whole, of which each device keeps a part: the results of the fusion.
            yield instruction._replace(opcode="reduce-scatter", shapes=fusion.shapes)
        elif opcode in COLLECTIVES:
            yield instruction


def _called_computations(instruction: Instruction) -> list[str]:
    """Returns the names of the computations whose instructions run on their own."""
    # A fusion is one kernel, and that of a reduction or a collective is the sum that it computes.
    if instruction.opcode not in ("call", "conditional", "async-start"):
        return []
    branches = _find(r"branch_computations=\{([^}]*)\}", instruction.text)
    return [*_CALLED.findall(instruction.text), *re.findall(r"[\w.-]+", branches)]


def _rounds(loop: str, computations: dict[str, str]) -> int:
    """Returns how often a loop runs, given its line; 1 if it cannot be known."""
    trip_count = _find(r'known_trip_count":?=?\{"n":"?(\d+)', loop)
    if trip_count:
        return int(trip_count)
    # The TPU compiler states no count: it is the constant that the condition compares with.
    text = computations.get(_find(r"condition=%?([\w.-]+)", loop), "")
    for called in _CALLED.findall(text):
        text += computations.get(called, "")
    constants = re.findall(r"s32\[\][^=]* constant\((\d+)\)", text)
    return max(map(int, constants), default=1)


def _find(pattern: str | re.Pattern[str], text: str) -> str:
    """Returns the first group of the first match, "" without a match."""
    match = re.search(pattern, text)
    return match[1] if match else ""
