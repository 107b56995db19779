"""Rows B1 to B7: a training step of one's own inside fit. Keras's own fit is what it is held to."""

import bridge  # isort: skip  # before keras

import jax
import keras
import numpy as np
import pytest
from keras import layers

from tests.guides.by_hand import assert_close, assert_fused, assert_same

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


class CustomSequential(keras.Sequential):
    compute_loss_and_updates = Custom.compute_loss_and_updates
    train_step, measure = Custom.train_step, Custom.measure


class Subclassed(keras.Model):
    compute_loss_and_updates = Custom.compute_loss_and_updates
    train_step, measure = Custom.train_step, Custom.measure

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(4)

    def call(self, x, training=False):
        return self.out(x)


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


def test_b2_a_single_output_agrees_but_for_last_bits(data) -> None:
    """The shape of the guide. The compiler rounds its sums otherwise in a loop than in a step."""
    x, y, weight = data

    def make():
        inputs = keras.Input((32,))
        return compiled(Custom(inputs, layers.Dense(1)(inputs)), "weighted_metrics")

    same_as_keras(make, x, y[:, :1], sample_weight=weight, same=assert_close)


class Lower(keras.Sequential):
    """Compiled with an optimizer alone: loss, tracker and metric are its own."""

    listed = True

    def __init__(self, layers):
        super().__init__(layers)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]  # so that they are reset at each epoch

    def compute_loss_and_updates(self, trainable, non_trainable, x, y, training=False):
        y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=training)
        return keras.losses.mean_squared_error(y, y_pred).mean(), (y_pred, non_trainable)

    def measure(self, values, loss, y, y_pred):
        n = len(self.loss_tracker.variables)
        first = self.loss_tracker.stateless_update_state(values[:n], loss)
        second = self.mae_metric.stateless_update_state(values[n:], y, y_pred)
        return {
            "loss": self.loss_tracker.stateless_result(first),
            "mae": self.mae_metric.stateless_result(second),
        }, first + second

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (y_pred, non_trainable)), grads = gradient(
            trainable, non_trainable, *data, training=True
        )
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        logs, metrics = self.measure(metrics, loss, data[1], y_pred)
        return logs, (trainable, non_trainable, optimizer, metrics)


def lower():
    model = Lower([keras.Input((32,)), layers.Dense(4)])
    model.compile(optimizer="adam")
    return model


def test_b3_own_loss_and_metrics_are_reset_at_each_epoch(data) -> None:
    x, y, _ = data
    model, history = same_as_keras(lower, x, y)
    seen = float(model.loss_tracker.count)
    assert seen == -(-EXAMPLES // 32)  # batches of the last epoch, not of both
    assert set(history) == {"loss", "mae"}


class Repaired(Custom):
    def test_step(self, state, data):
        trainable, non_trainable, metrics = state
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        loss, (y_pred, non_trainable) = self.compute_loss_and_updates(
            trainable, non_trainable, x, y, weight
        )
        logs, metrics = self.measure(metrics, loss, y, y_pred, weight)
        return self.reported(logs), (trainable, non_trainable, metrics)

    def reported(self, logs):
        return logs


class AsWritten(Repaired):
    """The guide's test_step overwrites its logs with each metric's result: the last one is left.

    That is the dict of the compiled metrics, of one entry, of which `evaluate` makes a number.
    """

    def reported(self, logs):
        return logs["compile_metrics"]


def test_b4_an_overridden_test_step_is_evaluated_as_usual(data) -> None:
    x, y, _ = data
    model = compiled(functional(Repaired))
    for flags in ({}, {"return_dict": True}):
        found = bridge.evaluate(model, x, y, verbose=0, rewrites="exact", **flags)
        expected = model.evaluate(x, y, verbose=0, **flags)
        assert found == pytest.approx(expected, rel=1e-6)


def test_b4_a_test_step_as_the_guide_writes_it_gives_a_bare_number(data) -> None:
    x, y, _ = data
    model = compiled(functional(AsWritten))
    found = bridge.evaluate(model, x, y, verbose=0, rewrites="exact")
    assert found == pytest.approx(model.evaluate(x, y, verbose=0), rel=1e-6)
    assert isinstance(found, float)


def test_b5_callbacks_go_on_working(data) -> None:
    x, y, _ = data

    def callbacks():
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1)),
            keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0),
        ]

    _, history = same_as_keras(lower, x, y, callbacks=callbacks)
    assert history["learning_rate"] == pytest.approx([0.01, 0.005])


def test_b5_distribution_goes_on_working(data) -> None:
    x, y, _ = data
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        same_as_keras(lower, x[:256], y[:256])
    finally:
        keras.distribution.set_distribution(None)


def sequential():
    return CustomSequential([keras.Input((32,)), layers.Dense(4)])


@pytest.mark.parametrize("make", [sequential, Subclassed])  # functional ones: row B1
def test_b6_every_kind_of_model_takes_the_step(make, data) -> None:
    x, y, _ = data
    same_as_keras(lambda: compiled(make()), x, y)


class Distilled(keras.Sequential):
    """Learns from a frozen teacher, by a loss of its own."""

    def __init__(self, layers, teacher):
        super().__init__(layers)
        self.teacher = teacher

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        hard = super().compute_loss(x, y, y_pred, sample_weight, training)
        return hard + keras.ops.mean((self.teacher(x, training=False) - y_pred) ** 2)


def test_b7_distillation_inside_fit(data) -> None:
    x, y, _ = data
    keras.utils.set_random_seed(1)
    teacher = keras.Sequential([keras.Input((32,)), layers.Dense(4)])
    teacher.trainable = False
    before = teacher.get_weights()

    def make():
        model = Distilled([keras.Input((32,)), layers.Dense(4)], teacher)
        model.compile("adam", "mse")
        return model

    # A Sequential does not count the teacher's variables among its own.
    with pytest.warns(UserWarning, match="compiled in as constants"):
        same_as_keras(make, x, y)
    assert_same(teacher.get_weights(), before)


class Contrastive(keras.Sequential):
    """Pulls two noisy views of an example together, and those of different examples apart."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        other = self(x + 0.1 * keras.random.normal(keras.ops.shape(x), seed=self.seeds))
        scores = y_pred @ keras.ops.transpose(other)
        labels = keras.ops.arange(keras.ops.shape(x)[0])
        loss = keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True)
        return keras.ops.mean(loss)

    def __init__(self, layers):
        super().__init__(layers)
        self.seeds = keras.random.SeedGenerator(7)


@pytest.mark.long
def test_b7_a_contrastive_loss_inside_fit(data) -> None:
    def make():
        model = Contrastive([keras.Input((32,)), layers.Dense(8)])
        model.compile("adam")
        return model

    _, history = same_as_keras(make, data[0], same=assert_close)
    assert history["loss"][1] < history["loss"][0]


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
