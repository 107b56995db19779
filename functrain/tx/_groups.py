"""Different transformations for different params."""

import functools
import itertools
import re
from collections.abc import Mapping
from typing import Any

import jax
import optax

from functrain.common import _patterns, _tree
from functrain.common._checks import require_no_problems
from functrain.common._types import PyTree
from functrain.tx._extra_args import with_any_extra_args


def param_groups(
    transformations: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation that applies each of several to the params that match its pattern.

    It is `optax.partition` with patterns of paths instead of labels.

    Args:
      transformations: The transformations by pattern. A param belongs to the first pattern that
        matches its path. Patterns are those of `warm_start`: ``*`` matches within one part of a
        path, ``**`` matches any number of parts. A last pattern ``"**"`` matches all remaining
        params. `optax.set_to_zero` does not train a group; `freeze` also avoids computing its
        gradient.

    Returns:
      The transformation. Learning rates injected by `optax.inject_hyperparams` are logged as
      ``<group>/learning_rate``. The name of a group consists of the words in its pattern, or is
      ``rest`` if the pattern has no words.

    Raises:
      ValueError: (from `init`) a pattern other than ``**`` is not the first to match any param, or
        a param matches no pattern.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> tx = param_groups({"**/bias": optax.sgd(1.0), "**": optax.sgd(0.1)})
      >>> params = {"dense": {"bias": jnp.ones(1), "kernel": jnp.ones(1)}}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> print(updates["dense"]["bias"], updates["dense"]["kernel"])
      [-1.] [-0.1]
    """
    group_names = _group_names(transformations)

    def label(path: Any, _: Any) -> str:
        pattern: Any = _patterns.first_match(transformations, _tree.path_str(path))
        return group_names[pattern]

    # `optax.partition` would drop the keywords that an `optax.MultiSteps` takes.
    with_keywords = map(with_any_extra_args, transformations.values())
    by_name = dict(zip(group_names.values(), with_keywords, strict=True))
    label_params = functools.partial(jax.tree_util.tree_map_with_path, label)
    partition = optax.partition(by_name, label_params)

    def init(params: PyTree) -> PyTree:
        paths = [path for path, _ in _tree.leaves_with_path(params)]
        groups = _patterns.group_paths("param_groups", transformations, paths)
        without = sorted(set(paths).difference(*groups.values()))
        advice = 'Add a last group "**" for all other params.'
        require_no_problems("param_groups", without, "a pattern for every param", advice)
        return partition.init(params)

    return optax.GradientTransformationExtraArgs(init, partition.update)


def _group_names(patterns: Mapping[str, Any]) -> dict[str, str]:
    """Returns a unique name for each pattern: its words, and a number if these are not unique."""
    # Names appear in the paths of logs, where the slashes of a pattern would add levels.
    names: dict[str, str] = {}
    for pattern in patterns:
        words = "_".join(re.findall(r"\w+", pattern)) or "rest"
        candidates = itertools.chain([words], (f"{words}_{i}" for i in itertools.count(2)))
        names[pattern] = next(name for name in candidates if name not in names.values())
    return names
