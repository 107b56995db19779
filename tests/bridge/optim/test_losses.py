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
from keras import layers

import functrain as ft
from tests.bridge.metric_cases import data, masked

B, T, C = 6, 5, 4
REDUCTIONS = ["sum_over_batch_size", "mean", "sum", "mean_with_sample_weight", "none", None]
IDENTITY = ft.Model(
    init=lambda key, x: ({}, {}),
    apply=lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(x, s),
)


OF_KIND = {
    "bits": "BinaryCrossentropy BinaryFocalCrossentropy Dice Tversky",
    "classes": "CategoricalGeneralizedCrossEntropy SparseCategoricalCrossentropy",
    "distributions": "KLDivergence",
    "embeddings": "Circle",
    "numbers": "CosineSimilarity Huber LogCosh MeanAbsoluteError MeanSquaredError",
    "one_hot": "CategoricalCrossentropy CategoricalFocalCrossentropy CategoricalHinge",
    "positive": "MeanAbsolutePercentageError MeanSquaredLogarithmicError Poisson",
    "signs": "Hinge SquaredHinge",
    "transcripts": "CTC",
}
LOSSES = {name: kind for kind, names in OF_KIND.items() for name in names.split()}
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
def test_a_loss_equals_keras_to_the_bit_and_has_a_value_per_example(name: str) -> None:
    loss = getattr(keras.losses, name)()
    require_equal(loss, LOSSES[name], (B,))
    values = jax.eval_shape(bridge.loss(loss), *data(LOSSES[name], B))
    assert values.shape == (() if name in SCALAR else (B,))


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


# In training


def tokens_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    x = keras.Input((T,), dtype="int32")
    h = layers.Embedding(7, 3, mask_zero=True)(x)
    return keras.Model(x, layers.TimeDistributed(layers.Dense(C))(h))


@pytest.mark.parametrize(
    ("reduction", "ignored", "weighted"),
    [
        ("sum_over_batch_size", None, True),
        ("sum_over_batch_size", 0, False),
        ("mean_with_sample_weight", None, False),
        ("mean_with_sample_weight", 0, True),
        (None, None, True),
    ],
)
def test_micro_batches_have_the_loss_and_the_gradient_of_keras_large_batch(
    reduction: Any, ignored: int | None, weighted: bool
) -> None:
    n = 7  # of 3, 3 and 1
    rng = np.random.default_rng(4)
    x, y = rng.integers(1, 7, (n, T)), rng.integers(0, C, (n, T))
    for i, length in enumerate(rng.integers(1, T, n)):
        x[i, length:] = 0  # as many in no two micro-batches
    weight = rng.uniform(0, 2, (n, T)).astype(np.float32) if weighted else None
    net = tokens_model()
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=ignored, reduction=reduction
    )

    def of_keras(trainable: Any) -> Any:
        outputs, _ = net.stateless_call(trainable, net.non_trainable_variables, x)
        return jnp.mean(loss(y, outputs, sample_weight=weight))

    values = [v.value for v in net.trainable_variables]
    expected, theirs = jax.jit(jax.value_and_grad(of_keras))(values)

    model = bridge.from_keras(net)
    params, model_state = model.init(jax.random.key(0), x)
    loss_fn = ft.micro_batches(ft.supervised(model, bridge.loss(loss)), 3)
    batch = (x, y) if weight is None else (x, y, weight)
    value = jax.jit(
        jax.value_and_grad(
            lambda p: loss_fn(p, model_state, batch, rng=None, training=True), has_aux=True
        )
    )
    (mine, _), grads = value(params)
    np.testing.assert_allclose(mine, expected, rtol=1e-6)
    found = sorted(jax.tree.leaves(grads), key=np.size)
    for a, b in zip(found, sorted(theirs, key=np.size), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_micro_batches_refuse_what_is_no_mean() -> None:
    model = bridge.from_keras(two_outputs(dict))
    x = np.ones((4, 3), np.float32)
    y = {"a": np.ones((4, C)), "b": np.ones((4, 1))}
    params, model_state = model.init(jax.random.key(0), x)

    def value(loss: Any) -> Any:
        loss_fn = ft.micro_batches(ft.supervised(model, loss), 2)
        return loss_fn(params, model_state, (x, y), rng=None, training=True)[0]

    large = model.apply(params, model_state, x).outputs
    np.testing.assert_allclose(value(bridge.loss("mse")), bridge.loss("mse")(large, y), rtol=1e-6)
    with pytest.raises(ValueError, match="micro_batches: expected a loss that is one mean"):
        value(bridge.loss(keras.losses.MeanSquaredError(reduction="sum")))


def two_outputs(kind: type) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = keras.Input((3,))
    outputs = {"a": layers.Dense(C, name="a")(x), "b": layers.Dense(1, name="b")(x)}
    return keras.Model(x, outputs if kind is dict else list(outputs.values()))


@pytest.mark.parametrize("kind", [dict, list])
def test_several_outputs_equal_compile(kind: type) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(B, 3)).astype(np.float32)
    each = {
        "a": (keras.losses.MeanSquaredError(), 0.3, rng.normal(size=(B, C))),
        "b": ("mae", 2.0, rng.normal(size=(B, 1))),
    }
    weights = {"a": np.linspace(0, 1, B), "b": np.linspace(1, 2, B)}

    def shaped(values: dict[str, Any]) -> Any:
        return values if kind is dict else list(values.values())

    losses, factors, y = (shaped({k: v[i] for k, v in each.items()}) for i in range(3))
    model = two_outputs(kind)
    model.compile("sgd", losses, loss_weights=factors)
    for weight in (None, shaped(weights)):
        expected = model.evaluate(x, y, sample_weight=weight, verbose=0)
        mine = bridge.loss(losses, loss_weights=factors)(model(x), y, sample_weight=weight)
        np.testing.assert_allclose(
            mine, expected if np.isscalar(expected) else expected[0], rtol=1e-6
        )
