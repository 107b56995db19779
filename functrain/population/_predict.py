"""Predictions of the members of a population, combined or each."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from functrain.common._checks import require
from functrain.common._types import PyTree, Step
from functrain.population._over_members import Block, OverMembers
from functrain.population._shared import join
from functrain.population._state import PopulationState, require_population
from functrain.step._eval import check_predict_step

Combine: TypeAlias = Literal["mean", "vote", "each"] | Callable[[PyTree], PyTree]


def predict_step(step: Step[Any], *, combine: Combine = "mean", block: Block = "auto") -> Step[Any]:
    """Returns the step with which a population predicts, for `predict`.

    Args:
      step: The predict step of one member, ``(state, inputs) -> (state, outputs)``, from
        `functrain.predict_step`.
      combine: ``"mean"``: the mean of the outputs, `[B, ...]`. ``"vote"``: the class, the argmax
        over the last axis, that most members predict, `i32[B, ...]`; of two classes with equally
        many votes, the smaller. ``"each"``: the outputs of each member, `[B, N, ...]`. Or a
        function from the outputs `[N, B, ...]` to `[B, ...]`: for members that return logits,
        ``lambda logits: jax.nn.softmax(logits).mean(0)`` returns the mean probabilities.
      block: How many members to compute at once; see `functrain.population.step`.

    Returns:
      ``(PopulationState, inputs) -> (PopulationState, outputs)``, which does not change the state.
      Stopped members predict, too.

    Raises:
      TypeError: `step` is not a predict step; or (when traced) the state is not a population.
      ValueError: `combine` or `block` is not one of those; or (when traced) there are no classes to
        vote for.

    Examples:
      >>> import functrain as ft, numpy as np
      >>> def step(state, x):
      ...     return state, x * state
      >>> population = ft.population.stack([1.0, 2.0])
      >>> x = ft.ArrayLoader(np.arange(3.0), batch_size=2)
      >>> print(ft.predict(population, predict_step(step), x))
      [0.  1.5 3. ]
      >>> print(ft.predict(population, predict_step(step, combine="each"), x).shape)
      (3, 2)
    """
    check_predict_step(step)
    expected = "'mean', 'vote', 'each', or a function of the outputs [N, B, ...]"
    require(callable(combine) or combine in _COMBINE, "combine", expected, combine)
    over = OverMembers("shared", block)

    def predict(population: PopulationState, inputs: PyTree, /) -> tuple[PopulationState, PyTree]:
        require_population(population)
        shared = population.shared

        def predict_one(own: PyTree, inputs: PyTree) -> PyTree:
            return step(join(own, shared), inputs)[1]

        outputs = over(predict_one, population.states, inputs)
        if callable(combine):
            return population, combine(outputs)
        return population, jax.tree.map(_COMBINE[combine], outputs)

    return predict


def _vote(x: jax.Array) -> jax.Array:
    # With one score per example, argmax is always 0.
    has_classes = x.ndim >= 3 and x.shape[-1] >= 2
    expected = "outputs [N, B, ..., C] with scores of at least two classes for 'vote'"
    advice = "For one score per example: combine=lambda scores: (scores > 0).mean(0) > 0.5."
    require(has_classes, "combine", expected, x, advice)
    # argmax returns the first of equal counts, so the smaller class wins a tie.
    votes = jax.nn.one_hot(jnp.argmax(x, -1), x.shape[-1]).sum(0)
    return jnp.argmax(votes, -1)


# Functions of one leaf of the outputs, `[N, B, ...]`.
_COMBINE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "mean": lambda x: jnp.mean(x, 0),
    "vote": _vote,
    # predict joins outputs along the axis of examples, which must be the first.
    "each": lambda x: jnp.moveaxis(x, 0, 1),
}
