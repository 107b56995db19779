import jax
import numpy as np

import functrain as ft


class Device:
    def __init__(self, **stats):
        self.stats = stats or None

    def memory_stats(self):
        return self.stats


def test_the_fullest_device_is_shown_and_one_that_does_not_count_adds_nothing(monkeypatch) -> None:
    devices = [
        Device(bytes_in_use=10, peak_bytes_in_use=40, pool_bytes=3),
        Device(bytes_in_use=30, peak_bytes_in_use=35),
        Device(),
    ]
    seen = []
    hooks = [ft.hooks.DeviceMemory(), lambda event: seen.append(event.values)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    ft.fit(np.zeros(()), lambda s, b: (s, {}), [np.ones(2)] * 2, hooks=hooks, verbose=0)
    assert seen == [{}, {"memory/in_use": 30.0, "memory/peak": 40.0}, {}]


def test_devices_are_asked_by_the_name_that_jax_has() -> None:
    assert all(hasattr(device, "memory_stats") for device in jax.local_devices())
