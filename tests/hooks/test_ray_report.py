"""Reports to Ray Train by a run alone; `make test-ray` has Ray itself."""

import sys
import types
from typing import Any

import jax.numpy as jnp
import pytest

import functrain as ft


class Ray(types.ModuleType):
    """Stands for `ray.train`: keeps the reports."""

    def __init__(self) -> None:
        super().__init__("ray.train")
        self.reports: list[dict[str, float]] = []

    def get_checkpoint(self) -> None:
        return None

    def report(self, metrics: dict[str, float], checkpoint: Any) -> None:
        assert checkpoint is None
        self.reports.append(metrics)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    module = Ray()
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.train", module)
    return module


def fit(*hooks: Any, **more: Any) -> None:
    def step(count: Any, batch: Any) -> Any:
        return count + 1, {"loss": jnp.sum(batch) + count}

    ft.fit(0, step, ft.ArrayLoader(jnp.ones(8), 2), hooks=hooks, verbose=0, **more)


def test_without_a_checkpointer_the_values_of_each_epoch_are_reported(ray: Ray) -> None:
    fit(ft.hooks.RayReport(), epochs=2)
    means = [2 + sum(range(4)) / 4, 2 + sum(range(4, 8)) / 4]
    assert ray.reports == [
        {"step": 4 * (epoch + 1), "epoch": epoch, "loss": means[epoch]} for epoch in (0, 1)
    ]


def test_reports_of_steps_have_the_logs_of_the_step_and_the_last_one_the_end(ray: Ray) -> None:
    fit(ft.hooks.RayReport(every=3), epochs=2)
    assert [values["step"] for values in ray.reports] == [3, 6, 8]
    assert [values.get("loss") for values in ray.reports] == [4.0, 7.0, None]


def test_a_run_that_fails_makes_no_last_report(ray: Ray) -> None:
    def fail(event: Any) -> None:
        if event.step == 8:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fit(ft.hooks.RayReport(), fail, epochs=4)
    assert ray.reports == []


def test_a_clock_and_a_path_are_refused_and_without_ray_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="clocks of workers differ"):
        ft.hooks.RayReport(every=ft.every(seconds=60))
    with pytest.raises(TypeError, match="Pass that of the run"):
        ft.hooks.RayReport("gs://bucket/run")
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(ImportError, match=r"functrain\[ray\]"):
        ft.hooks.RayReport()
