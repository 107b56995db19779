"""Where all is finite, a guarded run is the run without the guard.

The whole state is compared to the bit, but for convolutions that are rewritten.
"""

import chex
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


def trained(kind, tx, inner=lambda opt_state: opt_state, rewrites="auto"):
    model = models.make(kind, "float32")
    state = bridge.create_state(model, tx, rng=jax.random.key(2))
    step = ft.train_step(ft.supervised(bridge.from_keras(model), LOSS), tx)
    state, logs = ft.fuse(step, STEPS, rewrites=rewrites)(state, models.batches(model, STEPS))
    return state.params, state.model_state, inner(state.opt_state), np.array(logs["loss"])


CLIPPED = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-2, 20))
)
SGD = optax.sgd(0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("kind", "tx", "rewrites"),
    [
        ("batch_norm", SGD, "auto"),
        ("dropout", CLIPPED, "auto"),
        pytest.param("narrow", CLIPPED, "auto", marks=pytest.mark.long),
        # Where convolutions are rewritten, the guard changes last bits on some processors.
        pytest.param("convolutional", SGD, "off", marks=pytest.mark.long),
    ],
)
def test_skip_non_finite_changes_no_bit_of_a_finite_run(kind, tx, rewrites) -> None:
    plain = trained(kind, tx, rewrites=rewrites)
    guarded = trained(kind, ft.tx.skip_non_finite(tx), lambda state: state.inner, rewrites)
    assert digest(guarded) == digest(plain)


@pytest.mark.long
def test_skip_non_finite_changes_rewritten_convolutions_by_rounding_only() -> None:
    plain = trained("convolutional", SGD)
    guarded = trained("convolutional", ft.tx.skip_non_finite(SGD), lambda state: state.inner)
    chex.assert_trees_all_close(guarded, plain, rtol=0, atol=1e-6)
