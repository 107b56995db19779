"""One interface to linen and nnx modules, for Keras layers that run them.

The values of a module are one nested dict. It has `params`, and besides the other collections of a
linen module by name, or `state` with all other values of an nnx module except its random streams.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import flax.core
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp

from bridge.model._variables import OVERWRITTEN
from functrain import ModelOutput, from_linen, from_nnx
from functrain.internal import OverwrittenByGradient, PyTree, jit, require
from functrain.internal import tree as _tree

Values: TypeAlias = dict[str, PyTree]
FirstValues: TypeAlias = tuple[Values, Callable[[], list[jax.Array]]]


def wrap(module: Any, variables: Mapping[str, PyTree] | None) -> "FlaxModule":
    """Returns a linen or nnx module with the common interface.

    Raises:
      TypeError: `module` is not an instance of a flax module, or its call has other required
        arguments than inputs and a switch for training.
      ValueError: `variables` are passed with an nnx module, or are not a dict of collections.
    """
    is_linen = isinstance(module, nn.Module)
    advice = "It has its own values. Change them with flax.nnx.update(module, ...) before."
    has_source = variables is None or is_linen
    require(has_source, "variables", "None with an nnx module", variables, advice)
    expected, advice = "a module with __call__(self, inputs)", "Add it, or wrap the module."
    require(callable(module), "module", expected, module, advice, error=TypeError)
    return Linen(module, variables) if is_linen else Nnx(module)


def is_module(module: Any) -> bool:
    """Returns True for an instance of a linen or nnx module."""
    # Imported here, since `import bridge` must not import flax.nnx (see tests/test_house.py).
    from flax import nnx

    return isinstance(module, nn.Module | nnx.Module)


class Linen:
    """A linen module, as functions of its values."""

    def __init__(self, module: nn.Module, variables: Mapping[str, PyTree] | None) -> None:
        self._initial_values = None if variables is None else _copy_collections(variables)
        self._model = from_linen(module)

    def first_values(self, seed: int, inputs: PyTree) -> FirstValues:
        """Returns the shapes of the initial values, and a function that returns their leaves.

        Initial values that were passed are returned once, and no reference to them is kept.

        Raises:
          ValueError: The values that were passed lack a collection.
        """
        # Shapes first, since Keras may build a layer while something is traced: a model may be
        # built by its first batch.

        def init(inputs: PyTree) -> Values:
            params, collections = self._model.init(jax.random.key(seed), inputs)
            return {"params": params, **collections}

        @functools.cache
        def leaves() -> list[jax.Array]:
            with jax.ensure_compile_time_eval():
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
                return jax.tree.leaves(jit(init)(zeros))

        shapes = jax.eval_shape(init, inputs)
        initial_values, self._initial_values = self._initial_values, None
        if initial_values is None:
            return shapes, leaves
        expected = f"the result of module.init, with {sorted(shapes)}"
        is_complete = set(shapes) <= set(initial_values)
        advice = "Pass all collections, not only the params."
        require(is_complete, "variables", expected, sorted(initial_values), advice)
        return _shapes_and_leaves(initial_values)

    def apply(self, values: Values, inputs: PyTree, **mode: Any) -> ModelOutput:
        """Applies the module; `model_state` of the output has the values except `params`."""
        model_state = dict(values)
        params = model_state.pop("params", {})
        return self._model.apply(params, model_state, inputs, **mode)

    def draws(self, values: Values, inputs: PyTree, *, training: bool) -> bool:
        """Returns True if the module draws random numbers; `values` and `inputs` are shapes."""
        apply = functools.partial(self.apply, rng=None, training=training)
        try:
            jax.eval_shape(apply, values, inputs)
        except ValueError as error:
            if isinstance(error.__cause__, flax.errors.InvalidRngError):
                return True
            raise
        return False

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
        streams = nnx.to_pure_dict(nnx.state(module, nnx.RngState))
        stream_paths = dict(_tree.leaves_with_path(streams)).keys()
        # For each leaf of the state its random stream, or None if it is part of the values.
        self._streams: list[Any] = []
        for path, leaf in _tree.leaves_with_path(state):
            self._streams.append(leaf if path in stream_paths else None)
        self._structure = jax.tree.structure(state)
        self._initial_values: Values = {"params": params, "state": self._without_streams(state)}

    def first_values(self, seed: int, inputs: PyTree) -> FirstValues:
        del seed, inputs
        initial_values, self._initial_values = self._initial_values, {}
        return _shapes_and_leaves(initial_values)

    def apply(self, values: Values, inputs: PyTree, **mode: Any) -> ModelOutput:
        params, state = self._params_and_state(values)
        out = self._model.apply(params, state, inputs, **mode)
        return out._replace(model_state={"state": self._without_streams(out.model_state)})

    def draws(self, values: Values, inputs: PyTree, *, training: bool) -> bool:
        advanced = []

        # A draw advances a stream, so that its leaf becomes another tracer.
        def record(values: Values, inputs: PyTree) -> None:
            params, state = self._params_and_state(values)
            out = self._model.apply(params, state, inputs, training=training)
            leaves = zip(
                jax.tree.leaves(state), jax.tree.leaves(out.model_state), self._streams, strict=True
            )
            for old, new, stream in leaves:
                advanced.append(stream is not None and new is not old)

        jax.eval_shape(record, values, inputs)
        return any(advanced)

    def to_flax(self, values: Values) -> Any:
        from flax import nnx

        # `replace_by_pure_dict` changes a state in place, so that it gets copies of the containers.
        states = jax.tree.map(lambda x: x, self._states)
        for state, new in zip(states, self._params_and_state(values), strict=True):
            nnx.replace_by_pure_dict(state, _tree.copy(new))
        return nnx.merge(self._graph, *states)

    def _params_and_state(self, values: Values) -> tuple[PyTree, PyTree]:
        """Returns the params, and the state with the streams inserted."""
        state_values = iter(jax.tree.leaves(values.get("state", {})))
        leaves = [next(state_values) if x is None else x for x in self._streams]
        return values.get("params", {}), jax.tree.unflatten(self._structure, leaves)

    def _without_streams(self, state: PyTree) -> PyTree:
        """Returns a state with None in place of the streams."""
        leaves = zip(jax.tree.leaves(state), self._streams, strict=True)
        values = [x if stream is None else None for x, stream in leaves]
        return jax.tree.unflatten(self._structure, values)


FlaxModule: TypeAlias = Linen | Nnx


def _shapes_and_leaves(values: Values) -> FirstValues:
    return _tree.shapes(values), lambda: jax.tree.leaves(values)


def _copy_collections(variables: Any) -> Values:
    """Returns copies of linen variables, without sown values.

    Raises:
      ValueError: The variables are not a dict of collections.
    """
    variables = flax.core.unfreeze(variables)
    if not isinstance(variables, dict) or not all(isinstance(v, dict) for v in variables.values()):
        got = sorted(variables) if isinstance(variables, dict) else type(variables).__name__
        raise ValueError(
            "variables: expected the result of module.init, a dict of collections such as "
            f"{{'params': ...}}, got {got}. Pass all collections, not only the params."
        )
    # Sown values belong to one application, as in `functrain.from_linen`.
    for name in ("losses", "intermediates"):
        variables.pop(name, None)
    copies: Values = _tree.copy(variables)
    if OVERWRITTEN in copies:
        copies[OVERWRITTEN] = OverwrittenByGradient(copies[OVERWRITTEN])
    return copies
