"""Batches of a few shapes, such as sequences that are padded to one of several lengths."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

TX = optax.adam(0.1)


def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
    outputs = apply(params, batch["ids"])
    loss = jnp.mean((outputs - batch["y"]) ** 2)
    return loss, ft.Aux(model_state, outputs)


def apply(params: Any, ids: jax.Array) -> jax.Array:
    return jnp.tanh(params["table"][ids].mean(1)) @ params["w"]


STEP, EVAL_STEP = ft.train_step(loss_fn, TX), ft.eval_step(loss_fn)


def create() -> Any:
    keys = jax.random.split(jax.random.key(0))
    params = {"table": jax.random.normal(keys[0], (10, 4)), "w": jax.random.normal(keys[1], (4,))}
    return ft.TrainState.create(params=params, tx=TX)


def batch(examples: int, length: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    y = rng.normal(size=examples).astype(np.float32)
    return {"ids": rng.integers(0, 10, (examples, length), dtype=np.int32), "y": y}


# Lengths that change at every batch, in runs, and with a smaller last batch.
LENGTHS = {"often": [5, 8, 5, 3, 8, 5, 3, 3, 5], "in runs": [5] * 9 + [8] * 12 + [5] * 3 + [3] * 7}


def data(order: str) -> list[Any]:
    full = [batch(4, length, i) for i, length in enumerate(LENGTHS[order])]
    return [*full, batch(2, 8, 99)]


class Reiterable:
    """Batches of unknown number."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("order", LENGTHS)
@pytest.mark.parametrize("kind", [list, Reiterable])
def test_training_is_that_of_jitted_steps_whatever_k_is(order: str, kind: Any) -> None:
    batches = data(order)
    expected, losses, step = create(), [], jax.jit(STEP)
    for _ in range(2):
        for one in batches:
            expected, logs = step(expected, one)
            losses.append(float(logs["loss"]))
    weights = [len(one["y"]) for one in batches]
    means = np.reshape(losses, (2, -1)) @ weights / sum(weights)
    for fuse in (1, 3, "auto"):
        how = {"epochs": 2, "fuse": fuse, "rewrites": "off", "verbose": 0}
        state, history = ft.fit(create(), STEP, kind(batches), **how)
        assert_equal((state.params, state.step), (expected.params, expected.step))
        assert history.steps["loss"].tolist() == losses
        np.testing.assert_allclose(history.epochs["loss"], means, rtol=1e-6)


def test_a_transform_may_make_batches_of_several_shapes() -> None:
    batches = data("in runs")
    loader = ft.ArrayLoader(np.arange(len(batches)), 1, transform=lambda i, rng: batches[i[0]])
    expected, history = ft.fit(create(), STEP, batches, epochs=2, verbose=0)
    for fuse in (3, "auto"):
        state, own = ft.fit(create(), STEP, loader, epochs=2, fuse=fuse, verbose=0)
        assert_equal(state.params, expected.params)
        np.testing.assert_array_equal(own.epochs["loss"], history.epochs["loss"])


@pytest.mark.parametrize("keeps", [np.s_[:0], [0, 0, 1, 1, 1]])
def test_means_count_the_examples_that_a_transform_returns(keeps: Any) -> None:
    y = np.arange(22, dtype=np.float32)
    # The first batches keep all of their examples.
    change = lambda y, rng: y if y[0] < 8 else y[keeps] if len(y) == 4 else y[:1]  # noqa: E731
    loader = ft.ArrayLoader(y, 4, transform=change)
    seen = np.concatenate(list(loader)).astype(np.float64)

    def step(state: Any, y: jax.Array) -> Any:
        return state, {"loss": jnp.sum(y) / max(len(y), 1)}

    history = ft.fit(jnp.zeros(()), step, loader, verbose=0).history
    np.testing.assert_allclose(history.epochs["loss"], [seen.mean()], rtol=1e-6)


@pytest.mark.parametrize("order", LENGTHS)
def test_measures_and_predictions_are_those_of_jitted_functions(order: str) -> None:
    state, batches = create(), data(order)
    outputs = [jax.jit(apply)(state.params, one["ids"]) for one in batches]
    pairs = zip(outputs, batches, strict=True)
    errors = np.concatenate([(np.float64(x) - one["y"]) ** 2 for x, one in pairs])
    for fuse in (1, 3, "auto"):
        values = ft.evaluate(state, EVAL_STEP, batches, fuse=fuse)
        assert values["loss"] == pytest.approx(errors.mean(), rel=1e-6)
        predicted = ft.predict(
            state.params, lambda s, ids: (s, apply(s, ids)), [b["ids"] for b in batches], fuse=fuse
        )
        np.testing.assert_allclose(predicted, np.concatenate(outputs), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:data. Reiterable does not report its position")
@pytest.mark.parametrize("kind", [list, Reiterable])
@pytest.mark.parametrize("at", [1, 7, 10, 13, 31, 40])
def test_a_run_goes_on_at_any_batch(kind: Any, at: int, tmp_path: pathlib.Path) -> None:
    batches = data("in runs")
    expected = ft.fit(create(), STEP, kind(batches), epochs=2, verbose=0)

    @ft.at(at)
    def fail(event: Any) -> None:
        raise KeyError

    def train(*hooks: Any) -> Any:
        saves = ft.Checkpointer(tmp_path, every=ft.every(steps=3))
        how = {"epochs": 2, "fuse": 8, "verbose": 0, "checkpointer": saves, "hooks": hooks}
        return ft.fit(create(), STEP, kind(batches), **how)

    with pytest.raises(KeyError):
        train(fail)
    state, history = train()
    assert_equal(state.params, expected.state.params)
    assert_equal(history.steps["loss"], expected.history.steps["loss"])


def test_programs_are_few() -> None:
    traced = []

    def step(state: Any, one: Any) -> Any:
        traced.append(one.shape)
        return state + one.sum(), {}

    rng = np.random.default_rng(0)
    batches = [np.ones((4, n), np.float32) for n in rng.choice([2, 3, 5], 200)]
    state, _ = ft.fit(jnp.zeros(()), step, batches, epochs=2, verbose=0)
    assert float(state) == 2 * sum(x.sum() for x in batches)
    assert len(traced) <= 2 * 3, "one program for single batches and one for runs, for each shape"


# --- the number of examples ----------------------------------------------------------------------


def table_loss(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
    return jnp.mean(batch["x"]) * params, ft.Aux(model_state)


def weighted_loss(params: Any, model_state: Any, batch: Any, **_: Any) -> Any:
    loss, _ = table_loss(params, model_state, batch, rng=None, training=False)
    return loss, ft.Aux(model_state, weight=batch["x"].size)


def with_table(**others: Any) -> list[Any]:
    """Two batches, of eight and of two examples, whose mean is 1.2."""
    return [{**others, "x": np.full(n, x, np.float32)} for n, x in ((8, 1), (2, 2))]


PLAIN = ft.TrainState.create(params=jnp.ones(()), tx=optax.sgd(0.0), rng=None)


@pytest.mark.parametrize(
    "others", [{"a": np.float32(3)}, {"a": jax.random.key(0)}, {"z": 1}], ids=["scalar", "key", "1"]
)
def test_leaves_without_an_axis_of_examples_do_not_count(others: Any) -> None:
    batches = with_table(**others)
    evaluated = ft.evaluate(PLAIN, ft.eval_step(table_loss), batches)
    assert evaluated["loss"] == pytest.approx(1.2)
    history = ft.fit(PLAIN, ft.train_step(table_loss, optax.sgd(0.0)), batches, verbose=0).history
    assert history.epochs["loss"][0] == pytest.approx(1.2)


@pytest.mark.parametrize("name", ["a_table", "z_table"])
def test_a_table_in_a_batch_needs_the_number_that_the_loss_was_divided_by(name: str) -> None:
    batches = with_table(**{name: np.zeros((100, 2), np.float32)})
    with pytest.raises(ValueError, match=r"share their first axis(?s:.*)weight=number"):
        ft.evaluate(PLAIN, ft.eval_step(table_loss), batches)
    evaluated = ft.evaluate(PLAIN, ft.eval_step(weighted_loss), batches)
    assert evaluated["loss"] == pytest.approx(1.2)
    weighted = ft.train_step(weighted_loss, optax.sgd(0.0))
    history = ft.fit(PLAIN, weighted, batches, verbose=0).history
    assert history.epochs["loss"][0] == pytest.approx(1.2)
    plain = ft.train_step(table_loss, optax.sgd(0.0))
    with pytest.warns(UserWarning, match="every batch counts once in the means") as warnings:
        ft.fit(PLAIN, plain, batches, epochs=2, verbose=0)
    assert len(warnings) == 1
    # Labels have one row for each example.
    labelled = ft.eval_step(
        lambda *args, **how: (table_loss(*args, **how)[0], ft.Aux((), labels=args[2]["x"]))
    )
    assert ft.evaluate(PLAIN, labelled, batches)["loss"] == pytest.approx(1.2)
    # Batches of one size have equal weights, whatever their number of examples is.
    ft.fit(PLAIN, plain, batches[:1] * 3, verbose=0)


@pytest.mark.parametrize(
    ("step", "wrong"),
    [
        (lambda s, x: (s, {"o": x, "usage": jnp.ones(3)}), r"usage: float32\[3\]"),
        (lambda s, x: (s, {"o": x, "usage": jnp.ones((1, 4))}), r"usage: float32\[1, 4\]"),
        (lambda s, x: (s, x.sum()), r"float32\[\]"),
        (lambda s, x: (s, jnp.concatenate([x, x])), r"float32\[8, 2\]"),
    ],
)
@pytest.mark.parametrize("fuse", [1, 4])
def test_outputs_without_an_axis_of_examples_are_not_joined(step: Any, wrong: str, fuse) -> None:
    with pytest.raises(
        ValueError, match=rf"outputs: expected one row .*\[4, \.\.\.\](?s:.*){wrong}"
    ):
        ft.predict(0.0, step, ft.ArrayLoader(np.ones((10, 2), np.float32), 4), fuse=fuse)


# --- weak types ----------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("new", [lambda s: jnp.asarray(2.0), lambda s: jnp.where(s > 1, 0.0, 2.0)])
def test_a_weakly_typed_state_is_one_of_its_dtype(new: Any, jit: bool) -> None:
    for start in (jnp.float32(0), jnp.asarray(0.0)):
        expected, _ = jax.lax.scan(lambda s, _: (new(s), None), start, None, length=3)
        state = ft.fit(start, lambda s, b: (new(s), {}), ft.NoData(3), verbose=0, jit=jit).state
        assert (state, state.dtype) == (expected, expected.dtype)


@pytest.mark.parametrize("unroll", [1, 3])
def test_fuse_promotes_a_weakly_typed_state_as_scan_does(unroll: int) -> None:
    def step(state: Any, x: Any) -> Any:
        return state * 2 + x, {"state": state}

    xs = jnp.arange(3.0)
    for start in (jnp.asarray(1), jnp.asarray(1.0), jnp.float32(1)):
        expected, logs = jax.lax.scan(step, start, xs)
        state, rows = ft.fuse(step, 3, unroll=unroll)(start, xs)
        assert (float(state), state.dtype) == (float(expected), expected.dtype)
        assert rows["state"].tolist() == logs["state"].tolist()
    with pytest.raises(TypeError, match=r"expected int32\[\], got float32\[\]"):
        ft.fuse(step, 3)(jnp.int32(1), xs)
