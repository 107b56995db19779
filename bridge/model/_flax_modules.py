"""One interface to linen and nnx modules, for Keras layers that run them.

The values of a module are one nested dict. It has `params`, and besides the other collections of a
linen module by name, or `state` with all other values of an nnx module except its random streams.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import flax.core
import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict, unflatten_dict

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
        self._model = from_linen(module)
        # Sown values belong to one application, as in `functrain.from_linen`.
        collections = flax.core.unfreeze(dict(variables or {}))
        lasting = collections.keys() - {"losses", "intermediates"}
        self._initial_values: Values = _tree.copy({name: collections[name] for name in lasting})

    def first_values(self, seed: int, inputs: PyTree) -> Values:
        """Returns the initial values; those that were passed once only, to free their memory."""
        initial_values, self._initial_values = self._initial_values, {}
        if not initial_values:
            params, collections = jit(self._model.init)(jax.random.key(seed), inputs)
            initial_values = {"params": params, **collections}
        return initial_values

    def apply(self, values: Values, inputs: PyTree, **mode: Any) -> ModelOutput:
        """Applies the module; `model_state` of the output has the values except `params`."""
        model_state = dict(values)
        params = model_state.pop("params", {})
        return self._model.apply(params, model_state, inputs, **mode)

    def to_flax(self, values: Values) -> PyTree:
        """Returns copies of the values as linen variables."""
        return _tree.copy(values)


class Nnx:
    """An nnx module with its current values. It has the methods of `Linen`.

    Its random streams are not part of the values, since each application seeds them again.
    """

    def __init__(self, module: Any) -> None:
        from flax import nnx

        self._model = from_nnx(module)
        self._graph, *self._states = nnx.split(module, nnx.Param, ...)
        self._streams = flatten_dict(nnx.to_pure_dict(nnx.state(module, nnx.RngState)))
        params, state = self._model.init(jax.random.key(0), None)
        self._initial_values: Values = {"params": params, "state": self._without_streams(state)}

    def first_values(self, seed: int, inputs: PyTree) -> Values:
        del seed, inputs
        initial_values, self._initial_values = self._initial_values, {}
        return initial_values

    def apply(self, values: Values, inputs: PyTree, **mode: Any) -> ModelOutput:
        out = self._model.apply(*self._params_and_state(values), inputs, **mode)
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
        return values["params"], unflatten_dict(flatten_dict(values["state"]) | self._streams)

    def _without_streams(self, state: PyTree) -> PyTree:
        leaves = flatten_dict(state).items()
        return unflatten_dict({path: x for path, x in leaves if path not in self._streams})
