"""Every transformation of optax in a training step, compared with optax by hand."""

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


# Transformations that cannot be made with a learning rate, or with no arguments.
MADE: dict[str, Callable[[], Any]] = {
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.05), 2),
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_decayed_weights": lambda: optax.chain(optax.add_decayed_weights(0.1, is_matrix), SGD),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, KEY), SGD),
    "apply_every": lambda: optax.chain(SGD, optax.apply_every(2)),
    "apply_if_finite": lambda: optax.apply_if_finite(SGD, 3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05)),
    "clip": lambda: optax.chain(optax.clip(0.1), SGD),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.1), SGD),
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), SGD),
    "conditionally_mask": lambda: optax.conditionally_mask(SGD, lambda step: step > 1),
    "conditionally_transform": lambda: optax.conditionally_transform(SGD, lambda step: step > 1),
    "ema": lambda: optax.chain(optax.ema(0.9), SGD),
    "flatten": lambda: optax.flatten(SGD),
    "freeze": lambda: optax.chain(SGD, optax.freeze({"w": True, "b": False})),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.05),
    "keep_params_nonnegative": lambda: optax.chain(SGD, optax.keep_params_nonnegative()),
    "masked": lambda: optax.masked(SGD, is_matrix),
    "mechanize": lambda: C.mechanize(SGD),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(0.05), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}
    ),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("sgd", SGD)),
    "noisy_sgd": lambda: optax.noisy_sgd(0.05, key=KEY),
    "partition": lambda: optax.partition({True: SGD, False: optax.adam(0.05)}, is_matrix),
    "reduce_on_plateau": lambda: optax.chain(SGD, C.reduce_on_plateau(patience=1, rtol=0.5)),
    "sam": lambda: C.sam(SGD, optax.chain(C.normalize(), optax.sgd(0.05))),
    "sam, opaque": lambda: C.sam(
        SGD, optax.chain(C.normalize(), optax.sgd(0.05)), opaque_mode=True
    ),
    "scale": lambda: optax.chain(SGD, optax.scale(0.5)),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5, store_grad=True)
    ),
    "scale_by_galore": lambda: C.scale_by_galore(rank=2),
    "scale_by_learning_rate": lambda: optax.scale_by_learning_rate(0.05),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda count: -0.1 / (count + 1)),
    "scale_by_trust_ratio": lambda: optax.chain(optax.scale_by_trust_ratio(), SGD),
    "scale_by_zoom_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_zoom_linesearch(5)
    ),
    "schedule_free": lambda: C.schedule_free(SGD, 0.05),
    "selective_transform": lambda: optax.selective_transform(
        SGD, freeze_mask={"w": True, "b": False}
    ),
    "snapshot": lambda: optax.chain(optax.snapshot("norm", optax.tree.norm), SGD),
    "split_real_and_imaginary": lambda: C.split_real_and_imaginary(SGD),
    "stateless": lambda: optax.stateless(lambda g, p: jax.tree.map(lambda x: -0.1 * x, g)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: -0.1 * g - p),
    "trace": lambda: optax.chain(optax.trace(0.9), optax.scale(-0.1)),
    "jitted": lambda: optax.GradientTransformation(
        SGD.init, jax.jit(lambda grads, state, params=None: SGD.update(grads, state, params))
    ),
    "with_extra_args_support": lambda: optax.with_extra_args_support(SGD),
    # In MultiSteps, whose class optax does not recognize as one that takes keywords.
    "MultiSteps of lbfgs": lambda: optax.MultiSteps(optax.lbfgs(), 2),
    "MultiSteps of polyak_sgd": lambda: optax.MultiSteps(optax.polyak_sgd(), 2),
    "MultiSteps of reduce_on_plateau": lambda: optax.MultiSteps(
        optax.chain(SGD, C.reduce_on_plateau(patience=1, rtol=0.5)), 2
    ),
    "MultiSteps of sam": lambda: optax.MultiSteps(C.sam(SGD, optax.sgd(0.05), opaque_mode=True), 2),
    "MultiSteps of sophia": lambda: optax.MultiSteps(C.sophia(0.05), 2),
}
# Functions that make no optimizer: of numbers, schedules, losses, or for gradients of each example.
# The state of `monitor` gets another structure in its first update, so that no loop can carry it;
# `scale_by_muon` needs the dimensions that `muon` finds, `lookahead` has a test of its own.
OTHERS = {
    "global_norm", "init_empty_state", "matrix_inverse_pth_root", "microbatch", "monitor",
    "measure_with_ema", "multi_normal", "scale_by_muon", "nnls", "per_example_global_norm_clip",
    "per_example_layer_norm_clip", "periodic_update", "power_iteration", "scale_gradient",
    "skip_large_updates", "skip_not_finite", "tree_map_params", "value_and_grad_from_state",
    "apply_updates", "incremental_update", "lookahead", "optimistic_adam",
    "inject_stateful_hyperparams",  # deprecated
    "differentially_private_aggregate", "dpsgd", "schedule_free_eval_params",
}  # fmt: skip


def is_optimizer(name: str, function: Any) -> bool:
    if (
        name.startswith(("_", "safe_", "update_"))
        or name in OTHERS
        or not inspect.isfunction(function)
    ):
        return False
    module = function.__module__
    return not ("schedules" in module or "losses" in module or module.endswith("._schedule"))


def make(name: str) -> Any:
    if name in MADE:
        return MADE[name]()
    function = getattr(optax, name, None) or getattr(C, name)
    takes_rate = "learning_rate" in inspect.signature(function).parameters
    return function(learning_rate=0.05) if takes_rate else function()


NAMES = sorted(
    {
        name
        for module in (optax, C)
        for name, function in vars(module).items()
        if is_optimizer(name, function)
    }
    | MADE.keys()
)


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
    expected = by_hand(tx, name)
    # Only the order of sums may differ.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), state.params, expected
    )


@pytest.mark.parametrize("name", ["polyak_sgd", "MultiSteps of sam", "MultiSteps of polyak_sgd"])
def test_guards_and_groups_pass_the_keywords_on(name: str) -> None:
    for wrap in (ft.tx.skip_non_finite, lambda tx: ft.tx.param_groups({"**": tx})):
        tx = wrap(make(name))
        step = jax.jit(ft.train_step(loss_fn, tx))
        state = ft.TrainState.create(params=PARAMS, tx=tx)
        for _ in range(4):
            state, _ = step(state, (X, Y))
        expected = by_hand(make(name), name)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
            state.params,
            expected,
        )


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
