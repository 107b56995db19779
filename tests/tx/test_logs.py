import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

PARAMS = {"w": np.array([3.0, 4.0], np.float32)}


def loss_fn(params, model_state, batch, *, rng, training):
    return jnp.sum(params["w"] ** 2), ft.Aux(model_state)


def logs_of(tx, steps=1):
    step = jax.jit(ft.train_step(loss_fn, tx))
    state = ft.TrainState.create(params=PARAMS, tx=tx)
    rows = []
    for _ in range(steps):
        state, logs = step(state, None)
        rows.append(logs)
    return rows


def test_norms_are_logged_where_they_stand_in_the_chain() -> None:
    tx = optax.chain(
        ft.tx.log_norm(),
        optax.clip_by_global_norm(1.0),
        ft.tx.log_norm("clipped"),
        optax.sgd(0.5),
        ft.tx.log_norm("update_norm"),
    )
    (logs,) = logs_of(tx)
    assert {name: round(float(x), 5) for name, x in logs.items()} == {
        "loss": 25.0,
        "gradient_norm": 10.0,
        "clipped": 1.0,
        "update_norm": 0.5,
    }


def test_a_norm_that_nothing_has_passed_is_zero() -> None:
    rows = logs_of(optax.MultiSteps(optax.chain(ft.tx.log_norm(), optax.sgd(0.0)), 2), 3)
    assert [float(row["gradient_norm"]) for row in rows] == [0.0, 10.0, 10.0]


def test_norms_of_parts_of_the_params_are_logged_down_to_a_depth() -> None:
    gradients = {
        "first": {
            "kernel": np.array([[1.0, 2.0]], np.float32),
            "bias": np.array([2.0], np.float32),
        },
        "second": [np.array([4.0], np.float32)],
    }
    norms = {}
    for depth in (None, 1, 2):
        tx = optax.chain(ft.tx.log_norm("norm", depth=depth), optax.sgd(0.1))
        _, opt_state = tx.update(gradients, tx.init(gradients))
        norms[depth] = {name: float(x) for name, x in ft.tx.logged(opt_state).items()}
    assert norms == {
        None: {"norm": 5.0},
        1: {"norm": 5.0, "norm/first": 3.0, "norm/second": 4.0},
        2: {
            "norm": 5.0,
            "norm/first/kernel": pytest.approx(5**0.5),
            "norm/first/bias": 2.0,
            "norm/second/0": 4.0,
        },
    }


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("value", [1e-5, 300.0])
def test_norms_of_half_precision_are_computed_in_float32(dtype, value) -> None:
    gradients = [jnp.full(4, value, dtype) for _ in range(300)]
    tx = ft.tx.log_norm(depth=1)
    logs = ft.tx.logged(tx.update(gradients, tx.init(gradients))[1])
    expected = np.float64(gradients[0][0])
    assert logs["gradient_norm"] == pytest.approx(expected * 1200**0.5, rel=1e-5)
    assert logs["gradient_norm/0"] == pytest.approx(expected * 2, rel=1e-5)


def test_what_optax_snapshots_is_logged_if_it_is_a_scalar() -> None:
    tx = optax.chain(
        optax.snapshot("largest", lambda g: jnp.max(g["w"])),
        optax.snapshot("all", lambda g: g["w"]),
        optax.sgd(0.1),
    )
    (logs,) = logs_of(tx)
    assert set(logs) == {"loss", "largest"}
    assert logs["largest"] == 8.0


def test_one_name_for_two_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unique name for each scalar, got 'gradient_norm'"):
        logs_of(optax.chain(ft.tx.log_norm(), optax.sgd(0.1), ft.tx.log_norm()))


@pytest.mark.parametrize("whole_state", [False, True])
def test_a_step_of_ones_own_logs_what_a_training_step_does(whole_state: bool) -> None:
    tx = ft.tx.param_groups(
        {
            "w": optax.chain(ft.tx.log_norm(), optax.inject_hyperparams(optax.sgd)(0.5)),
            "**": optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1.0, 0.0, 4)),
        }
    )
    params = {**PARAMS, "b": np.float32(1.0)}
    state = ft.TrainState.create(params=params, tx=tx)
    _, logs = ft.train_step(loss_fn, tx)(state, None)
    new, _, _ = ft.update(state, loss_fn, tx, None)
    ours = ft.tx.logged(new if whole_state else new.opt_state)
    assert ours == {name: logs[name] for name in logs if name != "loss"}
    assert float(ours["w/learning_rate"]) == 0.5
    assert float(ours["rest/learning_rate"]) == 1.0
