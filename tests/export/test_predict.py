"""One file that predicts where there is no functrain."""

import os
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import bridge  # before keras
import functrain as ft

ELSEWHERE = """
import sys
# No import finds them.
sys.modules["functrain"] = sys.modules["bridge"] = sys.modules["keras"] = None
import jax, numpy as np
with open("model", "rb") as file:
    predict = jax.export.deserialize(bytearray(file.read())).call
x = np.load("x.npy")
np.save("y.npy", predict(x))
assert predict(x[:3]).shape == (3, 4)
del sys.modules["functrain"], sys.modules["bridge"], sys.modules["keras"]
assert not [name for name in sys.modules if name.split(".")[0] in ("functrain", "bridge", "keras")]
"""


def convnet():
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.DepthwiseConv2D(3),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5),
            layers.Dense(4),
        ]
    )


def exported(path):
    with open(path, "rb") as file:
        return jax.export.deserialize(bytearray(file.read()))


@pytest.mark.parametrize("rewrites", ["off", "auto"])
def test_a_process_without_functrain_predicts_what_keras_predicts(tmp_path, rewrites) -> None:
    model = convnet()
    state, step = (
        bridge.create_state(model, optax.adam(1e-3)),
        ft.predict_step(bridge.from_keras(model)),
    )
    x = np.random.default_rng(0).normal(size=(7, 12, 12, 3)).astype(np.float32)
    ft.export.predict(tmp_path / "model", state, step, x[:1], rewrites=rewrites)
    np.save(tmp_path / "x.npy", x)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), model.predict(x, verbose=0), atol=1e-6)


def linear(width=2):
    def apply(params, model_state, inputs, *, rng=None, training=False):
        return ft.ModelOutput(inputs @ params["w"], model_state)

    model = ft.Model(init=lambda key, x: ({}, {}), apply=apply)
    state = ft.TrainState.create(params={"w": jnp.ones((3, width))}, tx=optax.adam(1e-3))
    return state, ft.predict_step(model)


def test_what_the_optimizer_remembers_is_not_in_the_file(tmp_path) -> None:
    state, step = linear(1000)
    noise = jax.random.normal(jax.random.key(0), (3, 1000))
    state = state.replace(params={"w": noise})
    ft.export.predict(tmp_path / "model", state, step, jnp.ones((1, 3)))
    assert 12_000 < os.path.getsize(tmp_path / "model") < 20_000


def test_a_rewrite_for_cpu_is_in_no_file_for_another_platform(tmp_path) -> None:
    """A convolution of each channel alone is another program on CPU, and this one elsewhere."""

    def step(state, x):
        return state, jax.lax.conv_general_dilated(
            x, jnp.ones((3, 3, 1, 8)), (1, 1), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=8,
        )  # fmt: skip

    x = jnp.ones((1, 16, 16, 8))
    plain = {}
    for name, how in {
        "cpu": {},
        "plain": {"rewrites": "off"},
        "all": {"platforms": ("cpu", "cuda", "tpu")},
        "cuda": {"platforms": ["cuda"]},
    }.items():
        ft.export.predict(tmp_path / name, {}, step, x, shapes=None, **how)
        plain[name] = "feature_group_count = 8" in exported(tmp_path / name).mlir_module()
    assert plain == {"cpu": False, "plain": True, "all": True, "cuda": True}
    assert exported(tmp_path / "all").platforms == ("cpu", "cuda", "tpu")
    assert exported(tmp_path / "cuda").platforms == ("cuda",)


def test_trees_of_inputs_and_outputs_and_several_free_axes(tmp_path) -> None:
    def step(state, inputs):
        return state, {"sum": inputs["a"].sum((1, 2)) + inputs["b"], "n": (inputs["a"],)}

    inputs = {"a": jax.ShapeDtypeStruct((1, 4, 3), jnp.float32), "b": jnp.ones(1)}
    shapes = {"a": "n, length, 3", "b": "n"}
    ft.export.predict(tmp_path / "model", {}, step, inputs, shapes=shapes)
    out = exported(tmp_path / "model").call({"a": jnp.ones((2, 5, 3)), "b": jnp.ones(2)})
    np.testing.assert_array_equal(out["sum"], [16.0, 16.0])
    assert out["n"][0].shape == (2, 5, 3)


def test_a_state_on_several_devices_predicts_on_one(tmp_path) -> None:
    state, step = linear()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    ft.export.predict(tmp_path / "model", state, step, jnp.ones((1, 3)))
    program = exported(tmp_path / "model")
    assert program.nr_devices == 1
    np.testing.assert_array_equal(program.call(jnp.ones((4, 3))), np.full((4, 2), 3.0))


def test_a_model_that_asks_for_the_batch_size_is_told_how_to_have_one(tmp_path) -> None:
    def step(state, x):
        return state, x if x.shape[0] > 4 else x + 1

    with pytest.raises(jax.errors.InconclusiveDimensionOperation) as caught:
        ft.export.predict(tmp_path / "model", {}, step, jnp.ones((2, 3)))
    assert any("shapes=None" in note for note in caught.value.__notes__)
    assert not list(tmp_path.iterdir())
    ft.export.predict(tmp_path / "model", {}, step, jnp.ones((2, 3)), shapes=None)
    assert exported(tmp_path / "model").call(jnp.ones((2, 3)))[0, 0] == 2


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"platforms": "gpu"}, ValueError, r"platforms: expected some of \('cpu', 'cuda'"),
        ({"step": "no"}, TypeError, "step: expected"),
        ({"step": lambda s, x: x}, TypeError, r"returns \(state, outputs\), got float32"),
        ({"rewrites": "all"}, ValueError, "rewrites: expected"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_refused_in_words(tmp_path, how, error, message) -> None:
    state, step = linear()
    given = {"state": state, "step": step, "inputs": jnp.ones((1, 3)), **how}
    with pytest.raises(error, match=message):
        ft.export.predict(tmp_path / "model", **given)
    assert not list(tmp_path.iterdir())


def test_params_too_large_for_such_a_file_are_refused_before_memory_is_taken(tmp_path) -> None:
    class Large(NamedTuple):
        params: jax.ShapeDtypeStruct

    state = Large(jax.ShapeDtypeStruct((2**30,), jnp.float32))
    with pytest.raises(ValueError, match=r"less than 2 GiB.*got '4\.0 GiB'"):
        ft.export.predict(tmp_path / "model", state, lambda s, x: (s, x), jnp.ones((1, 3)))
