"""What save and load promise: the same bits back, or an error that names the leaf."""

import zlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import functrain as ft
from functrain import CheckpointCorruptError, CheckpointMismatchError, TrainState, load, save
from functrain.checkpoint import _arrays, _manifest
from tests.conftest import digest

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def create(dtype=jnp.float32, tx=TX, rng=True, width=4):
    kernel = jax.random.normal(jax.random.key(1), (3, width)).astype(dtype)
    return TrainState.create(
        params={"dense": {"kernel": kernel, "bias": jnp.zeros(width, dtype)}, "none": {}},
        model_state={"mean": jnp.arange(3.0), "nothing": (), "layers": {0: [jnp.ones(2)]}},
        tx=tx,
        rng=jax.random.key(2) if rng else None,
    )


def step(state, batch):
    def loss(params):
        return jnp.mean((batch @ params["dense"]["kernel"] + params["dense"]["bias"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads, TX), value


@pytest.mark.smoke
@pytest.mark.parametrize("abstract", [False, True])
@pytest.mark.parametrize("settings", [{}, {"dtype": jnp.bfloat16}, {"rng": False}])
def test_a_train_state_comes_back_bit_for_bit(tmp_path, settings, abstract):
    state = create(**settings)
    save(tmp_path / "c", state)
    got = load(tmp_path / "c", like=jax.eval_shape(lambda: state) if abstract else state)
    assert digest(got) == digest(state)
    assert not any(getattr(leaf, "weak_type", False) for leaf in jax.tree.leaves(got))


def test_training_resumed_is_training_uninterrupted_and_compiles_nothing_again(tmp_path):
    batches = jax.random.normal(jax.random.key(3), (6, 8, 3))
    many = jax.jit(chex.assert_max_traces(lambda s, c: jax.lax.scan(step, s, c), n=1))
    middle, _ = many(create(), batches[:3])
    save(tmp_path / "c", middle)
    straight, _ = many(middle, batches[3:])
    programs = many._cache_size()  # a private name, but traces do not count recompiled placements
    resumed, _ = many(load(tmp_path / "c", like=jax.eval_shape(create)), batches[3:])
    assert digest(resumed) == digest(straight)
    assert many._cache_size() == programs


def test_arrays_get_the_sharding_of_like(tmp_path):
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    tree = {"x": jnp.arange(8.0), "keys": jax.random.split(jax.random.key(0), 8)}
    like = jax.device_put(tree, sharding)
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in tree.items()
    }
    save(tmp_path / "c", tree)
    for got in (load(tmp_path / "c", like), load(tmp_path / "c", abstract)):
        assert digest(got) == digest(tree)
        for leaf in jax.tree.leaves(got):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert not load(tmp_path / "c", tree)["x"].committed


def test_the_loaded_state_may_be_donated(tmp_path):
    save(tmp_path / "c", create())
    loaded = load(tmp_path / "c", like=create())
    got, _ = jax.jit(step, donate_argnums=0)(loaded, jnp.ones((8, 3)))
    expected, _ = jax.jit(step)(create(), jnp.ones((8, 3)))
    assert digest(got) == digest(expected)


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (lambda: create(width=5), r"dense/kernel: expected float32\[3, 5\], got float32\[3, 4\]"),
        (lambda: create(jnp.bfloat16), r"dense/bias: expected bfloat16\[4\], got float32\[4\]"),
        (
            lambda: create(tx=optax.sgd(0.1)),
            r"opt_state/1/0/count: unexpected \(got int32\[\]\)",
        ),
        (lambda: create(rng=False), r"rng: unexpected \(got key<fry>\[\]\)"),
        (
            lambda: create().replace(rng=jax.random.key(0, impl="rbg")),
            r"rng: expected key<rbg>\[\], got key<fry>\[\]",
        ),
        (
            lambda: create().replace(model_state={"var": jnp.ones(3)}),
            r"model_state/var: missing \(expected float32\[3\]\)",
        ),
        (lambda: create().replace(step=jnp.zeros(())), r"step: expected float32\[\], got int32"),
        (lambda: create().replace(step=0), r"step: expected int, got int32\[\]"),
    ],
)
def test_another_state_is_refused_before_loading_and_the_leaf_is_named(tmp_path, like, message):
    save(tmp_path / "c", create())
    with pytest.raises(
        CheckpointMismatchError,
        match=rf"(?s)the leaves of the state, got.*{message}.*Nothing was loaded",
    ):
        load(tmp_path / "c", like=like())


def test_a_dtype_that_jax_cannot_hold_now_is_refused(tmp_path):
    save(tmp_path / "c", {"x": np.ones(2)})
    with pytest.raises(ValueError, match=r"x: expected float64.*jax_enable_x64"):
        load(tmp_path / "c", like={"x": jax.ShapeDtypeStruct((2,), np.float64)})


def test_overwrite_spares_what_is_no_checkpoint(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "file").write_text("mine")
    for path in (tmp_path / "notes", tmp_path / "notes" / "file"):
        with pytest.raises(FileExistsError, match="expected no such path, or an earlier"):
            save(path, {"x": jnp.ones(1)}, overwrite=True)
    assert (tmp_path / "notes" / "file").read_text() == "mine"


def test_a_donated_leaf_is_named(tmp_path):
    state = create()
    jax.jit(step, donate_argnums=0)(state, jnp.ones((8, 3)))
    with pytest.raises(ValueError, match=r"expected a live array.*donated"):
        save(tmp_path / "c", state)


def test_two_leaves_of_one_path_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a/b: expected one leaf of this path"):
        save(tmp_path / "c", {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})


def test_a_part_of_an_array_is_read_from_the_files_that_hold_it(tmp_path) -> None:
    directory = str(tmp_path / "c")
    data = np.arange(8, dtype=np.float32)
    save(directory, {"x": data})
    manifest = _manifest.read_manifest(directory)
    leaf = manifest["leaves"]["state/x"]
    offset = leaf["shards"][0][1]
    leaf["shards"] = [
        [0, offset, "0:4", f"{zlib.crc32(data[:4]):08x}"],
        [1, offset, "4:8", f"{zlib.crc32(data[4:]):08x}"],  # of a file that is not there
    ]
    with _arrays.StoredArrays(directory, manifest) as stored:
        assert stored.read("state/x", (slice(1, 4),)).tolist() == [1, 2, 3]
        with pytest.raises(CheckpointCorruptError, match=r"bytes of x as saved.*missing"):
            stored.read("state/x")


def test_a_resumed_fit_takes_shapes_for_a_state(tmp_path) -> None:
    def create() -> dict[str, Any]:
        return {"w": jnp.zeros(3), "key": jax.random.key(0), "n": np.zeros(2, np.int64)}

    def step(state: Any, batch: Any) -> Any:
        noise = jax.random.normal(jax.random.fold_in(state["key"], 0), 3)
        return state | {"w": state["w"] * 1.5 + noise + batch.sum()}, {"loss": state["w"][0]}

    def fit(state: Any, epochs: int, name: str = "run", **more: Any) -> Any:
        checkpointer = ft.Checkpointer(tmp_path / name)
        data = ft.ArrayLoader(np.arange(8, dtype=np.float32), 2, shuffle=True)
        options = {"checkpointer": checkpointer, "verbose": 0, **more}
        return ft.fit(state, step, data, epochs=epochs, **options).state

    expected = digest(fit(create(), 4, "straight"))
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        fit(jax.eval_shape(create), 2)
    fit(create(), 2)
    consumed = create()
    fit(consumed, 3, donate=True)
    assert consumed["w"].is_deleted()
    assert consumed["key"].is_deleted()
    # What does not fit is refused before the state is taken.
    refused = create() | {"w": jnp.zeros(4)}
    with pytest.raises(ft.CheckpointMismatchError, match=r"w: expected float32\[4\], got"):
        fit(refused, 4, donate=True)
    assert not any(leaf.is_deleted() for leaf in (refused["w"], refused["key"]))
    assert digest(fit(jax.eval_shape(create), 4)) == expected
    mesh = ft.sharding.mesh({"data": -1})
    abstract = jax.eval_shape(create)
    with pytest.warns(UserWarning, match="another environment"):
        sharded = fit(abstract, 5, sharding=mesh)
    assert sharded["w"].sharding.mesh == mesh
