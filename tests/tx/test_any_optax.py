"""Every transformation of optax in a training step, compared with optax by hand."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib as C
import pytest

import functrain as ft

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)
PARAMS = {"w": jnp.full((3, 4), 0.1), "b": jnp.full((4,), -0.2)}
SGD = optax.sgd(0.05, momentum=0.5)
KEY = jax.random.key(0)


def loss(params: Any) -> jax.Array:
    return jnp.mean((X @ params["w"] + params["b"] - Y) ** 2)


def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
    return jnp.mean((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2), ft.Aux(model_state)


def is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def plateau() -> Any:
    return optax.chain(SGD, C.reduce_on_plateau(patience=1, rtol=0.5))


def opaque_sam() -> Any:
    return C.sam(SGD, optax.chain(C.normalize(), optax.sgd(0.05)), opaque_mode=True)


# Transformations with keywords or states of their own that need arguments.
MADE: dict[str, Callable[[], Any]] = {
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, KEY), SGD),
    "apply_if_finite": lambda: optax.apply_if_finite(SGD, 3),
    "conditionally_mask": lambda: optax.conditionally_mask(SGD, lambda step: step > 1),
    "freeze": lambda: optax.chain(SGD, optax.freeze({"w": True, "b": False})),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.05),
    "jitted": lambda: optax.GradientTransformation(
        SGD.init, jax.jit(lambda grads, state, params=None: SGD.update(grads, state, params))
    ),
    "masked": lambda: optax.masked(SGD, is_matrix),
    "mechanize": lambda: C.mechanize(SGD),
    "partition": lambda: optax.partition({True: SGD, False: optax.adam(0.05)}, is_matrix),
    "reduce_on_plateau": plateau,
    "sam": lambda: C.sam(SGD, optax.chain(C.normalize(), optax.sgd(0.05))),
    "sam, opaque": opaque_sam,
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5, store_grad=True)
    ),
    "scale_by_galore": lambda: C.scale_by_galore(rank=2),
    "scale_by_zoom_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_zoom_linesearch(5)
    ),
    "schedule_free": lambda: C.schedule_free(SGD, 0.05),
    "snapshot": lambda: optax.chain(optax.snapshot("norm", optax.tree.norm), SGD),
    "split_real_and_imaginary": lambda: C.split_real_and_imaginary(SGD),
    # In MultiSteps, whose class optax does not recognize as one that takes keywords.
    "MultiSteps of lbfgs": lambda: optax.MultiSteps(optax.lbfgs(), 2),
    "MultiSteps of polyak_sgd": lambda: optax.MultiSteps(optax.polyak_sgd(), 2),
    "MultiSteps of reduce_on_plateau": lambda: optax.MultiSteps(plateau(), 2),
    "MultiSteps of sam": lambda: optax.MultiSteps(opaque_sam(), 2),
    "MultiSteps of sophia": lambda: optax.MultiSteps(C.sophia(0.05), 2),
}
# It needs the dimensions that `muon` finds.
OTHERS = {"scale_by_muon"}


def make(name: str) -> Any:
    if name in MADE:
        return MADE[name]()
    function = getattr(optax, name, None) or getattr(C, name)
    takes_rate = "learning_rate" in inspect.signature(function).parameters
    return function(learning_rate=0.05) if takes_rate else function()


def is_transformation(name: str) -> bool:
    """Whether a name of optax is that of one that needs no argument but a rate."""
    with contextlib.suppress(Exception):  # of functions that need others
        return hasattr(make(name), "update")
    return False


PUBLIC = {name for module in (optax, C) for name in vars(module) if not name.startswith("_")}
NAMES = sorted({*filter(is_transformation, PUBLIC - OTHERS), *MADE})


def by_hand(tx: Any, name: str) -> Any:
    """The params after four updates, with the keywords that the transformation has."""

    @jax.jit
    def step(params: Any, opt_state: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params)
        keywords: dict[str, Any] = {}
        if "sam" in name:
            keywords = {"grad_fn": lambda p, _: jax.grad(loss)(p)}
        elif "sophia" in name or "hutchinson" in name:
            keywords = {"obj_fn": loss}
        elif isinstance(tx, optax.GradientTransformationExtraArgs | optax.MultiSteps):
            keywords = {"value": value, "grad": grads, "value_fn": loss}
        updates, opt_state = tx.update(grads, opt_state, params, **keywords)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = PARAMS, tx.init(PARAMS)
    for _ in range(4):
        params, opt_state = step(params, opt_state)
    return params


# One of each kind of keywords and of state; the others take minutes to compile.
QUICK = {
    "adam", "jitted", "inject_hyperparams", "masked", "momo", "polyak_sgd", "sam, opaque",
    "snapshot", "MultiSteps of polyak_sgd", "MultiSteps of reduce_on_plateau", "MultiSteps of sam",
    "scale_by_backtracking_linesearch", "hutchinson_estimator_diag_hessian",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in NAMES]
)
def test_a_step_updates_as_optax_by_hand(name: str) -> None:
    tx = make(name)
    step = jax.jit(ft.train_step(loss_fn, tx))
    state = ft.TrainState.create(params=PARAMS, tx=tx)
    for _ in range(4):
        state, _ = step(state, (X, Y))
    # Only the order of sums may differ.
    chex.assert_trees_all_close(state.params, by_hand(tx, name), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["polyak_sgd", "MultiSteps of sam", "MultiSteps of polyak_sgd"])
def test_guards_and_groups_pass_the_keywords_on(name: str) -> None:
    for wrap in (ft.tx.skip_non_finite, lambda tx: ft.tx.param_groups({"**": tx})):
        tx = wrap(make(name))
        step = jax.jit(ft.train_step(loss_fn, tx))
        state = ft.TrainState.create(params=PARAMS, tx=tx)
        for _ in range(4):
            state, _ = step(state, (X, Y))
        expected = by_hand(make(name), name)
        chex.assert_trees_all_close(state.params, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("wrap", [lambda tx: tx, ft.tx.skip_non_finite])
def test_lookahead_trains_its_fast_params_and_evaluates_the_slow_ones(wrap: Any) -> None:
    tx = optax.lookahead(SGD, sync_period=3, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(PARAMS)
    model = ft.Model(
        lambda key, x: (PARAMS, {}),
        lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(x @ p["w"] + p["b"], s),
    )
    supervised = ft.supervised(model, optax.squared_error)
    guarded = wrap(tx)
    state = ft.TrainState.create(params=params, tx=guarded, model_state={})
    step = jax.jit(ft.train_step(supervised, guarded))
    opt_state = tx.init(params)
    for _ in range(4):
        updates, opt_state = tx.update(jax.grad(loss)(params.fast), opt_state, params)
        params = optax.apply_updates(params, updates)
        state, _ = step(state, (X, Y))
    chex.assert_trees_all_close(state.params, params, rtol=1e-5)
    values = ft.evaluate(state, ft.eval_step(supervised), ft.ArrayLoader((X, Y), 8))
    np.testing.assert_allclose(values["loss"], loss(params.slow), rtol=1e-5)
    outputs = ft.predict(state, ft.predict_step(model), ft.ArrayLoader(X, 8))
    np.testing.assert_allclose(outputs, X @ params.slow["w"] + params.slow["b"], rtol=1e-5)
