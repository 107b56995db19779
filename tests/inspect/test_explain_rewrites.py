"""What is rewritten, why, and what is left: told as it is done."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

import functrain as ft
from functrain.common._platform import compiling_for, current_platform
from functrain.inspect import explain_rewrites
from functrain.rewrites import _optimize, optimize
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites._rewrite import Rewrite

X = jnp.linspace(0.1, 2.0, 8)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUNCTRAIN_REWRITES", raising=False)


@pytest.fixture
def sin_to_cos(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rule for sines of vectors, which changes the result so that it shows."""
    rule = Rewrite(
        "sin_to_cos",
        primitives.sin_p,
        lambda eqn: len(eqn.invars[0].aval.shape) == 1,
        lambda x, **params: lax.cos(x),
        "it shows",
    )
    monkeypatch.setattr(_optimize, "REWRITES", (rule,))


def apply_impl(x: jax.Array, *, body: Any) -> jax.Array:
    return core.jaxpr_as_fun(body)(x)[0]


apply_p = core.Primitive("apply")  # nobody has heard of it
apply_p.def_impl(apply_impl)
apply_p.def_abstract_eval(lambda x, *, body: body.out_avals[0])


def apply(x: jax.Array) -> jax.Array:
    return apply_p.bind(x, body=jax.make_jaxpr(jnp.sin)(x))


@pytest.mark.usefixtures("sin_to_cos")
def test_a_row_tells_what_replaces_an_equation_and_why() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("layer"):
            return lax.sin(lax.sin(x)) + lax.sin(x[0])

    vectors, scalar = explain_rewrites(fn, X).rows
    assert vectors.primitive == scalar.primitive == "sin"
    assert (vectors.shapes, vectors.count) == ("float32[8] -> float32[8]", 2)
    assert (vectors.rule, vectors.reason) == ("sin_to_cos", "it shows")
    assert (scalar.shapes, scalar.count) == ("float32[] -> float32[]", 1)
    assert (scalar.rule, scalar.reason) == ("", "no rewrite is known to be faster here")
    assert vectors.location.startswith("layer  test_explain_rewrites.py:")


@pytest.mark.usefixtures("sin_to_cos")
def test_the_text_holds_every_row() -> None:
    text = str(explain_rewrites(lambda x: lax.exp(lax.sin(x)), X))
    lines = [line.strip() for line in text.splitlines()]
    assert lines[:3] == ["1 x sin: sin_to_cos", "float32[8] -> float32[8]", "it shows"]
    assert lines[3].startswith("test_explain_rewrites.py:")
    assert text.endswith("And 1 equation without a rewrite.")


def test_the_text_fits_a_terminal() -> None:
    class ConvolutionalNetwork(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            for i in range(2):
                x = nn.Conv(16, (3, 3), name=f"convolution_with_a_long_name_{i}")(x)
                x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
            return nn.Dense(10)(x.reshape(len(x), -1))

    model = ft.from_linen(ConvolutionalNetwork())
    x, y, tx = jnp.ones((8, 16, 16, 3)), jnp.zeros(8, jnp.int32), optax.adam(1e-3)
    params, _ = model.init(jax.random.key(0), x)
    loss_fn = ft.supervised(model, optax.softmax_cross_entropy_with_integer_labels)
    step = ft.train_step(ft.micro_batches(loss_fn, 4), tx)
    explanation = explain_rewrites(step, ft.TrainState.create(params=params, tx=tx), (x, y))
    lines = str(explanation).splitlines()
    assert len(explanation.rows) > 3
    assert max(map(len, lines)) <= 80
    assert any("convolution_with_a_long_name_0  " in line for line in lines)


@pytest.mark.usefixtures("sin_to_cos")
def test_it_says_of_inner_functions_what_the_pass_does_there() -> None:
    def fn(x: jax.Array) -> jax.Array:
        x = lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]
        return lax.cond(x[0] > 5, jnp.tan, jax.checkpoint(jnp.sin), x)

    (row,) = explain_rewrites(fn, X).rows
    assert (row.rule, row.count) == ("sin_to_cos", 2)


@pytest.mark.usefixtures("sin_to_cos")
def test_exact_names_the_rule_that_auto_would_take() -> None:
    (row,) = explain_rewrites(jnp.sin, X, rewrites="exact").rows
    assert row.rule == ""
    assert row.reason == 'sin_to_cos changes last bits; rewrites="auto" uses it'


@pytest.mark.usefixtures("sin_to_cos")
def test_an_unknown_primitive_runs_as_it_was() -> None:
    def fn(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return apply(x), jnp.sin(x)

    closed = jax.make_jaxpr(apply)(X)
    assert rewrite_jaxpr(closed, _optimize.REWRITES) is closed
    inner, outer = optimize(fn)(X)
    np.testing.assert_array_equal(inner, jnp.sin(X))
    np.testing.assert_array_equal(outer, jnp.cos(X))
    inside, plain = explain_rewrites(fn, X).rows
    assert (inside.rule, inside.reason) == ("", "inside apply, which no rewrite may enter")
    assert plain.rule == "sin_to_cos"


def boom(*inputs: Any, **params: Any) -> Any:
    raise ZeroDivisionError("boom")


@pytest.mark.parametrize("where", ["applies", "replace"])
def test_a_rewrite_that_fails_is_told(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = {"applies": lambda eqn: True, "replace": lambda x, **params: x}
    broken = Rewrite("broken", primitives.sin_p, **{**fine, where: boom})
    other = Rewrite("other", primitives.cos_p, **fine)
    monkeypatch.setattr(_optimize, "REWRITES", (broken, other))
    explanation = explain_rewrites(lambda x: jnp.sin(jnp.cos(x)), X)
    assert "A rewrite failed and is skipped: broken: " in explanation.note
    assert [row.rule for row in explanation.rows] == ["other", ""]


@pytest.mark.parametrize("how", ["argument", "environment", "platform"])
def test_where_rewrites_are_off_it_says_so(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setenv("FUNCTRAIN_REWRITES", "off")
    image, kernel = jnp.ones((2, 3, 8, 8)), jnp.ones((4, 3, 3, 3))
    off = "off" if how == "argument" else "auto"
    with compiling_for("neuron" if how == "platform" else "cpu"):
        explanation = explain_rewrites(
            lambda x, w: lax.conv(x, w, (1, 1), "SAME"), image, kernel, rewrites=off
        )
    assert "rewrites are off" in explanation.note
    assert [row.rule for row in explanation.rows] == [""]


def test_a_function_is_traced_for_the_platform_of_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("functrain.inspect._explain_rewrites.platform_of", lambda args: "tpu")
    platforms = []

    def fn(x: jax.Array) -> jax.Array:
        platforms.append(current_platform())
        return x

    explain_rewrites(fn, X)
    assert platforms == ["tpu"]


def test_steps_and_states_that_do_not_go_together_are_told_how_they_do() -> None:
    def loss_fn(params, model_state, batch, *, rng, training):
        return jnp.sum(params), ft.Aux(model_state, batch[0])

    tx = optax.sgd(0.1)
    state, batch = ft.TrainState.create(params=jnp.ones(3), tx=tx), (jnp.ones((2, 3)),) * 2
    mae = {"mae": ft.metrics.mean_absolute_error()}
    bare, metered = ft.train_step(loss_fn, tx), ft.train_step(loss_fn, tx, metrics=mae)
    with pytest.raises(TypeError, match=r"state: expected a TrainState, got Metered"):
        explain_rewrites(bare, metered.start(state), batch)
    for carry in (state, metered.start(state)):
        assert explain_rewrites(metered, carry, batch).rows == ()
