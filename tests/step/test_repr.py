import jax
import jax.numpy as jnp
import optax

import functrain as ft


def start():
    params = {f"layer{i}": jnp.ones((30, 40)) for i in range(100)}
    return ft.TrainState.create(params=params, tx=optax.adam(1e-3), rng=jax.random.key(0))


def test_a_state_is_shown_in_a_line() -> None:
    assert repr(start()) == (
        "TrainState(step=0, params=120,000 in 100 arrays, model_state=(), "
        "opt_state=240,001 in 201 arrays, rng=key<fry>[])"
    )


def test_a_state_that_a_program_took_over_says_so() -> None:
    state = start()
    jax.jit(lambda s: s.replace(step=s.step + 1), donate_argnums=0)(state)
    assert repr(state).startswith(
        "TrainState(step=int32[] (deleted), params=120,000 in 100 arrays (deleted), "
    )


def test_states_are_shown_where_they_have_no_values() -> None:
    shown = []
    jax.jit(lambda state: shown.append(repr(state)))(start())
    assert shown[0].startswith("TrainState(step=int32[], params=120,000 in 100 arrays,")
    assert repr(jax.eval_shape(start)).startswith("TrainState(step=int32[], params=120,000")
    many = jax.tree.map(lambda x: jnp.stack([x, x]), start())
    assert repr(many).startswith("TrainState(step=int32[2], params=240,000")


def test_metrics_and_steps_are_shown_without_addresses() -> None:
    step = ft.train_step(lambda: 0, optax.sgd(0.1), metrics={"a": ft.metrics.accuracy()})
    assert repr(step) == "MeteredStep(base=train, trains=True)"
    shown = repr(step.start(start()))
    assert shown.startswith("Metered(state=TrainState(step=0, ")
    assert shown.endswith("metrics=4 in 4 arrays)")


def test_states_are_equal_if_they_are_one_object() -> None:
    state = start()
    assert state == state
    assert state != start()
    assert len({state, state, start()}) == 2
