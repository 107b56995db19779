"""What a Keras layer asks of a flax module: one interface to linen and to nnx.

Values are one nested dict: `params`, and beside it a linen module's other collections by name,
or as `state` what else an nnx module holds, its random streams excepted.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import flax.core
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp

from functrain import ModelOutput, from_linen, from_nnx
from functrain.internal import SWITCHES, PyTree, jit
from functrain.internal import tree as _tree

Values: TypeAlias = dict[str, PyTree]
FirstValues: TypeAlias = tuple[Values, Callable[[], list[jax.Array]]]


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
    """A linen module, as functions of its values."""

    def __init__(self, module: nn.Module, variables: Mapping[str, PyTree] | None) -> None:
        self._given = None if variables is None else _own(variables)
        self._model = from_linen(module)

    def first_values(self, seed: int, inputs: PyTree) -> FirstValues:
        """Returns the shapes of the first values, and a function that returns their leaves.

        So a layer can be built while something is traced, as Keras does with models that are built
        by their first batch. Values that were given are let go of.

        Raises:
          ValueError: Those that were given lack a collection.
        """

        def init(inputs: PyTree) -> Values:
            params, rest = self._model.init(jax.random.key(seed), inputs)
            return {"params": params, **rest}

        @functools.cache
        def leaves() -> list[jax.Array]:
            with jax.ensure_compile_time_eval():
                zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs)
                return jax.tree.leaves(jit(init)(zeros))

        shapes = jax.eval_shape(init, inputs)
        given, self._given = self._given, None
        if given is None:
            return shapes, leaves
        if missing := set(shapes) - set(given):
            raise ValueError(
                f"variables: expected what module.init returns, with {sorted(shapes)}, got "
                f"{sorted(given)} without {sorted(missing)}. Pass all of it, not the params alone."
            )
        return _of_given(given)

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
        streams = nnx.to_pure_dict(nnx.state(module, nnx.RngState))
        stream_paths = {path for path, _ in _tree.leaves_with_path(streams)}
        leaves = _tree.leaves_with_path(state)
        self._streams = [x if path in stream_paths else None for path, x in leaves]
        self._structure = jax.tree.structure(state)
        self._given: Values = {"params": params, "state": self._without_streams(state)}

    def first_values(self, seed: int, inputs: PyTree) -> FirstValues:
        del seed, inputs
        given, self._given = self._given, {}
        return _of_given(given)

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


def _of_given(given: Values) -> FirstValues:
    return _tree.shapes(given), lambda: jax.tree.leaves(given)


def _own(variables: Any) -> Values:
    variables = flax.core.unfreeze(variables)
    if not isinstance(variables, dict) or not all(isinstance(v, dict) for v in variables.values()):
        got = sorted(variables) if isinstance(variables, dict) else type(variables).__name__
        raise ValueError(
            "variables: expected what module.init returns, a dict of collections such as "
            f"{{'params': ...}}, got {got}"
        )
    transient = ("losses", "intermediates")
    copies: Values = _tree.copy({k: v for k, v in variables.items() if k not in transient})
    return copies


def _check_call(module: Any) -> None:
    """Refuses a module which needs more than inputs and a switch."""
    parameters = list(inspect.signature(module).parameters.values()) if callable(module) else []
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
