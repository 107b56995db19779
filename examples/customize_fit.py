"""Seven ways to customize `fit`, each run by Keras and by the fused loops of `bridge`.

Each part replaces something: the step, the loss, the metrics, the evaluation, the callbacks or the
kind of model. Keras and `bridge` run it from the same initial values, and the script checks that
both give the same results.

    python examples/customize_fit.py            # about half a minute on two CPU cores
    python examples/customize_fit.py --quick    # some seconds
"""

# %% Options. `arguments` also selects the JAX backend, so it runs before Keras is imported
from _example import arguments

args = arguments(__doc__, quick="two epochs", epochs=20)

import bridge
import jax
import keras
import matplotlib.figure
import numpy as np

epochs = 2 if args.quick else args.epochs

# %% Data. A linear regression with 1000 examples of 32 features
rng = np.random.default_rng(args.seed)
x = rng.normal(size=(1000, 32)).astype(np.float32)
y = (x @ rng.normal(size=(32, 4)) / 6).astype(np.float32)
weight = rng.uniform(0.5, 1.5, 1000).astype(np.float32)


def layers():
    return [keras.Input((32,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(4)]


curves = {}  # title -> the losses of both trainings


def compare(title, make, *data, **kwargs):
    """Trains twice, from the same seed: as Keras does, and fused."""
    results = []
    for fit in (keras.Model.fit, bridge.fit):
        keras.utils.set_random_seed(args.seed)
        model = make()
        options = {"rewrites": "exact"} if fit is bridge.fit else {}
        history = fit(model, *data, epochs=epochs, verbose=0, **options, **kwargs).history
        results.append((model, history))
    (theirs, expected), (ours, found) = results
    apart = max(
        float(np.max(np.abs(np.subtract(a, b))))
        for a, b in zip(
            [*expected.values(), *theirs.get_weights()],
            [*found.values(), *ours.get_weights()],
            strict=True,
        )
    )
    # XLA may round a sum differently inside a loop than in a single step. This is rare, and changes
    # only the last bit.
    assert apart < 1e-5, (title, apart)
    same = f"within {apart:.0e}" if apart else "to the bit"
    last = {name: round(float(values[-1]), 4) for name, values in found.items()}
    curves[title] = expected["loss"], found["loss"]
    print(f"{title}: {last}, equal {same}")
    return ours


# %% 1. A custom train_step that uses the compiled loss and metrics
class Custom(keras.Model):
    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (_, aux), grads = gradient(
            trainable, non_trainable, metrics, x, y, sample_weight, training=True,
            optimizer_variables=optimizer,
        )  # fmt: skip
        loss, y_pred, non_trainable, metrics = aux
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        logs, new = {}, []
        for metric in self.metrics:
            n = len(metric.variables)
            values, metrics = metrics[:n], metrics[n:]
            if metric.name == "loss":
                values = metric.stateless_update_state(values, loss)
            else:
                # The metrics use the same sample weights as the loss, which example 2 passes.
                values = metric.stateless_update_state(
                    values, y, y_pred, sample_weight=sample_weight
                )
            logs[metric.name] = metric.stateless_result(values)  # a dict of them: nested logs
            new += values
        return logs, (trainable, non_trainable, optimizer, new)


def custom():
    inputs = keras.Input((32,))
    model = Custom(inputs, keras.layers.Dense(4)(keras.layers.Dense(32, "relu")(inputs)))
    model.compile("adam", "mse", metrics=["mae"])
    return model


compare("1. own train_step", custom, x, y)


# %% 2. The same step with sample weights
def weighted():
    model = custom()
    model.compile("adam", "mse", weighted_metrics=["mae"])
    return model


compare("2. with sample weights", weighted, x, y, sample_weight=weight)


# %% 3. A lower-level train_step. Only the optimizer is compiled. The model computes the loss and
# updates its metrics itself
class Bare(keras.Sequential):
    def __init__(self, layers):
        super().__init__(layers)
        self.tracker = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [self.tracker, self.mae]  # so that they begin anew with each epoch

    def loss_and_updates(self, trainable, non_trainable, x, y, training):
        y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=training)
        return keras.ops.mean(keras.ops.square(y - y_pred)), (y_pred, non_trainable)

    def update(self, metrics, loss, y, y_pred):
        n = len(self.tracker.variables)
        first = self.tracker.stateless_update_state(metrics[:n], loss)
        second = self.mae.stateless_update_state(metrics[n:], y, y_pred)
        logs = {
            "loss": self.tracker.stateless_result(first),
            "mae": self.mae.stateless_result(second),
        }
        return logs, [*first, *second]

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y = data
        gradient = jax.value_and_grad(self.loss_and_updates, has_aux=True)
        (loss, aux), grads = gradient(trainable, non_trainable, x, y, True)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        logs, metrics = self.update(metrics, loss, y, aux[0])
        return logs, (trainable, aux[1], optimizer, metrics)

    # Example 4 runs this step through `evaluate`.
    def test_step(self, state, data):
        trainable, non_trainable, metrics = state
        x, y = data
        loss, aux = self.loss_and_updates(trainable, non_trainable, x, y, False)
        logs, metrics = self.update(metrics, loss, y, aux[0])
        return logs, (trainable, aux[1], metrics)


def bare():
    model = Bare(layers())
    model.compile(keras.optimizers.Adam())
    return model


model = compare("3. own loss and metrics", bare, x, y)

# %% 4. A custom test_step, which `bridge.evaluate` runs
found = bridge.evaluate(model, x, y, verbose=0, rewrites="exact")
np.testing.assert_allclose(found, model.evaluate(x, y, verbose=0), rtol=1e-6)
print("4. own test_step:", [round(float(value), 4) for value in np.ravel(found)])


# %% 5. Callbacks. They work as in Keras and can change the learning rate or stop training
def watched():
    return [
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.05),
        keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True),
    ]


def fit_watched(fit, **options):
    keras.utils.set_random_seed(args.seed)
    model = bare()
    history = fit(model, x, y, epochs=epochs, verbose=0, callbacks=watched(), **options)
    return history.history


expected, found = fit_watched(keras.Model.fit), fit_watched(bridge.fit, rewrites="exact")
for name, series in expected.items():
    np.testing.assert_allclose(found[name], series, rtol=1e-5)
print("5. callbacks: the same history, learning rate included")


# %% 6. A subclassed model. The models above are Functional and Sequential
class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(32, "relu"), keras.layers.Dense(4)

    def call(self, x):
        return self.out(self.hidden(x))


def subclassed():
    model = Subclassed()
    model.compile("adam", "mse")
    return model


compare("6. subclassed", subclassed, x, y)


# %% 7. Distillation, a custom loss that depends on a second model, the teacher
class Distilled(keras.Sequential):
    def __init__(self, layers, teacher):
        super().__init__(layers)
        self.teacher = teacher  # frozen below: its variables come along, and stay

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        told = self.teacher(x, training=False)
        hard = super().compute_loss(x, y, y_pred, sample_weight, training)
        return 0.3 * hard + 0.7 * keras.ops.mean(keras.ops.square(told - y_pred))


model.trainable = False


def distilled():
    student = Distilled([keras.Input((32,)), keras.layers.Dense(4)], model)
    student.compile("adam", "mse")
    return student


compare("7. distillation", distilled, x, y)

# %% Plot. The losses of `bridge.fit` are dots on the lines of `model.fit`
figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
for title, (keras_losses, losses) in curves.items():
    (line,) = panel.plot(keras_losses, label=title)
    panel.plot(losses, "o", ms=3, color=line.get_color())
panel.set(xlabel="epoch", ylabel="loss of model.fit (lines) and bridge.fit (dots)", yscale="log")
panel.legend(fontsize=8)
figure.savefig(args.output / "customize_fit.png", dpi=120)
print(f"wrote {args.output / 'customize_fit.png'}")
