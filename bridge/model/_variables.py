"""Which variable is which: a Keras model's variables as two nested dicts, and back."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import optax

from bridge import keras_private
from bridge.model import _names
from bridge.model._names import Path
from functrain.internal import PyTree, fetch_global
from functrain.internal import tree as _tree


class Layout(NamedTuple):
    """Where each variable of a model lives.

    Keras's own order, each variable once; the paths are unique, and the same in every instance of
    an architecture.

    Attributes:
      params: The variables of `model.trainable_variables`, by path.
      model_state: All others, by path: statistics, frozen weights, seed counters, and metrics
        that layers hold.
      seeds: The paths in `model_state` that are the state of a SeedGenerator, `u32[2]` each.
    """

    params: dict[Path, Any]
    model_state: dict[Path, Any]
    seeds: tuple[Path, ...]

    def variables(self) -> dict[Path, Any]:
        """Returns all variables by path."""
        return {**self.params, **self.model_state}


def layout(model: keras.Layer) -> Layout:
    """Returns where each variable of a model lives now.

    Freezing a layer moves its variables to `model_state`, under the same path.

    Args:
      model: A built model or layer.

    Examples:
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
      >>> list(layout(model).params)
      [('dense', 'kernel'), ('dense', 'bias')]
    """
    trainable = {id(v) for v in model.trainable_variables}
    found = Layout({}, {}, ())
    seeds = []
    for path, member in _walk(model, (), {id(model)}):
        is_seed = isinstance(member, keras.random.SeedGenerator)
        variable = member.state if is_seed else member
        part = found.params if id(variable) in trainable else found.model_state
        part[path] = variable
        if is_seed:
            seeds.append(path)
    return found._replace(seeds=tuple(seeds))


def _walk(node: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    """Yields variables and seed generators with their paths; what is shared, where first met."""
    members = _members(node)
    for key, member in zip(_names.keys(node, members), members, strict=True):
        if id(member) in seen:
            continue
        seen.add(id(member))
        if isinstance(member, keras.Layer | keras.Metric):
            yield from _walk(member, (*path, key), seen)
        else:
            yield (*path, key), member


def _members(node: Any) -> list[Any]:
    if isinstance(node, keras.Metric):
        return list(node.variables)
    return [
        *keras_private.layers.own_variables(node),
        *keras_private.layers.seed_generators(node),
        *keras_private.layers.own_metrics(node),
        *keras_private.layers.sublayers(node),
    ]


def has_state(model: keras.Layer) -> bool:
    """Whether a model has variables, or has nothing unbuilt that could make some.

    `built` is no proof: `build` on a subclass can mark it built and leave its layers alone.
    """
    layers = keras_private.layers.sublayers(model)
    return bool(model.variables) or all(x.built and has_state(x) for x in layers)


def require_same(before: Layout, after: Layout) -> None:
    """Refuses an application that made variables.

    Raises:
      ValueError: It names them.
    """
    known = set(map(id, before.variables().values()))
    lines = [
        f"{'/'.join(path)}: {_tree.spec(v)}"
        for path, v in after.variables().items()
        if id(v) not in known
    ]
    if lines:
        raise ValueError(
            "the model made variables while it was applied, which the state does not hold:\n"
            f"{_tree.bullets(lines)}\n"
            "Some of its layers had not been built. They are now; to build all of a model, call "
            "it once on a batch, model(x, training=True). Then make the state again: "
            "bridge.create_state(model, tx)."
        )


def values(where: Layout) -> tuple[PyTree, PyTree]:
    """Returns `(params, model_state)`: the model's own arrays, not copies, in nested dicts.

    With a mixed precision policy these are the float32 masters.
    """
    params, others = ({path: v.value for path, v in part.items()} for part in where[:2])
    return nest(params), nest(others)


# The collections of a linen module made of a Keras model, beside `params`.
COLLECTIONS = ("batch_stats", "seeds")


def collections(model: keras.Layer) -> dict[str, PyTree]:
    """Returns the model's own arrays, not copies, as collections of a linen module."""
    where = layout(model)
    params, _ = values(where)
    others = {path: v.value for path, v in where.model_state.items()}
    seeds = {path: others.pop(path) for path in where.seeds}
    return {"params": params, "batch_stats": nest(others), "seeds": nest(seeds)}


def merge(*trees: PyTree) -> PyTree:
    """Returns nested mappings with no leaf in common as one nested dict."""
    leaves = [pair for tree in trees for pair in jax.tree_util.tree_leaves_with_path(tree)]
    return nest({_tree.keys(path): leaf for path, leaf in leaves})


def nest(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """Returns leaves by path as nested dicts."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def pair(where: Layout, params: PyTree, model_state: PyTree) -> list[tuple[Any, Any]]:
    """Returns `(variable, array)` for every variable.

    Raises:
      ValueError: The trees are not this model's; the message names the leaves that differ.
    """
    trees = {"params": params, "model_state": model_state}
    expected = {
        name: nest({path: _spec(v) for path, v in part.items()})
        for name, part in zip(trees, where[:2], strict=True)
    }
    lines = _tree.differences(expected, jax.tree.map(_spec, trees))
    if lines and all("got bfloat16[" in line or "got float16[" in line for line in lines):
        raise ValueError(
            f"params: expected them as the Keras model keeps them, got\n{_tree.bullets(lines)}\n"
            "functrain.cast does not reach into Keras's layers. For mixed precision call "
            "keras.config.set_dtype_policy('mixed_bfloat16') before the model is built."
        )
    if lines:
        raise ValueError(
            "the state does not fit the model. Leaves that differ from the model's variables as "
            f"they are now:\n{_tree.bullets(lines)}\n"
            "If the model changed after the state was made (a layer frozen or unfrozen, added, "
            "quantized), make the state again: bridge.create_state(model, tx). If the state is "
            "another model's, use it with that one."
        )
    parts = zip(where[:2], trees.values(), strict=True)
    return [(v, at(tree, path)) for part, tree in parts for path, v in part.items()]


def at(tree: PyTree, path: Path) -> Any:
    """Returns what is at a path in nested dicts."""
    for key in path:
        tree = tree[key]
    return tree


def _spec(x: Any) -> Any:
    """Returns shape and dtype, and forgets a weak type: the variable's dtype wins anyway."""
    if _tree.is_array(x) and not _tree.is_key(x):
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype))
    return x


def fitting(part: Mapping[Path, Any], tree: PyTree, name: str) -> dict[Path, Any]:
    """Returns the variables that have a leaf in a tree.

    `optax.masked` and `functrain.freeze` leave some out.

    Args:
      part: A model's variables, by path.
      tree: Nested dicts with a leaf for each of them, or None or `optax.MaskedNode()` in the place
        of a leaf or of a whole branch.
      name: What messages call the tree.

    Raises:
      ValueError: It names the leaves that differ.
    """
    entries = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_masked)
    masked = {_tree.keys(path): leaf for path, leaf in entries if _is_masked(leaf)}
    here = {p: v for p, v in part.items() if not any(p[: len(m)] == m for m in masked)}
    specs = {path: _spec(v) for path, v in here.items()}
    expected = masked[()] if () in masked else nest(specs | masked)
    lines = _tree.differences(expected, jax.tree.map(_spec, tree))
    if lines:
        raise ValueError(
            f"{name}: expected those of the model, as bridge.create_state makes them, got\n"
            f"{_tree.bullets(lines)}\n"
            "If layers were frozen or unfrozen since, make the state again."
        )
    return here


def _is_masked(x: Any) -> bool:
    """Returns True for what stands for a param that is left out: None for one that is frozen."""
    return x is None or isinstance(x, optax.MaskedNode)


def write(pairs: list[tuple[Any, Any]]) -> None:
    """Copies arrays into variables: all of them, or none if one cannot be copied.

    The variables get buffers of their own, so that a program may consume the arrays afterwards. A
    variable that is this process's own gets the whole of an array that is divided over processes.
    """
    copies = _tree.copy([array for _, array in pairs])
    for (variable, _), array in zip(pairs, copies, strict=True):
        is_own = keras_private.variables.layout(variable) is None
        is_divided = not array.is_fully_addressable
        variable.assign(fetch_global(array) if is_own and is_divided else array)


def require_values(tree: PyTree) -> None:
    """Refuses what cannot be written into a Keras model.

    Raises:
      TypeError: A leaf is being traced.
      ValueError: A leaf was donated to a program.
    """
    for path, leaf in _tree.leaves_with_path(tree):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"{path}: expected an array with a value, got a tracer, {_tree.spec(leaf)}. "
                "A Keras model cannot be written to from inside jit, grad, vmap or scan: return "
                "the state from there and call bridge.to_keras on it outside."
            )
        if _tree.is_deleted(leaf):
            raise ValueError(
                f"{path}: expected a live array, got {_tree.spec(leaf)} that a program took over "
                "(donation). Take the state that the program returned."
            )
