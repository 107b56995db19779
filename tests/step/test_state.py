import copy
from typing import Any, Generic, TypeVar

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft
from functrain import TrainState

T = TypeVar("T")


class Averaged(TrainState):
    average: Any
    decay: Any = 0.9
    name: str = flax.struct.field(pytree_node=False, default="ema")


class Deeper(Averaged, Generic[T]):
    extra: Any = None


PARAMS = {"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)}


def test_every_leaf_is_a_strongly_typed_array() -> None:
    assert TrainState.create(params=PARAMS, tx=optax.sgd(0.1)).rng is None
    state = TrainState.create(params={"w": 1.0}, tx=optax.adam(1e-3), rng=jax.random.key(0))
    for leaf in jax.tree.leaves(state):
        assert isinstance(leaf, jax.Array)
        assert not getattr(leaf, "weak_type", False)
    assert state.step.dtype == jnp.int32


def test_create_copies_so_donation_leaves_the_callers_arrays_alive() -> None:
    w = jnp.ones(3)
    statistics = jnp.zeros(3)
    # schedule_free keeps a copy of the params in its state: the same arrays, as optax makes it.
    tx = optax.contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1)
    state = TrainState.create(params={"a": w, "b": w}, model_state={"m": statistics}, tx=tx)
    jax.jit(lambda s: s.replace(step=s.step + 1), donate_argnums=0)(state)
    assert not w.is_deleted()
    assert not statistics.is_deleted()


@pytest.mark.smoke
def test_apply_gradients_is_optax_by_hand() -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = TrainState.create(params=PARAMS, tx=tx)
    grads = jax.tree.map(lambda x: jnp.full_like(x, 0.3), state.params)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    expected = optax.apply_updates(state.params, updates)
    new = state.apply_gradients(grads, tx)
    assert int(new.step) == 1
    chex.assert_trees_all_equal(new.params, expected)
    chex.assert_trees_all_equal(new.opt_state, opt_state)


@pytest.mark.parametrize("rng", [0, jax.random.PRNGKey(0), jax.random.split(jax.random.key(0))])
def test_a_wrong_rng_is_refused(rng) -> None:
    with pytest.raises(TypeError, match=r"rng: expected one typed key.*jax\.random\.key"):
        TrainState.create(params=PARAMS, tx=optax.sgd(0.1), rng=rng)


def test_params_that_cannot_be_trained_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"params: expected floating-point .*\n  count: int32\[\]"):
        TrainState.create(params={**PARAMS, "count": np.int32(1)}, tx=optax.sgd(0.1))
    # The gradients of jax would lead its imaginary part uphill.
    with pytest.raises(TypeError, match=r"\n  wave: complex64\[2\]\n.*its imaginary part"):
        TrainState.create(params={**PARAMS, "wave": jnp.ones(2, complex)}, tx=optax.sgd(0.1))


def test_a_function_in_the_state_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="expected an array at model_state/act, got function"):
        TrainState.create(params=PARAMS, tx=optax.sgd(0.1), model_state={"act": lambda x: x})
    with pytest.raises(TypeError, match="expected an array at average, got builtin"):
        Averaged.create(params=PARAMS, tx=optax.sgd(0.1), average=len)


@pytest.mark.parametrize("cls", [Averaged, Deeper, Deeper[int]])
def test_a_subclass_behaves_as_its_base(cls) -> None:
    mine = jnp.ones(3)

    def make():
        return cls.create(params=PARAMS, tx=optax.sgd(0.1), average={"w": mine}, name=len)

    state, other = make(), make()
    assert state == state != other
    assert len({state, other}) == 2
    assert "rng=None, average=3 in 1 array, decay=float32[], name=<built-in" in repr(state)
    assert not any(getattr(x, "weak_type", False) for x in jax.tree.leaves(state))
    for twin in (copy.deepcopy(state), copy.copy(state), state.replace(), other):
        assert type(twin) is type(state)
        assert jax.tree.structure(twin) == jax.tree.structure(state)
        chex.assert_trees_all_equal(twin, state)
    new = jax.jit(lambda s, g: s.apply_gradients(g, optax.sgd(0.1)), donate_argnums=0)(
        state, {k: np.ones_like(v) for k, v in PARAMS.items()}
    )
    np.testing.assert_array_equal(new.params["w"], PARAMS["w"] - np.float32(0.1))
    np.testing.assert_array_equal(new.average["w"], mine)


def test_a_step_key_depends_on_the_step_and_the_name_alone() -> None:
    state = ft.TrainState.create(params={}, tx=optax.sgd(0.1), rng=jax.random.key(3))
    later = state.replace(step=jnp.int32(7))
    drawn = {}
    for s in (state, later):
        for name in ("mixup", "noise", ""):
            drawn[int(s.step), name] = jax.random.bits(ft.step_key(s, name)).item()
        drawn[int(s.step), None] = jax.random.bits(jax.random.fold_in(s.rng, s.step)).item()
    assert len(set(drawn.values())) == len(drawn)
    again = jax.jit(lambda s: jax.random.bits(ft.step_key(s, "mixup")))(later)
    assert again.item() == drawn[7, "mixup"]
    with pytest.raises(TypeError, match=r"state\.rng: expected one typed key.*got None"):
        ft.step_key(state.replace(rng=None), "mixup")


def many_layers():
    params = {f"layer{i}": jnp.ones((30, 40)) for i in range(100)}
    return TrainState.create(params=params, tx=optax.adam(1e-3), rng=jax.random.key(0))


def test_a_state_is_shown_in_a_line_with_or_without_values() -> None:
    assert repr(many_layers()) == (
        "TrainState(step=0, params=120,000 in 100 arrays, model_state=(), "
        "opt_state=240,001 in 201 arrays, rng=key<fry>[])"
    )
    assert repr(jax.eval_shape(many_layers)).startswith("TrainState(step=int32[], params=120,000")
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), many_layers())
    assert repr(stacked).startswith("TrainState(step=int32[2], params=240,000")


def test_metrics_and_steps_are_shown_without_addresses() -> None:
    step = ft.train_step(lambda: 0, optax.sgd(0.1), metrics={"a": ft.metrics.accuracy()})
    assert repr(step) == "MeteredStep(base=train, trains=True)"
    shown = repr(step.start(many_layers()))
    assert shown.startswith("Metered(state=TrainState(step=0, ")
    assert shown.endswith("metrics=4 in 4 arrays)")
