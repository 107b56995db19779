"""A Keras model's variables as two nested dicts, params and model_state, and back."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import flax.core
import flax.traverse_util
import jax
import keras
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from bridge import keras_private
from bridge.model import _names
from bridge.model._names import Path
from functrain.internal import (
    PyTree,
    fetch_global,
    require,
    require_no_problems,
)
from functrain.internal import tree as _tree

# The key in `model_state` of the float8 scales is flax's name of their collection.
OVERWRITTEN = OVERWRITE_WITH_GRADIENT


class Layout(NamedTuple):
    """The path of each variable of a model.

    The variables are in Keras's order, each once. The paths are unique. In two instances of an
    architecture they differ only in the numbers that Keras gives to unnamed layers.

    Attributes:
      params: The variables of `model.trainable_variables` that optimizers update, by path.
      model_state: All other variables, by path: statistics, frozen weights, seed counters, and
        metrics that layers hold. The paths of float8 scales begin with `OVERWRITTEN`.
      seeds: The variables of SeedGenerators, `u32[2]` each, which are in `model_state` too.
    """

    params: dict[Path, Any]
    model_state: dict[Path, Any]
    seeds: tuple[Any, ...]

    def variables(self) -> dict[Path, Any]:
        """Returns all variables by path."""
        return {**self.params, **self.model_state}


def layout(model: keras.Layer) -> Layout:
    """Returns the current path of each variable of a model.

    Freezing a layer moves its variables to `model_state`, with the same path.

    Args:
      model: A built model or layer.

    Examples:
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="out")])
      >>> list(layout(model).params)
      [('out', 'kernel'), ('out', 'bias')]
    """
    # By id: paths and names of Keras variables are not unique.
    trainable_ids = set(map(id, model.trainable_variables))
    params: dict[Path, Any] = {}
    model_state: dict[Path, Any] = {}
    seeds = []
    for path, member in _walk(model, (), {id(model)}):
        is_seed = isinstance(member, keras.random.SeedGenerator)
        variable = member.state if is_seed else member
        if id(variable) not in trainable_ids:
            model_state[path] = variable
        elif variable.overwrite_with_gradient:
            model_state[OVERWRITTEN, *path] = variable
        else:
            params[path] = variable
        if is_seed:
            seeds.append(variable)
    return Layout(params, model_state, tuple(seeds))


def layout_of_state(model: keras.Layer, params: PyTree, model_state: PyTree = None) -> Layout:
    """Returns the layout of a model with the paths of a state, which may be of another instance.

    The paths of two instances may differ in the numbers that Keras gave to unnamed layers. If the
    paths differ in any other way, the layout has those of the model. Without a `model_state` only
    the paths of params are those of the state.
    """
    original = layout(model)
    if model_state is None:
        return original._replace(params=_paths_in_state(original.params, params))
    # The numbers of a layer are the same in both trees, and are counted over both.
    variables = {("params", *path): variable for path, variable in original.params.items()}
    variables |= {("model_state", *path): v for path, v in original.model_state.items()}
    by_path = _paths_in_state(variables, {"params": params, "model_state": model_state})
    return original._replace(
        params={path[1:]: v for path, v in by_path.items() if path[0] == "params"},
        model_state={path[1:]: v for path, v in by_path.items() if path[0] == "model_state"},
    )


def _paths_in_state(variables: Mapping[Path, Any], tree: PyTree) -> dict[Path, Any]:
    """Returns variables by their paths in a tree; by those given if the tree does not match."""
    tree_paths = leaves_by_path(tree).keys()
    if tree_paths == variables.keys():
        return dict(variables)
    by_number, variables_by_number = map(_names.numbered_alike, (tree_paths, variables))
    if by_number.keys() != variables_by_number.keys():
        return dict(variables)
    return {by_number[key]: variables[path] for key, path in variables_by_number.items()}


def _walk(node: Any, path: Path, visited_ids: set[int]) -> Iterator[tuple[Path, Any]]:
    """Yields variables and seed generators with their paths.

    A shared variable has the path at which it is visited first. A SeedGenerator that a layer
    shares with its parent is tracked by both.
    """
    is_metric = isinstance(node, keras.Metric)
    members = node.variables if is_metric else keras_private.layers.members(node)
    for key, member in zip(_names.keys(node, members), members, strict=True):
        if id(member) in visited_ids:
            continue
        visited_ids.add(id(member))
        if isinstance(member, keras.Layer | keras.Metric):
            yield from _walk(member, (*path, key), visited_ids)
        else:
            yield (*path, key), member


def require_no_new_variables(before: Layout, after: Layout) -> None:
    """Raises ValueError if a model has created variables, and names them."""
    old_ids = set(map(id, before.variables().values()))
    new = {path: v for path, v in after.variables().items() if id(v) not in old_ids}
    lines = [f"{'/'.join(path)}: {_tree.spec(variable)}" for path, variable in new.items()]
    expected = "no new variables in a call, since the state does not hold them"
    advice = (
        "Some of its layers had not been built. Call the model once on a batch, "
        "model(x, training=True), and create the state again: bridge.create_state(model, tx)."
    )
    require_no_problems("model", lines, expected, advice)


def values(layout: Layout) -> tuple[PyTree, PyTree]:
    """Returns `(params, model_state)` as nested dicts of the model's own arrays, not copies.

    With a mixed precision policy these are the float32 values that Keras casts for computations.
    """
    return arrays(layout.params), arrays(layout.model_state)


def arrays(variables: Mapping[Path, Any]) -> PyTree:
    """Returns the arrays that variables hold, not copies, as nested dicts."""
    return nest({path: variable.value for path, variable in variables.items()})


def from_collections(collections: Mapping[str, PyTree]) -> tuple[PyTree, PyTree]:
    """Returns `(params, model_state)` from the collections of `to_linen`; some may be missing."""
    # A module may have flax's FrozenDicts.
    variables = flax.core.unfreeze(dict(collections))
    model_state: dict[str, PyTree] = dict(variables.get("batch_stats", {}))
    if variables.get(OVERWRITTEN):
        model_state[OVERWRITTEN] = variables[OVERWRITTEN]
    return variables.get("params", {}), model_state


def nest(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """Returns a mapping from paths to leaves as nested dicts."""
    tree: dict[str, Any] = flax.traverse_util.unflatten_dict(leaves)
    return tree


def leaves_by_path(tree: PyTree) -> dict[Path, Any]:
    """Returns the leaves of a tree by their paths."""
    return {_tree.keys(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def pair(layout: Layout, params: PyTree, model_state: PyTree) -> list[tuple[Any, Any]]:
    """Returns the pair `(variable, array)` of every variable.

    Raises:
      ValueError: The trees do not match the model; the message names the leaves that differ.
    """
    variables = {"params": nest(layout.params), "model_state": nest(layout.model_state)}
    trees = {"params": params, "model_state": model_state}
    lines = _tree.differences(*(jax.tree.map(_spec, tree) for tree in (variables, trees)))
    advice = (
        "If layers were frozen, unfrozen, added or quantized since, create the state again. "
        "Instead of functrain.cast use keras.config.set_dtype_policy('mixed_bfloat16'). "
        "For functrain.freeze and lora pass functrain.merge_frozen(state) to bridge.to_keras."
    )
    require_no_problems("state", lines, "leaves like the model's current variables", advice)
    return list(zip(jax.tree.leaves(variables), jax.tree.leaves(trees), strict=True))


def get_at(tree: PyTree, path: Path) -> Any:
    """Returns the leaf or subtree at a path in nested dicts."""
    for key in path:
        tree = tree[key]
    return tree


def _spec(x: Any) -> Any:
    """Returns shape and dtype of an array, without its weak type, and any other leaf unchanged."""
    # A Keras variable casts to its own dtype, so that a weak type has no effect. One of float64
    # has a float32 value unless jax.config.jax_enable_x64 is set.
    if _tree.is_array(x) and not _tree.is_key(x):
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
    return x


def select_present(variables: Mapping[Path, Any], tree: PyTree, name: str) -> dict[Path, Any]:
    """Returns the variables that have a leaf in a tree.

    `optax.masked` and `functrain.freeze` leave some params out.

    Args:
      variables: A model's variables, by path.
      tree: Nested dicts with leaves for some of the variables.
      name: The name of the tree in messages.

    Raises:
      ValueError: The tree has leaves that are no variables; the message names them.
    """
    paths = leaves_by_path(tree)
    unknown = ["/".join(path) for path in paths if path not in variables]
    advice = "If layers have been frozen or unfrozen since, create the state again."
    text = "params of the model, as bridge.create_state returns them"
    require_no_problems(name, unknown, text, advice)
    return {path: variables[path] for path in variables if path in paths}


def assign_all(pairs: list[tuple[Any, Any]]) -> None:
    """Assigns copies of arrays to variables: to all of them, or to none if a copy fails."""
    # Copies, since `assign` would share the buffers, and a program may consume them later.
    copies = _tree.copy([array for _, array in pairs])
    for (variable, _), array in zip(pairs, copies, strict=True):
        # A variable without a layout is local to this process and gets the whole array.
        is_local = keras_private.variables.layout(variable) is None
        is_divided = not array.is_fully_addressable
        variable.assign(fetch_global(array) if is_local and is_divided else array)


def require_values(tree: PyTree) -> None:
    """Raises an error if a leaf has no value that could be assigned to a Keras variable.

    Raises:
      TypeError: A leaf is a tracer.
      ValueError: A leaf was donated to a program.
    """
    for path, leaf in _tree.leaves_with_path(tree):
        is_traced = isinstance(leaf, jax.core.Tracer)
        advice = "Return the state from jit, grad, vmap or scan, and call bridge.to_keras outside."
        require(not is_traced, path, "a value and no tracer", leaf, advice, error=TypeError)
        advice = "Use the state that the program returned (donation)."
        require(not _tree.is_deleted(leaf), path, "a live array", leaf, advice)
