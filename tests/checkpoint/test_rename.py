"""Rules of names and layouts: what they load, what they write, and what they refuse."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

import functrain as ft

RNG = np.random.default_rng(0)
WIDTH, HEADS, SIZE = 6, 2, 3
TORCH = {
    "emb.weight": RNG.normal(size=(5, WIDTH)),
    **{f"h.{i}.attn.{n}.weight": RNG.normal(size=(6, WIDTH)) for i in range(2) for n in "qkv"},
    **{f"h.{i}.mlp.weight": RNG.normal(size=(WIDTH, 12)) for i in range(2)},
    **{f"h.{i}.c_attn.weight": RNG.normal(size=(WIDTH, 18)) for i in range(2)},
    "cls_token": RNG.normal(size=(1, 1, WIDTH)),
    "conv.weight": RNG.normal(size=(4, 3, 2, 5)),
}
TORCH = {name: x.astype(np.float32) for name, x in TORCH.items()}
RULES = [
    ft.Rename("emb.weight", "params/embedding"),
    ft.Rename("h.*.mlp.weight", "params/block_*/mlp/kernel", "o i -> i o"),
    ft.Rename(
        [f"h.*.attn.{n}.weight" for n in "qkv"],
        "params/block_*/qkv/kernel",
        "(h d) i -> i 1 h d",
        axis=1,
    ),
    ft.Rename(
        "h.*.c_attn.weight",
        [f"params/block_*/{n}/kernel" for n in "qkv"],
        "i (h d) -> i h d",
        axis=1,
    ),
    ft.Rename("cls_token", "params/token", "1 1 d -> d"),
    ft.Rename("conv.weight", "params/conv", "o i h w -> h w i o"),
]


def expected():
    """The leaves by NumPy, written out."""

    def block(i):
        qkv = [TORCH[f"h.{i}.attn.{n}.weight"].T.reshape(6, HEADS, SIZE) for n in "qkv"]
        split = np.split(TORCH[f"h.{i}.c_attn.weight"], 3, 1)
        heads = {
            n: {"kernel": x.reshape(6, HEADS, SIZE)} for n, x in zip("qkv", split, strict=True)
        }
        mlp = {"kernel": TORCH[f"h.{i}.mlp.weight"].T}
        return {"mlp": mlp, "qkv": {"kernel": np.stack(qkv, 1)}, **heads}

    return {
        "embedding": TORCH["emb.weight"],
        "block_0": block(0),
        "block_1": block(1),
        "token": TORCH["cls_token"][0, 0],
        "conv": TORCH["conv.weight"].transpose(2, 3, 1, 0),
    }


def create():
    return ft.TrainState.create(params=jax.tree.map(jnp.zeros_like, expected()), tx=optax.sgd(0.1))


@pytest.fixture
def file(tmp_path):
    safetensors.numpy.save_file(TORCH, tmp_path / "torch.safetensors")
    return tmp_path / "torch.safetensors"


def test_arrays_are_renamed_transposed_divided_split_and_joined(file) -> None:
    warm = ft.warm_start(create(), file, rename=RULES)
    jax.tree.map(np.testing.assert_array_equal, warm.state.params, expected())
    assert warm.unused == warm.missing == ()
    assert set(warm.transformed) == set(warm.loaded) - {"params/embedding"}
    assert warm.loaded["params/block_1/qkv/kernel"] == ", ".join(
        f"h.1.attn.{n}.weight" for n in "qkv"
    )


@pytest.mark.parametrize("shard_bytes", [None, 400, 1])
def test_the_same_rules_write_what_was_read(tmp_path, file, shard_bytes) -> None:
    state = ft.warm_start(create(), file, rename=RULES).state
    out = tmp_path / "out" / "model.safetensors"
    ft.export.params(out, state, rename=RULES, shard_bytes=shard_bytes)
    files = [out]
    if shard_bytes:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        files = sorted({out.parent / name for name in index["weight_map"].values()})
        assert len(files) > 1
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in TORCH.values())
        for name, shard in index["weight_map"].items():
            assert name in safetensors.numpy.load_file(out.parent / shard)
    assert sorted(out.parent.glob("*.safetensors")) == files
    found = {name: x for each in files for name, x in safetensors.numpy.load_file(each).items()}
    assert found.keys() == TORCH.keys()
    jax.tree.map(np.testing.assert_array_equal, found, TORCH)
    again = ft.warm_start(create(), out.parent, rename=RULES).state
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)


def test_a_sharded_leaf_reads_its_parts_whatever_its_rule(file) -> None:
    mesh = jax.make_mesh((2,), ("x",))
    places = {3: PartitionSpec(None, "x"), 4: PartitionSpec(None, None, "x"), 2: PartitionSpec("x")}
    places |= {1: PartitionSpec("x")}
    params = jax.tree.map(
        lambda x: jax.device_put(
            jnp.zeros_like(x),
            NamedSharding(mesh, places[x.ndim] if x.shape[0] != 5 else PartitionSpec(None, "x")),
        ),
        expected() | {"conv": np.zeros((2, 5, 4, 4), np.float32)},
    )
    del params["conv"]
    warm = ft.warm_start({"params": params}, file, rename=RULES)
    want = {name: x for name, x in expected().items() if name != "conv"}
    jax.tree.map(np.testing.assert_array_equal, warm.state["params"], want)
    assert warm.state["params"]["embedding"].sharding.spec == PartitionSpec(None, "x")


def test_a_transposed_array_is_read_by_rows_of_its_part(file, monkeypatch) -> None:
    from functrain.checkpoint import _safetensors

    asked = []
    read_part = _safetensors._read_part
    monkeypatch.setattr(
        _safetensors, "_read_part", lambda *args: asked.append(args[-1]) or read_part(*args)
    )
    mesh = jax.make_mesh((2,), ("x",))
    leaf = jax.device_put(jnp.zeros((12, 6)), NamedSharding(mesh, PartitionSpec("x")))
    state = {"params": {"block_0": {"mlp": {"kernel": leaf}}}}
    rule = ft.Rename("h.*.mlp.weight", "params/block_*/mlp/kernel", "o i -> i o")
    ft.warm_start(state, file, rename=[rule])
    # On one process jax asks for all of it.
    assert asked == [None]
    with _safetensors.open_safetensors(str(file)) as arrays:
        part = arrays.read("h.0.mlp.weight", (slice(1, 3), slice(2, 9)))
    np.testing.assert_array_equal(part, TORCH["h.0.mlp.weight"][1:3, 2:9])


def test_tied_weights_fill_two_leaves_and_are_written_once(tmp_path, file) -> None:
    rules = [ft.Rename("emb.weight", "embedding"), ft.Rename("emb.weight", "head", "v d -> d v")]
    state = {"embedding": jnp.zeros((5, WIDTH)), "head": jnp.zeros((WIDTH, 5))}
    state = ft.warm_start(state, file, rename=rules).state
    np.testing.assert_array_equal(state["head"], TORCH["emb.weight"].T)
    ft.export.params(tmp_path / "out.safetensors", state, rename=rules)
    found = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    np.testing.assert_array_equal(found["emb.weight"], TORCH["emb.weight"])
    changed = state | {"head": state["head"] + 1}
    with pytest.raises(ValueError, match=r"rename: expected equal leaves for emb\.weight"):
        ft.export.params(tmp_path / "new.safetensors", changed, rename=rules)


def test_arrays_that_are_joined_may_have_other_sizes(tmp_path) -> None:
    arrays = {"q": np.ones((4, 3), np.float32), "k": np.zeros((2, 3), np.float32)}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    rule = ft.Rename(["q", "k"], "qk", "o i -> i o", axis=1, parts=(4, 2))
    state = ft.warm_start({"qk": jnp.ones((3, 6))}, tmp_path / "a.safetensors", rename=[rule]).state
    np.testing.assert_array_equal(state["qk"], np.concatenate([arrays["q"], arrays["k"]]).T)
    ft.export.params(tmp_path / "b.safetensors", state, rename=[rule])
    found = safetensors.numpy.load_file(tmp_path / "b.safetensors")
    jax.tree.map(np.testing.assert_array_equal, found, arrays)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (ft.Rename("h.0.mlp.weight", "w", "o i -> i o"), r"w: expected float32\[5, 5\], got"),
        (ft.Rename("h.0.mlp.weight", "w", "(a b) i -> a b i"), r"got float32\[6, 12\] by Rename"),
        (ft.Rename("h.0.mlp.weight", ["w", "u"], axis=1), r"got float32\[6, 12\] by Rename"),
        (ft.Rename("h.0.mlp.weight", ["w", "other"], axis=1), r"got float32\[6, 12\] by Rename"),
        (ft.Rename(["h.0.mlp.weight", "nothing"], "w"), r"all of h\.0\.mlp\.weight, nothing"),
    ],
)
def test_arrays_that_do_not_fit_a_rule_are_named_with_it(file, rule, message) -> None:
    state = {"w": jnp.zeros((5, 5)), "u": jnp.zeros((5, 5))}
    with pytest.raises(ft.CheckpointMismatchError, match=message):
        ft.warm_start(state, file, rename=[rule])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.*", "b"), "as many stars"),
        ((["a", "b"], ["c", "d"]), "one name"),
        (("a", "b", "o i -> i"), r"layout: expected axes .*'o i -> i o', got 'o i -> i'"),
        (("a", "b", "o o -> o o"), "layout: expected axes"),
        (("a", "b", "o i"), "layout: expected axes"),
        (("a", "b", "o i -> (o i)"), "Only those in the file can have parentheses"),
        (("a", "b", "(o i -> o i"), "layout: expected axes"),
        (("a", "b", "((o i) k) -> o i k"), "layout: expected axes"),
        (([], "b"), "one name"),
        ((["a", "a"], "b"), "names that differ"),
        (("a", ["b", "c"], "", -1), "axis: expected an integer of at least 0, got -1"),
        ((["a", "b"], "c", "o i -> i o", 2), "axis: expected one of the 2 axes of 'o i -> i o'"),
        (("a", ["b", "c"], "(h d) -> h d", 1), r"axis: expected one of the 1 axes of '\(h d\)"),
        ((["a", "b"], "c", "", 0, (6,)), r"parts: expected a size for each name .*, got \(6,\)"),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused_at_once(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        ft.Rename(*arguments)


@pytest.mark.parametrize("rename", [RULES[0], (x for x in RULES), {"a": "b"}, "a", [("a", "b")]])
def test_what_is_no_list_of_rules_is_refused(tmp_path, file, rename) -> None:
    with pytest.raises(TypeError, match=r"rename: expected a list of rules, ft\.Rename"):
        ft.warm_start({"w": jnp.zeros(2)}, file, rename=rename)
    with pytest.raises(TypeError, match=r"rename: expected a list of rules, ft\.Rename"):
        ft.export.params(tmp_path / "a.safetensors", {"w": jnp.zeros(2)}, rename=rename)


@pytest.mark.parametrize("arguments", [(["a", 1], "b"), ("a", "b", ["o i -> i o"])])
def test_names_and_layouts_that_are_no_texts_are_refused(arguments) -> None:
    with pytest.raises(TypeError, match="Rename: expected names and a layout that are texts"):
        ft.Rename(*arguments)


def test_rules_that_match_nothing_are_called_so(file) -> None:
    rules = [ft.Rename("h.*.bias", "params/block_*/bias")]
    with pytest.raises(ft.CheckpointMismatchError, match=r"got none that a rule matches, such as"):
        ft.warm_start(create(), file, rename=rules)


def test_axes_of_size_1_come_and_go_and_have_no_other_size(tmp_path) -> None:
    arrays = {"d": np.arange(3, dtype=np.float32), "s": np.array(2, np.float32)}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    rules = [ft.Rename("d", "d", "d -> 1 d"), ft.Rename("s", "s", " -> 1")]
    like = {"d": jnp.zeros((1, 3)), "s": jnp.zeros(1)}
    state = ft.warm_start(like, tmp_path / "a.safetensors", rename=rules).state
    np.testing.assert_array_equal(state["d"], arrays["d"][None])
    np.testing.assert_array_equal(state["s"], arrays["s"][None])
    ft.export.params(tmp_path / "b.safetensors", state, rename=rules)
    found = safetensors.numpy.load_file(tmp_path / "b.safetensors")
    jax.tree.map(np.testing.assert_array_equal, found, arrays)
    with pytest.raises(ft.CheckpointMismatchError, match=r"d: expected float32\[5, 3\]"):
        ft.warm_start({"d": jnp.zeros((5, 3))}, tmp_path / "a.safetensors", rename=rules)
    with pytest.raises(ValueError, match=r"d: float32\[5, 3\] by Rename"):
        ft.export.params(tmp_path / "c.safetensors", {"d": jnp.zeros((5, 3))}, rename=rules)


def test_arrays_of_other_dtypes_are_joined_only_by_cast(tmp_path) -> None:
    dtypes = {"f": "float32", "b": "bfloat16", "h": "float16", "i": "int8"}
    arrays = {name: np.arange(4).astype(jnp.dtype(dtype)) for name, dtype in dtypes.items()}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")

    def joined(names, **how):
        like, rules = {"w": jnp.zeros(8)}, [ft.Rename(names, "w")]
        return ft.warm_start(like, tmp_path / "a.safetensors", rename=rules, **how).state["w"]

    with pytest.raises(ft.CheckpointMismatchError, match=r"w: expected float32.*, got bfloat16"):
        joined(["f", "b"])
    with pytest.raises(ft.CheckpointMismatchError, match=r"w: expected float\[8\], got int8"):
        joined(["b", "i"], cast=True)
    np.testing.assert_array_equal(joined(["b", "h"], cast=True), [0, 1, 2, 3, 0, 1, 2, 3])


def test_random_keys_are_renamed_but_not_transposed(tmp_path) -> None:
    keys = jax.random.split(jax.random.key(0), (2, 3))
    ft.save(tmp_path / "a", {"k": keys})
    rules = [ft.Rename("k", "r")]
    warm = ft.warm_start({"r": keys[::-1]}, tmp_path / "a", rename=rules)
    np.testing.assert_array_equal(jax.random.key_data(warm.state["r"]), jax.random.key_data(keys))
    rules = [ft.Rename("k", "r", "a b -> b a")]
    with pytest.raises(ft.CheckpointMismatchError, match=r"got key<fry>\[2, 3\] by Rename"):
        ft.warm_start({"r": keys.T}, tmp_path / "a", rename=rules)


def test_two_rules_for_one_leaf_are_refused(file) -> None:
    rules = [ft.Rename("emb.weight", "w"), ft.Rename("h.0.mlp.weight", "w")]
    with pytest.raises(ValueError, match=r"'w'.*'emb\.weight', which is renamed to it, too"):
        ft.warm_start({"w": jnp.zeros((5, 6))}, file, rename=rules)


def test_rules_fill_the_leaves_of_frozen_models_and_of_their_adapters(tmp_path) -> None:
    """The arrays are split and joined whether the leaves are trained or frozen."""
    shapes = {"q": (3, 4), "k": (3, 4), "o": (4, 6)}
    arrays = {"qk": (8, 3), "o1": (3, 4), "o2": (3, 4)}
    arrays = {name: RNG.normal(size=shape).astype("f4") for name, shape in arrays.items()}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    rules = [
        ft.Rename("qk", ["params/q", "params/k"], "o i -> i o"),
        ft.Rename(["o1", "o2"], "params/o", "o i -> i o", axis=1),
    ]
    joined = np.concatenate([arrays["o1"], arrays["o2"]]).T
    want = {"q": arrays["qk"][:4].T, "k": arrays["qk"][4:].T, "o": joined}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    base = ft.Model(lambda *_: (params, {}), apply=None)
    for model in (ft.freeze(base, "q"), ft.freeze(base, "*"), ft.lora(base, "q", "o", rank=2)):
        trained, model_state = model.init(jax.random.key(0), None)
        state = ft.TrainState.create(params=trained, model_state=model_state, tx=optax.sgd(0.1))
        warm = ft.warm_start(state, tmp_path / "a.safetensors", rename=rules)
        assert len(warm.transformed) == 3
        jax.tree.map(np.testing.assert_array_equal, ft.merge_frozen(warm.state).params, want)
    taken = ft.warm_start(state, tmp_path / "a.safetensors", rename=rules, take="params/k")
    assert list(taken.loaded) == ["model_state/frozen/k"]


def test_a_rule_for_a_frozen_leaf_fills_one_that_is_trained(file) -> None:
    rules = [ft.Rename("h.0.mlp.weight", "model_state/frozen/w", "o i -> i o")]
    warm = ft.warm_start({"params": {"w": jnp.zeros((12, 6))}}, file, rename=rules)
    np.testing.assert_array_equal(warm.state["params"]["w"], TORCH["h.0.mlp.weight"].T)
