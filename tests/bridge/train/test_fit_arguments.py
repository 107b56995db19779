"""Arguments that bridge.fit, evaluate and predict refuse before anything is done, and how."""

import bridge  # isort: skip  # before keras: it chooses the backend

import fractions
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import keras
import numpy as np
import optax
import pytest
from keras import layers

import functrain as ft

X, Y = np.ones((48, 3), np.float32), np.ones((48, 4), np.float32)


def compiled(**kwargs: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **kwargs})
    return model


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"epochs": "3"}, "epochs: expected an integer of at least 0, got '3'"),
        ({"epochs": 2.0}, "epochs: expected an integer of at least 0, got 2.0"),
        ({"initial_epoch": -1}, "initial_epoch: expected an integer of at least 0, got -1"),
        ({"batch_size": "32"}, "batch_size: expected an integer of at least 0"),
        ({"batch_size": -1}, "batch_size: expected an integer of at least 0, got -1"),
        ({"steps_per_epoch": 1.5}, "steps_per_epoch: expected an integer"),
        ({"validation_steps": "2"}, "validation_steps: expected an integer"),
        ({"validation_batch_size": -1}, "validation_batch_size: expected an integer"),
        ({"verbose": "loud"}, "verbose: expected 'auto', 0, 1 or 2, got 'loud'"),
        ({"verbose": 3}, "verbose: expected 'auto', 0, 1 or 2, got 3"),
        ({"verbose": None}, "verbose: expected 'auto', 0, 1 or 2, got None"),
        ({"validation_split": "a"}, "validation_split: expected a fraction of the arrays"),
        ({"validation_split": 1.5}, "validation_split: expected a fraction of the arrays"),
        ({"validation_freq": "1"}, "validation_freq: expected a whole number of epochs"),
        ({"validation_freq": 0}, "validation_freq: expected a whole number of epochs"),
        ({"validation_freq": 2.0}, "validation_freq: expected a whole number of epochs"),
        ({"validation_freq": None}, "validation_freq: expected a whole number of epochs"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_argument_that_means_nothing(arguments: Any, words: str) -> None:
    model = compiled()
    with pytest.raises(ValueError, match=words):
        bridge.fit(model, X, Y, **{"validation_data": (X, Y), "verbose": 0, **arguments})
    assert int(model.optimizer.iterations.value) == 0


ROWS = jax.NamedSharding(ft.sharding.mesh({"data": -1}), jax.P("data"))
LOADER = ft.ArrayLoader((X, Y), 8)


@pytest.mark.parametrize("data", [LOADER, ft.NoData(3), ft.distributed.local(LOADER, ROWS)])
def test_loaders_of_functrain_are_refused_before_a_step(data: Any) -> None:
    model = compiled()
    words = "expected data that Keras accepts, got .*Pass the arrays themselves and batch_size="
    for call in (bridge.fit, bridge.evaluate, bridge.predict):
        with pytest.raises(TypeError, match=f"x: {words}"):
            call(model, data, verbose=0)
    with pytest.raises(TypeError, match=f"validation_data: {words}"):
        bridge.fit(model, X, Y, validation_data=data, verbose=0)
    assert int(model.optimizer.iterations.value) == 0


@pytest.mark.parametrize("which", [0, 1])
def test_big_endian_arrays_train_as_those_of_the_machine(which: int) -> None:
    losses = []
    for swap in (False, True):
        keras.utils.set_random_seed(0)
        data = [X, Y]
        if swap:
            data[which] = data[which].astype(">f4")
        losses.append(bridge.fit(compiled(), *data, verbose=0).history["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("which", [0, 1])
def test_masked_arrays_are_refused_since_the_mask_would_be_lost(which: int) -> None:
    data = [X, Y]
    data[which] = np.ma.masked_equal(data[which], 0)
    with pytest.raises(TypeError, match=f"{'xy'[which]}: expected arrays without a mask"):
        bridge.fit(compiled(), *data, verbose=0)


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_labels_that_32_bits_cannot_hold_are_refused(method: str) -> None:
    model, labels = compiled(loss="sparse_categorical_crossentropy"), np.zeros(48, np.int64)
    run, labels[40] = getattr(bridge, method), 2**40  # class 0 in 32 bits
    with pytest.raises(
        ValueError, match=r"^y: expected integers that fit into int32.*1099511627776"
    ):
        run(model, X, labels, batch_size=8, verbose=0)
    with pytest.raises(ValueError, match=r"^x: expected integers at ids that fit into int32"):
        run(model, {"ids": labels}, Y, batch_size=8, verbose=0)
    batches = ((X[i : i + 8], labels[i : i + 8]) for i in range(0, 48, 8))
    with pytest.raises(ValueError, match=r"^data: expected integers at 1 that fit into int32"):
        run(model, batches, verbose=0, **({"shuffle": False} if method == "fit" else {}))


def test_a_fit_within_jit_is_told_that_it_runs_on_the_host() -> None:
    model = compiled()
    with pytest.raises(TypeError, match=r"x and y: .* within jax\.jit, .* on the host"):
        jax.jit(lambda x: bridge.fit(model, x, Y, verbose=0))(X)


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("arguments", [{"batch_size": "32"}, {"steps": -1}, {"verbose": "loud"}])
def test_evaluate_and_predict_refuse_them_too(method: str, arguments: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}: expected"):
        getattr(bridge, method)(compiled(), X, **arguments)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_no_data(method: str) -> None:
    with pytest.raises(ValueError, match=r"x: expected arrays, a dataset.*got None"):
        getattr(bridge, method)(compiled(), None)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_class_for_a_callback(method: str) -> None:
    with pytest.raises(TypeError, match=r"got the class EarlyStopping.*EarlyStopping\(\.\.\.\)"):
        getattr(bridge, method)(compiled(), X, callbacks=[keras.callbacks.EarlyStopping])


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_what_is_functrains_for_a_model(method: str) -> None:
    model = compiled()
    state = bridge.create_state(model, optax.sgd(0.1))
    run = getattr(bridge, method)
    with pytest.raises(TypeError, match=r"got Model, a pair of functions.*functrain\.fit"):
        run(bridge.from_keras(model), X)
    with pytest.raises(TypeError, match=r"got TrainState\. .*bridge\.to_keras\(state, model\)"):
        run(state, X)
    with pytest.raises(TypeError, match=r"got KerasState\. .*bridge\.to_keras\(state, model\)"):
        run(bridge.keras_state(model, (X, Y)), X)
    result = ft.FitResult(state, None)
    with pytest.raises(TypeError, match=r"got FitResult.*to_keras\(result\.state, model\)"):
        run(result, X)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((X, Y[:, :3]), r"training has x float32\[16, 3\], y float32\[16, 4\].*y float32\[16, 3\]"),
        ((X[:, :2], Y), r"got x float32\[16, 2\]"),
        ((X,), r"got x float32\[16, 3\], y None"),
        (X, r"got x float32\[16, 3\], y None"),
        ((X, []), r"y None"),
        (([], []), r"expected \(x, y\) of arrays, got x=\[\]"),
        ([], "of length 0"),
        ((X, Y, X, Y), "a tuple of length 4"),
        ((X, Y[:16]), "cardinality"),
        ((X[:0], Y[:0]), "at least one batch"),
    ],
)
def test_validation_data_that_cannot_be_evaluated_are_found_before_the_first_step(
    data: Any, words: str
) -> None:
    model = compiled()
    with pytest.raises(ValueError, match=f"(?s)validation_data: .*{words}"):
        bridge.fit(model, X, Y, batch_size=16, validation_data=data, verbose=0)
    assert int(model.optimizer.iterations.value) == 0


def test_a_model_is_whole_after_a_refusal() -> None:
    model = compiled()
    with pytest.raises(ValueError, match="validation_data: "):
        bridge.fit(model, X, Y, validation_data=(X, Y[:, :3]), verbose=0)
    found = bridge.fit(model, X, Y, validation_data=(X, Y), verbose=0)
    assert np.isfinite(found.history["val_loss"]).all()


@pytest.mark.parametrize(
    "data",
    [
        (X.astype(np.float64), Y),
        (X[:5], Y[:5], np.ones(5)),
        (X, Y.astype(int)),
        (X, Y[:, :1]),  # broadcasts, as in Keras
    ],
)
def test_validation_data_that_look_different_and_can_be_evaluated_are_taken(data: Any) -> None:
    ours, theirs = compiled(), compiled()
    theirs.set_weights(ours.get_weights())
    arguments: dict[str, Any] = {"validation_data": data, "verbose": 0, "shuffle": False}
    found = bridge.fit(ours, X, Y, rewrites="exact", **arguments).history["val_loss"]
    assert found == theirs.fit(X, Y, **arguments).history["val_loss"]


def test_a_test_step_gets_what_keras_gives_it() -> None:
    class Own(keras.Sequential):
        def _two(self, data: Any) -> Any:
            x, y = data  # not three
            return x, y

        def test_step(self, state: Any, data: Any) -> Any:
            return super().test_step(state, self._two(data))

    model = Own([keras.Input((3,)), layers.Dense(4)])
    model.compile("sgd", "mse")
    bridge.fit(model, X, Y, validation_data=(X, Y[:, :1]), verbose=0)


def test_a_generator_to_evaluate_on_is_asked_for_what_keras_asks_it() -> None:
    def taken(way: Any) -> list[int]:
        asked: list[int] = []

        def batches() -> Iterator[Any]:
            for i in range(9):
                asked.append(i)
                yield X[:16], Y[:16, :1]

        way(compiled(), X, Y, verbose=0, validation_data=batches(), validation_steps=5)
        return asked

    assert taken(bridge.fit) == taken(keras.Model.fit)


def test_a_model_that_runs_uncompiled_is_not_traced_to_find_out() -> None:
    class Counted(keras.Sequential):
        calls = 0

        def test_step(self, state: Any, data: Any) -> Any:
            self.calls += 1
            return super().test_step(state, data)

    model = Counted([keras.Input((3,)), layers.Dense(4)])
    model.compile("sgd", "mse", run_eagerly=True)
    bridge.fit(model, X, Y, validation_data=(X, Y[:, :1]), validation_batch_size=16, verbose=0)
    assert model.calls == 3


@pytest.mark.parametrize("name", ["x", "y"])
def test_lists_of_numbers_are_refused_in_a_line(name: str) -> None:
    data: dict[str, Any] = {"x": X, "y": Y}
    data[name] = data[name].tolist() * 2000
    with pytest.raises(TypeError, match=rf"{name}: .* a list of \d numbers.*np\.asarray") as error:
        bridge.fit(compiled(), **data)
    assert len(str(error.value)) < 200


SCHEDULE = optax.cosine_decay_schedule(0.1, 100)
PLATEAU = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9.0)
SCHEDULER = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)


@pytest.mark.parametrize("tx", [optax.adam(SCHEDULE), optax.adam(0.1)], ids=["schedule", "number"])
@pytest.mark.parametrize("callback", [PLATEAU, SCHEDULER, keras.callbacks.TensorBoard("nowhere")])
def test_a_rate_that_nobody_can_see_is_missed_before_the_first_step(tx: Any, callback: Any) -> None:
    model = compiled(optimizer=bridge.OptaxOptimizer(tx))
    words = rf"{type(callback).__name__} asks .*OptaxOptimizer\(optax\.adam, learning_rate=1e-3\)"
    with pytest.raises(ValueError, match=words):
        bridge.fit(model, X, Y, verbose=0, callbacks=[callback])
    assert int(model.optimizer.iterations.value) == 0


@pytest.mark.parametrize("callback", [PLATEAU, SCHEDULER])
def test_a_schedule_s_rate_cannot_be_set(callback: Any) -> None:
    model = compiled(optimizer=bridge.OptaxOptimizer(optax.adam, learning_rate=SCHEDULE))
    with pytest.raises(ValueError, match=r"expected an optimizer with one learning rate.*schedule"):
        bridge.fit(model, X, Y, verbose=0, callbacks=[callback])
    assert int(model.optimizer.iterations.value) == 0


@pytest.mark.parametrize("callback", [PLATEAU, SCHEDULER])
def test_a_rate_that_is_a_number_can_be_set(callback: Any) -> None:
    model = compiled(optimizer=bridge.OptaxOptimizer(optax.adam, learning_rate=0.1))
    bridge.fit(model, X, Y, epochs=3, verbose=0, callbacks=[callback])
    assert float(model.optimizer.learning_rate) < 0.1


def test_optimizers_are_shown_in_a_line() -> None:
    shown = repr(bridge.OptaxOptimizer(optax.adam, learning_rate=0.1))
    assert shown == "OptaxOptimizer(adam, learning_rate=0.1)"
    assert "0x" not in repr(bridge.OptaxOptimizer(optax.adam(SCHEDULE)))


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        *[("fit", {"validation_split": x}) for x in (np.float32(0.2), np.float16(0.25))],
        ("fit", {"validation_split": np.array(0.2)}),
        ("fit", {"validation_split": fractions.Fraction(1, 5)}),
        ("fit", {"steps_per_epoch": 0}),
        ("fit", {"steps_per_epoch": np.int64(2)}),
        *[("fit", {"batch_size": size}) for size in (0, 200, np.int32(7))],
        *[("fit", {"validation_data": "same", "validation_steps": n}) for n in (0, np.int64(1))],
        *[("fit", {"validation_data": "same", "validation_batch_size": n}) for n in (0, 200)],
        ("fit", {"verbose": np.int64(0)}),
        *[("evaluate", {"steps": n}) for n in (0, np.int64(2))],
        *[(method, {"batch_size": 200}) for method in ("evaluate", "predict")],
        *[("predict", {"steps": n}) for n in (0, np.int64(2))],
    ],
    ids=str,
)
def test_numbers_that_keras_takes_are_taken(method: str, arguments: dict[str, Any]) -> None:
    results = []
    for owner, more in ((bridge, {"rewrites": "exact"}), (keras.Model, {})):
        keras.utils.set_random_seed(0)
        model, kwargs = compiled(), dict(arguments)
        data = {"x": X} if method == "predict" else {"x": X, "y": Y}
        if "validation_data" in kwargs:
            kwargs["validation_data"] = (X, Y)
        if method == "fit":
            kwargs["epochs"] = 2
        result = getattr(owner, method)(model, **{"verbose": 0, **data, **kwargs, **more})
        results.append(result.history if method == "fit" else result)
    np.testing.assert_equal(*results)


@pytest.mark.parametrize("value", ["balanced", [1.0, 2.0]])
def test_class_weights_are_a_dict(value: Any) -> None:
    with pytest.raises(TypeError, match="class_weight: expected a dict"):
        bridge.fit(compiled(), X, Y, class_weight=value)


def test_a_stateful_rnn_is_refused_before_a_callback_begins(tmp_path: Any) -> None:
    path = tmp_path / "log.csv"
    path.write_text("epoch,loss\n0,1.0\n")
    model = keras.Sequential(
        [keras.Input((4, 3), batch_size=8), keras.layers.LSTM(2, stateful=True)]
    )
    model.compile("sgd", "mse")
    x, y = np.zeros((8, 4, 3), np.float32), np.zeros((8, 2), np.float32)
    logger = keras.callbacks.CSVLogger(path)
    with pytest.raises(ValueError, match="expected stateful=False"):
        bridge.fit(model, x, y, batch_size=8, callbacks=[logger])
    assert path.read_text() == "epoch,loss\n0,1.0\n"
    begun = keras.callbacks.LambdaCallback()
    begun.on_test_begin = lambda logs=None: pytest.fail("it began")
    with pytest.raises(ValueError, match="expected stateful=False"):
        bridge.evaluate(model, x, y, batch_size=8, callbacks=[begun])


def test_a_monitored_name_that_is_misspelled_is_told() -> None:
    stopping = keras.callbacks.EarlyStopping("val_los")
    with pytest.raises(ValueError, match="val_los") as error:
        bridge.fit(compiled(), X, Y, validation_split=0.2, verbose=0, callbacks=[stopping])
    assert any("Did you mean 'val_loss'?" in note for note in error.value.__notes__)


def test_tensorboard_without_tensorflow_points_to_the_one_without(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ModuleNotFoundError) as error:
        bridge.fit(compiled(), X, Y, verbose=0, callbacks=[keras.callbacks.TensorBoard("nowhere")])
    assert any("functrain.hooks.TensorBoard" in note for note in error.value.__notes__)


def test_a_metric_that_reads_the_rate_is_told_what_it_reads() -> None:
    optimizer = keras.optimizers.Adam(0.01)
    model = compiled(optimizer=optimizer, metrics=[lambda y, outputs: optimizer.learning_rate])
    with pytest.raises(TypeError) as error:
        bridge.fit(model, X, Y, verbose=0)
    assert any("reads adam/learning_rate" in note for note in error.value.__notes__)


def test_a_loss_that_is_not_finite_is_told_in_its_epoch() -> None:
    told: list[int] = []
    epochs = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: told.append(epoch))
    x = np.full_like(X, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="expected a finite loss, got nan, first in epoch 0"):
            bridge.fit(compiled(), x, Y, epochs=3, verbose=0, callbacks=[epochs])
    assert not told


IMAGES = np.random.default_rng(0).integers(0, 256, (48, 4, 4, 1), np.uint8)
CLASSES = np.arange(48) % 4


def classifier(*first: Any, loss: Any, last: Any = None) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((4, 4, 1)), *first, layers.Flatten(), layers.Dense(4, last)]
    )
    model.compile("sgd", loss)
    return model


def functional(loss: Any) -> keras.Model:
    inputs = keras.Input((4, 4, 1))
    hidden = layers.Flatten()(layers.Rescaling(1 / 255)(inputs))
    model = keras.Model(inputs, layers.Dense(4, "softmax", name="probabilities")(hidden))
    model.compile("sgd", loss)
    return model


def sparse(**kwargs: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(**kwargs)


SCALED, LOGITS = layers.Rescaling(1 / 255), {"from_logits": True}


@pytest.mark.parametrize(
    ("make", "labels", "words"),
    [
        (lambda: classifier(SCALED, loss=sparse(**LOGITS)), CLASSES + 1, "labels from 0 to 3.*4"),
        (lambda: functional("sparse_categorical_crossentropy"), CLASSES - 1, "got -1"),
        (lambda: functional(sparse(ignore_class=-1)), CLASSES[:, None] * 9, "got 9"),
        (
            lambda: classifier(SCALED, loss=sparse(**LOGITS), last="softmax"),
            CLASSES,
            "expected logi",
        ),
        (lambda: functional(sparse(**LOGITS)), CLASSES, "logits from layer 'probabilities'"),
        (lambda: classifier(loss=sparse(**LOGITS)), CLASSES, r"x: .*Rescaling\(1 / 255\)"),
    ],
    ids=["above", "below", "column", "softmax", "functional", "images"],
)
def test_data_that_teach_nothing_are_told_before_the_first_step(
    make: Any, labels: Any, words: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=words):
            bridge.fit(make(), IMAGES, labels, verbose=0)


@pytest.mark.parametrize(
    ("make", "labels"),
    [
        (lambda: classifier(SCALED, loss=sparse(**LOGITS)), CLASSES),
        (lambda: classifier(layers.BatchNormalization(), loss=sparse(**LOGITS)), CLASSES),
        (lambda: functional(sparse(ignore_class=-1)), CLASSES - (CLASSES == 3) * 4),
        (lambda: functional("mse"), np.eye(4, dtype=np.float32)[CLASSES]),
        (lambda: classifier(SCALED, loss="mse"), np.full((48, 4), 9)),
    ],
    ids=["logits", "BatchNormalization", "ignored", "probabilities", "regression"],
)
def test_data_that_teach_something_are_not(make: Any, labels: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bridge.fit(make(), IMAGES, labels, verbose=0)
