"""Which epochs end with an evaluation: those that Keras's do."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import keras
import pytest

from bridge.train._runs import Evaluation, Options

del bridge


@pytest.mark.parametrize("freq", [1, 2, 3, [1, 4], []])
def test_an_evaluation_is_due_when_it_is_in_keras(freq: Any) -> None:
    theirs = [keras.Sequential()._should_eval(epoch, freq) for epoch in range(6)]
    evaluation = Evaluation(keras.Sequential(), (None,), None, None, freq, Options(1, "off"))
    assert [evaluation.is_due(epoch) for epoch in range(6)] == theirs
