"""What a step refuses, and in which words, before anything is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft
from functrain.step._check import check_step

X = np.ones((8, 3), np.float32)
LOADER = ft.ArrayLoader((X, X), 4)
TX = optax.adam(0.1)


def start(tx=TX, **parts):
    return ft.TrainState.create(params={"w": jnp.ones(3), "b": jnp.zeros(())}, tx=tx, **parts)


def logging(**logs):
    def loss_fn(params, model_state, batch, *, rng, training):
        value = jnp.mean(params["w"] * batch[0]) + params["b"]
        return value, ft.Aux(model_state, batch[0], {n: jnp.float32(x) for n, x in logs.items()})

    return loss_fn


MAE = {"mae": ft.metrics.mean_absolute_error()}


@pytest.mark.parametrize(
    ("log", "metrics"),
    [("mae", MAE), ("loss", MAE), ("loss", None), ("loss", {"loss": MAE["mae"]})],
)
def test_a_log_named_like_a_metric_or_the_loss_is_refused(log, metrics) -> None:
    step = ft.train_step(logging(**{log: 1.0}), TX, metrics=metrics)
    message = rf"logs: expected a name of its own for the loss .*, got \['{log}'\]"
    with pytest.raises(ValueError, match=message):
        ft.fit(start(), step, LOADER, verbose=0)


def test_a_metric_whose_value_is_no_scalar_is_refused_before_the_first_step() -> None:
    counts = ft.metrics.Metric(lambda: jnp.zeros(3), lambda m, batch, aux, loss: m + 1, lambda m: m)
    step = ft.train_step(logging(), TX, metrics={"counts": counts})
    with pytest.raises(TypeError, match=r"(?s)metrics: expected a scalar.*counts: float32\[3\]"):
        jax.eval_shape(step, step.start(start()), (X, X))
    with pytest.raises(TypeError, match=r"(?s)metrics: expected a scalar.*counts: float32\[3\]"):
        ft.evaluate(start(), ft.eval_step(logging(), metrics={"counts": counts}), LOADER)


@pytest.mark.parametrize(
    ("made", "stepped", "found"),
    [
        (optax.adam(0.1), optax.sgd(0.1), r"0/mu/b: unexpected \(got \[\]\)"),
        (optax.sgd(0.1), optax.adam(0.1), r"0/mu/w: missing \(expected \[3\]\)"),
        (optax.adam(0.1), optax.chain(optax.clip(1.0), optax.adam(0.1)), "1/0/count: missing"),
    ],
)
def test_the_state_of_another_optimizer_is_refused_by_leaf(made, stepped, found) -> None:
    step = ft.train_step(logging(), stepped)
    with pytest.raises(ValueError, match=rf"(?s)opt_state: expected leaves of.*{found}"):
        ft.fit(start(made), step, LOADER, verbose=0)


def test_moments_wider_than_the_params_they_belong_to_are_no_other_optimizers() -> None:
    state = start()
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)
    new, _ = ft.train_step(logging(), TX)(state.replace(params=halved), (X, X))
    assert new.opt_state[0].mu["w"].dtype == jnp.float32


def test_an_optimizer_whose_init_cannot_be_traced_is_taken_as_it_is() -> None:
    def init(params):
        return {"norm": jnp.float32(np.linalg.norm(np.asarray(params["w"])))}

    tx = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
    assert jax.jit(ft.train_step(logging(), tx))(start(tx), (X, X))[0].step == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((logging(), start(), TX), r"state: expected a TrainState, got function\. Make one with"),
        ((start(), TX, logging()), r"loss_fn: expected \(params, .*supervised\(model, loss\)"),
        ((start(), ft.train_step(logging(), TX), TX), r"loss_fn: .*got step\(state, batch\)"),
        ((start(), logging(), optax.adam), r"tx: expected .* got adam\. Call the function"),
    ],
)
def test_arguments_of_update_that_are_mixed_up_are_named(arguments, words) -> None:
    with pytest.raises(TypeError, match=words):
        ft.update(*arguments, (X, X))


@pytest.mark.parametrize("loss", [logging(), ft.supervised(ft.Model(None, None), lambda o, y: o)])
def test_a_loss_is_no_step(loss) -> None:
    with pytest.raises(TypeError, match=r"step: expected \(state, batch\).*got loss_fn\(params"):
        check_step(loss)


@pytest.mark.parametrize("step", [ft.train_step(logging(), TX), lambda s, b: (s, {}), np.add])
def test_a_step_is_a_step(step) -> None:
    check_step(step)
