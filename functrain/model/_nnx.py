"""Models from nnx modules."""

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._checks import require_instance, require_no_problems
from functrain.common._types import PyTree
from functrain.model._call import (
    require_maker,
    require_one_input,
    require_own_state,
    restrict_to,
    switches,
    warn_of_other_switch,
)
from functrain.model._model import Model, ModelOutput

if TYPE_CHECKING:
    from flax import nnx


def from_nnx(module: "nnx.Module | Callable[[nnx.Rngs], Any]") -> Model:
    """Returns a model that applies an nnx module. The module itself never changes.

    ``apply`` builds a copy of the module from `params` and `model_state`, and sets the copy to
    ``module.train()`` or ``module.eval()`` mode, which overrides a mode set by hand. If the
    module's ``__call__`` takes an argument named `training`, `train`, `deterministic` or
    `use_running_average`, `apply` passes it as well. If one of another name keeps the copy from
    drawing numbers and updating its state in training, ``apply`` warns.

    Args:
      module: A function that makes a module of random streams, ``lambda rngs: Net(rngs=rngs)``; or
        an instance of `flax.nnx.Module`, whose values the model starts from. The module is called
        as ``module(inputs)``: `inputs` is one pytree.

    Returns:
      A model. ``init(key, inputs)`` returns the values of a module as nested dicts of arrays. It
      calls a function with ``nnx.Rngs(key)``. For an instance it returns copies of the current
      values, the same for every key. params has every `nnx.Param`; model_state has
      everything else (batch statistics, random streams). In ``apply``, with ``rng=None`` the module
      draws from its own random streams, which are part of model_state and advance. With a key
      `key[]`, every stream is seeded with a different key derived from it, and the streams in
      model_state are returned unchanged. Variables that a call creates (`sow`) are dropped; losses
      are ().

    Raises:
      TypeError: `module` is neither an nnx module nor a function that returns one, it holds a value
        that is not an array, or it cannot be called with one argument. Raised by `init` and `apply`
        for a function.
      ValueError: (from ``apply``) params or model_state does not have the structure that ``init``
        returned.

    Examples:
      >>> from flax import nnx
      >>> import jax, jax.numpy as jnp
      >>> def make(rngs):
      ...     return nnx.Sequential(nnx.Linear(3, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs))
      >>> model = from_nnx(make)
      >>> x = jnp.ones((4, 3))
      >>> params, model_state = model.init(jax.random.key(0), x)
      >>> jax.tree.map(jnp.shape, model_state)
      {'layers': {1: {'mean': (8,), 'var': (8,)}}}
      >>> model.apply(params, model_state, x, training=True).outputs.shape
      (4, 8)
    """
    # Imported here, since importing functrain must not import flax.nnx (see tests/test_house.py):
    # users of linen would wait for it.
    from flax import nnx

    is_instance = isinstance(module, nnx.Module)
    expected = "an instance of flax.nnx.Module, or a function that makes one of nnx.Rngs"
    if not is_instance:
        require_maker(module, expected, "flax.nnx")

    def make(key: Any) -> Any:
        instance: Any = module if is_instance else module(nnx.Rngs(key))
        require_instance("module", instance, nnx.Module, expected)
        require_one_input(instance, list(switches(instance, False)))
        # Earlier calls may have left sown values, which grow with each call.
        instance = nnx.clone(instance)
        nnx.pop(instance, nnx.Intermediate)
        return instance

    @functools.cache
    def structure() -> tuple[Any, PyTree, PyTree]:
        """Returns the graph of the module, and the shapes of its params and other variables."""
        # Not traced: nnx (0.12.8) takes traced arrays among the attributes for constants.
        with jax.ensure_compile_time_eval():
            graphdef, *states = nnx.split(make(jax.random.key(0)), nnx.Param, ...)
        # Shapes only: the module may get other values later, and a closure over values would keep
        # the old ones alive. `_tree.copy` raises TypeError here for values that are not arrays.
        params, rest = (jax.eval_shape(_tree.copy, state) for state in states)
        return graphdef, params, rest

    if is_instance:
        structure()

    def init(key: jax.Array, inputs: PyTree, /) -> tuple[PyTree, PyTree]:
        instance = make(key)
        params = nnx.to_pure_dict(nnx.state(instance, nnx.Param))
        model_state = nnx.to_pure_dict(nnx.state(instance, nnx.Not(nnx.Param)))
        # Copies, since a step may donate them, and the module must keep its own values.
        return _tree.copy(params), _tree.copy(model_state)

    def apply(
        params: PyTree, model_state: PyTree, inputs: PyTree, rng: Any = None, training: bool = False
    ) -> ModelOutput:
        require_own_state(model_state)
        graphdef, params_like, state_like = structure()
        old_state = _to_nnx_state(state_like, model_state, "model_state")
        nnx_params = _to_nnx_state(params_like, params, "params")
        seeded_state = old_state if rng is None else _reseed(old_state, rng)
        module_copy = nnx.merge(graphdef, nnx_params, seeded_state)
        if training:
            module_copy.train()
            trains = functools.partial(_trains, *nnx.split(module_copy), inputs)
            warn_of_other_switch(module_copy, training, trains)
        else:
            module_copy.eval()
        outputs = module_copy(inputs, **switches(module_copy, training))
        new_state = nnx.state(module_copy, nnx.Not(nnx.Param))
        if rng is not None:
            new_state = nnx.merge_state(new_state, nnx.filter_state(old_state, nnx.RngState))
        new_model_state = restrict_to(model_state, nnx.to_pure_dict(new_state))
        return ModelOutput(outputs, new_model_state, ())

    return Model(init, apply)


def _trains(graphdef: Any, state: PyTree, inputs: PyTree, **flags: Any) -> bool:
    """Returns True if a module, called with these flags, draws numbers or updates its state."""
    from flax import nnx

    def call() -> None:
        # A trace may change only the variables that are made in it.
        module = nnx.merge(graphdef, jax.tree.map(lambda x: x, state))
        old = dict(_tree.leaves_with_path(nnx.to_pure_dict(nnx.state(module))))
        module(inputs, **flags)
        new = dict(_tree.leaves_with_path(nnx.to_pure_dict(nnx.state(module))))
        changed.extend(new.get(path) is not x for path, x in old.items())

    changed: list[bool] = []
    # A flag of another kind may need other arguments. The call itself raises errors.
    with contextlib.suppress(Exception):
        jax.eval_shape(call)
    return any(changed)


def _to_nnx_state(reference: PyTree, values: PyTree, name: str) -> PyTree:
    """Returns nested dicts of arrays as an `nnx.State` with the variables of `reference`.

    Raises:
      ValueError: The leaves of `values` are not those of `reference`.
    """
    from flax import nnx

    # Only paths are compared: a state that was created without a model_state has () where nnx has
    # {}, and `cast` changes dtypes.
    expected = [path for path, _ in _tree.leaves_with_path(nnx.to_pure_dict(reference))]
    got = [path for path, _ in _tree.leaves_with_path(values)]
    advice = "Take them from init. If the module has changed since, call from_nnx again."
    differing = sorted(set(expected).symmetric_difference(got))
    require_no_problems(name, differing, "all leaves that init returned, and no others", advice)
    return jax.tree.unflatten(jax.tree.structure(reference), jax.tree.leaves(values))


def _reseed(state: PyTree, rng: jax.Array) -> PyTree:
    """Returns the state with every random stream seeded with a different key."""
    from flax import nnx

    def seed(index: int, variable: PyTree) -> PyTree:
        if isinstance(variable, nnx.RngKey):
            # The key depends on the variable's index, not on its name: two dropout layers whose
            # streams share a name would otherwise draw the same mask.
            key = jax.random.fold_in(rng, index)
            # Modules made by `nnx.vmap` hold an array of keys, one for each copy of the layer.
            return jax.tree.map(
                lambda old: jax.random.split(key, old.shape) if old.shape else key, variable
            )
        is_count = isinstance(variable, nnx.RngCount)
        return jax.tree.map(jnp.zeros_like, variable) if is_count else variable

    variables, structure = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return jax.tree.unflatten(structure, map(seed, range(len(variables)), variables))
