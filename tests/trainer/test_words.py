"""What people bring from other libraries, or mix up, and what fit, evaluate and predict say."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import functrain as ft

X, Y = np.ones((8, 3), np.float32), np.zeros(8, np.int32)
LOADER = ft.ArrayLoader((X, Y), 4)
TX = optax.sgd(0.1)
MODULE = nn.Dense(2)
MODEL = ft.from_linen(MODULE)
PARAMS, MODEL_STATE = MODEL.init(jax.random.key(0), X)
LOSS = ft.supervised(MODEL, optax.softmax_cross_entropy_with_integer_labels)
STEP = ft.train_step(LOSS, TX)
STATE = ft.TrainState.create(params=PARAMS, model_state=MODEL_STATE, tx=TX)
KERAS = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((STATE, STEP, (X, Y)), r"data: expected an ArrayLoader .* got tuple\. For arrays"),
        ((STATE, STEP, [[1.0, 2.0], [3.0, 4.0]]), "data: batch 0: .*list of 2 floats"),
        ((STATE, STEP, iter([(X.tolist(), Y)])), "data: batch 0: .*list of 3 floats"),
        ((STATE, STEP, list(range(10**6))), "data: expected an ArrayLoader or .*, got list"),
        ((KERAS, STEP, LOADER), r"got Sequential.*bridge\.create_state\(model, tx\)"),
        (
            (PARAMS, STEP, LOADER),
            r"expected a TrainState, got dict\. .*TrainState\.create\(params=",
        ),
        ((STEP, STATE, LOADER), r"step: expected \(state, batch\).*got TrainState"),
        ((STATE, LOSS, LOADER), r"step: expected .* got loss_fn\(params.*train_step"),
        ((STATE, ft.eval_step(LOSS), LOADER), r"step: expected a step that trains.*eval_step"),
        ((STATE, ft.fuse(STEP, 2), LOADER), r"got Fused\(step, k=2\).* fuse=2"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_mixed_up_is_named(args, words) -> None:
    with pytest.raises(TypeError, match=words):
        ft.fit(*args, verbose=0)


@pytest.mark.parametrize("states", [{"a": STATE, "b": STATE}, ft.population.stack([STATE] * 2)])
def test_several_states_are_not_evaluated_as_one(states) -> None:
    with pytest.raises(TypeError, match=r"state: expected a state.*get_state=.*population\.step"):
        ft.evaluate(states, ft.eval_step(LOSS), LOADER)


def test_a_population_is_trained_by_the_step_of_one() -> None:
    with pytest.raises(TypeError, match=r"got PopulationState.*population\.step\(step\)"):
        ft.fit(ft.population.stack([STATE] * 2), STEP, LOADER, verbose=0)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap])
@pytest.mark.parametrize("loop", ["fit", "evaluate", "predict"])
def test_a_loop_within_a_transformation_is_told_to_leave_it(transform, loop) -> None:
    step = ft.eval_step(LOSS) if loop == "evaluate" else STEP

    def call(w):
        return getattr(ft, loop)(w, step, LOADER)

    with pytest.raises(TypeError, match=r"within jax\.jit, grad, vmap .* outside of it"):
        transform(call)(jnp.zeros(2 if transform is jax.vmap else ()))


def test_evaluate_and_predict_take_states_of_arrays_only() -> None:
    for call in (
        lambda state: ft.evaluate(state, ft.eval_step(LOSS), LOADER),
        lambda state: ft.predict(state, ft.predict_step(MODEL), ft.ArrayLoader(X, 4)),
    ):
        with pytest.raises(TypeError, match=r"state: expected an array at history.*pass its state"):
            call(ft.fit(STATE, STEP, LOADER, verbose=0))


def test_a_loss_that_drops_the_model_state_is_told_to_hand_it_on() -> None:
    def loss_fn(params, model_state, batch, *, rng, training):
        return jnp.sum(params["kernel"]), ft.Aux()

    state = STATE.replace(model_state={"seen": jnp.zeros(2)})
    with pytest.raises(
        TypeError, match=r"model_state/seen: missing(.|\n)*Aux\(model_state, \.\.\."
    ):
        ft.fit(state, ft.train_step(loss_fn, TX), LOADER, verbose=0)


def test_predict_says_what_it_takes() -> None:
    with pytest.raises(TypeError, match=r"got MeteredStep.*predict_step\(model\)"):
        ft.predict(STATE, ft.eval_step(LOSS), LOADER)
    with pytest.raises(ValueError, match=r"(?s)one row for each example.*predict_step\(model\)"):
        ft.predict(STATE, STEP, LOADER)


@pytest.mark.parametrize("leaf", ["text", object(), np.array(["a"]), np.array([None])], ids=type)
def test_a_state_of_other_things_than_numbers_is_named_by_its_leaf(leaf) -> None:
    with pytest.raises(TypeError, match="expected an array at b, got "):
        ft.fit({"b": leaf}, lambda s, b: (s, {}), LOADER, verbose=0)
