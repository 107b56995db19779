"""bridge.fit equals model.fit: History and every variable, to the bit."""

import bridge  # isort: skip  # before keras: it chooses the backend

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops, optimizers, regularizers

N, BATCH = 104, 16  # six whole batches, and one of eight
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 8)).astype(np.float32)
Y = RNG.normal(size=(N, 4)).astype(np.float32)
LABELS = RNG.integers(0, 4, N)
IMAGES = RNG.normal(size=(N, 6, 6, 4)).astype(np.float32)
TOKENS = RNG.integers(0, 9, size=(N, 6))
WEIGHTS = RNG.uniform(0.5, 2, N).astype(np.float32)

Case = tuple[keras.Model, dict[str, Any]]
CASES: dict[str, Callable[[], Case]] = {}


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    """A model and the arguments of fit, both made anew at each call."""
    CASES[function.__name__] = function
    return function


def dense(*more: Any, compiled: dict[str, Any] | None = None, **kwargs: Any) -> Case:
    net = [keras.Input((8,)), layers.Dense(8, "relu"), *more, layers.Dense(4)]
    model = keras.Sequential(net)
    model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"], **(compiled or {})})
    return model, {"x": X, "y": Y, **kwargs}


@case
def adam() -> Case:
    return dense()


for _name, _optimizer in {
    "sgd": lambda: optimizers.SGD(0.05),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "adamax": lambda: optimizers.Adamax(0.01),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adadelta": lambda: optimizers.Adadelta(0.1),
    "nadam": lambda: optimizers.Nadam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "ftrl": lambda: optimizers.Ftrl(0.05),
    "lion": lambda: optimizers.Lion(0.001),
    "lamb": lambda: optimizers.Lamb(0.01),
    "adafactor": lambda: optimizers.Adafactor(0.05),
    "muon": lambda: optimizers.Muon(0.01),
    "ema": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "ema_overwriting": lambda: optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "loss_scale": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01)),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "clipnorm": lambda: optimizers.SGD(0.1, clipnorm=0.1),
    "global_clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.01),
    "exponential": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)),
    "cosine": lambda: optimizers.SGD(
        optimizers.schedules.CosineDecay(0.0, 9, warmup_target=0.1, warmup_steps=4)
    ),
    "piecewise": lambda: optimizers.SGD(
        optimizers.schedules.PiecewiseConstantDecay([3, 8], [0.1, 0.01, 0.001])
    ),
}.items():
    CASES[_name] = lambda make=_optimizer: dense(compiled={"optimizer": make()})


@case
def shuffled() -> Case:
    return dense(shuffle=True)


@case
def shuffled_in_batches() -> Case:
    return dense(shuffle="batch")


@case
def one_size_of_batches() -> Case:
    return dense(x=X[:96], y=Y[:96])


@case
def sample_weight() -> Case:
    weighted = {"weighted_metrics": ["mae"], "metrics": ["mse"]}
    return dense(compiled=weighted, sample_weight=WEIGHTS)


@case
def class_weight() -> Case:
    return classifier(class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.5})


def classifier(*more: Any, **kwargs: Any) -> Case:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
    return dense(*more, compiled={"loss": loss, "metrics": metrics}, y=LABELS, **kwargs)


@case
def validation_split() -> Case:
    return dense(layers.Dropout(0.3), validation_split=0.3)


@case
def validation_data() -> Case:
    held = (X[:40], Y[:40], WEIGHTS[:40])
    return dense(validation_data=held, validation_batch_size=8, validation_freq=2, epochs=4)


@case
def validation_steps() -> Case:
    return dense(validation_data=(X, Y), validation_steps=2)


@case
def batch_norm() -> Case:
    return dense(layers.BatchNormalization(), validation_split=0.25)


@case
def dropout() -> Case:
    return dense(layers.Dropout(0.5), layers.GaussianNoise(0.1))


@case
def frozen() -> Case:
    model, arguments = dense(layers.BatchNormalization())
    model.layers[0].trainable = model.layers[1].trainable = False
    model.compile("adam", "mse")
    return model, arguments


@case
def constraints() -> Case:
    return dense(layers.Dense(8, kernel_constraint="max_norm", bias_constraint="non_neg"))


@case
def kernel_regularizers() -> Case:
    return dense(layers.Dense(8, kernel_regularizer="l2", bias_regularizer=regularizers.L1(0.1)))


@case
def activity_regularizer() -> Case:
    return dense(layers.Dense(8, activity_regularizer="l2"), layers.ActivityRegularization(0.01))


class AddsLoss(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


@case
def add_loss() -> Case:
    return dense(AddsLoss(), layers.Dense(8), AddsLoss())


@case
def convolutions() -> Case:
    model = keras.Sequential(
        [
            keras.Input((6, 6, 4)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    model.compile("adam", "mse")
    return model, {"x": IMAGES, "y": Y}


@case
def random_augmentation() -> Case:
    net = [keras.Input((6, 6, 4)), layers.RandomFlip(), layers.Flatten(), layers.Dense(4)]
    model = keras.Sequential(net)
    model.compile("adam", "mse")
    return model, {"x": IMAGES, "y": Y}


@case
def masks() -> Case:
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 8, mask_zero=True)(inputs)
    x = layers.LSTM(8, return_sequences=True)(x)
    model = keras.Model(inputs, layers.TimeDistributed(layers.Dense(4))(x))
    model.compile("adam", "mse", metrics=["mae"])
    return model, {"x": TOKENS, "y": RNG_SEQUENCES}


RNG_SEQUENCES = RNG.normal(size=(N, 6, 4)).astype(np.float32)


@case
def bidirectional_gru() -> Case:
    model = keras.Sequential(
        [
            keras.Input((6, 4)),
            layers.Bidirectional(layers.GRU(8, dropout=0.2)),
            layers.Dense(4),
        ]
    )
    model.compile("adam", "mse")
    return model, {"x": RNG_SEQUENCES, "y": Y}


@case
def attention() -> Case:
    inputs = keras.Input((6, 4))
    x = layers.MultiHeadAttention(2, 4, dropout=0.1)(inputs, inputs)
    x = layers.LayerNormalization()(x + inputs)
    model = keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))
    model.compile("adamw", "mse")
    return model, {"x": RNG_SEQUENCES, "y": Y}


@case
def mixed_bfloat16() -> Case:
    policy = "mixed_bfloat16"
    net = [keras.Input((8,)), layers.Dense(8, "relu", dtype=policy), layers.Dense(4, dtype=policy)]
    model = keras.Sequential(net)
    model.compile("adam", "mse", metrics=["mae"])
    return model, {"x": X, "y": Y}


@case
def mixed_float16() -> Case:
    policy = "mixed_float16"
    net = [keras.Input((8,)), layers.Dense(8, "relu", dtype=policy), layers.Dense(4, dtype=policy)]
    model = keras.Sequential(net)
    model.compile(optimizers.LossScaleOptimizer(optimizers.SGD(0.1)), "mse")
    return model, {"x": X, "y": Y}


def two_heads(**compiled: Any) -> keras.Model:
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    x = layers.Dense(8, "relu")(layers.Concatenate()([a, b]))
    outputs = {"value": layers.Dense(4, name="value")(x), "kind": layers.Dense(4, name="kind")(x)}
    model = keras.Model({"a": a, "b": b}, outputs)
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", {"value": "mse", "kind": crossentropy}, **compiled)
    return model


@case
def dict_targets() -> Case:
    model = two_heads(metrics={"value": ["mae"], "kind": ["accuracy"]})
    return model, {"x": {"a": X, "b": -X}, "y": {"value": Y, "kind": LABELS}}


@case
def loss_weights() -> Case:
    model = two_heads(
        loss_weights={"value": 0.3, "kind": 2.0},
        weighted_metrics={"value": ["mae"], "kind": ["accuracy"]},
    )
    targets = {"value": Y, "kind": LABELS}
    weights = {"value": WEIGHTS, "kind": WEIGHTS[::-1]}
    return model, {"x": {"a": X, "b": -X}, "y": targets, "sample_weight": weights}


@case
def lists_of_outputs() -> Case:
    a, b = keras.Input((8,)), keras.Input((8,))
    x = layers.Concatenate()([a, b])
    model = keras.Model([a, b], [layers.Dense(4)(x), layers.Dense(4)(x)])
    model.compile("sgd", ["mse", "mae"], metrics=[["mae"], ["mse"]])
    return model, {"x": [X, -X], "y": [Y, -Y], "validation_split": 0.25}


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(8, "relu")
        self.drop = layers.Dropout(0.3)
        self.out = layers.Dense(4)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.drop(self.hidden(x), training=training))


@case
def subclassed() -> Case:
    model = Subclassed()
    model.compile("adam", "mse", metrics=["mae"])
    return model, {"x": X, "y": Y, "validation_split": 0.25}


class OwnLoss(Subclassed):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.abs(y - y_pred)) + 0.01 * ops.mean(ops.square(y_pred))


@case
def own_compute_loss() -> Case:
    model = OwnLoss()
    model.compile("adam", metrics=["mae"])
    return model, {"x": X, "y": Y}


class OwnMetrics(Subclassed):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "norm": ops.mean(ops.square(y_pred))}


@case
def own_compute_metrics() -> Case:
    model = OwnMetrics()
    model.compile("adam", "mse", metrics=["mae"])
    return model, {"x": X, "y": Y}


class OwnStep(Subclassed):
    """Its own train_step and metrics, as the guide writes them; its logs are nested."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def loss_and_updates(self, trainable, rest, x, y):
        y_pred, rest = self.stateless_call(trainable, rest, x, training=True)
        return ops.mean(ops.square(y - y_pred)), rest

    def train_step(self, state, data):
        import jax

        trainable, rest, opt, metrics = state
        x, y = data
        grad = jax.value_and_grad(self.loss_and_updates, has_aux=True)
        (loss, rest), grads = grad(trainable, rest, x, y)
        trainable, opt = self.optimizer.stateless_apply(opt, grads, trainable)
        metrics = self.tracker.stateless_update_state(metrics, loss)
        logs = {"loss": self.tracker.stateless_result(metrics), "more": {"now": loss}}
        return logs, (trainable, rest, opt, metrics)


@case
def own_train_step_with_nested_logs() -> Case:
    model = OwnStep()
    model.compile("adam")
    return model, {"x": X, "y": Y}


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return N // BATCH + 1

    def __getitem__(self, i: int) -> Any:
        rows = slice(i * BATCH, (i + 1) * BATCH)
        return X[rows], Y[rows]


def endless() -> Any:
    while True:
        for i in range(N // BATCH):
            yield X[i * BATCH :][:BATCH], Y[i * BATCH :][:BATCH]


@case
def py_dataset() -> Case:
    return dense(x=Batches(), y=None, validation_data=Batches())


@case
def generator() -> Case:
    return dense(x=endless(), y=None, steps_per_epoch=7)


@case
def generator_of_weights() -> Case:
    batches = ((x, y, np.arange(1, BATCH + 1, dtype=np.float32)) for x, y in endless())
    return dense(x=batches, y=None, steps_per_epoch=5)


@case
def steps_per_epoch() -> Case:
    return dense(steps_per_epoch=3, epochs=2)


@case
def steps_of_many_epochs_from_arrays() -> Case:
    return dense(
        steps_per_epoch=5, epochs=3, shuffle=True, x=np.tile(X, (3, 1)), y=np.tile(Y, (3, 1))
    )


@case
def initial_epoch() -> Case:
    return dense(initial_epoch=2, epochs=4)


@case
def jax_arrays() -> Case:
    return dense(x=ops.convert_to_tensor(X), y=ops.convert_to_tensor(Y))


@case
def double_precision_arrays() -> Case:
    return dense(x=X.astype(np.float64), y=Y.astype(np.float64))


@case
def inputs_without_targets() -> Case:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), AddsLoss(), layers.Dense(4)])
    model.compile("adam")
    return model, {"x": X}


@case
def steps_per_execution() -> Case:
    return dense(compiled={"steps_per_execution": 3})


@case
def eager() -> Case:
    return dense(compiled={"run_eagerly": True}, epochs=1)


@case
def not_compiled() -> Case:
    return dense(compiled={"jit_compile": False}, epochs=1)


@case
def early_stopping() -> Case:
    stop = keras.callbacks.EarlyStopping(
        "loss", patience=1, min_delta=0.5, restore_best_weights=True
    )
    return dense(callbacks=[stop], epochs=6)


@case
def reduced_learning_rate() -> Case:
    lower = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=1)
    return dense(callbacks=[lower], epochs=5)


@case
def scheduled_learning_rate() -> Case:
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.5)
    return dense(callbacks=[schedule], epochs=3)


@case
def swapped_averages() -> Case:
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    optimizer = optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    return dense(compiled={"optimizer": optimizer}, callbacks=[swap], validation_data=(X, Y))


@case
def lambda_callback_of_epochs() -> Case:
    found = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)
    return dense(callbacks=[found])


@case
def jax_metrics_with_reset() -> Case:
    auc = [keras.metrics.AUC(num_thresholds=20), keras.metrics.Precision(), "binary_accuracy"]
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4, "sigmoid")])
    model.compile("adam", "binary_crossentropy", metrics=auc)
    return model, {"x": X, "y": (Y > 0).astype(np.float32), "validation_split": 0.25}


@case
def lora() -> Case:
    model, arguments = dense(layers.Dense(8))
    for layer in model.layers:
        layer.enable_lora(2)
    model.compile("adam", "mse")
    return model, arguments


@case
def float8() -> Case:
    model, arguments = dense(layers.Dense(8))
    for layer in model.layers:
        layer.quantize("float8")
    model.compile("adam", "mse")
    return model, arguments


@case
def int8_with_lora() -> Case:
    model, arguments = dense(layers.Dense(8))
    for layer in model.layers:
        layer.quantize("int8")
        layer.enable_lora(2)
    model.compile("adam", "mse")
    return model, arguments


@case
def data_frames() -> Case:
    pandas = pytest.importorskip("pandas")
    return dense(x=pandas.DataFrame(X), y=pandas.DataFrame(Y), batch_size=BATCH)


EVERY_RUN = {
    "adam", "ema_overwriting", "loss_scale", "accumulation", "cosine", "shuffled", "sample_weight",
    "validation_split", "batch_norm", "dropout", "add_loss", "masks", "mixed_bfloat16",
    "loss_weights", "own_train_step_with_nested_logs", "py_dataset", "generator",
    "reduced_learning_rate", "steps_per_execution", "eager",
}  # fmt: skip


def marked(names: Any) -> list[Any]:
    long = pytest.mark.long
    return [pytest.param(n, marks=() if n in EVERY_RUN else long) for n in names]


def run(name: str, way: Callable[..., Any], **options: Any) -> tuple[keras.Model, Any]:
    """Fits a fresh model; returns it and the History."""
    keras.utils.clear_session()  # names are numbered from 0 again, and are keys of History
    keras.utils.set_random_seed(0)
    model, arguments = CASES[name]()
    defaults = {"epochs": 2, "verbose": 0, "shuffle": False}
    if isinstance(arguments["x"], np.ndarray) and "steps_per_epoch" not in arguments:
        defaults["batch_size"] = BATCH
    np.random.seed(0)  # the order of shuffled arrays is drawn from it
    return model, way(model, **{**defaults, **arguments}, **options).history


def variables(model: keras.Model) -> list[Any]:
    optimizer = model.optimizer.variables if model.optimizer else []
    return [np.asarray(v.value) for v in [*model.variables, *optimizer, *model.metrics_variables]]


@pytest.mark.parametrize("name", marked(CASES))
def test_fit_equals_keras_to_the_bit_whatever_is_fused(name: str) -> None:
    keras_model, keras_history = run(name, keras.Model.fit)
    for fuse in (1, 5, "auto"):
        model, history = run(name, bridge.fit, fuse=fuse, rewrites="exact")
        assert history == keras_history, f"fuse={fuse}"
        pairs = zip(variables(keras_model), variables(model), strict=True)
        for i, (a, b) in enumerate(pairs):
            np.testing.assert_array_equal(a, b, err_msg=f"fuse={fuse}, variable {i}")


@pytest.mark.parametrize(
    "name",
    ["validation_split", "dict_targets", "own_train_step_with_nested_logs", "py_dataset"],
)
def test_evaluate_and_predict_equal_keras(name: str) -> None:
    keras.utils.set_random_seed(0)
    model, arguments = CASES[name]()
    data = {k: v for k, v in arguments.items() if k in ("x", "y", "batch_size")}
    if name != "py_dataset":
        data["batch_size"] = BATCH
    inputs = {k: v for k, v in data.items() if k != "y"}
    if not isinstance(model, OwnStep):
        assert bridge.evaluate(model, **data, verbose=0) == model.evaluate(**data, verbose=0)
        kwargs = {**data, "verbose": 0, "return_dict": True}
        assert bridge.evaluate(model, **kwargs, fuse=2) == model.evaluate(**kwargs)
    for fuse in (1, 5, "auto"):
        ours = bridge.predict(model, **inputs, verbose=0, fuse=fuse)
        theirs = model.predict(**inputs, verbose=0)
        keras.tree.map_structure(np.testing.assert_array_equal, ours, theirs)
