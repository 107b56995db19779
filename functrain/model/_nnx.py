"""Nnx modules as functrain models."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._checks import require_instance, require_no_problems
from functrain.common._types import PyTree
from functrain.model._model import Model, ModelOutput
from functrain.model._switches import switches

if TYPE_CHECKING:
    from flax import nnx


def from_nnx(module: "nnx.Module") -> Model:
    """Makes a model of an nnx module, which already has its values; the module never changes.

    Every application runs on a twin made of the values it is given, in ``module.train()`` or
    ``module.eval()`` mode; a call that takes `training`, `train`, `deterministic` or
    `use_running_average` is given it too. Any other mode set by hand is overruled by that.

    Args:
      module: An instance of `flax.nnx.Module`, called as ``module(inputs)``: `inputs` is one
        pytree.

    Returns:
      A model. ``init(key, inputs)`` uses neither argument: it returns copies of the values that
      the module has at that moment, as nested dicts of arrays: params = every `nnx.Param`,
      model_state = everything else (batch statistics, random streams). In ``apply``, with
      ``rng=None`` the module draws from its own streams, which live in model_state and move on;
      with a key `key[]` every stream is seeded anew from it, each with a key of its own, and the
      entries of the streams come back as they were given. Variables that come into being in a
      call (`sow`) are dropped; losses are ().

    Raises:
      TypeError: `module` is no instance of an nnx module, or holds a value that is no array.
        From ``apply``:
      ValueError: params or model_state is not of the structure ``init`` returned.

    Examples:
      >>> from flax import nnx
      >>> import jax, jax.numpy as jnp
      >>> rngs = nnx.Rngs(0)
      >>> net = nnx.Sequential(nnx.Linear(3, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs))
      >>> model = from_nnx(net)
      >>> x = jnp.ones((4, 3))
      >>> params, model_state = model.init(jax.random.key(0), x)
      >>> jax.tree.map(jnp.shape, model_state)
      {'layers': {1: {'mean': (8,), 'var': (8,)}}}
      >>> model.apply(params, model_state, x, training=True).outputs.shape
      (4, 8)
    """
    from flax import nnx  # linen users need not wait for it

    advice = "Construct it first, as in Net(...); for a module of flax.linen use from_linen."
    require_instance("module", module, nnx.Module, "an instance of flax.nnx.Module", advice)
    graphdef, *states = nnx.split(module, nnx.Param, ...)
    params_like, rest_like = (jax.eval_shape(_tree.copy, state) for state in states)

    def init(key: jax.Array, inputs: PyTree, /) -> tuple[PyTree, PyTree]:
        params, rest = nnx.state(module, nnx.Param), nnx.state(module, nnx.Not(nnx.Param))
        return _tree.copy(nnx.to_pure_dict(params)), _tree.copy(nnx.to_pure_dict(rest))

    def apply(
        params: PyTree,
        model_state: PyTree,
        inputs: PyTree,
        /,
        *,
        rng: jax.Array | None = None,
        training: bool = False,
    ) -> ModelOutput:
        rest = _fill(rest_like, model_state, "model_state")
        trained = _fill(params_like, params, "params")
        twin = nnx.merge(graphdef, trained, rest if rng is None else _reseed(rest, rng))
        if training:
            twin.train()
        else:
            twin.eval()
        outputs = twin(inputs, **switches(twin, training))
        after = nnx.state(twin, nnx.Not(nnx.Param))
        if rng is not None:
            after = nnx.merge_state(after, nnx.filter_state(rest, nnx.RngState))
        after = _only(model_state, nnx.to_pure_dict(after))
        return ModelOutput(outputs, after, ())

    return Model(init, apply)


def _fill(like: PyTree, values: PyTree, name: str) -> PyTree:
    """Puts plain nested dicts of arrays back into the variables of an `nnx.State`."""
    from flax import nnx

    expected = nnx.to_pure_dict(like)
    paths, given = ([p for p, _ in _tree.leaves_with_path(x)] for x in (expected, values))
    # By path, so that () stands for {}: the model_state of a state created without one.
    if paths != given:
        wrong = _tree.differences(expected, values)
        advice = "Take them from init. If the module has changed since, call from_nnx again."
        require_no_problems(name, wrong, "the leaves that init returned", advice)
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(values))


def _reseed(state: PyTree, rng: jax.Array) -> PyTree:
    """Seeds every random stream with a key of its own.

    By place, not by name: layers that share a stream's name would get one key, and one mask.
    """
    from flax import nnx

    def seed(i: int, variable: PyTree) -> PyTree:
        if isinstance(variable, nnx.RngKey):
            key = jax.random.fold_in(rng, i)
            return jax.tree.map(
                lambda old: jax.random.split(key, old.shape) if old.shape else key, variable
            )
        if isinstance(variable, nnx.RngCount):
            return jax.tree.map(jnp.zeros_like, variable)
        return variable

    variables, structure = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return jax.tree.unflatten(structure, [seed(i, v) for i, v in enumerate(variables)])


def _only(like: PyTree, tree: PyTree) -> PyTree:
    """The part of a nested dict that `like` has, with what a call added left out."""
    if isinstance(like, dict):
        return {name: _only(below, tree[name]) for name, below in like.items()}
    return tree if jax.tree.leaves(like) else like
