import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

FALLING = optax.linear_schedule(1.0, 0.0, 10)


def loss_fn(params, model_state, batch, *, rng, training):
    return jnp.sum(params["w"]), ft.Aux(model_state)


def rates(tx, schedule=None, steps=9):
    """The rates that are logged, and those by which params moved: the gradient is 1."""
    step = jax.jit(ft.train_step(loss_fn, tx, learning_rate=schedule))
    state = ft.TrainState.create(params={"w": np.float32(0)}, tx=tx)
    logged, moved = [], []
    for _ in range(steps):
        new, logs = step(state, None)
        logged.append(float(logs["learning_rate"]))
        moved.append(float(state.params["w"] - new.params["w"]))
        state = new
    return np.round(logged, 4).tolist(), np.round(moved, 4).tolist()


def test_the_rate_under_multi_steps_is_that_of_the_update_it_takes_part_in() -> None:
    logged, moved = rates(optax.MultiSteps(optax.sgd(FALLING), 4), FALLING)
    assert logged == [1, 1, 1, 1, 0.9, 0.9, 0.9, 0.9, 0.8]
    assert moved == [0, 0, 0, 1, 0, 0, 0, 0.9, 0]


def test_an_injected_schedule_is_logged_as_it_was_applied() -> None:
    logged, moved = rates(optax.inject_hyperparams(optax.sgd)(learning_rate=FALLING))
    assert logged == moved == [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    logged, _ = rates(optax.inject_hyperparams(optax.adam)(learning_rate=FALLING))
    assert logged == moved


def test_the_schedule_is_asked_with_the_optimizers_count_not_the_states() -> None:
    tx = optax.sgd(FALLING)
    state = ft.TrainState.create(params={"w": np.float32(0)}, tx=tx).replace(step=jnp.int32(7))
    new, logs = ft.train_step(loss_fn, tx, learning_rate=FALLING)(state, None)
    assert float(logs["learning_rate"]) == -float(new.params["w"]) == 1.0


def test_a_schedule_that_multi_steps_does_not_show_is_asked_with_its_updates() -> None:
    moments = optax.chain(optax.trace(0.0), optax.scale(-1.0))
    logged, _ = rates(optax.MultiSteps(moments, 2), FALLING, steps=5)
    assert logged == [1, 1, 0.9, 0.9, 0.8]


def test_a_param_with_the_name_of_the_rate_is_not_logged_as_it() -> None:
    injected = optax.inject_hyperparams(optax.adam)(learning_rate=0.5)
    params = {"w": np.float32(0), "learning_rate": np.float32(0.1)}
    for tx, expected in ((injected, 0.5), (optax.adam(0.5), None)):
        state = ft.TrainState.create(params=params, tx=tx)
        _, logs = ft.train_step(loss_fn, tx)(state, None)
        assert logs.get("learning_rate") == expected


LINE_SEARCHES = {
    "zoom": optax.lbfgs(),
    "backtracking": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20)),
}


@pytest.mark.parametrize("name", LINE_SEARCHES)
def test_the_rate_that_a_line_search_found_is_logged(name: str) -> None:
    tx = LINE_SEARCHES[name]

    def square(params, model_state, batch, *, rng, training):
        loss = 10 * (params["w"] - 0.3) ** 2 + 0 * params["learning_rate"]
        return loss, ft.Aux(model_state)

    params = {"w": np.float32(0), "learning_rate": np.float32(0.1)}
    state = ft.TrainState.create(params=params, tx=tx)
    new, logs = jax.jit(ft.train_step(square, tx))(state, None)
    (found,) = [x.learning_rate for x in new.opt_state if "Linesearch" in type(x).__name__]
    assert logs["learning_rate"] == found
    assert 0 < float(found) < 1


def test_a_number_in_place_of_the_schedule_is_refused_with_its_schedule() -> None:
    with pytest.raises(TypeError, match=r"^learning_rate: .*got 0\.001.*constant_schedule"):
        ft.train_step(loss_fn, optax.sgd(1e-3), learning_rate=1e-3)
