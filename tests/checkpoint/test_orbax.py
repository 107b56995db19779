"""Checkpoints of Orbax: those that others write are read, and those written here are Orbax's."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import bridge
import functrain as ft
from tests.conftest import digest
from tests.several_processes import lines_starting, outputs, start

ocp = pytest.importorskip("orbax.checkpoint")

TREE = {
    "params": {
        "dense": {"kernel": np.arange(6.0).reshape(3, 2), "bias": jnp.ones(2, jnp.bfloat16)}
    },
    "blocks": [{"w": jnp.arange(4)}, {"w": jnp.arange(4) + 1}],
    "step": jnp.int32(7),
    "empty": {},
    "none": None,
}
LIKE = jax.tree.map(jnp.zeros_like, TREE)


def check(source, tree=TREE, **how) -> None:
    warm = ft.warm_start(jax.tree.map(jnp.zeros_like, tree), source, cast=True, **how)
    jax.tree.map(np.testing.assert_array_equal, warm.state, jax.tree.map(jnp.asarray, tree))
    assert warm.missing == warm.unused == ()


@pytest.mark.parametrize(
    "options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}], ids=["ocdbt", "folders", "zarr3"]
)
def test_a_checkpoint_of_every_format_of_orbax_is_read(tmp_path, options) -> None:
    with ocp.PyTreeCheckpointer(**options) as checkpointer:
        checkpointer.save(tmp_path / "tree", TREE)
    check(tmp_path / "tree")


def test_the_checkpoint_of_flaxs_guide_is_read(tmp_path) -> None:
    # https://flax.readthedocs.io/en/latest/guides/checkpointing.html
    net = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.split(net)[1])
    params, _ = ft.from_nnx(nnx.Linear(3, 2, rngs=nnx.Rngs(1))).init(jax.random.key(0), None)
    rules = [ft.Rename("*/value", "params/*")]
    warm = ft.warm_start({"params": params}, tmp_path / "state", rename=rules)
    assert warm.missing == ()
    np.testing.assert_array_equal(warm.state["params"]["kernel"], net.kernel[...])


def test_the_newest_step_of_a_manager_is_read(tmp_path) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (9, 10):
            tree = TREE | {"step": jnp.int32(step)}
            manager.save(step, args=ocp.args.StandardSave(tree))
    check(tmp_path / "run", TREE | {"step": jnp.int32(10)})
    check(tmp_path / "run" / "9", TREE | {"step": jnp.int32(9)})
    check(tmp_path / "run" / "9" / "default", TREE | {"step": jnp.int32(9)})


def test_of_several_items_paths_begin_with_the_item(tmp_path) -> None:
    options = ocp.CheckpointManagerOptions(step_prefix="step", step_format_fixed_length=12)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        items = {"model": ocp.args.StandardSave(TREE["params"]), "notes": ocp.args.JsonSave({})}
        manager.save(1, args=ocp.args.Composite(**items))
        items["optimizer"] = ocp.args.StandardSave({"m": jnp.ones(3)})
        manager.save(2, args=ocp.args.Composite(**items))
    check(tmp_path / "run" / "step_000000000001", TREE["params"])
    check(tmp_path / "run", {"model": TREE["params"], "optimizer": {"m": jnp.ones(3)}})


def test_a_sharded_leaf_reads_only_its_parts(tmp_path) -> None:
    kernel = np.arange(24, dtype=np.float32).reshape(4, 6)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", {"kernel": kernel})
    mesh = jax.make_mesh((2,), ("x",))
    like = jax.device_put(jnp.zeros((6, 4)), NamedSharding(mesh, PartitionSpec("x")))
    rule = ft.Rename("kernel", "kernel", "o i -> i o")
    warm = ft.warm_start({"kernel": like}, tmp_path / "tree", rename=[rule])
    np.testing.assert_array_equal(warm.state["kernel"], kernel.T)
    assert warm.state["kernel"].sharding == like.sharding


@pytest.mark.parametrize("name", ["my run", "100%", "%20", "a#b?c", "über"])
@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}], ids=["ocdbt", "folders"])
def test_names_may_have_any_signs(tmp_path, name, options) -> None:
    tree = {"x.y": {"a b": jnp.arange(3.0)}, "100%": jnp.ones(2), "?#": jnp.ones(1)}
    with ocp.PyTreeCheckpointer(**options) as checkpointer:
        checkpointer.save(tmp_path / name, tree)
    check(tmp_path / name, tree)


def test_all_of_a_state_is_read_with_its_random_keys(tmp_path) -> None:
    tx = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    rngs = [jax.random.key(3), jax.random.split(jax.random.key(4, impl="rbg"), 2)]
    params = {"w": jnp.ones((3, 2)), "f8": jnp.ones(4, jnp.float8_e4m3fn)}
    state = ft.TrainState.create(params=params, tx=tx, rng=rngs[0], model_state=rngs)
    ft.export.orbax(tmp_path / "state", state.replace(step=jnp.int32(7)))
    others = [jax.random.key(5), jax.random.split(jax.random.key(6, impl="rbg"), 2)]
    like = ft.TrainState.create(params=params, tx=tx, rng=others[0], model_state=others)
    warm = ft.warm_start(like, tmp_path / "state", take="**")
    assert warm.missing == warm.unused == warm.unchanged == ()
    assert digest(warm.state) == digest(state.replace(step=jnp.int32(7)))
    with pytest.raises(ft.CheckpointMismatchError, match=r"0: expected key<rbg>\[\], got key<fry>"):
        ft.warm_start(like.replace(model_state=[jax.random.key(5, impl="rbg")]), tmp_path / "state")


def test_a_directory_with_several_models_is_refused(tmp_path) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(9, args=ocp.args.StandardSave(TREE))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run" / "best" / "default", TREE)
        checkpointer.save(tmp_path / "both", TREE)
    with pytest.raises(ft.CheckpointMismatchError, match=r"expected one checkpoint, got \['9/def"):
        check(tmp_path / "run")
    ft.export.params(tmp_path / "both" / "model.safetensors", {"w": jnp.ones(2)})
    with pytest.raises(ft.CheckpointMismatchError, match=r"expected one model, got \['model\.saf"):
        check(tmp_path / "both")


def test_two_arrays_of_one_path_are_refused(tmp_path) -> None:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", {"a/b": jnp.ones(2), "a": {"b": jnp.ones(3)}})
    with pytest.raises(ft.CheckpointMismatchError, match="expected one array at a/b, got 2"):
        check(tmp_path / "tree", {"a": {"b": jnp.ones(3)}})


@pytest.mark.parametrize("what", ["_METADATA", "manifest.ocdbt", "d"])
def test_a_damaged_checkpoint_is_called_so(tmp_path, what) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", TREE)
    for path in (tmp_path / "tree").rglob(what if what != "d" else "d/*"):
        path.write_bytes(path.read_bytes()[:-9] + b"xxxxxxxxx")
    with pytest.raises(ft.CheckpointCorruptError, match="expected an intact Orbax checkpoint"):
        check(tmp_path / "tree")


def test_what_is_written_here_is_read_by_orbax_alone(tmp_path) -> None:
    tx = optax.adam(1e-3)
    params = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2, jnp.bfloat16)}}
    state = ft.TrainState.create(params=params, tx=tx, rng=jax.random.key(3))
    ft.export.orbax(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "state")
        again = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: tree))
    np.testing.assert_array_equal(tree["params"]["dense"]["kernel"], np.ones((3, 2)))
    assert tree["params"]["dense"]["bias"].dtype == jnp.bfloat16
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    zeros = state.replace(params=jax.tree.map(jnp.zeros_like, params), step=jnp.int32(0))
    warm = ft.warm_start(zeros, tmp_path / "state")
    jax.tree.map(np.testing.assert_array_equal, warm.state.params, params)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        ft.export.orbax(tmp_path / "state", state)
    for value in (0, 1):
        ft.export.orbax(tmp_path / "state", {"w": jnp.full(2, value)}, overwrite=True)
        check(tmp_path / "state", {"w": jnp.full(2, value)})
    assert list(tmp_path.iterdir()) == [tmp_path / "state"]


def test_an_export_that_fails_leaves_the_old_checkpoint(tmp_path) -> None:
    ft.export.orbax(tmp_path / "state", {"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="zero size"):  # of Orbax
        ft.export.orbax(tmp_path / "state", {"w": jnp.ones((0, 2))}, overwrite=True)
    check(tmp_path / "state", {"w": jnp.ones(2)})


def test_an_export_replaces_nothing_but_a_checkpoint_of_orbax(tmp_path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name in ("runs", "file"):
        with pytest.raises(FileExistsError, match="or an Orbax checkpoint and overwrite=True"):
            ft.export.orbax(tmp_path / name, {"w": jnp.ones(2)}, overwrite=True)
    assert (tmp_path / "runs" / "first").is_dir()
    ft.export.orbax(tmp_path / "runs" / "first", {"w": jnp.ones(2)}, overwrite=True)  # empty
    check(tmp_path / "runs" / "first", {"w": jnp.ones(2)})


def build(name=None):
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,)), *layers], name=name)
    model.compile("adam", "mse")
    return model


def test_the_checkpoint_of_kerass_callback_fills_a_keras_model(tmp_path) -> None:
    trained = build()
    x, y = np.random.default_rng(0).normal(size=(8, 3)), np.ones((8, 2))
    callback = keras.callbacks.OrbaxCheckpoint(str(tmp_path / "run"), save_freq="epoch")
    trained.fit(x, y, epochs=2, verbose=0, callbacks=[callback])
    # Keras has given the layers of this one other numbers.
    model = build()
    state = bridge.create_state(model, optax.adam(1e-3))
    warm = bridge.warm_start(state, tmp_path / "run", model)
    assert warm.missing == ()
    assert {path.split("/")[0] for path in warm.unused} == {
        "optimizer_variables",
        "metrics_variables",
    }
    bridge.to_keras(warm.state, model)
    np.testing.assert_array_equal(model.predict(x, verbose=0), trained.predict(x, verbose=0))


def saved(path, model, **options):
    """Trains a model for a step, with a checkpoint of Keras's callback."""
    model.compile("adam", "mse")
    callback = keras.callbacks.OrbaxCheckpoint(str(path), save_freq="epoch", **options)
    model.fit(np.ones((2, 3)), np.ones((2, 2)), verbose=0, callbacks=[callback])
    return model


def dense(*widths, name=None):
    return keras.Sequential([keras.Input((3,)), *map(keras.layers.Dense, widths)], name=name)


def nested():
    return keras.Sequential([keras.Input((3,)), dense(4, 4), keras.layers.Dense(2)])


def shared():
    inputs, layer = keras.Input((3,)), keras.layers.Dense(3)
    return keras.Model(inputs, keras.layers.Dense(2)(layer(layer(inputs))))


def warm(path, model):
    return bridge.warm_start(bridge.create_state(model, optax.adam(1e-3)), path, model)


@pytest.mark.parametrize("create", [nested, shared])
@pytest.mark.parametrize("weights_only", [True, False])
def test_layers_within_layers_and_shared_ones_are_found(
    tmp_path, monkeypatch, create, weights_only
) -> None:
    trained = saved(tmp_path / "run", create(), save_weights_only=weights_only)
    monkeypatch.chdir(tmp_path)
    model = create()
    bridge.to_keras(warm("run", model).state, model)
    for ours, theirs in zip(model.weights, trained.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_unnamed_layers_of_another_architecture_are_not_matched_by_their_numbers(tmp_path) -> None:
    keras.utils.clear_session()
    saved(tmp_path / "run", dense(3, 3, 2))
    keras.utils.clear_session()
    keras.layers.Dense(1)
    # dense_1 and dense_2, as the last two of the three in the file.
    with pytest.raises(ft.CheckpointMismatchError, match="expected leaves to take"):
        warm(tmp_path / "run", dense(3, 2))


def test_named_layers_of_a_larger_model_are_found(tmp_path) -> None:
    def create(*more):
        named = [keras.layers.Dense(3, name="block_1"), keras.layers.Dense(2, name="head")]
        return keras.Sequential([keras.Input((3,)), *more, *named])

    trained, model = (
        saved(tmp_path / "run", create()),
        create(keras.layers.Dense(3, name="block_0")),
    )
    report = warm(tmp_path / "run", model)
    assert report.missing == ("params/block_0/bias", "params/block_0/kernel")
    kernel = report.state.params["block_1"]["kernel"]
    np.testing.assert_array_equal(kernel, trained.get_layer("block_1").kernel)


MULTIPROCESS = """
import sys, jax, jax.numpy as jnp, numpy as np, functrain as ft
ft.distributed.initialize()
mesh = ft.sharding.mesh({"data": jax.device_count()})
rows, columns, everywhere = (
    jax.NamedSharding(mesh, jax.P(*axes)) for axes in (["data"], [None, "data"], [])
)
x = np.arange(64.0, dtype=np.float32).reshape(8, 8)

def create(number):
    return {"x": jnp.asarray(x) + number, "rng": jax.random.key(number)}

def is_same(array, expected):
    return all(np.array_equal(y.data, expected[y.index]) for y in array.addressable_shards)

places = {"x": rows, "rng": everywhere}
one, other = (jax.jit(create, out_shardings=places, static_argnums=0)(i) for i in (1, 0))
ft.export.orbax(sys.argv[1], other)
ft.export.orbax(sys.argv[1], one, overwrite=True)
warm = ft.warm_start(other, sys.argv[1])
key = jax.random.key_data(warm.state["rng"])
print("same", is_same(warm.state["x"], x + 1), is_same(key, np.array([0, 1], np.uint32)))
like = jax.jit(lambda: jnp.zeros((8, 8)), out_shardings=columns)()
rules = [ft.Rename("x", "y", "o i -> i o")]
warm = ft.warm_start({"y": like}, sys.argv[1], rename=rules)
print("transposed", is_same(warm.state["y"], (x + 1).T))
"""


@pytest.mark.long
def test_two_processes_write_and_read_a_checkpoint_together(tmp_path) -> None:
    path = tmp_path / "state"
    printed = outputs(start(2, ["-c", MULTIPROCESS], str(path)))
    assert lines_starting(printed, "same") == ["same True True"] * 2
    assert lines_starting(printed, "transposed") == ["transposed True"] * 2
    like = {"x": jnp.zeros((8, 8)), "rng": jax.random.key(9)}
    warm = ft.warm_start(like, path).state
    np.testing.assert_array_equal(warm["x"], np.arange(64).reshape(8, 8) + 1)
    assert jnp.array_equal(jax.random.key_data(warm["rng"]), jnp.array([0, 1], "uint32"))
