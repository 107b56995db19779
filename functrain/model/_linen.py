"""Models from linen modules."""

from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import unfreeze
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from functrain.common import _tree
from functrain.common._checks import require, require_instance
from functrain.common._types import PyTree
from functrain.model._call import require_one_input, restrict_to, switches
from functrain.model._freeze import wrapped_state_advice
from functrain.model._model import Model, ModelOutput
from functrain.model._overwritten import OverwrittenByGradient


def from_linen(module: nn.Module) -> Model:
    """Returns a model that applies a linen module.

    If the module's ``__call__`` takes an argument named `training`, `train`, `deterministic` or
    `use_running_average`, `apply` passes it; the last two as ``not training``. An argument that
    the module also has as a field with a value is not passed, since linen accepts it in one place
    only. A module that takes it as ``**kwargs`` does not get it: name the argument.

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
        argument; the error shows a wrapper.
      ValueError: (from ``apply``) the module draws random numbers but `rng` is None, it sows a
        loss that is not a scalar, or `model_state` lacks a collection of the module.

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
    require_one_input(module, "nn.Module", list(_linen_switches(module, False)))

    def init(key: jax.Array, inputs: PyTree, /) -> tuple[PyTree, PyTree]:
        mode = _linen_switches(module, False)
        # flax returns FrozenDicts if it is configured to.
        variables = unfreeze(module.init(key, inputs, **mode))
        # Sown values and perturbations belong to one application, not to the state that the next
        # one receives: they are as large as its batch.
        for name in ("losses", "intermediates", "perturbations"):
            variables.pop(name, None)
        collections = {name: x for name, x in variables.items() if name != "params"}
        # A value that is sown into another collection is a tuple, as a variable may be. Only the
        # former grows when the module is applied again.
        if any(isinstance(x, tuple) for x in jax.tree.leaves(collections, is_leaf=_is_tuple)):
            _, collections = jax.eval_shape(
                lambda: module.apply(variables, inputs, rngs=key, mutable=list(collections), **mode)
            )
        params = variables.pop("params", {})
        model_state = _without_grown(variables, unfreeze(collections))
        if OVERWRITE_WITH_GRADIENT in model_state:
            scales = model_state[OVERWRITE_WITH_GRADIENT]
            model_state[OVERWRITE_WITH_GRADIENT] = OverwrittenByGradient(scales)
        return params, model_state

    def apply(
        params: PyTree,
        model_state: PyTree,
        inputs: PyTree,
        /,
        *,
        rng: jax.Array | None = None,
        training: bool = False,
    ) -> ModelOutput:
        # A state that was created without a model_state has () there, and dict(()) is {}.
        collections = dict(model_state)
        scales = collections.get(OVERWRITE_WITH_GRADIENT, OverwrittenByGradient())
        advice = "Take the model_state from init of this Model, and replace its leaves."
        is_marked = isinstance(scales, OverwrittenByGradient)
        name = f"model_state/{OVERWRITE_WITH_GRADIENT}"
        require(is_marked, name, "the float8 scales that init returned", scales, advice)
        try:
            outputs, updated = module.apply(
                {"params": params, **collections},
                inputs,
                rngs=rng,
                # linen silently drops values that are sown into a collection that is not mutable.
                mutable=[*(collections if training else ()), "losses"],
                **_linen_switches(module, training),
            )
        except flax.errors.ModifyScopeVariableError as error:
            if not training:
                error.add_note(
                    "With training=False, as in evaluation, model_state stays as it is. Update the "
                    "variable only where its collection is mutable, which "
                    "self.is_mutable_collection(name) tells."
                )
            raise
        except flax.errors.InvalidRngError as error:
            # With an rng, every stream has a key, and the error has another cause.
            if rng is None:
                raise ValueError(_missing_rng_message(module, training)) from error
            raise
        except (
            flax.errors.ScopeCollectionNotFound,
            flax.errors.ApplyScopeInvalidVariablesStructureError,
        ) as error:
            raise ValueError(_missing_collection_message(module, params, collections)) from error
        except Exception as error:
            # flax takes the parts of such a model_state for collections, and fails in many ways.
            if advice := wrapped_state_advice(collections):
                expected = f"the collections that init returned, got {sorted(collections)}"
                raise ValueError(f"model_state: expected {expected}. {advice}") from error
            raise
        losses = _flatten_losses(updated.get("losses", {}))
        if training and collections:
            # Variables that the module creates in this call are dropped: the structure of
            # model_state must stay the same from step to step.
            # A call reads the scales of float8, and the step replaces them.
            model_state = restrict_to(model_state, {**updated, OVERWRITE_WITH_GRADIENT: scales})
        return ModelOutput(outputs, model_state, losses)

    return Model(init, apply)


def _without_grown(old: PyTree, new: PyTree) -> PyTree:
    """Returns a nested dict without the tuples that are longer in `new`; drops empty dicts."""
    kept = {}
    for name, x in old.items():
        below = new.get(name, x)
        if isinstance(x, dict) and x:
            if rest := _without_grown(x, below):
                kept[name] = rest
        elif not (isinstance(x, tuple) and isinstance(below, tuple) and len(x) < len(below)):
            kept[name] = x
    return kept


def _is_tuple(x: PyTree) -> bool:
    return isinstance(x, tuple)


def _linen_switches(module: Any, training: bool) -> dict[str, Any]:
    """Returns the switches to pass: those that are not already set as fields of the module."""
    values = switches(module, training)
    return {name: x for name, x in values.items() if getattr(module, name, None) is None}


def _missing_rng_message(module: nn.Module, training: bool) -> str:
    function = "TrainState.create" if training else "eval_step"
    return (
        f"{type(module).__name__}: expected a key, since the module draws random numbers with "
        f"training={training}, got rng=None. Pass rng=jax.random.key(seed) to {function}, or to "
        "apply."
    )


def _missing_collection_message(
    module: nn.Module, params: PyTree, model_state: dict[str, PyTree]
) -> str:
    got = f"params {sorted(params)} and model_state {sorted(model_state)}"
    return (
        f"{type(module).__name__}: expected the collections that init returned, got {got}. With "
        "params, model_state = model.init(key, inputs), create the state with both: "
        "TrainState.create(params=params, model_state=model_state, tx=tx)."
    )


def _flatten_losses(collection: PyTree) -> tuple[jax.Array, ...]:
    """Returns the sown losses as a tuple.

    Raises:
      ValueError: A loss is not a scalar.
    """
    for path, leaf in _tree.leaves_with_path(collection):
        advice = "Reduce it with jnp.sum or jnp.mean before self.sow."
        require(jnp.shape(leaf) == (), f"losses/{path}", "a scalar, float32[]", leaf, advice)
    return tuple(jax.tree.leaves(collection))
