"""What members predict, each or together."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from functrain.common._checks import require
from functrain.common._types import PyTree, Step
from functrain.population._over_members import Block, OverMembers
from functrain.population._state import PopulationState, require_population
from functrain.step._eval import check_predict_step

Combine: TypeAlias = Literal["mean", "vote", "each"] | Callable[[PyTree], PyTree]


def predict_step(step: Step[Any], *, combine: Combine = "mean", block: Block = "auto") -> Step[Any]:
    """Returns the step by which a population predicts, for `predict`.

    Args:
      step: That of one member, ``(state, inputs) -> (state, outputs)``, from
        `functrain.predict_step`.
      combine: ``"mean"``: of the outputs as they are, `[B, ...]`. ``"vote"``: the class, the
        largest of the last axis, that most members take, `i32[B]`; the smaller of two.
        ``"each"``: `[B, N, ...]`. Or a function of the outputs `[N, B, ...]` to `[B, ...]`: the
        probabilities of members that return logits are
        ``lambda logits: jax.nn.softmax(logits).mean(0)``.
      block: How many members at once; see `functrain.population.step`.

    Returns:
      ``(PopulationState, inputs) -> (PopulationState, outputs)``, the state untouched. Members
      that have been stopped take part, too.

    Raises:
      TypeError: `step` does not predict.
      ValueError: `combine` or `block` is none of those.

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
    require(callable(combine) or combine in _WAYS, "combine", expected, combine)
    outputs = OverMembers(lambda state, inputs: step(state, inputs)[1], "shared", block)

    def predict(population: PopulationState, inputs: PyTree, /) -> tuple[PopulationState, PyTree]:
        require_population(population)
        each = outputs(population.states, inputs)
        combined = combine(each) if callable(combine) else jax.tree.map(_WAYS[combine], each)
        return population, combined

    return predict


def _vote(x: jax.Array) -> jax.Array:
    votes = jax.nn.one_hot(jnp.argmax(x, -1), x.shape[-1]).sum(0)
    return jnp.argmax(votes, -1)


# Of each leaf `[N, B, ...]` of the outputs.
_WAYS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "mean": lambda x: jnp.mean(x, 0),
    "vote": _vote,
    "each": lambda x: jnp.moveaxis(x, 0, 1),
}
