"""The operation that made the first number that is not finite is named, with its place."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest

import bridge
import functrain as ft

TX = optax.sgd(0.1)


def of_loss(value: Any) -> tuple[Any, ft.TrainState]:
    def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
        return value(params, batch), ft.Aux(model_state)

    return ft.train_step(loss_fn, TX), ft.TrainState.create(params=jnp.ones(3), tx=TX)


def explained(value: Any, batch: Any) -> Any:
    step, state = of_loss(value)
    origin = ft.inspect.explain_nan(state, step, batch)
    is_bad = any(bool(jnp.any(~jnp.isfinite(x))) for x in jax.tree.leaves(step(state, batch)))
    assert origin is None or origin.reaches_output == is_bad
    return origin


def line_of(function: Any, offset: int = 1) -> str:
    return f"test_explain_nan.py:{function.__code__.co_firstlineno + offset}:"


def test_all_that_is_finite_is_nothing_to_explain() -> None:
    assert explained(lambda p, x: jnp.sum(p * x), jnp.ones(3)) is None


def test_the_first_operation_is_named_with_its_line_and_the_range_of_its_inputs() -> None:
    def value(p: Any, x: Any) -> Any:
        return jnp.sum(jnp.exp(jnp.log(x - 1.0) * p))

    origin = explained(value, jnp.array([2.0, 0.5, 3.0]))
    assert (origin.operation, origin.bad_values) == ("log", "NaN in 1 of 3")
    assert line_of(value) in origin.location
    assert origin.inputs == ("float32[3]: -0.5 to 2",)


def test_an_infinity_that_became_nan_is_followed_to_where_it_was_made() -> None:
    def value(p: Any, x: Any) -> Any:
        large = jnp.exp(x * p)
        return jnp.sum(large - large)

    origin = explained(value, jnp.array([1.0, 100.0, 2.0]))
    assert (origin.operation, origin.cause.operation) == ("sub", "exp")
    assert origin.cause.bad_values == "inf in 1 of 3"
    assert "The infinity came from\nexp: inf in 1 of 3 values" in str(origin)


def test_a_mask_of_infinities_is_passed_by_until_it_does_harm() -> None:
    def value(p: Any, x: Any) -> Any:
        return jnp.sum(jax.nn.softmax(jnp.where(x > 0, x * p, -jnp.inf))[:, 0])

    assert explained(value, jnp.array([[1.0, 2, 0], [3, 0, 0]])) is None
    origin = explained(value, jnp.array([[1.0, 2, 0], [0, 0, 0]]))  # nothing is left of a row
    assert (origin.operation, origin.bad_values) == ("sub", "NaN in 3 of 6")


def test_what_only_the_gradient_suffers_from_is_found_there() -> None:
    def value(p: Any, x: Any) -> Any:
        return jnp.sqrt(jnp.sum((p - x) ** 2))

    origin = explained(value, jnp.ones(3))
    assert (origin.operation, origin.cause.operation) == ("mul", "div")
    assert "transpose" in origin.location
    assert line_of(value) in origin.cause.location


def test_loops_are_entered_to_the_round() -> None:
    def scanned(p: Any, x: Any) -> Any:
        return jax.lax.scan(lambda c, x: (c * 10.0 + x, ()), jnp.sum(p), x)[0]

    def walked(p: Any, x: Any) -> Any:
        def body(c: Any) -> Any:
            return c[0] + 1, jnp.log(c[1]) * x[0]

        return jax.lax.stop_gradient(
            jax.lax.while_loop(lambda c: c[0] < 4, body, (0, jnp.sum(p)))[1]
        )

    assert explained(scanned, jnp.ones(60)).within == ("scan, iteration 38",)
    origin = explained(walked, jnp.ones(1))
    assert (origin.operation, origin.within) == ("log", ("while, iteration 3",))


def test_of_a_loop_the_round_of_the_nan_is_named_not_an_earlier_one_of_an_infinity() -> None:
    def body(c: Any, x: Any) -> Any:
        return c + jnp.exp(jnp.log(x)), jnp.log(x)

    def step(state: Any, batch: Any) -> Any:
        return jax.lax.scan(body, state, batch)[0], {}

    origin = ft.inspect.explain_nan(jnp.zeros(()), step, jnp.array([0.0, 1.0, -1.0]))
    assert origin is not None
    assert (origin.operation, origin.bad_values) == ("log", "NaN in 1 of 1")
    assert origin.within == ("scan, iteration 2",)


def test_an_infinity_is_followed_from_one_round_of_a_loop_to_the_next() -> None:
    def scanned(state: Any, batch: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            return (c[0] * 1e20, c[1] + (c[0] - c[0])), ()

        return jax.lax.scan(body, state, batch)[0], {}

    def walked(state: Any, batch: Any) -> Any:
        def body(c: Any) -> Any:
            return c[0] + 1, (c[1][0] * batch[0], c[1][1] + (c[1][0] - c[1][0]))

        return jax.lax.while_loop(lambda c: c[0] < batch.size, body, (0, state))[1], {}

    for step, loop in ((scanned, "scan"), (walked, "while")):
        origin = ft.inspect.explain_nan((1.0, 0.0), step, jnp.full(6, 1e20))
        assert origin is not None
        assert origin.cause is not None
        assert (origin.operation, origin.within) == ("sub", (f"{loop}, iteration 2",))
        assert (origin.cause.operation, origin.cause.within) == ("mul", (f"{loop}, iteration 1",))


def test_nan_of_an_output_that_nothing_uses_is_not_the_cause_of_an_infinity() -> None:
    def step(state: Any, batch: Any) -> Any:
        w, _ = jax.lax.scan(lambda c, x: (c * 1e30, jnp.log(x)), state, batch)
        return w - w, {}

    origin = ft.inspect.explain_nan(jnp.ones(2), step, jnp.array([1.0, 1.0, -1.0]))
    assert origin is not None
    assert origin.cause is not None
    assert (origin.operation, origin.cause.operation) == ("sub", "mul")
    assert origin.cause.bad_values == "inf in 2 of 2"
    assert origin.cause.within == ("scan, iteration 1",)


def test_of_a_bodys_infinities_the_one_that_led_to_nan_is_the_cause() -> None:
    @jax.jit
    def two(x: Any) -> Any:
        return 1.0 / (x - x), jnp.exp(x)

    def value(p: Any, x: Any) -> Any:
        mask, large = two(x)
        return jnp.sum(jnp.where(mask > 0, p, 0.0) * (large - large))

    origin = explained(value, jnp.array([1.0, 100.0, 2.0]))
    assert (origin.operation, origin.cause.operation) == ("sub", "exp")


def test_of_a_cond_the_branch_is_named() -> None:
    def value(p: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.cond(x[0] > 0, lambda p: p / 0.0, lambda p: p, p))

    origin = explained(value, jnp.ones(3))
    assert (origin.operation, origin.within) == ("div", ("cond, branch 1",))
    assert explained(value, -jnp.ones(3)) is None


def test_what_came_in_is_named_by_its_path() -> None:
    step, state = of_loss(lambda p, x: jnp.sum(p * x["image"]))
    origin = ft.inspect.explain_nan(state, step, {"image": jnp.array([1.0, np.nan])})
    assert (origin.operation, origin.location) == ("input", "batch/image")
    assert "Go back" not in str(origin)
    state = state.replace(params=state.params.at[1].set(-jnp.inf))
    origin = ft.inspect.explain_nan(state, step, {"image": jnp.ones(3)})
    assert (origin.bad_values, origin.location) == ("-inf in 1 of 3", "state/params")


def test_an_infinity_that_is_meant_to_be_in_the_state_is_not_blamed_for_nan() -> None:
    def step(state: Any, batch: Any) -> Any:
        loss = jnp.sum(jnp.log(batch["x"]))
        return jnp.minimum(state, loss), {"loss": loss}

    mask = jnp.array([0.0, -jnp.inf])
    origin = ft.inspect.explain_nan(jnp.inf, step, {"x": jnp.array([-1.0]), "mask": mask})
    assert origin is not None
    assert (origin.operation, origin.bad_values) == ("log", "NaN in 1 of 1")


def in_loop(x: Any) -> Any:
    return jax.lax.scan(lambda c, x: (c + (x - x), ()), 0.0, x)[0]


@pytest.mark.parametrize(
    "value",
    [
        lambda x: jnp.sum(x * 0.0),
        lambda x: jnp.sum(x - jnp.mean(x)),
        jax.jit(lambda x: jnp.sum(x - jnp.max(x))),
        lambda x: jax.lax.cond(x[0] > 0, lambda x: jnp.sum(x * 0.0), jnp.sum, x),
        in_loop,
    ],
)
def test_an_infinite_input_is_the_cause_of_the_nan_that_it_led_to(value: Any) -> None:
    def step(state: Any, batch: Any) -> Any:
        loss = value(batch["x"])
        best = jnp.minimum(state["best_loss"], loss)
        return {"w": state["w"] - loss, "best_loss": best}, {"loss": loss}

    state = {"best_loss": jnp.inf, "w": jnp.ones(2)}
    batch = {"mask": jnp.array([0.0, -jnp.inf]), "x": jnp.array([1.0, jnp.inf])}
    origin = ft.inspect.explain_nan(state, step, batch)
    assert origin is not None
    assert origin.operation in ("mul", "sub")
    assert origin.cause == ft.inspect.NotFinite("input", "inf in 1 of 2", "batch/x")
    assert "The infinity came from\ninput: inf in 1 of 2 values" in str(origin)


def test_an_infinity_that_is_meant_is_not_blamed_for_the_nan_of_an_operations_infinity() -> None:
    def step(state: Any, batch: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            w, best_loss = c
            return (w * 1e30, jnp.minimum(best_loss, jnp.sum(w))), ()

        (w, best_loss), _ = jax.lax.scan(body, (state["w"], state["best_loss"]), None, length=2)
        return {"best_loss": best_loss, "w": w - w}, {}

    state = {"best_loss": jnp.array(jnp.inf), "w": jnp.ones(2)}
    origin = ft.inspect.explain_nan(state, step, 0)
    assert origin is not None
    assert origin.cause is not None
    assert (origin.operation, origin.cause.operation) == ("sub", "mul")
    assert origin.cause.within == ("scan, iteration 1",)


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"g": s}, lambda s: (1.0, s)])
def test_nan_in_the_state_sends_one_step_back_where_it_is_found(wrap) -> None:
    # The gradient of sqrt at 0 is infinite, and times 0 NaN: the loss of this step is finite.
    step, start = of_loss(lambda p, x: jnp.sum(jnp.sqrt(p * 0)))
    after, logs = jax.jit(step)(start, jnp.ones(2))
    assert np.isfinite(logs["loss"])

    def wrapped(state, batch):
        return wrap(step(jax.tree.leaves(state, is_leaf=is_state)[-1], batch)[0]), {}

    def is_state(x):
        return isinstance(x, ft.TrainState)

    origin = ft.inspect.explain_nan(wrap(after), wrapped, jnp.ones(2))
    assert origin.operation == "input"
    assert "If an earlier step made it, go back one step" in str(origin)
    origin = ft.inspect.explain_nan(wrap(start), wrapped, jnp.ones(2))
    assert origin.operation != "input"
    assert "Go back" not in str(origin)


def test_an_infinity_beside_the_value_that_made_nan_is_not_its_cause() -> None:
    origin = explained(lambda p, x: jnp.sum(p * jnp.log(x)), jnp.array([-1.0, jnp.inf, 1.0]))
    assert (origin.operation, origin.bad_values, origin.cause) == ("log", "NaN in 1 of 3", None)


def test_a_number_that_is_nan_is_named_by_its_path() -> None:
    state = {"w": 1.0, "rng": jax.random.key(0)}
    origin = ft.inspect.explain_nan(state, lambda s, b: (s, {}), {"weight": np.nan})
    assert origin == ft.inspect.NotFinite("input", "NaN in 1 of 1", "batch/weight")


@pytest.mark.parametrize(("label", "index"), [(4, 4), (-5, -1)])
def test_a_label_outside_of_the_classes_is_named_with_its_leaf(label: int, index: int) -> None:
    model = ft.from_linen(nn.Dense(4))
    params, model_state = model.init(jax.random.key(0), jnp.ones((6, 3)))
    step = ft.train_step(ft.supervised(model, optax.softmax_cross_entropy_with_integer_labels), TX)
    state = ft.TrainState.create(params=params, model_state=model_state, tx=TX)
    labels = np.array([0, 1, label, 3, 2, 1], np.int32)
    origin = ft.inspect.explain_nan(state, step, (np.ones((6, 3), np.float32), labels))
    assert (origin.operation, origin.bad_values) == ("gather", "NaN in 1 of 6")
    leaf = f"batch/1, int32[6]: {labels.min()} to {labels.max()}"
    assert origin.out_of_range == (4, (index,), leaf)
    assert f"Indices outside of [0, 4) return NaN: {index}. They come from {leaf}." in str(origin)


@pytest.mark.parametrize("zero", [0.0, np.float64(0), np.zeros(())])
def test_inputs_are_shown_with_the_dtypes_that_jax_computes_in(zero: Any) -> None:
    origin = ft.inspect.explain_nan(zero, lambda state, x: (jnp.log(state), {}), 1.0)
    assert origin is not None
    assert origin.inputs[0].startswith("float32[]")


def test_a_gather_within_its_bounds_is_not_blamed() -> None:
    origin = explained(lambda p, x: jnp.sum(jnp.log(jnp.take(p - 1.0, x) - 1.0)), jnp.arange(3))
    assert origin.operation == "log"
    assert origin.out_of_range is None


def test_what_does_not_reach_the_result_is_said_to() -> None:
    def value(p: Any, x: Any) -> Any:
        bad = jnp.sum(jax.lax.stop_gradient(p)) / x[0] * x[0]  # inf * 0
        return jnp.sum(p) + 0.0 * jnp.where(jnp.isfinite(bad), bad, 0.0)

    origin = explained(value, jnp.zeros(1))
    assert (origin.operation, origin.reaches_output) == ("mul", False)
    assert "No output of the step is NaN or infinite because of these values." in str(origin)


def test_a_loss_is_no_step() -> None:
    def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
        return 0.0, ft.Aux(model_state)

    with pytest.raises(TypeError, match=r"step: expected \(state, batch\).*got loss_fn\(params"):
        ft.inspect.explain_nan({}, loss_fn, {})


class Log(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return keras.ops.log(x - 100.0)


def keras_model(spoil: Any) -> keras.Model:
    dense = [keras.layers.Dense(4, name=name) for name in ("first", "head")]
    return keras.Sequential([keras.Input((4,)), dense[0], spoil, dense[1]])


X, Y = jnp.ones((2, 4)), jnp.zeros((2, 4))


def test_layers_of_keras_are_named_with_the_line_that_was_written() -> None:
    model = keras_model(Log(name="spoils"))
    step = ft.train_step(ft.supervised(bridge.from_keras(model), optax.squared_error), TX)
    origin = ft.inspect.explain_nan(bridge.create_state(model, TX), step, (X, Y))
    assert origin is not None
    assert origin.operation == "log"
    assert "/spoils" in origin.location
    assert f"{line_of(Log.call)}" in origin.location

    model.compile("sgd", "mse")
    batch = np.asarray(X), np.asarray(Y)
    origin = ft.inspect.explain_nan(
        bridge.keras_state(model, batch), bridge.train_step(model), batch
    )
    assert origin is not None
    assert "spoils" in origin.location
    assert f"{line_of(Log.call)}" in origin.location


class Net(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        return self.linear(x)


def test_layers_of_equinox_are_named_with_the_line_that_was_written() -> None:
    model = ft.from_equinox(lambda key: Net(eqx.nn.Linear(4, 4, key=key)))
    params, model_state = model.init(jax.random.key(0), X)

    def step(params: Any, x: Any) -> Any:
        return params, {"sum": jnp.sum(model.apply(params, model_state, x).outputs)}

    large = jax.tree.map(lambda w: jnp.full_like(w, 1e30), params)
    origin = ft.inspect.explain_nan(large, step, 1e30 * X)
    assert origin is not None
    assert origin.operation == "dot_general"
    assert f"{line_of(Net.__call__)}" in origin.location


def test_constants_of_a_body_and_what_was_replaced_are_not_blamed() -> None:
    def masked(c: Any) -> Any:
        return c[0] + 1, jnp.where(c[1] > 0, c[1], -jnp.inf)

    def value(p: Any, x: Any) -> Any:
        y = jnp.nan_to_num(jnp.sqrt(x))  # its NaN goes no further
        _, z = jax.lax.while_loop(lambda c: c[0] < 2, masked, (0, jax.lax.stop_gradient(p) + y))
        return jnp.sum(z - z)

    origin = explained(lambda p, x: value(p * 0.0, x), jnp.array([-4.0, 4.0, -4.0]))
    assert (origin.operation, origin.bad_values, origin.cause) == ("sub", "NaN in 2 of 3", None)
