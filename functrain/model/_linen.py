"""Linen modules as functrain models."""

from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.model._model import Model, ModelOutput
from functrain.model._switches import check_instance, switches


def from_linen(module: nn.Module) -> Model:
    """Makes a model of a linen module.

    Where the module's ``__call__`` takes an argument named `training`, `train`, `deterministic`
    or `use_running_average`, it is given: the last two as ``not training``. A switch that the
    module already holds as a field is left alone, since linen allows one place only.

    Args:
      module: An instance of `flax.linen.Module`, called as ``module(inputs)``: `inputs` is one
        pytree.

    Returns:
      A model. ``init(key, inputs)`` gives the `params` collection, and as model_state a dict of
      all others but `losses` and `intermediates`. ``apply`` moves model_state on in training and
      returns it untouched otherwise. `rng`, a key `key[]`, serves every stream the module asks
      for, as ``module.apply(..., rngs=rng)`` does. What the module sows into `losses`
      (``self.sow("losses", "l2", value)``, each `f32[]`) comes back as ``ModelOutput.losses``.

    Raises:
      TypeError: `module` is no instance of a linen module. From ``apply``:
      ValueError: The module draws random numbers and got no `rng`, sows a loss that is no
        scalar, or was given a model_state without what it keeps.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> class Net(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x, train):
      ...         x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
      ...         return nn.Dropout(0.5, deterministic=not train)(x)
      >>> model = from_linen(Net())
      >>> x = jnp.ones((4, 3))
      >>> params, model_state = model.init(jax.random.key(0), x)
      >>> sorted(params), sorted(model_state)
      (['BatchNorm_0', 'Dense_0'], ['batch_stats'])
      >>> model.apply(params, model_state, x, rng=jax.random.key(1), training=True).outputs.shape
      (4, 8)
    """
    check_instance(module, nn.Module, "flax.linen.Module", "from_nnx", "flax.nnx")

    def init(key: jax.Array, inputs: PyTree, /) -> tuple[PyTree, PyTree]:
        variables = dict(module.init(key, inputs, **_linen_switches(module, False)))
        params = variables.pop("params", {})
        transient = ("losses", "intermediates")  # what one application says, not what it keeps
        return params, {name: c for name, c in variables.items() if name not in transient}

    def apply(
        params: PyTree,
        model_state: PyTree,
        inputs: PyTree,
        /,
        *,
        rng: jax.Array | None = None,
        training: bool = False,
    ) -> ModelOutput:
        kept = dict(model_state)  # () is a dict too: the model_state of a state created without
        try:
            outputs, changed = module.apply(
                {"params": params, **kept},
                inputs,
                rngs=rng,
                mutable=[*(kept if training else ()), "losses"],
                **_linen_switches(module, training),
            )
        except flax.errors.InvalidRngError as error:
            if rng is None:
                raise ValueError(_no_rng(module, training)) from error
            raise
        except (
            flax.errors.ScopeCollectionNotFound,
            flax.errors.ApplyScopeInvalidVariablesStructureError,
        ) as error:
            raise ValueError(_missing(module, params, kept)) from error
        if training and kept:
            model_state = {name: changed.get(name, c) for name, c in kept.items()}
        return ModelOutput(outputs, model_state, _losses(changed.get("losses", {})))

    return Model(init, apply)


def _linen_switches(module: Any, training: bool) -> dict[str, Any]:
    taken = switches(module, training)
    return {name: on for name, on in taken.items() if getattr(module, name, None) is None}


def _no_rng(module: Any, training: bool) -> str:
    how = {
        True: "Create the state with rng=jax.random.key(seed)",
        False: "For an evaluation, eval_step(loss_fn, rng=jax.random.key(seed))",
    }
    return (
        f"{type(module).__name__}: expected rng, one key key[], since the module draws random "
        f"numbers with training={training}; got rng=None. {how[training]}; or pass rng= to apply."
    )


def _missing(module: nn.Module, params: PyTree, model_state: dict[str, PyTree]) -> str:
    got = str(["params"] * bool(params) + sorted(model_state))
    if "params" in params:
        got = f"params that hold collections themselves, {sorted(params)}"
    return (
        f"{type(module).__name__}: expected params and model_state with the collections that init "
        f"returned, got {got}. With (params, model_state) = model.init(key, inputs), "
        "create the state with both: TrainState.create(params=params, model_state=model_state, "
        "tx=tx)."
    )


def _losses(collection: PyTree) -> tuple[jax.Array, ...]:
    for path, leaf in _tree.leaves_with_path(collection):
        if jnp.shape(leaf) != ():
            raise ValueError(
                f"losses/{path}: expected a scalar, f32[], got {_tree.spec(leaf)}. "
                "Reduce it before it is sown, with jnp.sum or jnp.mean."
            )
    return tuple(jax.tree.leaves(collection))
