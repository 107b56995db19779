"""Models from linen modules."""

import functools
from typing import Any

import flax.errors
import flax.linen as nn
import jax
from flax.core import DenyList, unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

from functrain.common._checks import require_instance
from functrain.common._types import PyTree
from functrain.model._call import (
    require_one_input,
    require_own_state,
    restrict_to,
    switches,
    warn_of_other_switch,
)
from functrain.model._model import Model, ModelOutput

# Sown values and perturbations belong to one application, not to the state that the next one
# receives: they are as large as its batch.
_LASTING = DenyList(("losses", "intermediates", "perturbations"))


def from_linen(module: nn.Module) -> Model:
    """Returns a model that applies a linen module.

    If the module's ``__call__`` takes an argument named `training`, `train`, `deterministic` or
    `use_running_average`, `apply` passes it; the last two as ``not training``. An argument that
    the module also has as a field with a value is not passed, since linen accepts it in one place
    only. A module that takes it as ``**kwargs``, or under another name, does not get it; if that
    leaves dropout or batch statistics in the wrong mode, ``apply`` warns.

    Args:
      module: An instance of `flax.linen.Module`, called as ``module(inputs)``: `inputs` is one
        pytree.

    Returns:
      A model. ``init(key, inputs)`` returns the `params` collection, and as model_state a dict of
      all other collections except `losses`, `intermediates` and `perturbations`, and without the
      values that the module sows, which belong to one batch. ``apply`` updates model_state in
      training and returns it unchanged otherwise. `rng`, a key `key[]`, serves every random stream
      of the module, as ``module.apply(..., rngs=rng)`` does. The values that the module sows into
      `losses` (``self.sow("losses", "l2", value)``, each `f32[]`) are ``ModelOutput.losses``.

    Raises:
      TypeError: `module` is not an instance of a linen module, or cannot be called with one
        argument.
      ValueError: (from ``apply``) `model_state` is that of a model of `freeze` or `lora`.
      flax.errors.FlaxError: (from ``apply``) the module draws random numbers but `rng` is None, or
        `model_state` lacks a collection of the module.

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
    require_one_input(module, list(_linen_switches(module, False)))

    def init(key: jax.Array, inputs: PyTree, /) -> tuple[PyTree, PyTree]:
        mode = _linen_switches(module, False)
        # flax returns FrozenDicts if it is configured to.
        variables = unfreeze(module.init(key, inputs, mutable=_LASTING, **mode))
        params = variables.pop("params", {})
        flat = flatten_dict(variables)
        # A value that is sown into another collection is a tuple, as a variable may be. Only the
        # former grows when the module is applied again.
        if any(isinstance(x, tuple) for x in flat.values()):
            mode |= {"rngs": key, "mutable": list(variables)}
            whole = {"params": params, **variables}
            _, updated = jax.eval_shape(lambda: module.apply(whole, inputs, **mode))
            later = flatten_dict(unfreeze(updated))
            flat = {path: x for path, x in flat.items() if not _is_sown(x, later.get(path, x))}
        model_state = unflatten_dict(flat)
        return params, model_state

    def apply(
        params: PyTree, model_state: PyTree, inputs: PyTree, rng: Any = None, training: bool = False
    ) -> ModelOutput:
        require_own_state(model_state)
        # A state that was created without a model_state has () there, and dict(()) is {}.
        collections = dict(model_state)
        variables = {"params": params, **collections}
        trains = functools.partial(_trains, module, variables, inputs)
        warn_of_other_switch(module, training, trains)
        try:
            outputs, updated = module.apply(
                variables,
                inputs,
                rngs=rng,
                # linen silently drops values that are sown into a collection that is not mutable.
                mutable=[*(collections if training else ()), "losses"],
                **_linen_switches(module, training),
            )
        except flax.errors.ScopeCollectionNotFound as error:
            error.add_note(
                f"The model_state has {sorted(collections)}. Pass that of model.init(key, inputs) "
                "to TrainState.create(params=params, model_state=model_state, tx=tx)."
            )
            raise
        losses = updated.get("losses", {})
        if training and collections:
            # Variables that the module creates in this call are dropped: the structure of
            # model_state must stay the same from step to step.
            model_state = restrict_to(model_state, updated)
        return ModelOutput(outputs, model_state, tuple(jax.tree.leaves(losses)))

    return Model(init, apply)


def _is_sown(old: PyTree, new: PyTree) -> bool:
    return isinstance(old, tuple) and len(new) > len(old)


def _trains(module: nn.Module, variables: PyTree, inputs: PyTree, **flags: Any) -> bool:
    """Returns True if a module, called with these flags, drops values or updates its state."""
    # A flag may also add a variable, such as the cache of a decoder, which is no training.
    mutable = DenyList(tuple(variables))
    try:
        jax.eval_shape(lambda: module.apply(variables, inputs, mutable=mutable, **flags))
    except flax.errors.ModifyScopeVariableError:
        return True
    except flax.errors.InvalidRngError as error:
        # It names the layer and the stream. A model that samples draws from other streams.
        return "drop" in str(error).lower()
    except Exception:
        # A flag of another kind may need other arguments. The call itself raises errors.
        return False
    return False


def _linen_switches(module: Any, training: bool) -> dict[str, Any]:
    """Returns the switches to pass: those that are not already set as fields of the module."""
    values = switches(module, training)
    return {name: x for name, x in values.items() if getattr(module, name, None) is None}
