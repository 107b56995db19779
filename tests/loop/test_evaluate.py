import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft
from functrain.engine._driver import Driver

RNG = np.random.default_rng(0)
X = RNG.normal(size=(103, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 103)
W = RNG.normal(size=(4, 3)).astype(np.float32)
MODEL = ft.Model(
    init=lambda key, x: ({"w": jnp.asarray(W)}, {}),
    apply=lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(x @ p["w"], s),
)
LOSS = ft.supervised(MODEL, optax.softmax_cross_entropy_with_integer_labels)
STATE = ft.TrainState.create(params={"w": W}, tx=optax.sgd(0.1))


@pytest.mark.parametrize("fuse", [1, 4, "auto"])
@pytest.mark.parametrize("jit", [True, False])
def test_a_smaller_last_batch_counts_as_much_as_it_holds(fuse, jit) -> None:
    step = ft.eval_step(LOSS, metrics={"accuracy": ft.metrics.accuracy()})
    values = ft.evaluate(STATE, step, ft.ArrayLoader((X, Y), 10), fuse=fuse, jit=jit)
    logits = X.astype(np.float64) @ W
    expected = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(103), Y])
    assert values["loss"] == pytest.approx(expected, rel=1e-6)
    assert values["accuracy"] == pytest.approx(np.mean(logits.argmax(1) == Y), rel=1e-6)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_weighted_mean_does_not_depend_on_the_batch_size(batch) -> None:
    weights = RNG.uniform(size=103).astype(np.float32)
    weights[:16] = 0.0  # whole batches of padding
    loss_fn = ft.supervised(
        MODEL, optax.softmax_cross_entropy_with_integer_labels, reduction="weighted_mean"
    )

    def logs_itself(*args, **how):
        loss, aux = loss_fn(*args, **how)
        return loss, aux.replace(logs={"twice": 2 * loss})

    step = ft.eval_step(logs_itself, metrics={"again": ft.metrics.mean_loss()}, logs=["twice"])
    data = ft.ArrayLoader((X, Y, weights), batch)
    values = ft.evaluate(STATE, step, data)
    logits, weights = X.astype(np.float64) @ W, weights.astype(np.float64)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(103), Y]
    expected = np.sum(losses * weights) / np.sum(weights)
    assert values["loss"] == pytest.approx(expected, rel=1e-6)
    assert values["again"] == values["loss"]
    assert values["twice"] == pytest.approx(2 * expected, rel=1e-6)
    population = ft.evaluate(ft.population.stack([STATE] * 2), ft.population.step(step), data)
    np.testing.assert_allclose(population["loss"], expected, rtol=1e-6)


def test_a_batch_without_weight_does_not_count_whatever_its_loss_says() -> None:
    def loss_fn(params, model_state, batch, *, rng, training):
        x, w = batch
        total = jnp.sum(w)
        return jnp.sum(x * w) / total, ft.Aux(model_state, weight=total)

    x, w = np.arange(6, dtype=np.float32), np.array([0, 0, 1, 3, 0, 2], np.float32)
    values = ft.evaluate(STATE, ft.eval_step(loss_fn), ft.ArrayLoader((x, w), 2))
    assert values["loss"] == pytest.approx((2 + 9 + 10) / 6)


def test_evaluating_again_does_not_compile_again() -> None:
    traces = []

    def loss_fn(*args, **kwargs):
        traces.append(None)
        return LOSS(*args, **kwargs)

    step = ft.eval_step(loss_fn)
    for _ in range(3):
        ft.evaluate(STATE, step, ft.ArrayLoader((X[:100], Y[:100]), 10), fuse=10)
    assert len(traces) == 1


def test_a_step_that_trains_is_refused() -> None:
    step = ft.train_step(LOSS, optax.sgd(0.1), metrics={"accuracy": ft.metrics.accuracy()})
    with pytest.raises(TypeError, match="got a step that trains"):
        ft.evaluate(STATE, step, ft.ArrayLoader((X, Y), 10))


def test_a_loader_that_drops_examples_is_refused_for_evaluation() -> None:
    dropping = ft.ArrayLoader((X, Y), 10, drop_remainder=True)
    message = "not a loader that drops 3 examples, got ArrayLoader"
    with pytest.raises(ValueError, match=f"^data: .*{message}"):
        ft.evaluate(STATE, ft.eval_step(LOSS), dropping)
    with pytest.raises(ValueError, match=message):
        ft.hooks.Evaluate(ft.eval_step(LOSS), dropping)
    tx = optax.sgd(0.1)
    with pytest.raises(ValueError, match=f"^eval_data: .*{message}"):
        ft.fit(
            STATE,
            ft.train_step(LOSS, tx),
            dropping,
            eval_data=dropping,
            eval_step=ft.eval_step(LOSS),
        )
    none_dropped = ft.ArrayLoader((X[:100], Y[:100]), 10, drop_remainder=True)
    assert ft.evaluate(STATE, ft.eval_step(LOSS), none_dropped)


@pytest.mark.parametrize("fuse", [1, 4, "auto"])
@pytest.mark.parametrize("jit", [True, False])
def test_predictions_come_in_the_order_of_the_data(fuse, jit) -> None:
    step = ft.predict_step(MODEL)
    outputs = ft.predict(STATE, step, ft.ArrayLoader(X, 10), fuse=fuse, jit=jit)
    assert isinstance(outputs, np.ndarray)
    np.testing.assert_allclose(outputs, X @ W, rtol=1e-5, atol=1e-6)


def test_a_step_that_has_predicted_is_not_traced_again() -> None:
    traces = []

    def step(state, x):
        traces.append(None)
        return state, x * state

    for state in (1.0, 2.0):
        ft.predict(state, step, ft.ArrayLoader(X, 10), fuse=4)
        ft.predict(state, step, ft.ArrayLoader(X, 10))
        if state == 1.0:
            before = len(traces)
    assert len(traces) == before


def test_a_loader_that_shuffles_is_refused() -> None:
    with pytest.raises(ValueError, match="from a loader with shuffle=False"):
        ft.predict(STATE, ft.predict_step(MODEL), ft.ArrayLoader(X, 10, shuffle=True))


def test_outputs_that_are_not_per_example_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"outputs: expected one row for each example of a batch, \[10, \.\.\.\]"
    ):
        ft.predict((), lambda s, x: (s, jnp.sum(x)), ft.ArrayLoader(X, 10))


def test_a_metric_that_changes_its_state_is_blamed_itself() -> None:
    metric = ft.metrics.Metric(
        lambda: jnp.int32(0), lambda m, batch, aux, loss: m + 0.5, lambda m: jnp.sum(m)
    )
    step = ft.eval_step(LOSS, metrics={"n": metric})
    words = r"(?s)metrics: expected from update the .*n: expected int32\[\], got float32\[\]"
    with pytest.raises(TypeError, match=words):
        ft.evaluate(STATE, step, ft.ArrayLoader((X, Y), 20))


@pytest.mark.parametrize("fuse", ["auto", 500])
@pytest.mark.parametrize("of", [list, lambda batches: ft.ArrayLoader(np.concatenate(batches), 3)])
def test_chunks_have_no_more_rows_than_there_are_batches(of, fuse, monkeypatch) -> None:
    rows, run = [], Driver.run
    monkeypatch.setattr(Driver, "run", lambda self, x: rows.append((x.k, x.steps)) or run(self, x))
    data = of([np.ones(3, np.float32)] * 2)
    metered = ft.eval_step(lambda params, s, x, **how: (x.mean(), ft.Aux(s)))
    ft.evaluate(STATE, metered, data, fuse=fuse)
    ft.fit(0, lambda s, x: (s, {}), data, epochs=2, fuse=fuse, verbose=0)
    assert rows == [(2, 2)] * 3
