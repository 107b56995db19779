"""Logs: the names are the user's own, may come and go, and what the loop knows is not a name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

SKIPPING = ft.tx.skip_non_finite(optax.sgd(0.1))
BATCHES = [np.ones(2, np.float32), np.full(2, np.nan, np.float32), np.full(2, 3.0, np.float32)]
RESERVED = "seconds", "sum_of_weights", "skipped", "skipped_in_a_row", "loss_scale", "learning_rate"


def loss_fn(params, model_state, x, *, rng, training):
    return jnp.mean(x) * params["w"], ft.Aux(model_state)


def state(tx=SKIPPING):
    return ft.TrainState.create(params={"w": jnp.ones(())}, tx=tx)


def counting(*names):
    def step(count, batch):
        return count + 1, {name: count * (i + 1) for i, name in enumerate(names)}

    return step


@pytest.mark.parametrize("prefix", ["", "g/"])
@pytest.mark.parametrize("fuse", [1, 3])
def test_a_step_of_ones_own_may_use_any_name(prefix, fuse) -> None:
    names = [prefix + name for name in RESERVED]
    step = counting("loss", *names)
    _, history = ft.fit(jnp.zeros(()), step, [np.ones(2)] * 4, fuse=fuse, verbose=0)
    for i, name in enumerate(["loss", *names]):
        assert history.steps[name].tolist() == [0, i + 1, 2 * i + 2, 3 * i + 3]
        assert history.epochs[name].tolist() == [1.5 * (i + 1)]


@pytest.mark.parametrize(
    "nest",
    [
        lambda logs: logs,
        lambda logs: {"g": logs},
        lambda logs: {"a": {"g": logs}},
        lambda logs: {"loss": logs.pop("loss"), "optimizer": logs},
        lambda logs: {**logs, "more": jnp.float32(0)},
    ],
    ids=["flat", "nested", "nested twice", "apart", "copied"],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_skipped_steps_do_not_count_wherever_a_step_logs_them(nest, wrap) -> None:
    def step(state, batch):
        state, loss, _ = ft.update(state, loss_fn, SKIPPING, batch)
        return state, nest({"loss": loss, **ft.tx.logged(state)})

    _, history = ft.fit(state(), wrap(step), BATCHES, epochs=2, verbose=0)
    name = next(name for name in history.epochs if name.endswith("loss"))
    w, means = 1.0, []
    for _ in range(2):
        losses = []
        for mean in (1.0, 3.0):
            losses.append(mean * w)
            w -= 0.1 * mean
        means.append(np.mean(losses))
    np.testing.assert_allclose(history.epochs[name], means, rtol=1e-6)
    counts = next(x for n, x in history.epochs.items() if n.endswith("skipped"))
    assert counts.tolist() == [1, 2]


def test_networks_that_skip_each_their_own_steps_keep_their_own_means() -> None:
    def step(states, batch):
        g, g_loss, _ = ft.update(states["g"], loss_fn, SKIPPING, batch["g"])
        d, d_loss, _ = ft.update(states["d"], loss_fn, SKIPPING, batch["d"])
        logs = {"g": {"loss": g_loss, **ft.tx.logged(g)}, "d": {"loss": d_loss, **ft.tx.logged(d)}}
        return {"g": g, "d": d}, logs

    ones = np.ones(2, np.float32)
    batches = [{"g": ones, "d": x} for x in BATCHES]
    _, history = ft.fit({"g": state(), "d": state()}, step, batches, verbose=0)
    assert history.epochs["g/loss"][0] == pytest.approx((1 + 0.9 + 0.8) / 3)
    assert history.epochs["d/loss"][0] == pytest.approx((1 + 3 * 0.9) / 2)


def weighted(params, model_state, batch, *, rng, training):
    x, weight = batch
    total = jnp.sum(weight)
    return jnp.sum(x * weight) / jnp.where(total == 0, 1, total), ft.Aux(model_state, weight=total)


@pytest.mark.parametrize("nest", [lambda x: x, lambda x: {**x, "b": 0.0}, lambda x: {"g": x}])
def test_weights_stay_with_the_logs_of_a_wrapped_step(nest) -> None:
    step = ft.train_step(weighted, optax.sgd(0.0))

    def wrapped(state, batch):
        state, logs = step(state, batch)
        return state, nest(logs)

    x = np.arange(12, dtype=np.float32)
    weight = np.arange(12, dtype=np.float32)[::-1] ** 2
    loader = ft.ArrayLoader((x, weight), 5)
    _, history = ft.fit(state(optax.sgd(0.0)), wrapped, loader, verbose=0)
    (name,) = (n for n in history.epochs if n.endswith("loss"))
    assert history.epochs[name][0] == pytest.approx(np.average(x, weights=weight), rel=1e-6)


@pytest.mark.parametrize("weights", [(1.0, -1.0), (2.0, -1.0, -1.0)])
def test_weights_that_sum_to_zero_give_nan(weights) -> None:
    batches = [(np.ones(1, np.float32), np.full(1, w, np.float32)) for w in weights]
    step = ft.train_step(weighted, optax.sgd(0.0))
    _, history = ft.fit(state(optax.sgd(0.0)), step, batches, verbose=0)
    assert np.isnan(history.epochs["loss"][0])
    zeros = [(np.ones(1, np.float32), np.zeros(1, np.float32))] * 2
    assert ft.fit(state(optax.sgd(0.0)), step, zeros, verbose=0).history.epochs["loss"] == 0


@pytest.mark.parametrize("history", ["steps", "epochs"])
@pytest.mark.parametrize("members", [0, 2])
def test_a_resumed_step_may_log_more_and_less(tmp_path, history, members) -> None:
    def run(step, epochs):
        state, data = jnp.zeros(()), ft.ArrayLoader(np.ones((12, 2), np.float32), 2)
        if members:
            state, step = ft.population.stack([state] * members), ft.population.step(step)
        checkpointer = ft.Checkpointer(tmp_path / "run")
        options = {"epochs": epochs, "history": history, "verbose": 0}
        return ft.fit(state, step, data, checkpointer=checkpointer, **options).history

    run(counting("a", "b"), 1)
    run(counting("a", "c"), 2)
    result = run(counting("a", "b"), 3)
    shape = (3, members) if members else (3,)
    nan = np.nan
    expected = {"a": [2.5, 8.5, 14.5], "b": [5.0, nan, 29.0], "c": [nan, 17.0, nan]}
    for name, values in expected.items():
        assert result.epochs[name].shape == shape
        np.testing.assert_array_equal(result.epochs[name].T, np.broadcast_to(values, shape[::-1]))
    if history == "steps":
        steps = result.steps["b"].reshape(18, -1)
        np.testing.assert_array_equal(
            steps[:, 0], [0, 2, 4, 6, 8, 10, *[nan] * 6, *range(24, 36, 2)]
        )


@pytest.mark.parametrize(
    "logs",
    [
        lambda x: {"a": {"b": x}, "a/b": x},
        lambda x: {"a": [x], "a/0": x},
        lambda x: {"g": {"a/b": {"c": x}, "a": {"b/c": x}}},
    ],
)
@pytest.mark.parametrize("jit", [True, False])
def test_two_logs_of_one_path_are_refused(logs, jit) -> None:
    def step(state, batch):
        return state, logs(state)

    with pytest.raises(ValueError, match="logs: expected a name of its own for each log, got '"):
        ft.fit(jnp.zeros(()), step, [np.ones(2)], verbose=0, jit=jit)


def test_complex_logs_are_left_out_with_a_warning() -> None:
    def step(state, batch):
        return state, {"z": state + 2j, "loss": state, "key": jax.random.key(0)}

    with pytest.warns(UserWarning, match=r"expected real numbers, got complex \['z'\].*jnp\.real"):
        _, history = ft.fit(jnp.zeros(()), step, [np.ones(2)], verbose=0)
    assert list(history.epochs) == ["loss", "seconds"]


def test_complex_values_of_hooks_are_refused() -> None:
    def add(event):
        event.values["z"] = np.complex64(1 + 2j)

    with pytest.raises(TypeError, match=r"event\.values\['z'\]: expected a number, got complex64"):
        ft.fit(jnp.zeros(()), counting("loss"), [np.ones(2)], hooks=[add], verbose=0)
