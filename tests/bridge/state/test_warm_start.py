"""Files of Keras into states: as Keras's own load_weights would have it, and part by part."""

import keras
import numpy as np
import optax
import pytest

import bridge
import functrain as ft
from tests.bridge.flax_cases import make_dense

layers = keras.layers


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [layers.Dense(4), layers.Dense(4)]
        self.by_name = {"a": layers.Dense(4)}
        self.norm = layers.BatchNormalization()
        self.scale = self.add_weight(shape=(4,), initializer="uniform", name="scale")

    def call(self, x):
        x = self.blocks[1](self.blocks[0](x))
        return self.norm(self.by_name["a"](x)) * self.scale


def subclassed():
    model = Subclassed()
    model(np.ones((2, 4)))
    return model


def shared_and_nested():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="query")])
    shared, inputs = layers.Dense(4), keras.Input((4,))
    hidden = shared(inner(inputs))
    return keras.Model(inputs, layers.Dense(2)(shared(hidden) + inner(hidden)))


def attention():
    inputs = keras.Input((16,), dtype="int32")
    hidden = layers.Embedding(50, 8)(inputs)
    hidden = hidden + layers.MultiHeadAttention(2, 4)(hidden, hidden)
    hidden = layers.Bidirectional(layers.LSTM(3))(layers.LayerNormalization()(hidden))
    return keras.Model(inputs, layers.Dense(3)(hidden))


def written_twice():
    return keras.Sequential(
        [keras.Input((4,)), layers.Normalization(), layers.SpectralNormalization(layers.Dense(3))]
    )


def half_precision():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, dtype="bfloat16"), layers.Dense(2)])


def with_flax():
    return keras.Sequential([keras.Input((4,)), bridge.from_flax(make_dense, name="flax")])


def compiled():
    model = shared_and_nested()
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    return model


def mobilenet():
    return keras.applications.MobileNetV2(input_shape=(96, 96, 3), weights=None, classes=10)


def randomized(model, seed):
    rng = np.random.default_rng(seed)
    for variable in model.variables:
        if "float" in variable.dtype:
            variable.assign(rng.normal(size=variable.shape).astype(np.float32))
    return model


def warm_start(model, path, **arguments):
    state = bridge.create_state(model, optax.identity())
    return bridge.warm_start(state, path, model, **arguments)


def values(model):
    return [np.array(v.value) for v in model.variables if "float" in v.dtype]


@pytest.mark.parametrize(
    ("architecture", "suffix"),
    [
        *((subclassed, ".keras"), (shared_and_nested, ".weights.h5"), (attention, ".keras")),
        *((written_twice, ".weights.h5"), (half_precision, ".keras"), (with_flax, ".weights.h5")),
        *((compiled, ".keras"), (compiled, ".weights.h5")),
        pytest.param(mobilenet, ".keras", marks=pytest.mark.long),
    ],
)
def test_a_state_gets_what_load_weights_would_give_the_model(
    tmp_path, architecture, suffix
) -> None:
    path = tmp_path / f"old{suffix}"
    old, model = randomized(architecture(), 1), randomized(architecture(), 2)
    (old.save if suffix == ".keras" else old.save_weights)(path)
    untouched = values(model)
    warm = warm_start(model, path)
    for before, after in zip(untouched, values(model), strict=True):
        np.testing.assert_array_equal(before, after)
    bridge.to_keras(warm.state, model)
    reference = randomized(architecture(), 3)
    reference.load_weights(path)
    for expected, found in zip(values(reference), values(model), strict=True):
        np.testing.assert_array_equal(expected, found)
    assert all("seed_generator" in name for name in warm.missing)
    assert all(name.startswith(("optimizer/", "layers/spectral")) for name in warm.unused)


def chain(*names):
    """Layers of one shape, so that a wrong match would not be noticed."""
    return keras.Sequential([keras.Input((4,)), *(layers.Dense(4, name=name) for name in names)])


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
@pytest.mark.parametrize(
    ("old_names", "new_names"),
    [
        (["body1", "body2", "body3"], ["body1", "extra", "body2", "body3"]),
        (["a", "b", "c"], ["c", "b", "a"]),
        (["a", "dense_1", "b"], ["b", "dense_1"]),
    ],
)
def test_layers_are_matched_by_their_names(tmp_path, suffix, old_names, new_names) -> None:
    old, model = randomized(chain(*old_names), 1), chain(*new_names)
    old.save(tmp_path / "old.keras")
    old.save_weights(tmp_path / "old.weights.h5")
    warm = warm_start(model, tmp_path / f"old{suffix}")
    for name in new_names:
        source = old if name in old_names else model
        kernel = warm.state.params[name]["kernel"]
        np.testing.assert_array_equal(kernel, source.get_layer(name).kernel.value)


def test_layers_of_nested_models_are_matched_by_their_names(tmp_path) -> None:
    def build(*names):
        inputs = keras.Input((4,))
        return keras.Model(inputs, [chain(*names)(inputs), chain("other")(inputs)])

    old, model = randomized(build("a", "b"), 1), build("new", "b", "a")
    old.save(tmp_path / "old.keras")
    warm = warm_start(model, tmp_path / "old.keras")
    inner = warm.state.params[model.layers[1].name]
    for name in ("a", "b"):
        np.testing.assert_array_equal(
            inner[name]["kernel"], old.layers[1].get_layer(name).kernel.value
        )


@pytest.mark.parametrize("numbers", [(0, 1, 2), (2, 3, 4), (1, 3)])
def test_unnamed_layers_of_other_numbers_are_missing(tmp_path, numbers) -> None:
    chain("head", "dense_1", "dense_2").save(tmp_path / "old.keras")
    model = chain(*(f"dense_{i}" for i in numbers), "head")
    warm = warm_start(model, tmp_path / "old.keras")
    assert sorted(warm.loaded) == ["params/head/bias", "params/head/kernel"]
    assert len(warm.missing) == 2 * len(numbers)


def classifier(classes):
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, name="body"), layers.Dense(classes, name="head")]
    )


def test_a_head_of_another_width_is_named_as_the_state_names_it(tmp_path) -> None:
    old, model = classifier(10), classifier(2)
    old.save(tmp_path / "old.keras")
    with pytest.raises(
        ft.CheckpointMismatchError,
        match=r"params/head/kernel: expected .*\[8, 2\], got .*\[8, 10\]",
    ):
        warm_start(model, tmp_path / "old.keras")
    warm = warm_start(model, tmp_path / "old.keras", skip="params/head/*")
    np.testing.assert_array_equal(warm.state.params["body"]["kernel"], old.weights[0].value)
    np.testing.assert_array_equal(warm.state.params["head"]["kernel"], model.weights[2].value)
    assert sorted(warm.unused) == ["layers/dense_1/vars/0", "layers/dense_1/vars/1"]


def test_a_file_of_a_part_goes_into_a_state_of_the_whole(tmp_path) -> None:
    part = keras.Sequential([keras.Input((4,)), layers.Dense(8, name="in")], name="encoder")
    part.save_weights(tmp_path / "part.weights.h5")
    kernel = np.array(part.weights[0].value)
    randomized(part, 5)
    whole = keras.Sequential([keras.Input((4,)), part, layers.Dense(2, name="out")])
    warm = bridge.warm_start(
        bridge.create_state(whole, optax.identity()),
        tmp_path / "part.weights.h5",
        part,
        rename=lambda path: path.replace("params/", "params/encoder/"),
    )
    np.testing.assert_array_equal(warm.state.params["encoder"]["in"]["kernel"], kernel)
    assert warm.missing == ("params/out/bias", "params/out/kernel")


def test_lora_goes_on_from_the_file_of_the_model_without_it(tmp_path) -> None:
    old, model = classifier(2), classifier(2)
    old.save(tmp_path / "old.keras")
    model.layers[0].enable_lora(3)
    randomized(model, 1)
    warm = warm_start(model, tmp_path / "old.keras")
    kernel = warm.state.model_state["body"]["kernel"]  # frozen by LoRA
    np.testing.assert_array_equal(kernel, old.weights[0].value)
    assert sorted(warm.missing) == ["params/body/lora_kernel_a", "params/body/lora_kernel_b"]


def test_a_file_with_a_lambda_is_read_and_its_code_is_not(tmp_path) -> None:
    def build(fn):
        return keras.Sequential([keras.Input((4,)), layers.Dense(3, name="d"), layers.Lambda(fn)])

    old, model = build(lambda x: x + 1), build(lambda x: x * 2)
    old.save(tmp_path / "old.keras")
    with pytest.raises(ValueError, match="Lambda"):
        keras.saving.load_model(tmp_path / "old.keras")
    warm = warm_start(model, tmp_path / "old.keras")
    np.testing.assert_array_equal(warm.state.params["d"]["kernel"], old.weights[0].value)


def test_sources_that_are_not_of_keras_are_read_as_without_a_model(tmp_path) -> None:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="head")])
    state = bridge.create_state(model, optax.adam(1e-3))
    with ft.Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(state, 1)
    ft.export.params(tmp_path / "a.safetensors", state)
    for source in (tmp_path / "run", tmp_path / "a.safetensors"):
        assert len(bridge.warm_start(state, source, model).loaded) == 2
    with pytest.raises(FileNotFoundError, match="nowhere"):
        bridge.warm_start(state, tmp_path / "nowhere", model)


def test_rules_for_a_file_of_keras_are_refused(tmp_path) -> None:
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="head")])
    model.save(tmp_path / "a.keras")
    rules = [ft.Rename("head/kernel", "params/head/kernel")]
    state = bridge.create_state(model, optax.adam(1e-3))
    with pytest.raises(TypeError, match="rename: expected a function for a file of Keras"):
        bridge.warm_start(state, tmp_path / "a.keras", model, rename=rules)
