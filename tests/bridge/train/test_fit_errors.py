"""What bridge.fit, evaluate and predict refuse, and that the model is as it was."""

import bridge  # isort: skip  # before keras: it chooses the backend

import re
from typing import Any

import jax
import keras
import numpy as np
import pandas as pd
import pytest
from keras import layers

import functrain as ft
from tests.bridge.fitting import fit, fresh

X, Y = np.ones((32, 4), np.float32), np.ones((32, 4), np.float32)


def compiled() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_model_that_is_not_compiled(method: str) -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
    with pytest.raises(ValueError, match=r"to be compiled\. Call model\.compile\(optimizer="):
        getattr(bridge, method)(model, X, Y)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_something_else_than_a_model(method: str) -> None:
    with pytest.raises(TypeError, match=r"model: expected a keras\.Model, got Dense"):
        getattr(bridge, method)(layers.Dense(1), X)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_unknown_arguments(method: str) -> None:
    with pytest.raises(TypeError, match="workers"):
        getattr(bridge, method)(compiled(), X, workers=3)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("fuse", [0, -1, "all", 2.5])
def test_a_fuse_that_is_no_number_of_steps(method: str, fuse: Any) -> None:
    with pytest.raises(ValueError, match="fuse: expected 'auto' or a whole number"):
        getattr(bridge, method)(compiled(), X, fuse=fuse)


@pytest.mark.parametrize("hook", [ft.hooks.EarlyStopping("val_loss"), ft.hooks.CSVLogger("x.csv")])
def test_hooks_of_functrain(hook: Any) -> None:
    words = rf"callbacks: expected those of Keras.*Use keras\.callbacks\.{type(hook).__name__}"
    with pytest.raises(TypeError, match=rf"{words}.*fit\(hooks=\)"):
        fit(fresh(), callbacks=[hook])


def test_a_checkpointer_among_callbacks(tmp_path: Any) -> None:
    with pytest.raises(TypeError, match=r"Pass it to bridge\.fit as checkpointer="):
        fit(fresh(), callbacks=[ft.Checkpointer(tmp_path / "run")])


def test_unknown_rewrites() -> None:
    with pytest.raises(ValueError, match="rewrites: expected 'auto', 'exact' or 'off'"):
        bridge.fit(compiled(), X, Y, rewrites="fast")


def test_weights_of_two_kinds() -> None:
    with pytest.raises(ValueError, match="`class_weight` and `sample_weight`"):
        bridge.fit(compiled(), X, Y, class_weight={0: 1.0}, sample_weight=np.ones(32))


def test_arrays_of_different_lengths() -> None:
    with pytest.raises(ValueError, match="cardinality"):
        bridge.fit(compiled(), X, Y[:16])


@pytest.mark.parametrize("arguments", [(np.ones((32, 3)), Y), (X, np.ones((32, 3)))])
def test_wrong_shapes_leave_the_model_whole(arguments: Any) -> None:
    model = compiled()
    model.fit(X, Y, verbose=0)
    before = [np.asarray(v.value) for v in [*model.variables, *model.optimizer.variables]]
    with pytest.raises(Exception, match=r"incompatible|shape|dimension"):
        bridge.fit(model, *arguments, verbose=0)
    after = [np.asarray(v.value) for v in [*model.variables, *model.optimizer.variables]]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    bridge.fit(model, X, Y, verbose=0)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_data_without_a_batch(method: str) -> None:
    data = (X[:0],) if method == "predict" else (X[:0], Y[:0])
    with pytest.raises(ValueError, match=r"x: expected at least one batch, got ndarray .*\(0, 4\)"):
        getattr(bridge, method)(compiled(), *data, verbose=0)


def test_validation_data_without_a_batch_leave_the_model_whole() -> None:
    model = compiled()
    with pytest.raises(ValueError, match="x: expected at least one batch"):
        bridge.fit(model, X, Y, validation_data=(X[:0], Y[:0]), verbose=0)
    bridge.fit(model, X, Y, verbose=0)


def test_an_overridden_loop_is_told_once_that_it_is_not_run() -> None:
    class Own(keras.Sequential):
        def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("not called")

    def own() -> keras.Model:
        model = Own([keras.Input((4,)), layers.Dense(4)])
        model.compile("adam", "mse")
        return model

    with pytest.warns(UserWarning, match="Own overrides evaluate, which bridge.fit"):
        bridge.fit(own(), X, Y, validation_data=(X, Y), verbose=0)
    bridge.fit(own(), X, Y, verbose=0)


@pytest.mark.parametrize("weights", [[0.5, 0.5, 1.0], np.ones(3)])
def test_sample_weights_of_another_length(weights: Any) -> None:
    with pytest.raises(ValueError, match="cardinality"):
        bridge.fit(compiled(), X, Y, sample_weight=np.asarray(weights), verbose=0)


def test_targets_with_a_dataset() -> None:
    batches = ((X[:8], Y[:8]) for _ in range(4))
    with pytest.raises(ValueError, match="the targets"):
        bridge.fit(compiled(), batches, Y, verbose=0, shuffle=False)


def test_a_structure_that_is_not_the_models() -> None:
    model = compiled()
    with pytest.raises(Exception, match=r"structure|expects 1 input|Missing|received"):
        bridge.fit(model, {"a": X, "b": X}, Y, verbose=0)
    bridge.fit(model, X, Y, verbose=0)


@pytest.mark.parametrize("labels", [["cat", "dog"], [b"cat", b"dog"]], ids=["str", "bytes"])
@pytest.mark.parametrize("dtype", [None, object])
def test_strings_raise_an_error_that_says_how_to_convert_them(labels: Any, dtype: Any) -> None:
    strings = np.array(labels * 16, dtype)
    problem = (
        r": expected numbers, got strings, such as b?'cat'\. A model cannot be trained on strings\."
        r".*keras\.layers\.StringLookup or classes, y = np\.unique\(y, return_inverse=True\).*"
        r"keras\.layers\.TextVectorization"
    )
    with pytest.raises(TypeError, match="^y" + problem):
        bridge.fit(compiled(), X, strings, verbose=0)
    with pytest.raises(TypeError, match="^x" + problem):
        bridge.fit(compiled(), {"text": strings}, Y, verbose=0)
    with pytest.raises(TypeError, match="^validation_data's y" + problem):
        bridge.fit(compiled(), X, Y, validation_data=(X, strings), verbose=0)
    with pytest.raises(TypeError, match="^y" + problem):
        bridge.evaluate(compiled(), X, strings, verbose=0)
    with pytest.raises(TypeError, match="^x" + problem):
        bridge.predict(compiled(), strings, verbose=0)


@pytest.mark.parametrize(
    "strings",
    [
        np.array("cat"),
        np.array("cat", object),
        np.array([None, "cat"] * 16, object),
        np.array([[1, "cat"]] * 32, object),
        ["cat", "dog"] * 16,
        pd.Series(["cat", "dog"] * 16, dtype="string"),
        pd.DataFrame({"number": np.arange(32), "animal": ["cat", "dog"] * 16}),
    ],
    ids=["scalar", "object scalar", "None first", "mixed", "list", "series", "table"],
)
def test_strings_are_found_wherever_they_are(strings: Any) -> None:
    with pytest.raises(TypeError, match=r"^y: expected numbers, got strings, such as 'cat'"):
        bridge.fit(compiled(), X, strings, verbose=0)


class OfFour(keras.Sequential):
    """Takes batches of four arrays."""

    def train_step(self, state: Any, data: Any) -> Any:
        raise RuntimeError(f"of {len(data)} arrays")


def test_an_error_of_a_train_step_with_batches_of_its_own_is_raised_with_their_shapes() -> None:
    model = OfFour([keras.Input((4,)), layers.Dense(4)])
    model.compile("adam", "mse")
    state = bridge.keras_state(model, (X, Y))
    with pytest.raises(RuntimeError, match="of 4 arrays") as info:
        bridge.train_step(model)(state, (X, Y, X[:2], Y))
    assert "batch float32[32, 4], float32[32, 4], float32[2, 4]" in info.value.__notes__[0]


class Product(keras.Model):
    """Checks no inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = self.add_weight(shape=(4, 4))

    def call(self, x: Any) -> Any:
        return x @ self.w


def built_product() -> keras.Model:
    model = Product()
    model(X)
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("is_fitted", [False, True])
@pytest.mark.parametrize(
    ("make", "takes"),
    [(compiled, r"'sequential\w*' takes float32\[None, 4\]"), (built_product, r"\(32, 4\)")],
)
def test_inputs_of_another_width_are_named_beside_what_the_model_takes(
    make: Any, takes: str, is_fitted: bool
) -> None:
    model = make()
    if is_fitted:
        bridge.keras_state(model, (X, Y))
    with pytest.raises(Exception, match=r"incompatible|contracting") as error:
        bridge.fit(model, np.ones((32, 3), np.float32), Y, verbose=0)
    (note,) = [note for note in error.value.__notes__ if note.startswith("Shapes: ")]
    assert re.search(r"x float32\[32, 3\], y float32\[32, 4\]; the model .*" + takes, note)


@pytest.mark.parametrize("place", ["step", "loss"])
def test_a_python_if_on_a_traced_value_is_told_what_to_write_instead(place: str) -> None:
    def halved_if_large(y: Any, p: Any) -> Any:
        loss = keras.ops.mean(keras.ops.square(y - p))
        return loss / 2 if loss > 1 else loss

    class Step(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            logs, state = super().train_step(state, data)
            return (logs if logs["loss"] > 1 else {}), state

    model = (Step if place == "step" else keras.Sequential)([keras.Input((4,)), layers.Dense(4)])
    model.compile("adam", halved_if_large if place == "loss" else "mse")
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        bridge.fit(model, X, Y, verbose=0)
    notes = "\n".join(error.value.__notes__)
    assert all(name in notes for name in ("jnp.where", "jax.lax.cond", "run_eagerly=True"))
