"""The doctor tells what this installation computes wrongly, and that functrain does not."""

import signal
import subprocess

import pytest

import functrain as ft
from functrain.common import _compile
from functrain.inspect import _doctor


def test_functrain_avoids_every_known_fault_of_this_installation():
    found = ft.inspect.doctor()
    assert [finding.functrain for finding in found.findings] == ["right"] * len(_doctor.FAULTS)
    assert found.is_affected == _compile.IS_AFFECTED


def test_a_fault_is_listed_with_its_issue_and_the_remedy():
    fault = _doctor.FAULTS[0]
    affected = ft.inspect.Doctor({"jax": "0.10.1"}, (_doctor.Finding(fault, "wrong", "right"),))
    assert "jax#39103" in str(affected)
    assert "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= " in repr(affected)
    crashes = ft.inspect.Doctor(
        {"jax": "0.10.1"}, tuple(_doctor.Finding(x, "crash", "right") for x in _doctor.FAULTS)
    )
    assert max(map(len, repr(crashes).splitlines())) <= 80
    well = ft.inspect.Doctor({"jax": "0.12.0"}, (_doctor.Finding(fault, "right", "right"),))
    assert "XLA_FLAGS" not in str(well)
    assert not well.is_affected


@pytest.mark.parametrize(
    ("printed", "code", "expected"),
    [
        ("right right", 0, ("right", "right")),
        ("right", -signal.SIGABRT, ("crash", "right")),
        ("right", 1, ("crash", "right")),
        ("", -signal.SIGABRT, ("crash", "crash")),
    ],
)
def test_a_process_that_ends_early_has_crashed(monkeypatch, printed, code, expected):
    done = subprocess.CompletedProcess([], code, printed)
    monkeypatch.setattr(_doctor.subprocess, "run", lambda *args, **options: done)
    assert _doctor._check_fault(0)[1:] == expected


def test_a_fault_is_looked_for_on_the_cpu_whatever_the_platform_of_the_environment(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert _doctor._check_fault(0).functrain == "right"


def test_an_error_of_the_installation_is_no_crash(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(_doctor.sys, "executable", "false")
    with pytest.raises(RuntimeError, match=r"doctor: expected a process that runs 'sums of prod"):
        _doctor._check_fault(0)
