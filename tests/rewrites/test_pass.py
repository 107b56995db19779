"""The pass: what it enters, what it keeps, and what happens when a rewrite fails."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from functrain.rewrites import optimize
from functrain.rewrites._pass import inline_calls, rewrite_jaxpr
from functrain.rewrites._rewrite import Rewrite

X = jnp.linspace(0.1, 2.0, 8)


def sin_to_cos(x: jax.Array, **params: Any) -> jax.Array:
    return lax.cos(x)


RULE = Rewrite("sin_to_cos", primitives.sin_p, lambda eqn: True, sin_to_cos)


def rule(replace: Any) -> Rewrite:
    return RULE._replace(name="broken", replace=replace)


def equations(jaxpr: Any) -> Iterator[core.JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def names(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name for eqn in equations(jaxpr)]


def scanned(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0]


def looped(x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: jnp.sin(c).sum() > 100, jnp.sin, x)


def chosen(x: jax.Array) -> jax.Array:
    return lax.cond(x[0] > 5, jnp.tan, jnp.sin, x)


@jax.custom_jvp
def with_jvp(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


with_jvp.defjvps(lambda t, ans, x: t)


@jax.custom_vjp
def with_vjp(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, g: (g,))


def called(x: jax.Array) -> jax.Array:
    closed = jax.make_jaxpr(jnp.sin)(x)
    return primitives.closed_call_p.bind(x, call_jaxpr=closed)[0]


def mapped(check_vma: bool) -> Any:
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        lambda x: jnp.sin(x) * lax.psum(x.sum(), "d"),
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P("d"),
        check_vma=check_vma,
    )


KINDS = {
    "jit": jax.jit(jnp.sin),
    "scan": scanned,
    "while": looped,
    "cond": chosen,
    "remat": jax.checkpoint(jnp.sin),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "shard_map": mapped(check_vma=True),
    "shard_map, unchecked": mapped(check_vma=False),
    "scan in jit in cond": lambda x: lax.cond(x[0] > 5, jax.jit(scanned), lambda x: x, x),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_inner_jaxpr_is_entered(kind: str) -> None:
    before = jax.make_jaxpr(KINDS[kind])(X)
    after = rewrite_jaxpr(before, [RULE])
    assert "sin" in names(before)
    assert "sin" not in names(after)
    assert names(after).count("cos") == names(before).count("sin")


@pytest.mark.parametrize("kind", KINDS)
def test_an_identical_rewrite_changes_no_bit(kind: str, rules: Any) -> None:
    rules(rule(lambda x, **params: primitives.sin_p.bind(x, **params)))
    np.testing.assert_array_equal(jax.jit(optimize(KINDS[kind]))(X), jax.jit(KINDS[kind])(X))


@pytest.mark.parametrize("kind", KINDS)
def test_a_jaxpr_where_nothing_applies_is_returned_itself(kind: str) -> None:
    closed = jax.make_jaxpr(KINDS[kind])(X)
    assert rewrite_jaxpr(closed, []) is closed
    assert rewrite_jaxpr(closed, [RULE._replace(applies=lambda eqn: False)]) is closed
    assert rewrite_jaxpr(closed, [RULE._replace(primitive=primitives.conv_general_dilated_p)]) is (
        closed
    )


def test_equations_alike_are_traced_once_and_stay_apart() -> None:
    calls = []

    def replace(x: jax.Array, **params: Any) -> jax.Array:
        calls.append(x)
        return lax.cos(lax.cos(x))

    def fn(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        first, second = jnp.sin(x), jnp.sin(y)  # both are read when both are there
        return second - first, jnp.sin(x[:2]), first * second

    after = rewrite_jaxpr(jax.make_jaxpr(fn)(X, X + 1), [rule(replace)])
    assert len(calls) == 2  # one for each shape
    x, y = (np.cos(np.cos(np.asarray(v))) for v in (X, X + 1))
    for got, want in zip(core.jaxpr_as_fun(after)(X, X + 1), (y - x, x[:2], x * y), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_first_rewrite_that_applies_is_taken() -> None:
    second = rule(lambda x, **params: lax.tan(x))
    closed = jax.make_jaxpr(jnp.sin)(X)
    assert names(rewrite_jaxpr(closed, [RULE, second])) == ["cos"]
    assert names(rewrite_jaxpr(closed, [RULE._replace(applies=lambda e: False), second])) == ["tan"]


def test_what_a_rewrite_returns_is_looked_at_by_those_after_it() -> None:
    tan = Rewrite("cos_to_tan", primitives.cos_p, lambda eqn: True, lambda x, **_: lax.tan(x))
    before = jax.make_jaxpr(jnp.sin)(X)
    assert names(rewrite_jaxpr(before, [RULE, tan])) == ["tan"]
    assert names(rewrite_jaxpr(before, [tan, RULE])) == ["cos"]


def test_a_rewrite_may_return_its_input_or_a_constant(rules: Any) -> None:
    def fn(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = lax.sin(x)
        return y, y + 1

    rules(rule(lambda x, **params: x))
    np.testing.assert_array_equal(optimize(fn)(X)[0], X)
    np.testing.assert_array_equal(optimize(fn)(X)[1], X + 1)
    rules(rule(lambda x, **params: lax.full_like(x, 2)))
    np.testing.assert_array_equal(optimize(fn)(X)[1], jnp.full_like(X, 3))


def test_names_and_source_lines_are_kept() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("layer"):
            return lax.sin(x)

    before = jax.make_jaxpr(fn)(X)
    after = rewrite_jaxpr(before, [RULE])
    assert after.eqns[0].primitive.name == "cos"
    assert after.eqns[0].source_info == before.eqns[0].source_info
    assert after.eqns[0].ctx == before.eqns[0].ctx
    assert after.jaxpr.debug_info == before.jaxpr.debug_info


def test_an_inner_jaxpr_used_twice_stays_one_object() -> None:
    inner = jax.jit(jnp.sin)
    after = rewrite_jaxpr(jax.make_jaxpr(lambda x: inner(inner(x)))(X), [RULE])
    first, second = (eqn.params["jaxpr"] for eqn in after.eqns)
    assert first is second


def test_calls_are_inlined_with_their_place_in_the_model_and_the_source() -> None:
    @jax.jit
    def inner(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.nn.relu(x) - y

    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("layer"):
            return inner(x, x[:1]) + inner(x, x[:1])

    x = jnp.arange(-3.0, 3.0).reshape(3, 2)
    before = jax.make_jaxpr(fn)(x)
    after = inline_calls(before)
    names = {eqn.primitive.name for eqn in after.jaxpr.eqns}
    assert names == {"slice", "max", "broadcast_in_dim", "sub", "add"}
    assert {str(eqn.source_info.name_stack) for eqn in after.jaxpr.eqns} == {"layer"}
    # Each equation has its own variables, although the function is called twice.
    outputs = [var for eqn in after.jaxpr.eqns for var in eqn.outvars]
    assert len(set(outputs)) == len(outputs)
    np.testing.assert_array_equal(jax.extend.core.jaxpr_as_fun(after)(x)[0], fn(x))


def test_a_call_that_places_its_output_is_kept() -> None:
    mesh = Mesh(jax.devices()[:2], ("data",))
    sharding = jax.sharding.NamedSharding(mesh, P("data"))
    placed = jax.jit(jnp.sin, out_shardings=sharding)
    after = inline_calls(jax.make_jaxpr(lambda x: jax.jit(jnp.cos)(placed(x)))(X))
    assert [eqn.primitive.name for eqn in after.jaxpr.eqns] == ["jit", "cos"]
    assert after.jaxpr.eqns[0].params["out_shardings"] == (sharding,)
