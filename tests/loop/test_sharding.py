"""On several devices everything stays where it was, and what does not divide is found first."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import functrain as ft

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(48, 8)).astype(np.float32), RNG.integers(0, 4, 48).astype(np.int32)
TX = optax.adam(1e-2)
SHAPES = {"w1": (8, 16), "b1": (16,), "w2": (16, 4), "b2": (4,)}


def mesh(kind: AxisType = AxisType.Auto) -> Any:
    return jax.make_mesh((2,), ("data",), axis_types=(kind,))


def at(*spec: Any) -> NamedSharding:
    return NamedSharding(mesh(), PartitionSpec(*spec))


def apply(params: Any, model_state: Any, x: Any, *, rng: Any = None, training: bool = False) -> Any:
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    return ft.ModelOutput(hidden @ params["w2"] + params["b2"], model_state)


MODEL = ft.Model(init=None, apply=apply)


def cross_entropy(logits: Any, labels: Any) -> Any:
    # jax 0.12 cannot differentiate optax's own loss of integer labels where axes are explicit.
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, 4))


LOSS = ft.supervised(MODEL, cross_entropy)
STEP = ft.train_step(LOSS, TX, metrics={"accuracy": ft.metrics.accuracy()})
EVAL = ft.eval_step(LOSS, metrics={"accuracy": ft.metrics.accuracy()})


def create() -> Any:
    rng = np.random.default_rng(1)
    params = {n: rng.normal(size=s).astype(np.float32) / 4 for n, s in SHAPES.items()}
    return ft.TrainState.create(params=params, tx=TX)


def loader(batch: int = 8, **how: Any) -> ft.ArrayLoader:
    return ft.ArrayLoader((X, Y), batch, **how)


def specs(tree: Any) -> Any:
    return [x.sharding.spec for x in jax.tree.leaves(tree)]


def tensor_parallel(state: Any) -> Any:
    """Columns of the first layer and rows of the second on each device, as are their moments."""
    places = {"w1": at(None, "data"), "w2": at("data", None)}

    def place(path: Any, x: Any) -> Any:
        return jax.device_put(x, places.get(getattr(path[-1], "key", None), at()))

    return jax.tree_util.tree_map_with_path(place, state)


@pytest.mark.parametrize("fuse", [1, 3])
def test_a_tensor_parallel_state_stays_where_it_was_and_compiles_once(fuse) -> None:
    traces = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        traces.append(0)
        return LOSS(*args, **kwargs)

    state = tensor_parallel(create())
    step = ft.train_step(counted, TX)
    trained, _ = ft.fit(state, step, loader(), epochs=3, fuse=fuse, sharding=at("data"), verbose=0)
    assert specs(trained) == specs(state)
    assert len(traces) == 1
    alone, _ = ft.fit(create(), ft.train_step(LOSS, TX), loader(), epochs=3, fuse=fuse, verbose=0)
    for a, b in zip(jax.tree.leaves(trained), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_state_that_lies_nowhere_in_particular_goes_to_all_devices_and_compiles_once() -> None:
    traces = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        traces.append(0)
        return LOSS(*args, **kwargs)

    step = ft.train_step(counted, TX, metrics={"accuracy": ft.metrics.accuracy()})
    how: Any = {"sharding": at("data"), "fuse": 3, "verbose": 0}
    state, history = ft.fit(create(), step, loader(), epochs=3, **how)
    assert len(traces) == 1
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state))
    assert {len(x.devices()) for x in jax.tree.leaves(state)} == {2}
    _, alone = ft.fit(create(), STEP, loader(), epochs=3, fuse=3, verbose=0)
    np.testing.assert_allclose(history.epochs["loss"], alone.epochs["loss"], rtol=1e-5)
    np.testing.assert_allclose(history.epochs["accuracy"], alone.epochs["accuracy"], rtol=1e-6)


def test_a_mesh_of_one_device_with_explicit_axes_trains_to_the_bits_of_no_mesh() -> None:
    one = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    how: Any = {"eval_data": loader(), "eval_step": EVAL, "epochs": 2, "verbose": 0}
    state, history = ft.fit(create(), STEP, loader(), sharding=one, **how)
    alone, expected = ft.fit(create(), STEP, loader(), **how)
    jax.tree.map(np.testing.assert_array_equal, state, alone)
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        np.testing.assert_array_equal(history.epochs[name], expected.epochs[name])
    assert len(jax.tree.leaves(ft.predict(state, ft.predict_step(MODEL), [X[:8]], sharding=one)))


def test_a_last_batch_that_does_not_divide_is_found_before_anything_is_trained() -> None:
    odd = ft.ArrayLoader((X[:43], Y[:43]), 8)
    ran = []
    step = ft.MeteredStep(lambda s, b: ran.append(0) or (s, jnp.zeros(()), ft.Aux()), STEP.metrics)
    how: Any = {"eval_data": loader(8), "eval_step": EVAL, "verbose": 0}
    with pytest.raises(ValueError, match=r"(?s)^data: sharding: .*0: float32\[3, 8\]"):
        ft.fit(create(), step, odd, sharding=at("data"), **how)
    assert not ran


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("batch", "fuse"), [(8, 3), (6, 1), (5, "auto")])
def test_no_example_is_left_out_where_devices_do_not_divide_the_batches(kind, batch, fuse) -> None:
    def contrasts(params: Any, model_state: Any, batch: Any, **how: Any) -> Any:
        loss, aux = LOSS(params, model_state, batch, **how)  # sees the whole batch, padding too
        scores = aux.outputs @ aux.outputs.T
        return loss + jnp.mean(jax.nn.logsumexp(scores, axis=1)), aux

    state, data = create(), ft.ArrayLoader((X[:43], Y[:43]), batch)
    where = NamedSharding(mesh(kind), PartitionSpec("data"))
    for loss_fn in (LOSS, contrasts) if (kind, batch) == (AxisType.Auto, 5) else (LOSS,):
        step = ft.eval_step(loss_fn, metrics={"accuracy": ft.metrics.accuracy()})
        found = ft.evaluate(state, step, data, sharding=where, fuse=fuse)
        alone = ft.evaluate(state, step, data)
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert found["accuracy"] == alone["accuracy"]
    hidden = np.maximum(X[:43].astype(np.float64) @ state.params["w1"] + state.params["b1"], 0)
    outputs = hidden @ state.params["w2"] + state.params["b2"]
    assert found["accuracy"] == np.float32(np.mean(outputs.argmax(1) == Y[:43]))
    inputs = ft.ArrayLoader(X[:43], batch)
    ours = ft.predict(state, ft.predict_step(MODEL), inputs, sharding=where, fuse=fuse)
    np.testing.assert_allclose(ours, outputs, atol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_leaves_that_lack_axes_of_the_sharding_are_divided_along_those_they_have(kind) -> None:
    devices = jax.make_mesh((1, 2), ("data", "sequence"), axis_types=(kind, kind))
    sharding = NamedSharding(devices, PartitionSpec("data", "sequence"))
    batches = [{"x": X[i : i + 8], "y": Y[i : i + 8], "scale": np.float32(i)} for i in (0, 8)]

    def step(total: Any, batch: Any) -> Any:
        rows = batch.get("scale", 1) * batch["x"].sum(1) + batch["y"]
        return total + rows.sum(), {}

    start = jnp.zeros(())
    expected = ft.fit(start, step, batches, verbose=0).state
    found = ft.fit(start, step, batches, sharding=sharding, verbose=0).state
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert ft.inspect.memory(start, step, {"x": X, "y": Y}, sharding=sharding).state == 4


def test_a_mesh_of_one_axis_and_a_spec_within_a_mesh_say_enough() -> None:
    how: Any = {"fuse": 2, "verbose": 0}
    expected = ft.fit(create(), STEP, loader(), sharding=at("data"), **how).state
    for sharding in (mesh(), PartitionSpec("data")):
        with jax.set_mesh(mesh()):
            found = ft.fit(create(), STEP, loader(), sharding=sharding, **how).state
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("sharding", "error", "message"),
    [
        (PartitionSpec("data"), ValueError, "expected a mesh for"),
        ("data", TypeError, r"expected that of a batch, jax\.sharding\.NamedSharding"),
    ],
)
def test_a_sharding_that_says_too_little_is_refused(sharding, error, message) -> None:
    inputs = ft.ArrayLoader(X, 8)
    with pytest.raises(error, match=message):
        ft.fit(create(), STEP, loader(), sharding=sharding)
    with pytest.raises(error, match=message):
        ft.predict(create(), ft.predict_step(MODEL), inputs, sharding=sharding)


def test_a_mesh_of_several_axes_is_to_say_which() -> None:
    both = jax.make_mesh((2, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=r"a mesh of one axis, .* got \('data', 'model'\)"):
        ft.run(create(), STEP, loader(), sharding=both)


def test_a_state_of_numpy_arrays_that_a_hook_puts_in_goes_to_all_devices_too() -> None:
    def through_the_host(event: Any) -> None:
        event.state = jax.device_get(event.state)

    how: Any = {"sharding": at("data"), "fuse": 2, "verbose": 0}
    state, _ = ft.fit(create(), STEP, loader(), hooks=[through_the_host], **how)
    alone, _ = ft.fit(create(), STEP, loader(), **how)
    assert specs(state) == specs(alone)
    jax.tree.map(np.testing.assert_array_equal, state, alone)
