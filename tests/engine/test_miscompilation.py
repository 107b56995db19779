"""Programs that jaxlib before 0.12 compiles wrongly on CPU come out right: against NumPy."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import functrain as ft
from functrain.rewrites import _compile

pytestmark = pytest.mark.filterwarnings("ignore::functrain.inspect.MiscompilationWarning")

EXAMPLES = 40_000  # the wrong rows are beyond 32,768 of float32
RNG = np.random.default_rng(0)
X = RNG.standard_normal((EXAMPLES, 3), np.float32)
W = {m: RNG.standard_normal((m, 3), np.float32) for m in (2, 3)}
if_affected = pytest.mark.skipif(not _compile.IS_AFFECTED, reason="this jaxlib is right")

# What makes the product, what follows, and what it is summed up by: 2 x 5 x 5 x 3 programs.
PRODUCTS = {
    "w @ x.T": lambda w, x: w @ x.T,
    "w @ x": lambda w, x: w @ x,
    "vmap(w @ row)": lambda w, x: jax.vmap(lambda row: w @ row, out_axes=1)(x),
    "vmap(w @ row).T": lambda w, x: jax.vmap(lambda row: w @ row)(x).T,
    "einsum": lambda w, x: jnp.einsum("mk,nk->mn", w, x),
}
FOLLOWING = {
    "nothing": lambda np, h: h,
    "square": lambda np, h: h**2,
    "relu": lambda np, h: np.maximum(h, 0),
    "scaled": lambda np, h: 1.5 * h,
    "tanh": lambda np, h: np.tanh(h),
}
SUMS = {
    "sum": lambda np, h: np.sum(h, axis=0),
    "mean": lambda np, h: np.mean(h, axis=0),
    "max": lambda np, h: np.max(h, axis=0),
}
MOST_LIKELY = [(2, "w @ x.T", "nothing", "sum"), (3, "vmap(w @ row)", "square", "sum")]
MOST_LIKELY += [(3, "einsum", "nothing", "max"), (2, "w @ x.T", "relu", "mean")]


def wrong_rows(m, product, following, total):
    """Rows that a fused program gets wrong, by NumPy in float64."""
    given = X.T.copy() if product == "w @ x" else X

    def step(state, x):
        return state, SUMS[total](jnp, FOLLOWING[following](jnp, PRODUCTS[product](W[m], x)))

    _, got = ft.fuse(step, 1, donate=False)(jnp.zeros(()), given[None])
    exact = SUMS[total](np, FOLLOWING[following](np, W[m].astype(np.float64) @ X.T))
    return int(np.sum(np.abs(got[0] - exact) > 1e-4 * (1 + np.abs(exact))))


@pytest.mark.parametrize(("m", "product", "following", "total"), MOST_LIKELY)
def test_sums_of_products_over_few_features_are_right(m, product, following, total):
    assert wrong_rows(m, product, following, total) == 0


@pytest.mark.long
@pytest.mark.parametrize("m", W)
@pytest.mark.parametrize("product", PRODUCTS)
def test_all_two_layer_programs_are_right(m, product):
    wrong = {
        (following, total): count
        for following, total in itertools.product(FOLLOWING, SUMS)
        if (count := wrong_rows(m, product, following, total))
    }
    assert not wrong


def test_a_sum_of_a_product_over_many_rows_does_not_crash():
    x, w = RNG.standard_normal((33_000, 16), np.float32), RNG.standard_normal((32, 16), np.float32)
    fused = ft.fuse(lambda state, x: (state, (x @ w.T).max(0)), 1)
    _, got = fused(jnp.zeros(()), x[None])
    np.testing.assert_allclose(got[0], (x.astype(np.float64) @ w.T).max(0), rtol=1e-5)


def model():
    """Sums up the features of a product, of each example."""
    return ft.Model(
        init=lambda key, x: ({"w": jnp.asarray(W[2])}, {}),
        apply=lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(
            jax.vmap(lambda row: jnp.sum(p["w"] @ row))(x), s
        ),
    )


def state():
    return ft.TrainState.create(params={"w": jnp.asarray(W[2])}, tx=optax.sgd(0.1))


def exact():
    return (X.astype(np.float64) @ W[2].T).sum(1)


def test_predict_is_right():
    data = ft.ArrayLoader(X, batch_size=EXAMPLES)
    got = ft.predict(state(), ft.predict_step(model()), data)
    np.testing.assert_allclose(got, exact(), atol=1e-5)


def test_a_program_compiled_ahead_of_time_is_right():
    fused = ft.fuse(lambda s, x: (s, (W[2] @ x.T).sum(0)), 1, donate=False)
    for made in (fused.lower, lambda *args: fused.trace(*args).lower()):
        compiled = made(jnp.zeros(()), X[None], 1).compile()
        got = compiled(jnp.zeros(()), X[None], np.int32(1))[1]
        np.testing.assert_allclose(got[0], exact(), atol=1e-5)


def summed(w, x):
    return (w @ x.T).sum(0)


@if_affected
def test_jax_alone_gets_it_wrong():
    assert np.max(np.abs(jax.jit(summed)(W[2], X) - exact())) > 1


@if_affected
def test_the_user_is_told_once(monkeypatch):
    monkeypatch.setattr(_compile, "_has_warned", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            _compile.jit(lambda w, x: summed(w, x))(W[2], X)
    assert [w.category for w in caught] == [ft.inspect.MiscompilationWarning]
    assert "computes a sum of products of this program wrongly" in str(caught[0].message)
    assert "jax.jit and Keras's fit do not" in str(caught[0].message)


def test_other_programs_bring_no_warning(monkeypatch):
    monkeypatch.setattr(_compile, "_has_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = np.ones((8, 3), np.float32)
        np.testing.assert_array_equal(_compile.jit(lambda x: x @ x.T)(x), x @ x.T)


@if_affected
def test_the_inspection_can_be_turned_off(monkeypatch):
    def fail(hlo):
        raise AssertionError

    monkeypatch.setattr(_compile, "has_wrong_fusion", fail)
    monkeypatch.setenv("FUNCTRAIN_CHECK_PROGRAMS", "off")
    assert _compile.jit(lambda x: x + 1)(1) == 2
    monkeypatch.setenv("FUNCTRAIN_CHECK_PROGRAMS", "no")
    with pytest.raises(ValueError, match="FUNCTRAIN_CHECK_PROGRAMS: expected 'on' or 'off', got"):
        _compile.jit(lambda x: x + 1)


@if_affected
def test_every_shape_is_traced_once_and_chosen_by_itself():
    traced = []

    def function(w, x):
        traced.append(x.shape)
        return summed(w, x)

    program = _compile.jit(function)
    for n in (100, EXAMPLES, 100, EXAMPLES, 200, 200):
        np.testing.assert_allclose(program(W[2], X[:n]), exact()[:n], atol=1e-5)
    assert traced.count((100, 3)) == traced.count((200, 3)) == 1
    assert traced.count((EXAMPLES, 3)) <= 2  # at most once for each compilation


@if_affected
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: f], ids=["jit", "vmap", "none"])
def test_programs_run_within_transformations(transform):
    program = _compile.jit(lambda x: jnp.sum(x**2, axis=-1))
    x = np.ones((2, 5), np.float32)
    np.testing.assert_array_equal(transform(program)(x), [5, 5])
    np.testing.assert_array_equal(jax.grad(lambda x: program(x).sum())(x), 2 * x)
    assert jax.jit(lambda: program(x))().shape == (2,)
    assert jax.eval_shape(program, x).shape == (2,)


def test_a_program_that_was_transformed_before_is_right():
    program = _compile.jit(lambda w, x: summed(w, x))
    for look in (jax.eval_shape, lambda f, *args: jax.jit(f).lower(*args)):
        look(program, W[2], X)
    assert program.eval_shape(W[2], X).shape == (EXAMPLES,)
    np.testing.assert_allclose(program(W[2], X), exact(), atol=1e-5)


def test_a_fusion_of_a_product_and_a_sum_is_found():
    fusion = 'ROOT %ynn_fusion = f32[9]{0} fusion(%a), calls=%f, {"kind":"__ynn_fusion"}'
    wrong = "%f (a: f32[2,3]) -> f32[9] {\n  %d = dot(%a)\n  ROOT %r = reduce(%d)\n}\n"
    assert _compile.has_wrong_fusion(f"{wrong}ENTRY %main () -> f32[9] {{\n  {fusion}\n}}\n")
    assert not _compile.has_wrong_fusion(wrong)
    for right in (wrong.replace("dot(", "add("), wrong.replace("reduce(", "add(")):
        assert not _compile.has_wrong_fusion(f"{right}ENTRY %main () {{\n  {fusion}\n}}\n")
    rank_7 = "%f (a: f32[1,2,3,4,5,6,7]) -> f32[9] {\n  ROOT %r = reduce(%a)\n}\n"
    assert _compile.has_wrong_fusion(f"{rank_7}ENTRY %main () {{\n  {fusion}\n}}\n")


@if_affected
def test_a_program_whose_check_was_interrupted_is_checked_by_the_next_call(monkeypatch):
    program = _compile.jit(summed)

    def interrupted(hlo):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_compile, "has_wrong_fusion", interrupted)
        with pytest.raises(KeyboardInterrupt):
            program(W[2], X)
    np.testing.assert_allclose(program(W[2], X), exact(), atol=1e-5)


@if_affected
def test_a_program_is_checked_anew_for_another_sharding():
    program, mesh = _compile.jit(summed), jax.make_mesh((2,), ("data",))
    for spec in (PartitionSpec("data"), PartitionSpec()):
        x = jax.device_put(X, NamedSharding(mesh, spec))
        np.testing.assert_allclose(program(jnp.asarray(W[2]), x), exact(), atol=1e-5)


@if_affected
@pytest.mark.parametrize("look", ["__call__", "lower", "trace"])
def test_a_program_is_checked_anew_in_another_context(look):
    def function(w, x):
        return summed(w, x) if jax.config.jax_default_matmul_precision else jnp.zeros(EXAMPLES)

    program = _compile.jit(function)
    assert not program(W[2], X).any()
    with jax.default_matmul_precision("highest"):
        getattr(program, look)(W[2], X)
    for _ in range(2):  # also where it is checked already
        with jax.default_matmul_precision("highest"):
            np.testing.assert_allclose(program(W[2], X), exact(), atol=1e-5)
        assert not program(W[2], X).any()
