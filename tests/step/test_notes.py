"""Notes on errors of a loss, in `fit` and in a step that is called by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

TX = optax.sgd(0.1)
BATCH = np.ones((4, 5), np.float32), np.ones((4, 1), np.float32)
TRAINED_WIDTH = jnp.ones((1, 7))


def apply_kernel(params, model_state, x, *, rng=None, training=False):
    return ft.ModelOutput(x @ params["w"], model_state)


def kernel_loss(params, model_state, batch, *, rng, training):
    x, y = batch
    return jnp.mean((x @ params["w"] - y) ** 2), ft.Aux(model_state)


LINEN = ft.from_linen(nn.Sequential([nn.Dense(16), nn.Dense(1)]))
BY_HAND = ft.Model(lambda key, x: ({"w": jnp.ones((x.shape[-1], 1))}, {}), apply_kernel)
LOSSES = {
    "linen": (LINEN, ft.supervised(LINEN, optax.squared_error), "layers_0/kernel float32[7, 16]"),
    "model": (BY_HAND, ft.supervised(BY_HAND, optax.squared_error), "w float32[7, 1]"),
    "loss": (BY_HAND, kernel_loss, "w float32[7, 1]"),
}


def fit(state, step, batch):
    ft.fit(state, step, [batch], verbose=0)


def call(state, step, batch):
    step(state, batch)


def call_jitted(state, step, batch):
    jax.jit(step)(state, batch)


def notes_of(take_step, state, step, batch) -> str:
    with pytest.raises(Exception) as error:  # noqa: PT011  # flax's or jax's own
        take_step(state, step, batch)
    notes = error.value.__notes__
    assert len(notes) == len(set(notes))
    return "\n".join(notes)


def make_state(model):
    params, model_state = model.init(jax.random.key(0), TRAINED_WIDTH)
    return ft.TrainState.create(params=params, model_state=model_state, tx=TX)


@pytest.mark.parametrize("take_step", [fit, call, call_jitted])
@pytest.mark.parametrize("name", LOSSES)
def test_inputs_of_a_wrong_width_are_noted_with_the_kernel_they_do_not_fit(name, take_step) -> None:
    model, loss_fn, kernel = LOSSES[name]
    notes = notes_of(take_step, make_state(model), ft.train_step(loss_fn, TX), BATCH)
    assert "Shapes: batch[0] float32[4, 5], batch[1] float32[4, 1]." in notes
    assert f"batch[0] float32[4, 5] has 5 features, {kernel} expects 7. Pass inputs with 7" in notes
    assert "model.init(key, x)" in notes


def test_the_width_is_noted_in_evaluation_prediction_and_micro_batches() -> None:
    state, loss_fn = make_state(LINEN), LOSSES["linen"][1]
    small = ft.train_step(ft.micro_batches(loss_fn, 2), TX)
    for take_step, step, batch in [
        (lambda *args: ft.evaluate(args[0], args[1], [args[2]]), ft.eval_step(loss_fn), BATCH),
        (lambda *args: ft.predict(args[0], args[1], [args[2]]), ft.predict_step(LINEN), BATCH[0]),
        (call, small, BATCH),
    ]:
        notes = notes_of(take_step, state, step, batch)
        assert notes.count("has 5 features, layers_0/kernel float32[7, 16] expects 7") == 1


def test_labels_that_do_not_fit_the_outputs_are_not_taken_for_inputs() -> None:
    labels = np.ones((4, 3), np.float32)
    state = ft.TrainState.create(params={"w": jnp.ones((5, 2)), "v": jnp.ones((2, 2))}, tx=TX)
    notes = notes_of(call, state, ft.train_step(kernel_loss, TX), (BATCH[0], labels))
    assert "batch[1] float32[4, 3]" in notes
    assert "do not fit the params" not in notes


@pytest.mark.parametrize("take_step", [fit, call_jitted])
def test_an_if_on_a_traced_loss_is_told_what_to_write_instead(take_step) -> None:
    def loss_fn(params, model_state, batch, *, rng, training):
        loss = jnp.mean(batch[0] @ params["w"])
        return (loss if loss < 0 else 2 * loss), ft.Aux(model_state)

    state = ft.TrainState.create(params={"w": jnp.ones((5, 1))}, tx=TX)
    notes = notes_of(take_step, state, ft.train_step(loss_fn, TX), BATCH)
    for remedy in ("jnp.where", "jax.lax.cond", "jit=False", "jax.disable_jit()"):
        assert remedy in notes


@pytest.mark.parametrize("take_step", [fit, call, call_jitted])
def test_a_loss_without_aux_is_told_how_to_return_one(take_step) -> None:
    def loss_fn(params, model_state, batch, *, rng, training):
        return jnp.mean(batch[0] @ params["w"])

    state = ft.TrainState.create(params={"w": jnp.ones((5, 1))}, tx=TX)
    message = r"return \(loss, Aux\(\.\.\.\)\), got a float32 scalar\. Write: return loss, "
    with pytest.raises(TypeError, match=message):
        take_step(state, ft.train_step(loss_fn, TX), BATCH)


def test_a_model_that_returns_bare_outputs_is_told_what_to_return() -> None:
    model = ft.Model(BY_HAND.init, lambda p, s, x, **mode: x @ p["w"])
    state = ft.TrainState.create(params={"w": jnp.ones((5, 1))}, tx=TX)
    message = r"model\.apply: expected a ModelOutput from it, got float32\[4, 1\]\. Write: return"
    with pytest.raises(TypeError, match=message):
        ft.train_step(ft.supervised(model, optax.squared_error), TX)(state, BATCH)
    with pytest.raises(TypeError, match=message):
        ft.predict(state, ft.predict_step(model), [BATCH[0]])
