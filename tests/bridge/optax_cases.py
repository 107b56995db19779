"""Every optimizer that optax has, and a small model trained by them: in Keras, and by hand."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import optax.contrib
from keras import layers

C = optax.contrib
X = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(32, 2)).astype(np.float32)

NOT_OPTIMIZERS = {  # pieces, wrappers and clippings; a few are among the cases below
    "chain", "named_chain", "identity", "set_to_zero", "keep_params_nonnegative", "zero_nans",
    "centralize", "add_decayed_weights", "apply_every", "normalize_by_update_norm", "masked",
    "normalize", "reduce_on_plateau", "inject_hyperparams", "inject_stateful_hyperparams", "trace",
    "multi_transform", "partition", "flatten", "freeze", "ema", "snapshot", "stateless",
    "stateless_with_tree_map", "with_extra_args_support", "clip", "clip_by_block_rms",
    "clip_by_global_norm", "adaptive_grad_clip", "add_noise", "apply_if_finite",
    "conditionally_mask", "conditionally_transform", "measure_with_ema", "lookahead",
    "selective_transform", "differentially_private_aggregate", "scale",
    "dpsgd",  # takes the gradients of single examples
    "optimistic_adam",  # deprecated for optimistic_adam_v2
}  # fmt: skip
SGD = optax.sgd(1e-2, momentum=0.9)


def by_layer(params: Any) -> Any:
    """Labels each param by its layer, `a` or `b`, in a model or alone."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-2].key, params)


COMPOSED: dict[str, Callable[[], Any]] = {
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 6)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.set_to_zero()}, by_layer
    ),
    "masked": lambda: optax.chain(
        SGD, optax.add_decayed_weights(0.1, lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 3),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "apply_if_finite": lambda: optax.apply_if_finite(SGD, 3),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), SGD),
    "flatten": lambda: optax.flatten(SGD),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(1)),
    "mechanize": lambda: C.mechanize(SGD),
    "sam": lambda: C.sam(SGD, optax.chain(C.normalize(), optax.sgd(0.05))),
    "schedule_free": lambda: C.schedule_free(SGD, 1e-2),
    "split_real_and_imaginary": lambda: C.split_real_and_imaginary(SGD),
    "low-precision momentum": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
}
MORE = {"polyak_sgd", "momo", "momo_adam", "sophia", "lbfgs"}  # need more than gradients
QUICK = {"adamw", "multi_transform", "MultiSteps", "prodigy"}


def optimizers() -> dict[str, Callable[[], Any]]:
    """Every function of optax and optax.contrib that makes an optimizer, with its defaults."""
    found: dict[str, Callable[[], Any]] = dict(COMPOSED)
    for module in (optax, C):
        for name, function in vars(module).items():
            left_out = name in NOT_OPTIMIZERS | MORE or name in COMPOSED
            if left_out or not inspect.isfunction(function) or name.startswith(("_", "scale_by_")):
                continue
            signature = inspect.signature(function)
            if "GradientTransformation" in str(signature.return_annotation):
                needs_rate = "learning_rate" in signature.parameters
                arguments = {"learning_rate": 1e-2} if needs_rate else {}
                found[name] = lambda f=function, a=arguments: f(**a)
    return found


ALL = optimizers()


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, "relu", name="a")(inputs)
    # A Functional model, whose paths begin with its layers, as in `by_hand`.
    return keras.Model(inputs, layers.Dense(2, name="b")(hidden))


def fitted(optimizer: Any, fit: Any = keras.Model.fit) -> keras.Model:
    model = make_model()
    model.compile(optimizer, "mse")
    fit(model, X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return model


def by_hand(tx: Any) -> tuple[Any, Any]:
    """The same 8 steps, in jax and optax alone."""
    model = make_model()
    variables = model.trainable_variables
    keys = [tuple(v.path.split("/")[-2:]) for v in variables]

    def loss(params: Any, x: Any, y: Any) -> Any:
        values = [params[layer][name] for layer, name in keys]
        outputs, _ = model.stateless_call(values, [], x)
        return jnp.mean(jnp.mean((y - outputs) ** 2, -1))

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    params: Any = {"a": {}, "b": {}}
    for (layer, name), v in zip(keys, variables, strict=True):
        params[layer][name] = v.value
    state = tx.init(params)
    for i in range(8):
        rows = slice(i % 4 * 8, i % 4 * 8 + 8)
        params, state = step(params, state, X[rows], Y[rows])
    return [params[layer][name] for layer, name in keys], state


def same(a: Any, b: Any) -> bool:
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for tree in (a, b)
        for x in map(jnp.asarray, jax.tree.leaves(tree))
    ]
    half = len(leaves) // 2
    return all(map(np.array_equal, leaves[:half], leaves[half:]))
