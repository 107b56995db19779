"""`optimize`: which rewrites it uses, and what happens when one of them fails."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

from functrain.common._platform import compiling_for
from functrain.inspect import explain_rewrites
from functrain.rewrites import _optimize, optimize, resolve_mode
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites._rewrite import Rewrite, RewriteError

from .test_pass import RULE, X, names, rule


@pytest.mark.parametrize("applies", [True, False])
def test_a_function_is_traced_once(applies: bool, rules: Any) -> None:
    traces = []

    def fn(x: jax.Array) -> jax.Array:
        traces.append(x)
        return lax.sin(x)

    rules(RULE._replace(applies=lambda eqn: applies))
    compiled = jax.jit(optimize(fn))
    compiled(X)
    compiled(X)
    optimize(fn)(X)
    assert len(traces) == 1


def test_structure_dtypes_and_weak_types_are_kept(rules: Any) -> None:
    def fn(x: Any, *, scale: Any) -> Any:
        y = lax.sin(x["a"])
        return {"y": y, "n": None, "t": (1.0, 2, True, scale, y * 2, jnp.bfloat16(3), np.ones(2))}

    rules(RULE)
    for x, scale in ((1.0, 2), (jnp.float32(1), jnp.int32(2)), (X.astype(jnp.bfloat16), 1.5)):
        want = jax.eval_shape(fn, {"a": x}, scale=scale)
        for got in (
            jax.eval_shape(optimize(fn), {"a": x}, scale=scale),
            optimize(fn)({"a": x}, scale=scale),
        ):
            assert jax.tree.structure(got) == jax.tree.structure(want)
            for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert (g.shape, g.dtype, g.weak_type) == (w.shape, w.dtype, w.weak_type)


def test_a_weak_type_is_not_lost_where_a_rewrite_loses_it() -> None:
    strong = rule(lambda x, **params: lax.convert_element_type(lax.cos(x), jnp.float32))
    closed = jax.make_jaxpr(lambda x: lax.sin(x))(1.0)
    assert rewrite_jaxpr(closed, [strong]).out_avals[0].weak_type


def test_an_optimized_function_can_be_transformed(rules: Any) -> None:
    rules(rule(lambda x, **params: primitives.sin_p.bind(x, **params)))
    np.testing.assert_allclose(jax.vmap(optimize(jnp.sin))(X), jnp.sin(X), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(optimize(jnp.sin))(1.0), jnp.cos(1.0), rtol=1e-6)


def test_values_that_the_function_closes_over_may_be_traced() -> None:
    @jax.jit
    def outer(x: jax.Array) -> jax.Array:
        return optimize(lambda y: y * x.sum())(x)

    np.testing.assert_allclose(outer(X), X * X.sum(), rtol=1e-6)


def boom(x: jax.Array, **params: Any) -> jax.Array:
    raise ZeroDivisionError("boom")


@pytest.mark.parametrize(
    ("replace", "says"),
    [
        (boom, "boom"),
        (lambda x, **params: lax.cos(x)[0], "expected outputs"),
        (lambda x, **params: x + X, "captures no arrays"),
    ],
    ids=["it raises", "another shape", "it captures an array"],
)
def test_where_the_only_rewrite_fails_the_step_is_as_it_was(
    replace: Any, says: str, rules: Any
) -> None:
    with pytest.raises(RewriteError, match="broken"):
        rewrite_jaxpr(jax.make_jaxpr(jnp.sin)(X), [rule(replace)])
    rules(rule(replace))
    with pytest.warns(UserWarning, match=f"(?s)broken.*{says}.*FUNCTRAIN_REWRITES=off"):
        got = jax.jit(optimize(jnp.sin))(X)
    np.testing.assert_array_equal(got, jax.jit(jnp.sin)(X))


@pytest.mark.parametrize("fails", ["applies", "replace", "after another"])
def test_a_rewrite_that_fails_is_left_out_alone(fails: str, rules: Any) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return lax.tan(lax.sin(x))

    broken = rule(boom)._replace(primitive=primitives.tan_p)
    if fails == "applies":
        broken = broken._replace(applies=boom)
    if fails == "after another":  # what RULE returns is a cosine
        broken = broken._replace(primitive=primitives.cos_p)
    rules(RULE, broken)
    with pytest.warns(UserWarning, match="skipped: broken: ZeroDivision") as warned:
        jaxpr = jax.make_jaxpr(optimize(fn))(X)
    assert names(jaxpr) == ["cos", "tan"]
    assert [str(w.message).count(r"at float32[8] -> float32[8] (test_") for w in warned] == [1]


def test_a_pass_that_fails_leaves_the_program_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(_optimize, "rewrite_jaxpr", fail)
    message = r"stays as it is: ZeroDivisionError\('boom'\)\."
    with pytest.warns(UserWarning, match=rf"{message} Please report it"):
        jaxpr = jax.make_jaxpr(optimize(lax.sin))(X)
    assert names(jaxpr) == ["sin"]
    assert re.search(message, explain_rewrites(lax.sin, X).note)


def test_an_error_of_the_step_itself_is_the_users() -> None:
    with pytest.raises(ZeroDivisionError, match="boom"):
        optimize(boom)(X)


def test_rewrites_need_not_be_as_strict_as_the_user(rules: Any) -> None:
    def replace(x: jax.Array, **params: Any) -> jax.Array:
        mixed = x + jnp.ones((1, 1), jnp.float16)  # two ranks, two dtypes
        return mixed[0] - 1

    rules(rule(replace))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        np.testing.assert_allclose(jax.jit(optimize(jnp.sin))(X), X, rtol=1e-6)


def test_modes_choose_the_rewrites(rules: Any) -> None:
    rules(RULE, RULE._replace(primitive=primitives.tan_p, is_exact=lambda eqn: True))

    def fn(x: jax.Array) -> jax.Array:
        return lax.sin(lax.tan(x))

    assert names(jax.make_jaxpr(optimize(fn))(X)) == ["cos", "cos"]
    assert names(jax.make_jaxpr(optimize(fn, "exact"))(X)) == ["cos", "sin"]
    assert optimize(fn, "off") is fn


def test_an_operation_that_asks_for_an_algorithm_is_left_alone() -> None:
    """A convolution may have one that no matrix product has."""

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv(x, w, (1, 1), "SAME", precision="TF32_TF32_F32")

    x, w = jnp.ones((16, 512, 2, 2)), jnp.ones((512, 512, 3, 3))
    np.testing.assert_array_equal(jax.jit(optimize(fn))(x, w), jax.jit(fn)(x, w))
    plain = jax.make_jaxpr(fn)(x, w)
    assert _optimize.rewrite_or_keep(plain, "auto", "cpu") == (plain, [])


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="rewrites: expected 'auto', 'exact' or 'off', got 'on'"):
        optimize(jnp.sin, "on")  # type: ignore[arg-type]  # that is the point


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCTRAIN_REWRITES", "off")
    assert resolve_mode("auto") == "off"
    assert optimize(jnp.sin) is jnp.sin
    monkeypatch.setenv("FUNCTRAIN_REWRITES", "")
    assert resolve_mode("exact") == "exact"
    monkeypatch.setenv("FUNCTRAIN_REWRITES", "yes")
    with pytest.raises(ValueError, match=r"FUNCTRAIN_REWRITES: expected .* got 'yes'"):
        resolve_mode("auto")


def test_a_platform_without_rewrites_has_none_in_any_mode() -> None:
    modes = ("auto", "exact", "off")
    for platform in ("cpu", "tpu"):
        with compiling_for(platform):
            assert [resolve_mode(mode) for mode in modes] == ["auto", "exact", "off"]
    assert [resolve_mode(mode, "gpu") for mode in modes] == ["off", "off", "off"]
    with pytest.raises(ValueError, match="rewrites"):
        resolve_mode("on")


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_program_gets_the_rewrites_of_its_platform(platform: str, monkeypatch: Any) -> None:
    rules = [
        Rewrite(name, primitives.sin_p, lambda eqn: True, replace, platforms=platforms)
        for name, replace, platforms in (
            ("for one", lambda x, **_: lax.cos(x), ("tpu",)),
            ("for two", lambda x, **_: lax.exp(x), ("cpu", "gpu")),
        )
    ]
    monkeypatch.setattr(_optimize, "REWRITES", tuple(rules))
    with compiling_for(platform):
        jaxpr = jax.make_jaxpr(optimize(jnp.sin))(X).jaxpr
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["cos" if platform == "tpu" else "exp"]


def recurrence(x: jax.Array) -> jax.Array:
    def cell(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = jnp.tanh(carry @ jnp.ones((16, 16)) + row)
        return new, new * row

    return lax.scan(cell, x[:, 0], jnp.swapaxes(x, 0, 1))[1]


def layers(x: jax.Array) -> jax.Array:
    image = lax.reduce_window(x[..., None], -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    numbers = ("NHWC", "HWIO", "NHWC")
    kernel = jnp.ones((3, 3, 1, 2))
    out = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return jax.nn.relu(out).mean((1, 2)) @ jnp.ones((2, 64))


def nested_loops(x: jax.Array) -> jax.Array:
    """Values of known sizes, which a scan of eight iterations computes as often as x has columns.

    No iteration reads a column.
    """

    def inner(carry: jax.Array, column: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(carry @ jnp.ones((16, 16))), None

    def outer(carry: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        new = lax.scan(inner, carry, x[0])[0]
        return new, new * 2

    return lax.scan(outer, jnp.ones((4, 16)), length=8)[1] + x.sum()


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("shape", ["batch, 12, 16", "8, time, 16"])
@pytest.mark.parametrize("model", [recurrence, layers, nested_loops])
def test_no_rewrite_fails_if_a_size_is_a_symbol(model: Any, shape: str, platform: str) -> None:
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32)

    def fn(x: jax.Array) -> Any:
        out, pull = jax.vjp(model, x)
        return jnp.argmax(out, axis=-1), pull(out)

    _, failures = _optimize.rewrite_or_keep(jax.make_jaxpr(fn)(x), "auto", platform)
    assert failures == []
