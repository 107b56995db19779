import jax
import numpy as np
import pytest

import functrain as ft
from functrain.events import ChunkEnd
from functrain.targets import _chips


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def finish(hook, clock, seconds, steps=10, examples=4):
    clock.now += seconds
    at = ft.Position(steps)
    hook.logs(ChunkEnd(position=at, state=(), steps=steps, examples=examples, rows={}))


def values(hook, state=()):
    event = ChunkEnd(position=ft.Position(1), state=state, steps=1, examples=1, rows={})
    hook(event)
    return {name.removeprefix("throughput/"): x for name, x in event.values.items()}


def test_rates_are_those_since_the_hook_was_last_due(clock) -> None:
    hook = ft.hooks.Throughput(tokens_per_example=16, flops_per_step=1e6)
    hook._clock = clock
    finish(hook, clock, 60.0)  # the first program is compiled
    assert values(hook) == {}
    finish(hook, clock, 2.0)
    finish(hook, clock, 3.0, steps=5)
    assert values(hook) == {"steps": 3.0, "examples": 12.0, "tokens": 192.0, "flops": 3e6}
    finish(hook, clock, 10.0)
    assert values(hook) == {"steps": 1.0, "examples": 4.0, "tokens": 64.0, "flops": 1e6}
    assert values(hook) == {}  # no step has ended since


def test_the_utilization_is_the_part_of_the_peak_of_all_devices(clock, monkeypatch) -> None:
    devices = jax.devices()
    chip = _chips.known_chip("TPU v5 lite")
    monkeypatch.setattr("functrain.hooks._throughput.known_chip", lambda kind: chip)
    hook = ft.hooks.Throughput(flops_per_step=chip.peak_flops / 40)
    hook._clock = clock
    finish(hook, clock, 1.0)
    finish(hook, clock, 1.0)
    state = [jax.device_put(np.ones(2), device) for device in devices]
    assert values(hook, state)["utilization"] == pytest.approx(10 / 40 / len(devices))


def test_a_second_run_counts_from_its_own_beginning() -> None:
    hook = ft.hooks.Throughput()
    data = [np.ones(2)] * 8
    for _ in range(2):
        history = ft.fit(0, lambda s, b: (s + 1, {"x": b[0]}), data, epochs=3, hooks=[hook], fuse=2,
                         verbose=0).history  # fmt: skip
        assert (history.epochs["throughput/steps"] > 0).all()
        np.testing.assert_allclose(
            history.epochs["throughput/examples"], 2 * history.epochs["throughput/steps"]
        )


def test_progress_lines_have_the_rates_that_they_do_not_have_anyway(capsys) -> None:
    hook = ft.hooks.Throughput(tokens_per_example=3)
    data = [np.ones(2)] * 8
    ft.fit(0, lambda s, b: (s + 1, {}), data, epochs=2, hooks=[hook], fuse=2, verbose="lines")
    (line,) = capsys.readouterr().out.splitlines()[-1:]
    assert "throughput/tokens" in line
    assert "throughput/steps" not in line
    assert "throughput/examples" not in line


class Device:
    def __init__(self, **stats):
        self.stats = stats or None

    def memory_stats(self):
        return self.stats


def test_the_memory_is_that_of_the_fullest_device_that_counts_it(monkeypatch) -> None:
    devices = [
        Device(bytes_in_use=10, peak_bytes_in_use=40, pool_bytes=3),
        Device(bytes_in_use=30, peak_bytes_in_use=35),
        Device(),
    ]
    assert all(hasattr(device, "memory_stats") for device in jax.local_devices())
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert values(ft.hooks.Throughput()) == {"memory/in_use": 30.0, "memory/peak": 40.0}
