"""One interface to linen and nnx modules, for Keras layers that run them.

The values of a module are one nested dict. It has `params`, and besides the other collections of a
linen module by name, or `state` with all other values of an nnx module except its random streams.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import flax.core
import flax.linen as nn
import jax

from functrain import ModelOutput, from_linen, from_nnx
from functrain.internal import PyTree, jit, require
from functrain.internal import tree as _tree

Values: TypeAlias = dict[str, PyTree]


def wrap(module: Any, variables: Mapping[str, PyTree] | None) -> "Linen | Nnx":
    """Returns a linen or nnx module with the common interface.

    Raises:
      TypeError: `module` is not an instance of a flax module, or its call has other required
        arguments than inputs and a switch for training.
      ValueError: `variables` are passed with an nnx module.
    """
    if isinstance(module, nn.Module):
        return Linen(module, variables)
    advice = "It has its own values. Change them with flax.nnx.update(module, ...) before."
    require(variables is None, "variables", "None with an nnx module", variables, advice)
    return Nnx(module)


class Linen:
    """A linen module, as functions of its values."""

    def __init__(self, module: nn.Module, variables: Mapping[str, PyTree] | None) -> None:
        self._initial_values = None if variables is None else _copy_collections(variables)
        self._model = from_linen(module)

    def first_values(self, seed: int, inputs: PyTree) -> Values:
        """Returns the initial values; those that were passed once only, to free their memory."""
        initial_values, self._initial_values = self._initial_values, None
        if initial_values is not None:
            return initial_values
        params, collections = jit(self._model.init)(jax.random.key(seed), inputs)
        return {"params": params, **collections}

    def apply(self, values: Values, inputs: PyTree, **mode: Any) -> ModelOutput:
        """Applies the module; `model_state` of the output has the values except `params`."""
        model_state = dict(values)
        params = model_state.pop("params", {})
        return self._model.apply(params, model_state, inputs, **mode)

    def to_flax(self, values: Values) -> dict[str, PyTree]:
        """Returns copies of the values as linen variables."""
        copies: dict[str, PyTree] = _tree.copy(values)
        # A plain dict, as flax returns it.
        return {name: dict(tree) for name, tree in copies.items()}


class Nnx:
    """An nnx module with its current values. It has the methods of `Linen`.

    Its random streams are not part of the values, since each application seeds them again.
    """

    def __init__(self, module: Any) -> None:
        from flax import nnx

        self._model = from_nnx(module)
        self._graph, *self._states = nnx.split(module, nnx.Param, ...)
        params, state = self._model.init(jax.random.key(0), None)
        streams = dict(_tree.leaves_with_path(nnx.to_pure_dict(nnx.state(module, nnx.RngState))))
        # The state with None for each leaf that is part of the values.
        self._streams = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if _tree.path_str(path) in streams else None, state
        )
        self._initial_values: Values = {"params": params, "state": self._without_streams(state)}

    def first_values(self, seed: int, inputs: PyTree) -> Values:
        del seed, inputs
        initial_values, self._initial_values = self._initial_values, {}
        return initial_values

    def apply(self, values: Values, inputs: PyTree, **mode: Any) -> ModelOutput:
        params, state = self._params_and_state(values)
        out = self._model.apply(params, state, inputs, **mode)
        return out._replace(model_state={"state": self._without_streams(out.model_state)})

    def to_flax(self, values: Values) -> Any:
        from flax import nnx

        # `replace_by_pure_dict` changes a state in place, so that it gets copies of the containers.
        states = jax.tree.map(lambda x: x, self._states)
        for state, new in zip(states, self._params_and_state(values), strict=True):
            nnx.replace_by_pure_dict(state, _tree.copy(new))
        return nnx.merge(self._graph, *states)

    def _params_and_state(self, values: Values) -> tuple[PyTree, PyTree]:
        """Returns the params, and the state with the streams inserted."""
        state = self._map(lambda stream, x: x if stream is None else stream, values["state"])
        return values["params"], state

    def _without_streams(self, state: PyTree) -> PyTree:
        """Returns a state with None in place of the streams."""
        return self._map(lambda stream, x: x if stream is None else None, state)

    def _map(self, function: Callable[[Any, Any], Any], state: PyTree) -> PyTree:
        return jax.tree.map(function, self._streams, state, is_leaf=lambda x: x is None)


def _copy_collections(variables: Mapping[str, PyTree]) -> Values:
    """Returns copies of linen variables, without sown values."""
    variables = flax.core.unfreeze(dict(variables))
    # Sown values belong to one application, as in `functrain.from_linen`.
    for name in ("losses", "intermediates"):
        variables.pop(name, None)
    copies: Values = _tree.copy(variables)
    return copies
