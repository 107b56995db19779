"""Where all is finite, a guarded run is the run without the guard: the whole state, to the bit."""

import jax
import numpy as np
import optax
import pytest

import bridge
import functrain as ft

from ..conftest import digest
from . import models

STEPS = 9
LOSS = optax.softmax_cross_entropy_with_integer_labels


def trained(kind, tx, inner):
    model = models.make(kind, "float32")
    state = bridge.create_state(model, tx, rng=jax.random.key(2))
    step = ft.train_step(ft.supervised(bridge.from_keras(model), LOSS), tx)
    state, logs = ft.fuse(step, STEPS)(state, models.batches(model, STEPS))
    return digest((state.params, state.model_state, inner(state.opt_state), np.array(logs["loss"])))


CLIPPED = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 20))
)
SGD = optax.sgd(0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("kind", "tx"),
    [
        ("batch_norm", SGD),
        ("dropout", CLIPPED),
        pytest.param("narrow", CLIPPED, marks=pytest.mark.long),
        pytest.param("convolutional", SGD, marks=pytest.mark.long),
    ],
)
def test_skip_non_finite_changes_no_bit_of_a_finite_run(kind, tx) -> None:
    plain = trained(kind, tx, lambda opt_state: opt_state)
    assert trained(kind, ft.tx.skip_non_finite(tx), lambda opt_state: opt_state.inner) == plain
