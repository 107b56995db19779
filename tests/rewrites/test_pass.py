"""The pass: what it enters, what it keeps, and what happens when a rewrite fails."""

import warnings
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

from functrain.common._platform import compiling_for
from functrain.rewrites import _optimize, optimize, resolve_mode
from functrain.rewrites._pass import inline_calls, rewrite_jaxpr
from functrain.rewrites._rewrite import Rewrite, RewriteError

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


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUNCTRAIN_REWRITES", raising=False)


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *rules: monkeypatch.setattr(_optimize, "REWRITES", rules)


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
def test_what_is_rewritten_still_runs(kind: str, rules: Any) -> None:
    rules(RULE)
    got = jax.jit(optimize(KINDS[kind]))(X)
    assert got.shape == X.shape
    assert bool(jnp.isfinite(got).all())


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


def test_names_reach_the_compiled_program(rules: Any) -> None:
    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("layer"):
            return lax.sin(x)

    rules(RULE)
    text = jax.jit(optimize(fn)).lower(X).as_text(debug_info=True)
    assert "layer/cos" in text


def test_an_inner_jaxpr_used_twice_stays_one_object() -> None:
    inner = jax.jit(jnp.sin)
    after = rewrite_jaxpr(jax.make_jaxpr(lambda x: inner(inner(x)))(X), [RULE])
    first, second = (eqn.params["jaxpr"] for eqn in after.eqns)
    assert first is second


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


def test_keys_and_empty_states_pass_through() -> None:
    def fn(state: Any) -> Any:
        return state | {"key": jax.random.split(state["key"])[0]}

    state = {"key": jax.random.key(0), "none": None, "empty": ()}
    got = optimize(fn)(state)
    assert got["empty"] == ()
    np.testing.assert_array_equal(
        jax.random.key_data(got["key"]), jax.random.key_data(fn(state)["key"])
    )


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
    assert [
        str(w.message).count(r"at float32[8] -> float32[8] (test_pass.py:") for w in warned
    ] == [1]


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


def attention(x: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("nth,nsh->nts", x, x))
    return jnp.einsum("nts,nsh->nth", weights, x) + jnp.arange(16.0)


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
@pytest.mark.parametrize("model", [attention, recurrence, layers, nested_loops])
def test_no_rewrite_fails_if_a_size_is_a_symbol(model: Any, shape: str, platform: str) -> None:
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32)

    def fn(x: jax.Array) -> Any:
        out, pull = jax.vjp(model, x)
        return jnp.argmax(out, axis=-1), pull(out)

    _, failures = _optimize.rewrite_or_keep(jax.make_jaxpr(fn)(x), "auto", platform)
    assert failures == []


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4])
def test_no_rewrite_fails_for_labels_of_four_bits(dtype: Any, platform: str) -> None:
    x, labels = jnp.ones((8, 5)), jnp.ones(8, dtype)

    def fn(x: jax.Array) -> Any:
        out, pull = jax.vjp(lambda x: jax.vmap(lambda row, j: row[j])(x, labels), x)
        return out, pull(out)

    _, failures = _optimize.rewrite_or_keep(jax.make_jaxpr(fn)(x), "auto", platform)
    assert failures == []


def test_a_program_without_slow_operations_is_not_warned_about_or_changed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = jax.jit(lambda x: jnp.sin(x) @ x).lower(X).as_text()
        after = jax.jit(optimize(lambda x: jnp.sin(x) @ x)).lower(X).as_text()
    assert before.replace("jit__lambda", "") == after.replace("jit__lambda", "")
