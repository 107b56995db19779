"""What a Keras layer asks of a flax module: one interface to linen and to nnx.

Values are one nested dict: `params`, and beside it a linen module's other collections by name,
or as `state` what else an nnx module holds, its random streams excepted.
"""

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

import flax.core
import flax.errors
import flax.linen as nn
import jax

from functrain import ModelOutput, from_linen, from_nnx
from functrain.internal import SWITCHES, PyTree
from functrain.internal import tree as _tree

Values: TypeAlias = dict[str, PyTree]


def wrap(module: Any, variables: Mapping[str, PyTree] | None) -> "FlaxModule":
    """Returns a module behind the interface.

    Raises:
      TypeError: It is no instance of a flax module, or its call takes what nobody will give it.
      ValueError: `variables` meet an nnx module, or hold no `params`.
    """
    is_linen = isinstance(module, nn.Module)
    if variables is not None and not is_linen:
        raise ValueError(
            "variables: expected None with an nnx module, which has its values. Change them with "
            "flax.nnx.update(module, ...) before."
        )
    wrapped = Linen(module, variables) if is_linen else Nnx(module)
    _check_call(module)
    return wrapped


def is_module(module: Any) -> bool:
    """Whether something is an instance of a flax module."""
    from flax import nnx

    return isinstance(module, nn.Module | nnx.Module)


class Linen:
    """A linen module, as functions of its values.

    Attributes:
      given: The first values, where somebody has them; whoever takes them may set this to None.
    """

    def __init__(self, module: nn.Module, variables: Mapping[str, PyTree] | None) -> None:
        self.given = None if variables is None else _own(variables)
        self._model = from_linen(module)

    def init(self, key: jax.Array, inputs: PyTree) -> Values:
        """Makes the first values where none are given; `inputs` are arrays or shapes."""
        params, rest = self._model.init(key, inputs)
        return {"params": params, **rest}

    def apply(
        self, values: Values, inputs: PyTree, *, rng: jax.Array | None, training: bool
    ) -> ModelOutput:
        """Applies the module; its `model_state` are the values that move on."""
        rest = {name: value for name, value in values.items() if name != "params"}
        params = values.get("params", {})
        return self._model.apply(params, rest, inputs, rng=rng, training=training)

    def draws(self, values: Values, inputs: PyTree, *, training: bool) -> bool:
        """Whether it draws random numbers; `values` and `inputs` are shapes."""
        try:
            jax.eval_shape(lambda *a: self.apply(*a, rng=None, training=training), values, inputs)
        except ValueError as error:
            if isinstance(error.__cause__, flax.errors.InvalidRngError):
                return True
            raise
        return False

    def to_flax(self, values: Values) -> dict[str, PyTree]:
        """Returns copies of the values as flax has them: linen variables."""
        copies: dict[str, PyTree] = _tree.copy(values)
        return copies


class Nnx:
    """An nnx module, with the values it has now: what `Linen` has, but `to_flax` makes a module.

    Its random streams are not among the values: each draw seeds them anew.
    """

    def __init__(self, module: Any) -> None:
        from flax import nnx

        self._model = from_nnx(module)
        self._graph, *self._states = nnx.split(module, nnx.Param, ...)
        params, state = self._model.init(jax.random.key(0), None)
        is_stream = [isinstance(v, nnx.RngState) for v in _per_leaf(self._states[1])]
        leaves, self._structure = jax.tree.flatten(state)
        self._streams = [x if s else None for x, s in zip(leaves, is_stream, strict=True)]
        self.given: Values | None = {"params": params, "state": self._without_streams(state)}

    def init(self, key: jax.Array, inputs: PyTree) -> Values:
        raise NotImplementedError  # an nnx module has values from the start

    def apply(
        self, values: Values, inputs: PyTree, *, rng: jax.Array | None, training: bool
    ) -> ModelOutput:
        params, state = self._parts(values)
        out = self._model.apply(params, state, inputs, rng=rng, training=training)
        return out._replace(model_state={"state": self._without_streams(out.model_state)})

    def draws(self, values: Values, inputs: PyTree, *, training: bool) -> bool:
        moved = []

        def note(values: Values, inputs: PyTree) -> None:
            params, state = self._parts(values)
            out = self._model.apply(params, state, inputs, training=training)
            pairs = zip(jax.tree.leaves(state), jax.tree.leaves(out.model_state), strict=True)
            for (old, new), stream in zip(pairs, self._streams, strict=True):
                moved.append(stream is not None and new is not old)

        jax.eval_shape(note, values, inputs)
        return any(moved)

    def to_flax(self, values: Values) -> Any:
        from flax import nnx

        states = jax.tree.map(lambda x: x, self._states)
        for state, new in zip(states, self._parts(values), strict=True):
            nnx.replace_by_pure_dict(state, _tree.copy(new))
        return nnx.merge(self._graph, *states)

    def _parts(self, values: Values) -> tuple[PyTree, PyTree]:
        kept = iter(jax.tree.leaves(values.get("state", {})))
        full = [next(kept) if stream is None else stream for stream in self._streams]
        return values.get("params", {}), jax.tree.unflatten(self._structure, full)

    def _without_streams(self, state: PyTree) -> PyTree:
        leaves = zip(jax.tree.leaves(state), self._streams, strict=True)
        kept = [x if stream is None else None for x, stream in leaves]
        return jax.tree.unflatten(self._structure, kept)


FlaxModule: TypeAlias = Linen | Nnx


def _own(variables: Mapping[str, PyTree]) -> Values:
    if isinstance(variables, flax.core.FrozenDict):
        variables = flax.core.unfreeze(variables)
    if not isinstance(variables, dict) or not all(isinstance(v, dict) for v in variables.values()):
        raise ValueError(
            "variables: expected what module.init returns, a dict of collections such as "
            f"{{'params': ...}}, got {type(variables).__name__}"
            + (f" with {sorted(variables)}" if isinstance(variables, dict) else "")
        )
    transient = ("losses", "intermediates")
    copies: Values = _tree.copy({k: v for k, v in variables.items() if k not in transient})
    return copies


def _per_leaf(state: PyTree) -> list[Any]:
    """Returns the nnx variable of each leaf."""
    from flax import nnx

    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [v for v in variables for _ in jax.tree.leaves(v)]


def _check_call(module: Any) -> None:
    """Refuses a module which needs more than inputs and a switch."""
    parameters = (
        list(inspect.signature(module.__call__).parameters.values()) if callable(module) else []
    )
    if not parameters:
        raise TypeError(
            f"{type(module).__name__}: expected a module with __call__(self, inputs), got one "
            "without. Add it, or wrap the module in one that has it."
        )
    unknown = [
        p.name
        for p in parameters[1:]
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and p.name not in SWITCHES
    ]
    if unknown:
        raise TypeError(
            f"{type(module).__name__}.__call__: expected one pytree of inputs and any of "
            f"{', '.join(SWITCHES)}, got one that also needs {', '.join(unknown)}. Wrap it in a "
            "module that takes its inputs in a tuple or dict, and its switch by one of these names."
        )
