"""Which epochs end with an evaluation: those that Keras's do."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import keras
import pytest

from bridge.train._epochs import is_due

del bridge


@pytest.mark.parametrize("freq", [1, 2, 3, [1, 4], []])
def test_an_evaluation_is_due_when_it_is_in_keras(freq: Any) -> None:
    theirs = [keras.Sequential()._should_eval(epoch, freq) for epoch in range(6)]
    assert [is_due(epoch, freq) for epoch in range(6)] == theirs


@pytest.mark.parametrize("freq", ["2", 2.0, None])
def test_what_is_no_frequency_is_refused(freq: Any) -> None:
    with pytest.raises(ValueError, match="validation_freq: expected a number of epochs"):
        is_due(0, freq)
