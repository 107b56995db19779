"""Models from Equinox modules."""

from typing import TYPE_CHECKING, Any

import jax

from functrain.common import _tree
from functrain.common._arguments import accepts, parameters
from functrain.common._checks import require, require_instance
from functrain.common._library import import_optional
from functrain.common._types import PyTree
from functrain.model._freeze import wrapped_state_advice
from functrain.model._model import Model, ModelOutput

if TYPE_CHECKING:
    import equinox as eqx


def from_equinox(
    module: "eqx.Module", state: "eqx.nn.State | None" = None, *, axis_name: str | None = "batch"
) -> Model:
    """Returns a model that applies an Equinox module. The module itself never changes.

    Equinox modules compute one example. ``apply`` maps the module over the leading axis of its
    inputs with `jax.vmap`, and sets it to training or inference mode with
    ``equinox.nn.inference_mode``, which overrides a mode set by hand.

    Args:
      module: A module that is called as ``module(x)``, where `x` is one pytree; as
        ``module(x, state)`` if it has a state. If its ``__call__`` has a parameter `key`, it gets a
        key of its own for each example, or None if ``apply`` gets no `rng`.
      state: The state from ``equinox.nn.make_with_state``, for modules that have one.
      axis_name: The name of the axis that is mapped, for layers that compute over the batch, such
        as ``equinox.nn.BatchNorm(size, axis_name="batch")``. None calls the module with the whole
        batch, and does not map it.

    Returns:
      A model. ``init(key, inputs)`` uses neither argument: it returns copies of the current arrays.
      params is the module with its floating-point and complex arrays, and None for everything else.
      `TrainState.create` refuses complex ones; `freeze` makes them constants.
      model_state is ``{"arrays": the module with its other arrays, "state": state}``. After a
      training, ``equinox.combine(state.params, module)`` is the trained module, and
      ``state.model_state["state"]`` its state.

    Raises:
      TypeError: `module` is not an instance of an Equinox module, or `state` is not a state, or is
        missing for a module that takes one.
      ImportError: Equinox is not installed.
      ValueError: (from ``apply``) `model_state` is not that of this model.

    Examples:
      >>> import equinox as eqx, jax, jax.numpy as jnp
      >>> model = from_equinox(eqx.nn.MLP(3, 2, width_size=8, depth=1, key=jax.random.key(0)))
      >>> x = jnp.ones((4, 3))
      >>> params, model_state = model.init(jax.random.key(0), x)
      >>> jax.tree.map(jnp.shape, params.layers[0].weight)
      (8, 3)
      >>> model.apply(params, model_state, x, training=True).outputs.shape
      (4, 2)
    """
    eqx = import_optional("equinox", "from_equinox needs Equinox: pip install equinox")
    advice = "Construct it first, as in Net(key)."
    require_instance("module", module, eqx.Module, "an instance of equinox.Module", advice)
    if state is not None:
        advice = "module, state = equinox.nn.make_with_state(Net)(key) makes both."
        require_instance("state", state, eqx.nn.State, "an equinox.nn.State", advice)
    elif not accepts(module, 1) and accepts(module, 2):
        raise TypeError(
            "state: expected the state of a module that is called as module(x, state), got None. "
            "Make both with module, state = equinox.nn.make_with_state(Net)(key)."
        )
    params, rest = eqx.partition(module, eqx.is_inexact_array)
    arrays, static = eqx.partition(rest, eqx.is_array)
    takes_key = "key" in parameters(module)

    def init(key: jax.Array, inputs: PyTree, /) -> tuple[PyTree, PyTree]:
        # Copies, since a step may donate them, and the module must keep its own arrays.
        return _tree.copy(params), _tree.copy({"arrays": arrays, "state": state})

    def apply(
        params: PyTree,
        model_state: PyTree,
        inputs: PyTree,
        /,
        *,
        rng: jax.Array | None = None,
        training: bool = False,
    ) -> ModelOutput:
        is_own = isinstance(model_state, dict) and model_state.keys() == {"arrays", "state"}
        advice = wrapped_state_advice(model_state) or "Take it from init."
        require(is_own, "model_state", "{'arrays': ..., 'state': ...}", model_state, advice)
        whole = eqx.combine(params, model_state["arrays"], static)
        whole = eqx.nn.inference_mode(whole, value=not training)

        def call(x: PyTree, state: PyTree, key: jax.Array | None) -> tuple[PyTree, PyTree]:
            options: dict[str, Any] = {"key": key} if takes_key else {}
            if state is None:
                return whole(x, **options), None
            outputs, new_state = whole(x, state, **options)
            return outputs, new_state

        # Equinox allows each State object to be updated once, so that a copy is updated.
        old_state = jax.tree.map(lambda x: x, model_state["state"])
        if axis_name is None:
            outputs, new_state = call(inputs, old_state, rng)
        else:
            keys = _split_over_batch(rng, inputs) if takes_key else None
            mapped = jax.vmap(
                call,
                in_axes=(0, None, None if keys is None else 0),
                out_axes=(0, None),
                axis_name=axis_name,
            )
            outputs, new_state = mapped(inputs, old_state, keys)
        return ModelOutput(outputs, {**model_state, "state": new_state})

    return Model(init, apply)


def _split_over_batch(rng: jax.Array | None, inputs: PyTree) -> jax.Array | None:
    """Returns a key for each example, `key[B]`; None without `rng`."""
    return None if rng is None else jax.random.split(rng, len(jax.tree.leaves(inputs)[0]))
