"""Errors and warnings of a fit: what they say, and that the model is as it was."""

import bridge  # isort: skip  # before keras: it chooses the backend

import warnings
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import functrain as ft

X, Y = np.ones((32, 4), np.float32), np.ones((32, 4), np.float32)


def compiled(**kwargs: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
    model.compile(**{"optimizer": "adam", "loss": "mse", **kwargs})
    return model


@pytest.mark.parametrize(
    "arguments",
    [(np.ones((32, 3)), Y), (X, np.ones((32, 3))), ({"a": X, "b": X}, Y)],
    ids=["inputs", "labels", "structure"],
)
def test_wrong_shapes_leave_the_model_whole(arguments: Any) -> None:
    model = compiled()
    model.fit(X, Y, verbose=0)
    before = [np.asarray(v.value) for v in [*model.variables, *model.optimizer.variables]]
    with pytest.raises(Exception, match=r"incompatible|shape|dimension|structure|received"):
        bridge.fit(model, *arguments, verbose=0)
    after = [np.asarray(v.value) for v in [*model.variables, *model.optimizer.variables]]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    bridge.fit(model, X, Y, verbose=0)


def test_targets_with_a_dataset() -> None:
    batches = ((X[:8], Y[:8]) for _ in range(4))
    with pytest.raises(ValueError, match="the targets"):
        bridge.fit(compiled(), batches, Y, verbose=0, shuffle=False)


def test_the_shapes_of_data_that_a_model_cannot_take_are_noted_as_those_of_the_data() -> None:
    with pytest.raises(ValueError, match="incompatible") as error:
        bridge.fit(compiled(), X[:, :3], Y, batch_size=8, verbose=0)
    assert "Shapes of the data:\n  0: float32[32, 3]\n  1: float32[32, 4]" in error.value.__notes__


@pytest.mark.parametrize("x", [X, [(X[:8], Y[:8]), (X[8:16], Y[8:16])]], ids=["array", "batches"])
def test_missing_targets_are_noted(x: Any) -> None:
    with pytest.raises(Exception, match=r"None|structure|inputs") as error:
        bridge.evaluate(compiled(), x, verbose=0)
    assert any(note.startswith("y: the data have no targets") for note in error.value.__notes__)


def test_targets_of_a_generator_are_not_taken_for_missing() -> None:
    with pytest.raises(Exception, match="incompatible") as error:
        bridge.fit(compiled(), ((X[:8, :3], Y[:8]) for _ in range(4)), verbose=0, shuffle=False)
    assert not any("no targets" in note for note in error.value.__notes__)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (X.tolist(), r"^x: expected an array, got list.*np.asarray\(x, dtype\)"),
        (X.astype(object), r"^x: expected an array of numbers, got .*object"),
    ],
    ids=["list", "objects"],
)
def test_data_that_are_no_array_of_numbers_are_named(x: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words) as error:
        bridge.fit(compiled(), x, Y, verbose=0)
    assert len(str(error.value)) < 200


def test_a_monitored_value_that_no_epoch_has_is_noted_with_those_that_it_has() -> None:
    stop = keras.callbacks.EarlyStopping("val_los")
    with pytest.raises(ValueError, match="monitor=val_los") as error:
        bridge.fit(compiled(), X, Y, validation_split=0.5, callbacks=[stop], verbose=0)
    note = "monitor: expected one of ['loss', 'val_loss'], got 'val_los'."
    assert note in error.value.__notes__


def test_an_error_of_a_callback_of_the_user_has_no_note_of_a_missing_value() -> None:
    def fail(epoch: int, logs: Any) -> None:
        raise ValueError("the user's own")

    # Nothing is evaluated, and a val_loss is missing.
    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=fail), keras.callbacks.EarlyStopping()]
    with pytest.raises(ValueError, match="the user's own") as error:
        bridge.fit(compiled(), X, Y, callbacks=callbacks, verbose=0)
    assert not any("monitor" in note for note in getattr(error.value, "__notes__", []))


@pytest.mark.parametrize("name", ["adam", "loss_scale", "multi"])
def test_other_trained_variables_than_those_of_the_optimizer_are_named(name: str) -> None:
    optimizers = {
        "adam": keras.optimizers.Adam(use_ema=True),
        "loss_scale": keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
        "multi": keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.Adam())
        ),
    }
    model = compiled(optimizer=optimizers[name])
    bridge.fit(model, X, Y, verbose=0)
    model.layers[0].enable_lora(2)
    with pytest.raises(ValueError, match=r"^optimizer: expected one that was built") as error:
        bridge.fit(model, X, Y, verbose=0)
    assert "model.compile(" in str(error.value)
    model.compile("adam", "mse")
    bridge.fit(model, X, Y, verbose=0)


def test_tensorboard_without_tensorflow_is_refused_with_the_callback_that_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    board = keras.callbacks.TensorBoard(tmp_path)
    with pytest.raises(ImportError, match=r"functrain\.hooks\.TensorBoard\(directory\)"):
        bridge.fit(compiled(), X, Y, callbacks=[board], verbose=0)


def test_an_overridden_loop_is_told_that_it_is_not_run() -> None:
    class Own(keras.Sequential):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("not called")

        def make_predict_function(self, force: bool = False) -> Any:
            raise AssertionError("not called")

    model = Own([keras.Input((4,)), layers.Dense(4)])
    model.compile("adam", "mse")
    words = "Own overrides evaluate, make_predict_function, which bridge.fit"
    with pytest.warns(UserWarning, match=words) as caught:
        bridge.fit(model, X, Y, validation_data=(X, Y), verbose=0)
    assert caught[0].filename == __file__


class OfFour(keras.Sequential):
    """Takes batches of four arrays."""

    def train_step(self, state: Any, data: Any) -> Any:
        raise RuntimeError(f"of {len(data)} arrays")


def test_an_error_of_a_train_step_is_raised_with_the_shapes_of_its_batch() -> None:
    model = OfFour([keras.Input((4,)), layers.Dense(4)])
    model.compile("adam", "mse")
    state = bridge.keras_state(model, (X, Y))
    with pytest.raises(RuntimeError, match="of 4 arrays") as info:
        bridge.train_step(model)(state, (X, Y, X[:2], Y))
    assert "1: float32[32, 4]\n  2: float32[2, 4]" in info.value.__notes__[0]


class Counts(layers.Layer):
    """Updates a metric in its call, which Keras's own fit cannot do either."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x: Any) -> Any:
        self.seen.update_state(x)
        return x


def test_a_metric_that_a_layer_updates_in_its_call_is_refused_as_in_keras() -> None:
    for way in (keras.Model.fit, bridge.fit):
        model = keras.Sequential([keras.Input((4,)), Counts(), layers.Dense(4)])
        model.compile("adam", "mse")
        with pytest.raises(TypeError, match=r"(?s)calling Counts\.call\(\).*NoneType"):
            way(model, X, Y, verbose=0)
    assert all(np.isfinite(v.value).all() for v in model.variables)


def test_a_metric_that_reads_the_rate_is_told_what_it_reads() -> None:
    optimizer = keras.optimizers.Adam(0.01)
    model = compiled(optimizer=optimizer, metrics=[lambda y, outputs: optimizer.learning_rate])
    with pytest.raises(TypeError) as error:
        bridge.fit(model, X, Y, verbose=0)
    assert any("reads adam/learning_rate" in note for note in error.value.__notes__)


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


def test_two_ways_of_saving_a_fit_are_refused(tmp_path: Any) -> None:
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(ValueError, match="expected no BackupAndRestore beside checkpointer="):
        bridge.fit(
            compiled(), X, Y, callbacks=[backup], checkpointer=ft.Checkpointer(tmp_path / "c")
        )


def test_a_loss_that_is_not_finite_is_told_in_its_epoch() -> None:
    told: list[int] = []
    epochs = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: told.append(epoch))
    x = np.full_like(X, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="expected a finite loss, got nan, first in epoch 0"):
            bridge.fit(compiled(), x, Y, epochs=3, verbose=0, callbacks=[epochs])
    assert not told


CLASSES = np.arange(32, dtype=np.int32) % 4  # with int64, jax 0.12 warns in Keras
SPARSE = keras.losses.SparseCategoricalCrossentropy
LOGITS, IGNORING = SPARSE(from_logits=True), SPARSE(from_logits=True, ignore_class=-1)


@pytest.mark.parametrize(
    ("loss", "labels", "words"),
    [
        (LOGITS, CLASSES + 1, "labels from 0 to 3.*got 4"),
        (SPARSE(from_logits=True), CLASSES - 1, "got -1"),
        (IGNORING, CLASSES[:, None] * 9, "got 9"),
        (LOGITS, CLASSES, None),
        (IGNORING, np.where(CLASSES == 3, np.int32(-1), CLASSES), None),
        ("mse", np.full((32, 4), 9, np.int32), None),
    ],
    ids=["above", "below", "column", "in range", "ignored", "regression"],
)
def test_labels_without_a_class_are_told_before_the_first_step(
    loss: Any, labels: Any, words: str | None
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if words is None:
            bridge.fit(compiled(loss=loss), X, labels, verbose=0)
            return
        with pytest.raises(UserWarning, match=words):
            bridge.fit(compiled(loss=loss), X, labels, verbose=0)


def test_a_linear_activation_after_a_softmax_is_not_taken_for_logits() -> None:
    last = [layers.Dense(4, "softmax"), layers.Activation("linear", dtype="float32")]
    model = keras.Sequential([keras.Input((4,)), *last])
    model.compile("adam", "sparse_categorical_crossentropy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bridge.fit(model, X, CLASSES, verbose=0)


def classifier(activation: str | None, loss: Any) -> keras.Model:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(4, activation, name="last")(inputs))
    model.compile("adam", loss)
    return model


@pytest.mark.parametrize(
    ("activation", "loss", "words"),
    [
        (
            "softmax",
            LOGITS,
            "expected logits for from_logits=True, got the softmax of layer 'last'",
        ),
        (None, SPARSE(), r"got layer 'last' without an activation. .*Sparse.*\(from_logits=True\)"),
        (None, "sparse_categorical_crossentropy", "expected probabilities, got layer 'last'"),
        ("softmax", "sparse_categorical_crossentropy", None),
        (None, LOGITS, None),
        (None, "mse", None),
    ],
    ids=["softmax", "logits", "name", "probabilities", "from_logits", "regression"],
)
def test_outputs_that_the_crossentropy_does_not_take_are_told(
    activation: str | None, loss: Any, words: str | None
) -> None:
    labels = Y if loss == "mse" else CLASSES
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if words is None:
            bridge.fit(classifier(activation, loss), X, labels, verbose=0)
            return
        with pytest.raises(UserWarning, match=words):
            bridge.fit(classifier(activation, loss), X, labels, verbose=0)
