"""Linen modules as functrain models."""

from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._checks import require, require_instance
from functrain.common._types import PyTree
from functrain.model._model import Model, ModelOutput
from functrain.model._switches import switches


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
    advice = "Construct it first, as in Net(...); for a module of flax.nnx use from_nnx."
    require_instance("module", module, nn.Module, "an instance of flax.linen.Module", advice)

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


def _no_rng(module: nn.Module, training: bool) -> str:
    maker = "TrainState.create" if training else "eval_step"
    return (
        f"{type(module).__name__}: expected a key, since the module draws random numbers with "
        f"training={training}, got rng=None. Give rng=jax.random.key(seed) to {maker}, or to apply."
    )


def _missing(module: nn.Module, params: PyTree, model_state: dict[str, PyTree]) -> str:
    got = f"params {sorted(params)} and model_state {sorted(model_state)}"
    return (
        f"{type(module).__name__}: expected the collections that init returned, got {got}. With "
        "params, model_state = model.init(key, inputs), create the state with both: "
        "TrainState.create(params=params, model_state=model_state, tx=tx)."
    )


def _losses(collection: PyTree) -> tuple[jax.Array, ...]:
    for path, leaf in _tree.leaves_with_path(collection):
        advice = "Reduce it before it is sown, with jnp.sum or jnp.mean."
        require(jnp.shape(leaf) == (), f"losses/{path}", "a scalar, f32[]", leaf, advice)
    return tuple(jax.tree.leaves(collection))
