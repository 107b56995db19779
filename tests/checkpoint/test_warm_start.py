"""A part of a state out of a checkpoint: what is taken, what stays, and what is said of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import functrain as ft
from functrain.checkpoint import _warm_start
from tests.conftest import digest


def create(value=0.0, classes=3, dtype=jnp.float32, extra=None):
    params = {
        "encoder": {f"layer_{i}": {"kernel": jnp.full((4, 4), value + i, dtype)} for i in range(2)},
        "head": {"kernel": jnp.full((4, classes), value, dtype), "bias": jnp.zeros(classes, dtype)},
    }
    return ft.TrainState.create(
        params=params | (extra or {}),
        model_state={"mean": jnp.full(4, value)},
        tx=optax.adam(1e-3),
        rng=jax.random.key(int(value)),
    )


@pytest.fixture
def old(tmp_path):
    """A checkpoint of a training that came far: all of its values are above 7."""
    state = create(8.0).replace(step=jnp.int32(1000))
    ft.save(tmp_path / "old", state)
    return tmp_path / "old"


def test_a_training_begins_anew_with_the_params_and_statistics_of_another(old) -> None:
    state = create()
    warm = ft.warm_start(state, old)
    for part in ("params", "model_state"):
        assert digest(getattr(warm.state, part)) == digest(getattr(create(8.0), part))
    for part in ("step", "opt_state", "rng"):
        assert digest(getattr(warm.state, part)) == digest(getattr(state, part))
    assert warm.missing == ()
    assert {path.split("/")[0] for path in warm.unchanged} == {"step", "opt_state", "rng"}
    assert set(warm.unused) == set(warm.unchanged)


@pytest.mark.parametrize("state_dtype", [None, jnp.bfloat16])
def test_an_optimizers_copy_of_the_params_is_one_of_the_new_params(old, state_dtype) -> None:
    tx = optax.contrib.schedule_free_adamw(1e-3, state_dtype=state_dtype)
    state = create(1.0)
    state = state.replace(opt_state=tx.init(state.params))
    warm = ft.warm_start(state, old, skip="**/layer_1/*")
    assert digest(warm.state.opt_state) == digest(tx.init(warm.state.params))
    assert warm.loaded["opt_state/z/head/kernel"] == "params/head/kernel"
    assert not {*warm.loaded} & {*warm.unchanged}
    kept = ft.warm_start(state, old, skip="opt_state/z/**").state
    assert digest(kept.opt_state) == digest(state.opt_state)
    jax.jit(lambda s: s, donate_argnums=0)(warm.state)


class Averaged(ft.TrainState):
    average: Any
    weight: Any = 1.0


def test_a_copy_of_the_params_in_a_field_of_a_subclass_is_one_of_the_new_params(old) -> None:
    plain = create(1.0)
    fields = {"params": plain.params, "model_state": plain.model_state, "tx": optax.adam(1e-3)}
    state = Averaged.create(**fields, average=plain.params)
    warm = ft.warm_start(state, old)
    assert digest(warm.state.average) == digest(warm.state.params) == digest(create(8.0).params)
    assert warm.loaded["average/head/kernel"] == "params/head/kernel"
    assert float(warm.state.weight) == 1.0
    jax.jit(lambda s: s, donate_argnums=0)(warm.state)
    # One that differs from the params has been trained.
    trained = jax.tree.map(lambda x: x + 1, plain.params)
    kept = ft.warm_start(Averaged.create(**fields, average=trained), old).state
    assert digest(kept.average) == digest(trained)


def test_each_train_state_in_a_tree_begins_anew(tmp_path) -> None:
    trained = {"gan": (create(8.0).replace(step=jnp.int32(9)), create(9.0)), "best": jnp.ones(())}
    ft.save(tmp_path / "old", trained)
    new = {"gan": (create(), create()), "best": jnp.zeros(())}
    warm = ft.warm_start(new, tmp_path / "old")
    for start, state, old_state in zip(new["gan"], warm.state["gan"], trained["gan"], strict=True):
        assert digest(state.params) == digest(old_state.params)
        assert digest(state.model_state) == digest(old_state.model_state)
        for part in ("step", "opt_state", "rng"):
            assert digest(getattr(state, part)) == digest(getattr(start, part))
    assert warm.state["best"] == 1
    assert digest(ft.warm_start(new, tmp_path / "old", take="**").state) == digest(trained)


def create_frozen(value, *patterns):
    """A state of which the params that match a pattern are frozen; without patterns, of none."""
    if not patterns:
        return create(value)
    state = create(value)
    model = ft.Model(lambda key, x: (state.params, state.model_state), apply=None)
    params, model_state = ft.freeze(model, *patterns).init(jax.random.key(0), None)
    return ft.TrainState.create(params=params, model_state=model_state, tx=optax.adam(1e-3))


def whole(state):
    state = ft.merge_frozen(state) if hasattr(state.model_state, "frozen") else state
    return digest((state.params, state.model_state))


@pytest.mark.parametrize(
    ("saved_patterns", "patterns"),
    [((), ["encoder/**"]), (["encoder/**"], ()), (["encoder/**"], ["encoder/**"]),
     (["**/bias"], ["encoder/layer_1/**", "head/*"])],
    ids=["frozen later", "frozen before", "frozen alike", "frozen otherwise"],
)  # fmt: skip
def test_frozen_params_are_filled_as_the_others_are(tmp_path, saved_patterns, patterns) -> None:
    saved, new = create_frozen(8.0, *saved_patterns), create_frozen(0.0, *patterns)
    ft.save(tmp_path / "old", saved)
    warm = ft.warm_start(new, tmp_path / "old")
    assert warm.missing == ()
    assert whole(warm.state) == whole(saved)
    two = ft.warm_start({"a": new, "b": new}, tmp_path / "old", rename="a/{}".format).state
    assert whole(two["a"]) == whole(saved)
    assert whole(two["b"]) == whole(new)
    head = ft.warm_start(new, tmp_path / "old", take="params/head/**").state
    assert whole(head) == whole(ft.warm_start(create(), tmp_path / "old", take="**/head/*").state)
    rest = ft.warm_start(new, tmp_path / "old", skip="params/head/**").state
    assert whole(rest) == whole(ft.warm_start(create(), tmp_path / "old", skip="**/head/*").state)


def test_patterns_take_whatever_they_name(old) -> None:
    warm = ft.warm_start(create(), old, take=["params/encoder/*/kernel", "step"])
    assert list(warm.loaded) == [
        "step",
        "params/encoder/layer_0/kernel",
        "params/encoder/layer_1/kernel",
    ]
    assert warm.state.step == 1000
    assert warm.state.params["encoder"]["layer_1"]["kernel"][0, 0] == 9
    assert warm.state.params["head"]["kernel"][0, 0] == 0
    whole = ft.warm_start(create(), old, take="**").state
    assert digest(whole) == digest(ft.load(old, like=create()))


def test_a_head_of_another_width_is_an_error_until_it_is_skipped(old) -> None:
    state = create(classes=5)
    with pytest.raises(ft.CheckpointMismatchError) as caught:
        ft.warm_start(state, old)
    message = str(caught.value)
    assert "params/head/kernel: expected float32[4, 5], got float32[4, 3]" in message
    assert "params/head/bias: expected float32[5], got float32[3]" in message
    assert "skip= their paths" in message
    warm = ft.warm_start(state, old, skip="params/head/**")
    assert warm.state.params["head"] is not None
    assert digest(warm.state.params["head"]) == digest(state.params["head"])
    assert warm.state.params["encoder"]["layer_0"]["kernel"][0, 0] == 8
    assert "params/head/kernel" in warm.unchanged
    assert "params/head/kernel" in warm.unused


def test_dtypes_are_converted_only_when_asked(old) -> None:
    state = create(dtype=jnp.bfloat16)
    with pytest.raises(ft.CheckpointMismatchError, match="cast=True") as caught:
        ft.warm_start(state, old)
    assert "params/head/bias: expected bfloat16[3], got float32[3]" in str(caught.value)
    warm = ft.warm_start(state, old, cast=True)
    assert digest(warm.state.params) == digest(create(8.0, dtype=jnp.bfloat16).params)


def test_whole_numbers_and_keys_are_never_converted(tmp_path) -> None:
    ft.save(tmp_path / "c", {"n": jnp.arange(3), "key": jax.random.key(0)})
    with pytest.raises(ft.CheckpointMismatchError, match=r"expected float\[3\], got int32\[3\]"):
        ft.warm_start({"n": jnp.zeros(3)}, tmp_path / "c", cast=True)
    with pytest.raises(
        ft.CheckpointMismatchError, match=r"expected key<rbg>\[\], got key<fry>\[\]"
    ):
        ft.warm_start({"key": jax.random.key(0, impl="rbg")}, tmp_path / "c", cast=True)
    warm = ft.warm_start({"key": jax.random.key(7)}, tmp_path / "c")
    assert digest(warm.state) == digest({"key": jax.random.key(0)})


def test_what_is_taken_lies_where_what_it_replaces_lay(old) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    state = create()
    state = state.replace(params=jax.device_put(state.params, NamedSharding(mesh, PartitionSpec())))
    state.params["encoder"]["layer_0"]["kernel"] = jax.device_put(jnp.zeros((4, 4)), sharding)
    warm = ft.warm_start(state, old)
    before, after = jax.tree.leaves(state), jax.tree.leaves(warm.state)
    assert [x.sharding for x in before] == [x.sharding for x in after]
    assert not any(getattr(x, "weak_type", False) for x in after)
    assert warm.state.params["encoder"]["layer_0"]["kernel"][3, 3] == 8


def test_a_state_without_values_has_to_be_taken_whole(old) -> None:
    abstract = jax.eval_shape(create)
    assert digest(ft.warm_start(abstract, old, take="**").state) == digest(
        ft.load(old, like=abstract)
    )
    with pytest.raises(ValueError, match=r"neither abstract .* got\n  step"):
        ft.warm_start(abstract, old)


def test_the_last_good_checkpoint_of_a_training_is_taken(tmp_path) -> None:
    with ft.Checkpointer(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(create(float(step)), step)
    assert ft.warm_start(create(), tmp_path / "run").state.params["head"]["kernel"][0, 0] == 2
    step = tmp_path / "run" / f"{1:012d}"
    assert ft.warm_start(create(), step).state.params["head"]["kernel"][0, 0] == 1
    (tmp_path / "run" / f"{2:012d}" / "checkpoint.json").write_text("{}")
    with pytest.warns(UserWarning, match="Passed over, for step 1: .*damaged") as found:
        warm = ft.warm_start(create(), tmp_path / "run")
    assert found[0].filename == __file__
    assert warm.state.params["head"]["kernel"][0, 0] == 1
    (step / "checkpoint.json").write_text("{}")
    with pytest.raises(ft.CheckpointCorruptError, match=r"000000000002(.|\n)*000000000001"):
        ft.warm_start(create(), tmp_path / "run")


def test_what_a_run_chose_as_its_result_is_taken_rather_than_its_last_state(tmp_path) -> None:
    """EarlyStopping gives back the best state, which is another than the last."""

    def loss_fn(params, model_state, batch, *, rng, training):
        return jnp.mean((params["w"] - batch) ** 2), ft.Aux(model_state)

    tx = optax.sgd(3.0)  # far too fast: each epoch is worse than the one before
    state = ft.TrainState.create(params={"w": jnp.ones(())}, tx=tx)
    result, _ = ft.fit(
        state,
        ft.train_step(loss_fn, tx),
        ft.ArrayLoader(np.zeros((8,), np.float32), 4),
        epochs=6,
        hooks=[ft.hooks.EarlyStopping("loss", patience=2, restore_best=True)],
        checkpointer=ft.Checkpointer(tmp_path / "run"),
        verbose=0,
    )
    warm = ft.warm_start(state, tmp_path / "run")
    assert digest(warm.state.params) == digest(result.params)
    last = ft.load(tmp_path / "run" / sorted(p.name for p in (tmp_path / "run").glob("0*"))[-1],
                   like=state)  # fmt: skip
    assert digest(warm.state.params) != digest(last.params)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"take": ["params/**", "params/hed/*"]}, r"take: .* got 'params/hed/\*'.*params/head"),
        ({"skip": "params/hed/**"}, r"skip: .*Similar patterns: params/head/\*\*"),
        ({"rename": lambda path: f"x/{path}"}, r"got only others, such as .*x/step.*rename"),
        ({"rename": lambda path: "same"}, r"rename\('params/encoder.*got 'same'. .* has 'step'"),
    ],
)  # fmt: skip
def test_patterns_and_names_that_mean_nothing_are_refused(old, given, message) -> None:
    with pytest.raises(ValueError, match=message):
        ft.warm_start(create(), old, **given)


def test_patterns_of_the_state_are_told_to_rename_the_paths_of_the_file(tmp_path) -> None:
    weights = create().params
    ft.save(tmp_path / "bare", weights)
    take = "params/encoder/**"
    with pytest.raises(ValueError, match=r"expected leaves to take.*Pass rename="):
        ft.warm_start(create(), tmp_path / "bare", take=take)
    # A pattern of the paths in the file is not one of the state.
    with pytest.raises(ValueError, match=r"got 'encoder/.*params/encoder/\*"):
        ft.warm_start(create(), tmp_path / "bare", take="encoder/**")
    warm = ft.warm_start(
        create(), tmp_path / "bare", take=take, rename=lambda path: f"params/{path}"
    )
    assert warm.loaded
    assert all(path.startswith("params/encoder/") for path in warm.loaded)


def test_what_is_no_state_is_named(old) -> None:
    with pytest.raises(TypeError, match=r"The order is warm_start\(state, source\)"):
        ft.warm_start(old, create())
    with pytest.raises(TypeError, match=r"expected arrays, got \[1\.0\]"):
        ft.warm_start({"params": {"w": 1.0}}, old)
    state = create()
    state.opt_state[0].count.delete()
    with pytest.raises(ValueError, match=r"donated to a program.* got\n  opt_state/0/count\n"):
        ft.warm_start(state, old)


def test_the_report_is_a_table_of_a_few_lines(old) -> None:
    warm = ft.warm_start(create(classes=5), old, skip="params/head/**")
    lines = repr(warm).splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("  loaded        3  params/encoder/layer_0/kernel, params/")
    assert lines[2] == "  transformed   0"
    assert lines[3].startswith("  unused       13  step, params/head/bias, ")
    assert lines[4] == "  missing       0"


@pytest.mark.parametrize("step", [1, 2])
def test_a_checkpoint_that_is_replaced_or_removed_while_it_is_read_is_not_called_damaged(
    tmp_path, monkeypatch, step
) -> None:
    open_arrays = _warm_start.open_arrays
    with ft.Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save({"x": np.zeros(3)}, 1)

        def open_too_late(*arguments):
            monkeypatch.setattr(_warm_start, "open_arrays", open_arrays)
            checkpoints.save({"x": np.ones(3)}, step)
            return open_arrays(*arguments)

        monkeypatch.setattr(_warm_start, "open_arrays", open_too_late)
        warm = ft.warm_start({"x": np.zeros(3)}, tmp_path)
    assert warm.state["x"].all()
    assert warm.source.endswith(f"{step:012d}")
