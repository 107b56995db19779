"""ReduceLROnPlateau: the rate falls where Keras's callback lowers it, and resumes."""

from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import bridge
import functrain as ft

TX = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)


def create(tx: Any = TX) -> ft.TrainState:
    return ft.TrainState.create(params={"w": jnp.zeros(3)}, tx=tx)


def by_keras(values: list[float], **arguments: Any) -> list[float]:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    callback = keras.callbacks.ReduceLROnPlateau(**arguments)
    callback.set_model(model)
    callback.on_train_begin()
    rates = []
    for epoch, value in enumerate(values):
        callback.on_epoch_end(epoch, {callback.monitor: value})
        rates.append(float(model.optimizer.learning_rate))
    return rates


def by_hook(
    hook: Any, values: list[float], state: ft.TrainState
) -> tuple[list[float], ft.TrainState]:
    rates = []
    for epoch, value in enumerate(values):
        position = ft.Position(step=epoch, epoch=epoch)
        event = ft.events.EpochEnd(position=position, state=state, values={hook.monitor: value})
        hook(event)
        state = event.state
        rates.append(float(state.opt_state.hyperparams["learning_rate"]))
    return rates, state


RNG = np.random.default_rng(0)
FALLING = [1.0, 0.9, 0.9, 0.9, 0.8, 0.8, 0.79995, 0.8, 0.8, 0.8, 0.8, 0.7, 0.7, 0.7, 0.7]


@pytest.mark.parametrize(
    "arguments",
    [
        {"patience": 2},
        {"patience": 0, "factor": 0.5},
        {"patience": 1, "cooldown": 2, "min_lr": 0.2},
        {"patience": 2, "min_delta": 0.0, "factor": 0.3},
        {"patience": 1, "mode": "max", "monitor": "val_accuracy", "min_delta": 0.05},
    ],
)
@pytest.mark.parametrize("values", [FALLING, RNG.normal(size=40).round(1).tolist()])
def test_the_rate_falls_as_by_keras(arguments: Any, values: list[float]) -> None:
    rates, _ = by_hook(ft.hooks.ReduceLROnPlateau(**arguments), values, create())
    assert rates == by_keras(values, **arguments)
    assert len(set(rates)) > 1


def lowered(state: ft.TrainState) -> ft.TrainState:
    """Returns a state with half of its rates, after two equal values."""
    hook = ft.hooks.ReduceLROnPlateau(patience=0, factor=0.5)
    for _ in range(2):
        position, values = ft.Position(step=1), {"val_loss": 1.0}
        event = ft.events.EpochEnd(position=position, state=state, values=values)
        hook(event)
        state = event.state
    return state


def test_all_rates_of_groups_fall_and_keep_their_dtypes() -> None:
    tx = ft.tx.param_groups(
        {
            "a": optax.inject_hyperparams(optax.sgd)(0.5),
            "**": optax.inject_hyperparams(optax.adam)(0.25),
        }
    )
    state = ft.TrainState.create(params={"a": jnp.zeros(2), "b": jnp.zeros(2)}, tx=tx)
    rates = {name: float(x) for name, x in ft.tx.logged(lowered(state)).items()}
    assert rates == {"a/learning_rate": 0.25, "rest/learning_rate": 0.125}


def test_the_state_of_a_keras_optimizer_has_a_rate_to_set() -> None:
    state = lowered(create(bridge.optimizer(keras.optimizers.SGD(0.5))))
    assert float(state.opt_state.scalars["learning_rate"]) == 0.25


@pytest.mark.parametrize(
    "tx",
    [optax.sgd(0.5), optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(1.0, 0.0, 4))],
)
def test_a_state_without_a_rate_to_set_is_refused_before_the_first_step(tx: Any) -> None:
    seen: list[Any] = []

    def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
        return jnp.sum(params["w"] * batch), ft.Aux(model_state)

    with pytest.raises(ValueError, match=r"injected as a number.*inject_hyperparams"):
        ft.fit(
            create(tx),
            ft.train_step(loss_fn, tx),
            ft.ArrayLoader(np.ones((4, 3), np.float32), 2),
            hooks=[ft.hooks.ReduceLROnPlateau("loss"), lambda e: seen.append(e.step)],
            verbose=0,
        )
    assert not seen


def test_a_resumed_fit_lowers_the_rate_where_the_uninterrupted_one_does(tmp_path: Any) -> None:
    def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
        return jnp.mean((params["w"] * 0.0 + batch) ** 2), ft.Aux(model_state)

    step = ft.train_step(loss_fn, TX)
    data = ft.ArrayLoader(np.ones((4, 3), np.float32), 2)

    def fit(epochs: int, **arguments: Any) -> list[float]:
        hook = ft.hooks.ReduceLROnPlateau("loss", patience=2, factor=0.5, cooldown=1)
        result = ft.fit(create(), step, data, epochs=epochs, hooks=[hook], verbose=0, **arguments)
        return result.history.epochs["learning_rate"]

    whole = fit(9)
    fit(4, checkpointer=ft.Checkpointer(tmp_path / "run"))
    np.testing.assert_array_equal(fit(9, checkpointer=ft.Checkpointer(tmp_path / "run")), whole)
    assert len(set(np.asarray(whole).tolist())) > 2


@pytest.mark.parametrize(
    "arguments", [{"factor": 1.0}, {"factor": "x"}, {"cooldown": -1}, {"min_lr": None}]
)
def test_arguments_out_of_range_are_refused(arguments: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        ft.hooks.ReduceLROnPlateau(**arguments)


@pytest.mark.parametrize("hook", [ft.hooks.ReduceLROnPlateau, ft.hooks.EarlyStopping])
def test_a_value_with_axes_is_refused_by_name(hook: Any) -> None:
    event = ft.events.EpochEnd(
        position=ft.Position(step=1), state=create(), values={"val_loss": np.ones(1)}
    )
    with pytest.raises(TypeError, match="val_loss: expected a number"):
        hook("val_loss")(event)
