"""Stopping each member when it no longer gets better."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _tree
from functrain.hooks._early_stopping import EarlyStopping as _EarlyStopping
from functrain.loop._events import Event, RunEnd
from functrain.population._over_members import where_active
from functrain.population._state import require_population


class EarlyStopping(_EarlyStopping):
    """A hook that stops each member when its value no longer improves, and the run after the last.

    A member that is stopped keeps its state, bit for bit, while the others go on; a checkpoint
    knows it. Where members are computed one after another (`functrain.population.step`, block=1) it
    costs no time from there on; where all are computed at once, the time of a step stays.

    Args:
      monitor: Name of the value, one a member, such as ``"val_loss"``.
      patience: After how many values in a row without an improvement a member stops. As in Keras,
        0 stops it at the first one, and so does 1.
      min_delta: The value must be better than the best one by more than this to count as an
        improvement.
      mode: ``"min"`` or ``"max"``, which is better; ``"auto"`` takes it from the name.
      restore_best: Give each member, at the end of the run, the state that had its best value.
        This costs a second copy of the states on the device and in every checkpoint; the
        checkpoint of the run's end has a third.

    Attributes:
      best: The best value of each member so far, `f64[N]`. NaN is never best.
      best_step: The steps they were seen at, `i64[N]`; -1 for none.

    Raises:
      ValueError: As `functrain.hooks.EarlyStopping`.
      TypeError: (when called) the value is not one a member, or the state no population.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp
      >>> population = ft.population.stack([{"w": jnp.zeros(())}] * 2)
      >>> hook = EarlyStopping("val_loss")
      >>> for losses in ([0.5, 0.5], [0.4, 0.6], [0.45, 0.1]):
      ...     values = {"val_loss": np.array(losses)}
      ...     event = ft.EpochEnd(position=ft.Position(step=1), state=population, values=values)
      ...     hook(event)
      ...     population = event.state
      ...     print(population.active, event.stopped)
      [ True  True] False
      [ True False] False
      [False False] True
    """

    of_members = True
    best: Any
    best_step: Any
    _failures: Any

    def begin(self) -> None:
        """Resets the hook, unless its state has just been restored."""
        is_restored = self._restored
        super().begin()
        if not is_restored:
            self.best = self.best_step = self._failures = np.zeros(0)

    def state(self) -> dict[str, Any]:
        """Returns the best values and steps, the failures since, and the best states' leaves."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "failures": self._failures,
            "best_state": self._best_leaves,
        }

    @property
    def _has_seen_values(self) -> bool:
        return len(self.best) > 0

    @property
    def _has_best(self) -> bool:
        return bool((self.best_step >= 0).any())

    def _forget_best(self) -> None:
        self.best = np.full_like(self.best, self._sign * math.inf)
        self.best_step = np.full_like(self.best_step, -1)

    def _compare(self, event: Event, value: Any) -> None:
        require_population(event.state)
        values = np.asarray(value, np.float64)
        was_active = np.asarray(event.state.active)
        if values.shape != was_active.shape:
            raise TypeError(
                f"{self.monitor}: expected a value for each of the {len(was_active)} members, "
                f"[{len(was_active)}], got {_tree.spec(value)}"
            )
        is_first = not self._has_seen_values
        if is_first:
            self.best = np.full(values.shape, self._sign * math.inf)
            self.best_step = np.full(values.shape, -1)
            self._failures = np.zeros(values.shape, np.int64)
        better = was_active & self._is_better(values)
        self.best = np.where(better, values, self.best)
        self.best_step = np.where(better, event.step, self.best_step)
        self._failures = np.where(better | is_first, 0, self._failures + was_active)
        if self.restore_best and better.any():
            self._keep(event.state.states, better)
        active = was_active & (self._failures < max(1, self.patience))
        if (active != was_active).any():
            placed = _tree.placed_like(active, event.state.active)
            event.state = event.state.replace(active=placed)
        if not active.any():
            event.stop()

    def _keep(self, states: Any, better: np.ndarray) -> None:
        leaves = jax.tree.leaves(states)
        before = self._placed(leaves) or leaves
        self._best_leaves = where_active(jnp.asarray(better), leaves, before)

    def _placed(self, leaves: list[Any]) -> list[Any]:
        """Returns the leaves that are kept where those of a state are: a checkpoint's are not."""
        return [
            kept if isinstance(kept, jax.Array) else _tree.placed_like(kept, leaf)
            for kept, leaf in zip(self._best_leaves, leaves, strict=False)
        ]

    def _end(self, event: RunEnd) -> None:
        self._warn_of_missing_value()
        if not (self.restore_best and self._best_leaves):
            return
        leaves, structure = jax.tree.flatten(event.state.states)
        had_one = jnp.asarray(self.best_step >= 0)
        best = where_active(had_one, self._placed(leaves), leaves)
        event.state = event.state.replace(states=jax.tree.unflatten(structure, best))
