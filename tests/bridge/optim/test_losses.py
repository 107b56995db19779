"""bridge.loss gives what the Keras loss gives, whatever the loss, the mask, the weights."""

import bridge  # isort: skip  # before keras: it chooses the backend

import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import functrain as ft
from tests.bridge.metric_cases import data, masked

B, T = 6, 5
REDUCTIONS = ["sum_over_batch_size", "mean", "sum", "mean_with_sample_weight", "none", None]
IDENTITY = ft.Model(
    init=lambda key, x: ({}, {}),
    apply=lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(x, s),
)


LOSSES = {
    "BinaryCrossentropy": "bits",
    "BinaryFocalCrossentropy": "bits",
    "CTC": "transcripts",
    "CategoricalCrossentropy": "one_hot",
    "CategoricalFocalCrossentropy": "one_hot",
    "CategoricalGeneralizedCrossEntropy": "classes",
    "CategoricalHinge": "one_hot",
    "Circle": "embeddings",
    "CosineSimilarity": "numbers",
    "Dice": "bits",
    "Hinge": "signs",
    "Huber": "numbers",
    "KLDivergence": "distributions",
    "LogCosh": "numbers",
    "MeanAbsoluteError": "numbers",
    "MeanAbsolutePercentageError": "positive",
    "MeanSquaredError": "numbers",
    "MeanSquaredLogarithmicError": "positive",
    "Poisson": "positive",
    "SparseCategoricalCrossentropy": "classes",
    "SquaredHinge": "signs",
    "Tversky": "bits",
}
SCALAR = ("Dice", "Tversky")  # no value per example
NOT_OF_SEQUENCES = ("CTC", "Circle", "CategoricalGeneralizedCrossEntropy")


def ours(loss: Any, outputs: Any, y: Any, weight: Any = None, mask: Any = None) -> jax.Array:
    loss_fn = ft.supervised(IDENTITY, bridge.loss(loss))
    batch = (masked(outputs, mask), y) if weight is None else (masked(outputs, mask), y, weight)
    return loss_fn({}, {}, batch, rng=None, training=True)[0]


def theirs(loss: Any, outputs: Any, y: Any, weight: Any = None, mask: Any = None) -> jax.Array:
    # Where Keras gives values, supervised takes their mean; a scalar's mean is itself.
    return jnp.mean(loss(y, masked(outputs, mask), sample_weight=weight))


def variants(batch: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(1)
    weight = rng.uniform(0, 2, batch).astype(np.float32)
    mask = rng.uniform(size=batch) > 0.3
    return {
        "plain": {},
        "weighted": {"weight": weight},
        "masked": {"mask": mask},
        "masked and weighted": {"mask": mask, "weight": weight},
    }


def test_every_loss_of_keras_is_compared() -> None:
    public = {
        name
        for name, thing in vars(keras.losses).items()
        if inspect.isclass(thing) and issubclass(thing, keras.Loss) and thing is not keras.Loss
    }
    assert public == set(LOSSES)


def require_equal(loss: Any, kind: str, shape: tuple[int, ...], seed: int = 0) -> None:
    outputs, y = data(kind, *shape, seed=seed)
    values = []
    for value in (ours, theirs):  # compiled: as it stands, jnp.mean rounds in another way

        @jax.jit
        def each(outputs: Any, y: Any, value: Any = value) -> Any:
            return {k: value(loss, outputs, y, **v) for k, v in variants(shape).items()}

        values.append(each(outputs, y))
    assert values[0] == values[1]
    assert all(np.isfinite(value) for value in values[0].values())


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_equals_keras_to_the_bit(name: str) -> None:
    require_equal(getattr(keras.losses, name)(), LOSSES[name], (B,))


@pytest.mark.long
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_equals_keras_for_every_reduction_and_shape(name: str, reduction: Any) -> None:
    loss = getattr(keras.losses, name)(reduction=reduction)
    shapes = [(B,), (1,)] if name in NOT_OF_SEQUENCES else [(B,), (B, T), (1,)]
    for shape in shapes:
        require_equal(loss, LOSSES[name], shape, seed=len(shape))


def test_a_function_of_ones_own_counts_the_mask() -> None:
    def mine(y_true: Any, y_pred: Any) -> Any:
        return jnp.mean(abs(y_true - y_pred), -1)

    outputs, y = data("numbers", B, T)
    mask = np.arange(B * T).reshape(B, T) % 3 > 0
    expected = float(theirs(keras.losses.MeanAbsoluteError(), outputs, y, mask=mask))
    assert float(ours(mine, outputs, y, mask=mask)) == pytest.approx(expected, rel=1e-6)
    assert float(ours(mine, outputs, y)) != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", LOSSES)
def test_values_are_per_example(name: str) -> None:
    outputs, y = data(LOSSES[name], B)
    values = jax.eval_shape(bridge.loss(getattr(keras.losses, name)()), outputs, y)
    assert values.shape == (() if name in SCALAR else (B,))


@pytest.mark.parametrize("cls", ["MeanSquaredError", "CategoricalCrossentropy", "Dice"])
def test_functions_and_names_are_losses_too(cls: str) -> None:
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls).lower()
    outputs, y = data(LOSSES[cls], B)
    expected = jax.jit(lambda *a: theirs(getattr(keras.losses, cls)(), *a))(outputs, y)
    for loss in (name, getattr(keras.losses, name)):
        assert jax.jit(lambda *a, loss=loss: ours(loss, *a))(outputs, y) == expected


def test_crossentropy_is_chosen_by_the_shapes_as_compile_does() -> None:
    for kind, name in {"one_hot": "categorical", "classes": "sparse_categorical"}.items():
        outputs, y = data(kind, B)
        expected = ours(f"{name}_crossentropy", outputs, y)
        np.testing.assert_array_equal(ours("crossentropy", outputs, y), expected)


def test_the_losses_dtype_is_the_one_computed_in() -> None:
    outputs, y = data("numbers", B)
    half = keras.losses.MeanSquaredError(dtype="bfloat16")
    assert bridge.loss(half)(outputs, y).dtype == jnp.bfloat16
    assert bridge.loss("mse")(outputs.astype(jnp.bfloat16), y).dtype == jnp.float32


def test_ignored_classes_count_as_masked() -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=1)
    require_equal(loss, "classes", (B, T))


class Largest(keras.Loss):
    """A loss that does all by itself."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return keras.ops.max(keras.ops.abs(y_true - y_pred))


def test_a_loss_with_a_call_of_its_own_is_taken_as_it_is() -> None:
    outputs, y = data("numbers", B)
    np.testing.assert_array_equal(ours(Largest(), outputs, y), np.abs(outputs - y).max())


def test_one_loss_serves_all_outputs_and_none_leaves_one_out() -> None:
    outputs = {"a": np.ones((2, 1)), "b": np.full((2, 1), 3.0)}
    y = {"a": np.zeros((2, 1)), "b": np.zeros((2, 1))}
    assert bridge.loss("mae")(outputs, y) == 4.0
    assert bridge.loss({"a": None, "b": "mae"})(outputs, y) == 3.0


@pytest.mark.parametrize(
    ("loss", "loss_weights", "message"),
    [
        ("mean_square_eror", None, "Could not interpret loss identifier"),
        (3, None, "Could not interpret loss identifier"),
        ("mse", 0.5, "loss_weights: expected None with a single loss"),
        ({"a": "mse", "b": "mae"}, {"a": 1.0}, r"expected a factor for each loss, \['a', 'b'\]"),
    ],
)
def test_what_is_no_keras_loss_is_refused(loss: Any, loss_weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bridge.loss(loss, loss_weights=loss_weights)


ARRAY = np.ones((2, 1))


@pytest.mark.parametrize(
    ("loss", "outputs", "y", "message"),
    [
        ({"a": "mse"}, {"a": ARRAY}, {"b": ARRAY}, r"y: expected a dict or list .*'a' among them"),
        ({"a": "mse"}, [ARRAY], {"a": ARRAY}, r"outputs: expected a dict or list .*'a' among"),
        # An array is no list of outputs, though it has entries.
        ("mse", [ARRAY, ARRAY], ARRAY, "y: expected a dict or list .*0 among"),
        (["mse", "mae"], ARRAY, [ARRAY, ARRAY], "outputs: expected a dict or list"),
    ],
)
def test_outputs_of_another_structure_are_refused(
    loss: Any, outputs: Any, y: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        bridge.loss(loss)(outputs, y)


def test_weights_along_the_wrong_axis_are_refused() -> None:
    outputs, y = np.ones((3, 3, 1)), np.zeros((3, 3, 1))
    loss = bridge.loss("mse")
    np.testing.assert_array_equal(loss(outputs, y, np.arange(3.0)[:, None])[:, 0], [0, 1, 2])
    with pytest.raises(ValueError, match=r"as many axes as the losses.*weight\[:, None\]"):
        loss(outputs, y, np.ones(3))


def test_one_weight_an_example_weighs_sequences_of_length_one() -> None:
    outputs, y, weight = np.full((4, 1, 1), 2.0, np.float32), np.zeros((4, 1, 1)), np.arange(4.0)
    ours = bridge.loss("mse")(outputs, y, weight)
    np.testing.assert_array_equal(np.ravel(ours), 4 * weight)
    assert np.mean(ours) == keras.losses.MeanSquaredError()(y, outputs, weight)


def test_supervised_leaves_the_reduction_to_the_loss() -> None:
    with pytest.raises(ValueError, match=r"reduction: expected 'mean' with a loss of bridge"):
        ft.supervised(IDENTITY, bridge.loss("mse"), reduction="weighted_mean")
