"""Another transformation for other params."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import optax

from functrain.common import _patterns, _tree
from functrain.common._checks import require_no_problems
from functrain.common._types import PyTree


def param_groups(
    transformations: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Returns one transformation of several, each for the params whose paths its pattern means.

    It is `optax.partition`, with patterns for labels.

    Args:
      transformations: By pattern; the first one that means a path has it. Patterns are those of
        `warm_start`, over the paths of params: ``*`` stands within one part of a path, ``**`` for
        any number of parts. ``"**"``, last, is the rest; `optax.set_to_zero` trains nothing (to
        compute no gradient either, `freeze`).

    Returns:
      The transformation. Rates injected by `optax.inject_hyperparams` are logged as
      ``<group>/learning_rate``, where the group is called after the words of its pattern, and
      ``rest`` if it has none.

    Raises:
      ValueError: (from `init`) a pattern has no param of its own, or a param has no pattern.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> tx = param_groups({"**/bias": optax.sgd(1.0), "**": optax.sgd(0.1)})
      >>> params = {"dense": {"bias": jnp.ones(1), "kernel": jnp.ones(1)}}
      >>> updates, _ = tx.update(params, tx.init(params), params)
      >>> print(updates["dense"]["bias"], updates["dense"]["kernel"])
      [-1.] [-0.1]
    """
    names = _names(transformations)

    def labels(params: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: names[_first(transformations, _tree.path_str(path))], params
        )

    whole = optax.partition({names[p]: tx for p, tx in transformations.items()}, labels)

    def init(params: PyTree) -> PyTree:
        _check(transformations, [path for path, _ in _tree.leaves_with_path(params)])
        return whole.init(params)

    return optax.GradientTransformationExtraArgs(init, whole.update)


def _names(patterns: Mapping[str, Any]) -> dict[str, str]:
    """Calls each group by the words of its pattern; a number is added where that is not enough."""
    names: dict[str, str] = {}
    for pattern in patterns:
        name = "_".join(re.findall(r"\w+", pattern)) or "rest"
        taken = [x for x in names.values() if x == name or x.startswith(f"{name}_")]
        names[pattern] = f"{name}_{len(taken) + 1}" if taken else name
    return names


def _first(patterns: Mapping[str, Any], path: str) -> str:
    return next(pattern for pattern in patterns if _patterns.matches(pattern, path))


def _check(patterns: Mapping[str, Any], paths: list[str]) -> None:
    without = [f"{p}: no pattern" for p in paths if not _patterns.any_matches(patterns, p)]
    advice = 'Add a last group "**" for the rest.'
    require_no_problems("param_groups", without, "a pattern for every param", advice)
    used = {_first(patterns, path) for path in paths}
    for pattern in patterns:
        _patterns.require_match("param_groups", pattern, paths)
        if pattern not in used:
            raise ValueError(
                f"param_groups: expected params for the pattern {pattern!r}, but earlier patterns "
                "match all of them. Put it before those."
            )
