"""Models from Equinox modules."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._arguments import parameters
from functrain.common._checks import require_instance
from functrain.common._library import import_optional
from functrain.common._types import PyTree
from functrain.model._call import require_maker, require_one_input, require_own_state
from functrain.model._model import Model, ModelOutput

if TYPE_CHECKING:
    import equinox as eqx


def from_equinox(
    module: "eqx.Module | Callable[[jax.Array], Any]",
    state: "eqx.nn.State | None" = None,
    *,
    axis_name: str | None = "batch",
) -> Model:
    """Returns a model that applies an Equinox module. The module itself never changes.

    Equinox modules compute one example. ``apply`` maps the module over the leading axis of its
    inputs with `jax.vmap`, and sets it to training or inference mode with
    ``equinox.nn.inference_mode``, which overrides a mode set by hand.

    Args:
      module: A function that makes a module of a key, ``lambda key: Net(key)``, or the pair
        ``equinox.nn.make_with_state(Net)(key)``; or a module, whose values the model starts from.
        The module is called as ``module(x)``, where `x` is one pytree; as
        ``module(x, state)`` if it has a state. If its ``__call__`` has a parameter `key`, it gets a
        key of its own for each example, or None if ``apply`` gets no `rng`.
      state: The state from ``equinox.nn.make_with_state``, if `module` is a module that has one.
      axis_name: The name of the axis that is mapped, for layers that compute over the batch, such
        as ``equinox.nn.BatchNorm(size, axis_name="batch")``. None calls the module with the whole
        batch, and does not map it.

    Returns:
      A model. ``init(key, inputs)`` calls a function with its key. For a module it returns copies
      of the current arrays, the same for every key. params is the module with its floating-point
      and complex arrays, and None for everything else. `TrainState.create` refuses complex ones;
      `freeze` makes them constants.
      model_state is ``{"arrays": the module with its other arrays, "state": state}``. After a
      training, ``equinox.combine(state.params, module)`` is the trained module, and
      ``state.model_state["state"]`` its state.

    Raises:
      TypeError: `module` is neither an Equinox module nor a function that returns one, it cannot be
        called with one argument, or `state` is not a state, or is missing for a module that takes
        one. Raised by `init` and `apply` for a function.
      ImportError: Equinox is not installed.
      ValueError: (from ``apply``) `model_state` is that of a model of `freeze` or `lora`.

    Examples:
      >>> import equinox as eqx, jax, jax.numpy as jnp
      >>> model = from_equinox(lambda key: eqx.nn.MLP(3, 2, width_size=8, depth=1, key=key))
      >>> x = jnp.ones((4, 3))
      >>> params, model_state = model.init(jax.random.key(0), x)
      >>> jax.tree.map(jnp.shape, params.layers[0].weight)
      (8, 3)
      >>> model.apply(params, model_state, x, training=True).outputs.shape
      (4, 2)
    """
    eqx = import_optional("equinox", "from_equinox needs Equinox: pip install equinox")
    is_instance = isinstance(module, eqx.Module)
    expected = "an instance of equinox.Module, or a function that makes one of a key"
    if not is_instance:
        require_maker(module, expected, "equinox")
    with_state = "module, state = equinox.nn.make_with_state(Net)(key) makes both."
    if state is not None:
        require_instance("state", state, eqx.nn.State, "an equinox.nn.State", with_state)

    def make(key: Any) -> tuple[Any, Any]:
        function: Any = module
        parts = (module, state) if is_instance else function(key)
        # A function may return a module with its state.
        instance, instance_state = parts if isinstance(parts, tuple) else (parts, state)
        require_instance("module", instance, eqx.Module, expected)
        if instance_state is None:
            advice = f"If it has a state: {with_state} Otherwise: "
            require_one_input(instance, ["key"] if "key" in parameters(instance) else [], advice)
        return instance, instance_state

    def split(instance: Any, state: Any) -> tuple[PyTree, PyTree, PyTree]:
        """Returns params, model_state, and everything else of a module."""
        params, rest = eqx.partition(instance, _is_inexact)
        arrays, static = eqx.partition(rest, _tree.is_array)
        return params, {"arrays": arrays, "state": state}, static

    @functools.cache
    def structure() -> tuple[PyTree, PyTree, PyTree]:
        """Returns the result of `split` with shapes for arrays."""
        # A function gives new objects in each call (StateIndex, lambdas), which are not equal.
        # Those of one module are used for all.
        return split(*eqx.filter_eval_shape(make, jax.random.key(0)))

    if is_instance:
        structure()

    def init(key: jax.Array, inputs: PyTree, /) -> tuple[PyTree, PyTree]:
        *like, _ = structure()
        params, model_state, _ = split(*make(key))
        # Copies, since a step may donate them, and the module must keep its own arrays.
        arrays = _tree.copy(jax.tree.leaves((params, model_state)))
        initial: tuple[PyTree, PyTree] = jax.tree.unflatten(jax.tree.structure(tuple(like)), arrays)
        return initial

    def apply(
        params: PyTree, model_state: PyTree, inputs: PyTree, rng: Any = None, training: bool = False
    ) -> ModelOutput:
        require_own_state(model_state)
        _, _, static = structure()
        combined = eqx.combine(params, model_state["arrays"], static)
        combined = eqx.nn.inference_mode(combined, value=not training)
        takes_key = "key" in parameters(combined)

        def run(x: PyTree, state: PyTree, key: jax.Array | None) -> tuple[PyTree, PyTree]:
            options: dict[str, Any] = {"key": key} if takes_key else {}
            if state is None:
                return combined(x, **options), None
            outputs, new_state = combined(x, state, **options)
            return outputs, new_state

        keys = rng
        if axis_name is not None:
            run = jax.vmap(run, in_axes=(0, None, 0), out_axes=(0, None), axis_name=axis_name)
            if rng is not None:
                keys = jax.random.split(rng, len(jax.tree.leaves(inputs)[0]))
        # Equinox allows each State object to be updated once, so that a copy is updated.
        old_state = jax.tree.map(lambda x: x, model_state["state"])
        outputs, new_state = run(inputs, old_state, keys)
        return ModelOutput(outputs, {**model_state, "state": new_state})

    return Model(init, apply)


def _is_inexact(x: Any) -> bool:
    return _tree.is_array(x) and bool(jnp.issubdtype(x.dtype, jnp.inexact))
