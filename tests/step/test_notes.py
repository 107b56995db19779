"""Notes on errors of a loss, in `fit` and in a step that is called by hand."""

import flax.errors
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

TX = optax.sgd(0.1)
BATCH = np.ones((4, 5), np.float32), np.ones((4, 1), np.float32)
STATE = ft.TrainState.create(params={"w": jnp.ones((5, 1))}, tx=TX)
MODEL = ft.Model(
    lambda key, x: ({"w": jnp.ones((x.shape[-1], 1))}, {}),
    lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(x @ p["w"], s),
)
LOSS = ft.supervised(MODEL, optax.squared_error)


def fit(state, step, batch):
    ft.fit(state, step, [batch], verbose=0)


def call(state, step, batch):
    step(state, batch)


def call_jitted(state, step, batch):
    jax.jit(step)(state, batch)


WAYS = {
    "fit": (fit, ft.train_step(LOSS, TX)),
    "call": (call, ft.train_step(LOSS, TX)),
    "jit": (call_jitted, ft.train_step(LOSS, TX)),
    "micro-batches": (call, ft.train_step(ft.micro_batches(LOSS, 2), TX)),
    "evaluate": (lambda state, step, x: ft.evaluate(state, step, [x]), ft.eval_step(LOSS)),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_shapes_of_the_batch_are_noted_once(way) -> None:
    take_step, step = WAYS[way]
    batch = np.ones((4, 7), np.float32), BATCH[1]
    with pytest.raises(Exception, match=r"\(7,\) and \(5,\)|got \(7|contracting") as error:
        take_step(STATE, step, batch)
    rows = 2 if way == "micro-batches" else 4
    shapes = [note for note in error.value.__notes__ if note.startswith("Shapes of the batch:")]
    assert shapes == [f"Shapes of the batch:\n  0: float32[{rows}, 7]\n  1: float32[{rows}, 1]"]


def test_the_shapes_of_inputs_are_noted_in_a_prediction() -> None:
    with pytest.raises(TypeError, match="contracting") as error:
        ft.predict_step(MODEL)(STATE, np.ones((4, 7), np.float32))
    assert "Shapes of the batch:\n  (root): float32[4, 7]" in error.value.__notes__


def test_an_error_of_the_loss_on_outputs_has_both_shapes() -> None:
    batch = BATCH[0], BATCH[1][:, 0]
    with pytest.raises(ValueError, match="Shape mismatch") as error:
        ft.train_step(LOSS, TX)(STATE, batch)
    assert "loss(outputs, y) got float32[4, 1] and float32[4]." in error.value.__notes__


def test_a_model_that_returns_bare_outputs_is_told_what_to_return() -> None:
    model = ft.Model(MODEL.init, lambda p, s, x, **mode: x @ p["w"])
    message = r"model\.apply: expected a ModelOutput from it, got float32\[4, 1\]\. Write: return"
    with pytest.raises(TypeError, match=message):
        ft.train_step(ft.supervised(model, optax.squared_error), TX)(STATE, BATCH)
    with pytest.raises(TypeError, match=message):
        ft.predict(STATE, ft.predict_step(model), [BATCH[0]])


def drawing(params, model_state, batch, *, rng, training):
    return jnp.mean(params["w"] * jax.random.normal(rng, (3,))), ft.Aux(model_state)


@pytest.mark.parametrize("model", [MODEL, ft.from_linen(flax.linen.Dense(1))])
def test_what_init_returns_in_place_of_params_is_named(model: ft.Model) -> None:
    state = ft.TrainState.create(params=model.init(jax.random.key(0), BATCH[0]), tx=TX)
    step = ft.train_step(ft.supervised(model, optax.squared_error), TX)
    with pytest.raises((TypeError, flax.errors.FlaxError)) as error:
        step(state, BATCH)
    assert any("write params, model_state = model.init" in note for note in error.value.__notes__)


def test_other_errors_of_a_model_have_no_note_about_init() -> None:
    with pytest.raises(TypeError, match="contracting") as error:
        ft.predict_step(MODEL)(STATE, np.ones((4, 7), np.float32))
    assert not any("model.init" in note for note in error.value.__notes__)


def test_a_loss_that_draws_without_a_key_is_told_where_keys_come_from() -> None:
    evaluation = ft.eval_step(drawing)
    for take_step in (
        lambda: ft.update(STATE, drawing, TX, BATCH),
        lambda: evaluation(evaluation.start(STATE), BATCH),
    ):
        with pytest.raises(TypeError, match="PRNG key") as error:
            take_step()
        notes = "".join(error.value.__notes__)
        assert "Pass rng=jax.random.key(seed) to TrainState.create, and to eval_step" in notes
