"""Arguments that bridge.fit, evaluate and predict refuse before anything is done, and how."""

import bridge  # isort: skip  # before keras: it chooses the backend

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import optax
import pandas as pd
import pytest
from keras import layers

import functrain as ft

X, Y = np.ones((48, 3), np.float32), np.ones((48, 4), np.float32)
METHODS = pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])


def compiled(**kwargs: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **kwargs})
    return model


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"epochs": 2.0}, "epochs: expected an integer of at least 0, got 2.0"),
        ({"initial_epoch": -1}, "initial_epoch: expected an integer of at least 0, got -1"),
        ({"batch_size": "32"}, "batch_size: expected an integer of at least 0"),
        ({"steps_per_epoch": 1.5}, "steps_per_epoch: expected an integer"),
        ({"verbose": "loud"}, "verbose: expected 'auto' or 0 or 1 or 2, got 'loud'"),
        ({"validation_split": 1.5}, "validation_split: expected a fraction of the arrays"),
        ({"validation_freq": 0}, "validation_freq: expected a whole number of epochs"),
        ({"fuse": 2.5}, "fuse: expected 'auto' or a whole number"),
        ({"rewrites": "fast"}, "rewrites: expected 'auto', 'exact' or 'off'"),
        ({"sample_weight": np.ones(3)}, "cardinality"),
        ({"class_weight": {0: 1.0}, "sample_weight": np.ones(48)}, "`class_weight` and `sample_we"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_argument_that_means_nothing(arguments: Any, words: str) -> None:
    model = compiled()
    with pytest.raises(ValueError, match=words):
        bridge.fit(model, X, Y, **{"validation_data": (X, Y), "verbose": 0, **arguments})
    assert int(model.optimizer.iterations.value) == 0


@pytest.mark.parametrize("method", ["evaluate", "predict"])
@pytest.mark.parametrize("arguments", [{"batch_size": "32"}, {"steps": -1}, {"fuse": 0}])
def test_evaluate_and_predict_refuse_them_too(method: str, arguments: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}: expected"):
        getattr(bridge, method)(compiled(), X, **arguments)


CALLBACKS = [
    (keras.callbacks.EarlyStopping, r"expected those of Keras.*Pass objects, not classes"),
    (ft.hooks.CSVLogger("x.csv"), r"expected those of Keras.*functrain\.fit\(hooks=\)"),
    (ft.Checkpointer("nowhere"), r".*goes into bridge\.fit\(checkpointer=\)"),
]


@METHODS
def test_what_every_method_refuses(method: str) -> None:
    model, run = compiled(), getattr(bridge, method)
    state = bridge.create_state(model, optax.sgd(0.1))
    for other in (bridge.from_keras(model), state, layers.Dense(1)):
        with pytest.raises(
            TypeError, match=r"model: expected a keras\.Model, got .*functrain\.fit"
        ):
            run(other, X)
    with pytest.raises(ValueError, match=r"x: expected arrays, a dataset.*got None"):
        run(model, None)
    for data in (ft.ArrayLoader((X, Y), 8), iter([(X, Y)])):
        words = rf"^x: .*, got {type(data).__name__}\. .*ArrayLoader as x and y.*generator"
        with pytest.raises(ValueError, match=words):
            run(model, data)
    with pytest.raises(ValueError, match="x: expected at least one batch"):
        run(model, X[:0], **({} if method == "predict" else {"y": Y[:0]}))
    with pytest.raises(TypeError, match="workers"):
        run(model, X, workers=3)
    for callback, words in CALLBACKS:
        with pytest.raises(TypeError, match=f"callbacks: {words}"):
            run(model, X, callbacks=[callback])
    if method != "predict":
        with pytest.raises(ValueError, match=r"a compiled model, got .*model\.compile\(optimizer"):
            run(keras.Sequential([keras.Input((3,)), layers.Dense(4)]), X, Y)


@pytest.mark.parametrize("which", [0, 1])
def test_big_endian_arrays_train_as_those_of_the_machine(which: int) -> None:
    losses = []
    for dtype in ("<f4", ">f4"):
        keras.utils.set_random_seed(0)
        data = [X, Y]
        data[which] = data[which].astype(dtype)
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
    model, labels = (
        compiled(loss=keras.losses.SparseCategoricalCrossentropy(True)),
        np.zeros(48, np.int64),
    )
    run, labels[40] = getattr(bridge, method), 2**40  # class 0 in 32 bits
    with pytest.raises(
        ValueError, match=r"^y: expected integers that fit into int32.*1099511627776"
    ):
        run(model, X, labels, batch_size=8, verbose=0)
    with pytest.raises(ValueError, match=r"^x: expected integers that fit into int32"):
        run(model, {"ids": labels}, Y, batch_size=8, verbose=0)
    batches = ((X[i : i + 8], labels[i : i + 8]) for i in range(0, 48, 8))
    with pytest.raises(ValueError, match=r"^data: expected integers at 1 that fit into int32"):
        run(model, batches, verbose=0, **({"shuffle": False} if method == "fit" else {}))


TEXTS = ["cat", "dog"] * 24


@pytest.mark.parametrize(
    "strings",
    [
        np.array(TEXTS),
        np.array([b"cat", b"dog"] * 24, object),
        np.array([None, "cat"] * 24, object),
        TEXTS,
        pd.DataFrame({"number": np.arange(48), "animal": TEXTS}),
    ],
    ids=["str", "bytes", "None first", "list", "table"],
)
def test_strings_are_found_wherever_they_are(strings: Any) -> None:
    words = ": expected numbers, got strings, .*np.unique.*keras.layers.TextVectorization"
    with pytest.raises(TypeError, match=f"^y{words}"):
        bridge.fit(compiled(), X, strings, verbose=0)
    with pytest.raises(TypeError, match=f"^x{words}"):
        bridge.predict(compiled(), {"text": strings}, verbose=0)
    with pytest.raises(ValueError, match=f"^validation_data: y{words}"):
        bridge.fit(compiled(), X, Y, validation_data=(X, strings), verbose=0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((X, Y[:, :3]), r"got batches of float32\[16, 3\], float32\[16, 3\]\. No step was taken"),
        ((X[:, :2], Y), r"got batches of float32\[16, 2\]"),
        (X, r"got batches of float32\[16, 3\]\. .* Its test_step raised:"),
        ((X, Y, X, Y), "Data is expected to be in format"),
        (ft.ArrayLoader((X, Y), 8), r"got ArrayLoader\. Pass the arrays .* as x and y"),
        ((X, Y[:16]), "cardinality"),
        ((X[:0], Y[:0]), "at least one batch"),
        ((None, None), "x: expected arrays, a dataset, a loader or a generator, got"),
    ],
)
def test_validation_data_that_cannot_be_evaluated_are_found_before_the_first_step(
    data: Any, words: str
) -> None:
    model = compiled()
    with pytest.raises(ValueError, match=f"(?s)validation_data: .*{words}"):
        bridge.fit(model, X, Y, batch_size=16, validation_data=data, verbose=0)
    assert int(model.optimizer.iterations.value) == 0
    found = bridge.fit(model, X, Y, validation_data=(X, Y), verbose=0)
    assert np.isfinite(found.history["val_loss"]).all()


@pytest.mark.parametrize(
    "data",
    [
        (X[:5].astype(np.float64), Y[:5].astype(int), np.ones(5)),
        (X, Y[:, :1]),  # broadcasts, as in Keras
    ],
)
def test_validation_data_that_look_different_and_can_be_evaluated_are_taken(data: Any) -> None:
    ours, theirs = compiled(), compiled()
    theirs.set_weights(ours.get_weights())
    arguments: dict[str, Any] = {"validation_data": data, "verbose": 0, "shuffle": False}
    found = bridge.fit(ours, X, Y, rewrites="exact", **arguments).history["val_loss"]
    assert found == theirs.fit(X, Y, **arguments).history["val_loss"]


class Counted(keras.Sequential):
    """Counts the calls of its test_step, which gets x and y."""

    calls = 0

    def test_step(self, state: Any, data: Any) -> Any:
        self.calls += 1
        x, y = data  # not three
        return super().test_step(state, (x, y))


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_test_step_gets_what_keras_gives_it_and_is_traced_only_where_it_is_compiled(
    eagerly: bool,
) -> None:
    model = Counted([keras.Input((3,)), layers.Dense(4)])
    model.compile("sgd", "mse", run_eagerly=eagerly)
    bridge.fit(model, X, Y, validation_data=(X, Y[:, :1]), validation_batch_size=16, verbose=0)
    assert model.calls == (3 if eagerly else 2)


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


SCHEDULE = optax.cosine_decay_schedule(0.1, 100)
PLATEAU = keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=9.0)
SCHEDULER = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
WHOLE = keras.callbacks.ModelCheckpoint("nowhere.keras")
NO_RATE = r"callbacks: {} cannot .*OptaxOptimizer\(optax\.adam, learning_rate=1e-3\)"


@pytest.mark.parametrize(
    ("tx", "callback", "words"),
    [
        (lambda: optax.adam(0.1), PLATEAU, NO_RATE.format("ReduceLROnPlateau")),
        (lambda: optax.adam(SCHEDULE), SCHEDULER, NO_RATE.format("LearningRateScheduler")),
        (
            lambda: optax.adam(0.1),
            keras.callbacks.TensorBoard("nowhere"),
            NO_RATE.format("TensorBoard"),
        ),
        (lambda: optax.adam(0.1), WHOLE, "callbacks: ModelCheckpoint cannot"),
    ],
    ids=["plateau", "scheduler", "tensorboard", "whole model"],
)
def test_what_an_optimizer_does_not_have_is_missed_before_the_first_step(
    tx: Any, callback: Any, words: str
) -> None:
    model = compiled(optimizer=bridge.OptaxOptimizer(tx()))
    with pytest.raises(ValueError, match=words):
        bridge.fit(model, X, Y, verbose=0, callbacks=[callback])
    assert int(model.optimizer.iterations.value) == 0


@pytest.mark.parametrize("callback", [PLATEAU, SCHEDULER])
def test_a_rate_can_be_set_if_it_is_a_number_and_no_schedule(callback: Any) -> None:
    model = compiled(optimizer=bridge.OptaxOptimizer(optax.adam, learning_rate=SCHEDULE))
    with pytest.raises(ValueError, match="expected an optimizer with one learning rate for"):
        bridge.fit(model, X, Y, verbose=0, callbacks=[callback])
    assert int(model.optimizer.iterations.value) == 0
    model = compiled(optimizer=bridge.OptaxOptimizer(optax.adam, learning_rate=0.1))
    bridge.fit(model, X, Y, epochs=3, verbose=0, callbacks=[callback])
    assert float(model.optimizer.learning_rate) < 0.1


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("fit", {"validation_split": np.float16(0.25)}),
        ("fit", {"steps_per_epoch": 0}),
        ("fit", {"steps_per_epoch": np.int64(2)}),
        *[("fit", {"batch_size": size}) for size in (0, 200, np.int32(7))],
        ("fit", {"validation_data": (X, Y), "validation_steps": np.int64(1)}),
        ("fit", {"validation_data": (X, Y), "validation_batch_size": 0}),
        ("evaluate", {"steps": np.int64(2), "verbose": np.int64(0)}),
        ("predict", {"batch_size": 200, "steps": 0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_numbers_that_keras_takes_are_taken(method: str, arguments: dict[str, Any]) -> None:
    results = []
    for owner, more in ((bridge, {"rewrites": "exact"}), (keras.Model, {})):
        keras.utils.set_random_seed(0)
        data = {"x": X} if method == "predict" else {"x": X, "y": Y}
        epochs = {"epochs": 2} if method == "fit" else {}
        run = getattr(owner, method)
        result = run(compiled(), **{"verbose": 0, **data, **epochs, **arguments, **more})
        results.append(result.history if method == "fit" else result)
    np.testing.assert_equal(*results)
