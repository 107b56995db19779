"""The largest batch that fits, held to a search through all sizes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft

WIDTH = 32
STATE = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}


def step(state: Any, batch: Any) -> Any:
    x, y = batch
    h = jnp.sin(jnp.tanh(x @ state["w"]) @ state["w"])
    return {"w": state["w"] + jnp.mean(h) + jnp.mean(y)}, {"loss": jnp.mean(h)}


def batch(examples: int) -> Any:
    shapes = (examples, WIDTH), (examples,)
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def chip_with(memory: int) -> ft.Target:
    here = ft.target()
    return dataclasses.replace(here, chip=here.chip._replace(memory_bytes=memory))


@pytest.mark.parametrize("kib", [40, 100, 200])
@pytest.mark.parametrize("first", [8, 64, 4096])
def test_it_is_that_of_a_search_through_all_sizes(kib: int, first: int) -> None:
    target = chip_with(kib * 1024)
    found = ft.inspect.largest_batch(STATE, step, batch(first), fuse=2, target=target)

    def fits(examples: int) -> bool:
        shapes = batch(examples)
        return bool(ft.inspect.memory(STATE, step, shapes, fuse=2, target=target).fits)

    assert found > 0
    assert found % 8 == 0
    assert fits(found)
    # The answer is known to within a sixteenth.
    assert not fits(found + max(8, found // 16 // 8 * 8))


def test_zero_says_that_not_even_the_smallest_fits() -> None:
    state = 4 * WIDTH * WIDTH
    for room in (100, 3 * state + 100):
        assert ft.inspect.largest_batch(STATE, step, batch(64), target=chip_with(room)) == 0


def sizes_tried_on(room: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that sizes are added to; the compiler of their device makes room.

    Up to 200 examples memory grows with the batch, up to 560 it stays at 15,000 bytes.
    """
    sizes: list[int] = []

    def memory(state: Any, step: Any, shapes: Any, **options: Any) -> ft.inspect.Memory:
        examples = shapes[0].shape[0]
        sizes.append(examples)
        temporaries = 70 * min(examples, 200) if examples <= 560 else 70 * examples
        chip = chip_with(room).chip
        return ft.inspect.Memory(1, {"w": 1000}, {}, 0, 0, 0, temporaries, chip=chip)

    monkeypatch.setattr("functrain.inspect._largest_batch.memory", memory)
    return sizes


@pytest.mark.parametrize("first", [8, 64, 512, 4096])
def test_few_sizes_are_tried_though_memory_does_not_grow_with_all_of_them(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = sizes_tried_on(15_500, monkeypatch)
    found = ft.inspect.largest_batch(STATE, step, batch(first), target=ft.target())
    assert 560 * 16 / 17 - 8 < found <= 560
    assert len(tried) <= 10


def test_sizes_divide_over_the_devices_that_share_a_batch() -> None:
    target, options = chip_with(100 * 1024), {"fuse": 2}
    mesh = target.mesh({"data": -1})
    found = ft.inspect.largest_batch(
        STATE, step, batch(64), target=target, sharding=mesh, **options
    )
    assert found % 16 == 0
    # Each of the two devices has half of the batch.
    alone = ft.inspect.largest_batch(STATE, step, batch(64), target=target, **options)
    assert 1.8 * alone < found < 2.2 * alone
    expected = "multiple_of: expected a multiple of 2, the number of parts into which sharding"
    with pytest.raises(ValueError, match=expected):
        ft.inspect.largest_batch(
            STATE, step, batch(64), target=target, sharding=mesh, multiple_of=7
        )


def test_a_machine_of_unknown_memory_asks_for_a_target() -> None:
    with pytest.raises(ValueError, match=r"target: expected the devices, such as functrain.target"):
        ft.inspect.largest_batch(STATE, step, batch(8))


def test_batches_without_a_size_and_multiples_below_one_are_refused() -> None:
    uneven = np.ones((8, WIDTH), np.float32), np.ones(4, np.float32)
    with pytest.raises(ValueError, match="batch: expected leaves with one first axis"):
        ft.inspect.largest_batch(STATE, step, uneven, target=ft.target())
    with pytest.raises(TypeError, match=r"batch: 1: expected an array \[B, \.\.\.\]"):
        ft.inspect.largest_batch(STATE, step, (batch(8)[0], 1.0), target=ft.target())
    with pytest.raises(ValueError, match="multiple_of: expected an integer of at least 1, got 0"):
        ft.inspect.largest_batch(STATE, step, batch(8), multiple_of=0, target=ft.target())
