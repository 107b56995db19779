"""A training step of one's own inside fit. Keras's own fit is what it is held to."""

import bridge  # isort: skip  # before keras

import jax
import keras
import numpy as np
import pytest
from keras import layers

from tests.guides.by_hand import assert_fused

EXAMPLES, EPOCHS = 300, 2  # the last batch of 32 is smaller


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.random((EXAMPLES, 32), np.float32)
    return x, rng.random((EXAMPLES, 4), np.float32), rng.random(EXAMPLES, np.float32)


def same_as_keras(make, *args, same=assert_fused, **kwargs):
    """Fits twice, as Keras does and fused, and compares History and all variables."""
    results = []
    for fit, options in ((keras.Model.fit, {}), (bridge.fit, {"rewrites": "exact", "fuse": 4})):
        keras.utils.set_random_seed(0)
        model = make()
        extra = {name: value() if callable(value) else value for name, value in kwargs.items()}
        history = fit(model, *args, epochs=EPOCHS, verbose=0, **extra, **options)
        results.append((model, history.history))
    (theirs, expected), (ours, found) = results
    assert list(found) == list(expected)
    same(found.values(), expected.values())
    same(ours.get_weights(), theirs.get_weights())
    same(ours.optimizer.variables, theirs.optimizer.variables)
    return ours, found


class Custom(keras.Model):
    """The step of the guide: gradients, updates and metrics by hand, from the compiled loss."""

    def compute_loss_and_updates(self, trainable, non_trainable, x, y, weight, training=False):
        y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=training)
        loss = self.compute_loss(x, y, y_pred, weight)
        return loss, (y_pred, non_trainable)

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (y_pred, non_trainable)), grads = gradient(
            trainable, non_trainable, x, y, weight, training=True
        )
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        logs, metrics = self.measure(metrics, loss, y, y_pred, weight)
        return logs, (trainable, non_trainable, optimizer, metrics)

    def measure(self, values, loss, y, y_pred, weight):
        logs, new = {}, []
        for metric in self.metrics:
            n = len(metric.variables)
            mine, values = values[:n], values[n:]
            if metric.name == "loss":
                mine = metric.stateless_update_state(mine, loss)
            else:
                mine = metric.stateless_update_state(mine, y, y_pred, sample_weight=weight)
            logs[metric.name] = metric.stateless_result(mine)
            new += mine
        return logs, new


def functional(cls=Custom):
    inputs = keras.Input((32,))
    return cls(inputs, layers.Dense(4)(inputs))


def compiled(model, metrics="metrics"):
    model.compile("adam", "mse", **{metrics: ["mae"]})
    return model


def test_b1_an_overridden_train_step_is_fitted_as_usual(data) -> None:
    x, y, _ = data
    _, history = same_as_keras(lambda: compiled(functional()), x, y)
    assert set(history) == {"loss", "mae"}  # Keras flattens what the step nests


def test_b2_sample_weights_reach_the_loss_and_the_metrics(data) -> None:
    x, y, weight = data

    def make():
        return compiled(functional(), "weighted_metrics")

    _, weighted = same_as_keras(make, x, y, sample_weight=weight)
    _, plain = same_as_keras(make, x, y)
    assert abs(weighted["loss"][0] - plain["loss"][0]) > 0.01
    assert abs(weighted["mae"][0] - plain["mae"][0]) > 0.001


class GAN(keras.Model):
    """Two networks and two losses behind one `fit`; each network has the gradient of its own."""

    def __init__(self):
        super().__init__()
        self.d = keras.Sequential([keras.Input((32,)), layers.Dense(1)])
        self.g = keras.Sequential([keras.Input((4,)), layers.Dense(32)])
        self.seeds = keras.random.SeedGenerator(7)
        self.trackers = [keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")]
        self.built = True

    @property
    def metrics(self):
        return self.trackers

    def call(self, latents):
        return self.d(self.g(latents))

    def losses_of(self, trainable, non_trainable, real):
        pairs = zip(self.trainable_variables, trainable, strict=True)
        rest = zip(self.non_trainable_variables, non_trainable, strict=True)
        with keras.StatelessScope(state_mapping=[*pairs, *rest]) as scope:
            generated = self.g(keras.random.normal((real.shape[0], 4), seed=self.seeds))
            judged = self.d(keras.ops.concatenate([keras.ops.stop_gradient(generated), real]))
            half = keras.ops.ones((real.shape[0], 1))
            truth = keras.ops.concatenate([half, 0 * half])
            d_loss = keras.losses.binary_crossentropy(truth, judged, from_logits=True).mean()
            fooled = self.d(generated)
            g_loss = keras.losses.binary_crossentropy(
                keras.ops.zeros_like(fooled), fooled, from_logits=True
            ).mean()
        moved = [scope.get_current_value(v) for v in self.non_trainable_variables]
        return d_loss, g_loss, moved

    def train_step(self, state, real):
        trainable, non_trainable, optimizer, metrics = state

        def loss(which):
            def value(trainable):
                *losses, moved = self.losses_of(trainable, non_trainable, real)
                return losses[which], moved

            return jax.value_and_grad(value, has_aux=True)

        n = len(self.d.trainable_variables)
        (d_loss, moved), d_grads = loss(0)(trainable)
        (g_loss, _), g_grads = loss(1)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, d_grads[:n] + g_grads[n:], trainable
        )
        first = self.trackers[0].stateless_update_state(metrics[:2], d_loss)
        second = self.trackers[1].stateless_update_state(metrics[2:], g_loss)
        logs = {"d_loss": self.trackers[0].stateless_result(first),
                "g_loss": self.trackers[1].stateless_result(second)}  # fmt: skip
        return logs, (trainable, moved, optimizer, first + second)


@pytest.mark.long
def test_b7_a_gan_inside_fit(data) -> None:
    def make():
        model = GAN()
        model.compile("adam")
        return model

    model, history = same_as_keras(make, data[0])
    assert history["d_loss"][1] < history["d_loss"][0]
    keras.utils.set_random_seed(0)
    assert not np.array_equal(model.g.get_weights()[0], make().g.get_weights()[0])  # it learns, too
