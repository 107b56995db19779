"""Fixtures of the tests of rewrites."""

from typing import Any

import pytest

from functrain.rewrites import _optimize


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUNCTRAIN_REWRITES", raising=False)


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *rules: monkeypatch.setattr(_optimize, "REWRITES", rules)
