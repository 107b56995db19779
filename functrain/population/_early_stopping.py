"""Early stopping of each member of a population."""

from typing import Any, ClassVar

import jax
import numpy as np

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._gather import fetch_global
from functrain.hooks._early_stopping import EarlyStopping as _EarlyStopping
from functrain.loop._events import Event
from functrain.population._state import require_population
from functrain.population._stopped import where_active


class EarlyStopping(_EarlyStopping):
    """A hook that stops each member when its value no longer improves.

    The run ends when all members are stopped. A stopped member keeps its state, bit for bit, while
    the others are trained; checkpoints store which members are stopped. Where members are computed
    one after another (`functrain.population.step`, block=1), a stopped member costs no more time.
    Where all are computed at once, the time of a step does not change.

    Args:
      monitor: Name of a value with one number for each member, such as ``"val_loss"``.
      patience: Stop a member after this many values in a row without an improvement. As in Keras,
        0 stops it at the first one, and so does 1.
      min_delta: The value must be better than the best one by more than this to count as an
        improvement.
      mode: ``"min"`` if smaller is better, ``"max"`` if larger is; ``"auto"`` infers it from the
        name.
      baseline: A value that each member must beat, as for `functrain.hooks.EarlyStopping`.
      start_from_epoch: The number of epochs at the start whose values are ignored.
      restore_best: Give each member, at the end of the run, the state that had its best value.
        This costs a second copy of the states on the device and in every checkpoint; the
        checkpoint of the run's end has a third.

    Attributes:
      best: The best value of each member so far, `f64[N]`. NaN is never best.
      best_step: The steps of the best values, `i64[N]`; -1 for none.

    Raises:
      ValueError: As `functrain.hooks.EarlyStopping`.
      TypeError: (when called) the value does not have one number for each member, or the state is
        not a population.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp
      >>> population = ft.population.stack([{"w": jnp.zeros(())}] * 2)
      >>> hook = EarlyStopping("val_loss")
      >>> for losses in ([0.5, 0.5], [0.4, 0.6], [0.45, 0.1]):
      ...     values = {"val_loss": np.array(losses)}
      ...     end = ft.Position(step=1)
      ...     event = ft.events.EpochEnd(position=end, state=population, values=values)
      ...     hook(event)
      ...     population = event.state
      ...     print(population.active, event.stopped)
      [ True  True] False
      [ True False] False
      [False False] True
    """

    of_members: ClassVar[bool] = True

    @property
    def best_step(self) -> np.ndarray:
        """The steps of the best values."""
        return self._best_step

    def _compare(self, event: Event, value: Any) -> None:
        require_population(event.state)
        # On the host, as the decision to end the run is made there.
        values = np.asarray(value, np.float64)
        active = fetch_global(event.state.active)
        expected = f"a value for each of the {len(active)} members, [{len(active)}]"
        require(values.shape == active.shape, self.monitor, expected, value, error=TypeError)
        still_active = self._update(event, values, active)
        # The run copies a state that a hook assigns, so it is assigned only after a change.
        if (still_active != active).any():
            mask = _tree.device_put_like(still_active, event.state.active)
            event.state = event.state.replace(active=mask)
        if not still_active.any():
            event.stop()

    def _keep(self, state: Any, is_better: np.ndarray) -> None:
        leaves = jax.tree.leaves(state.states)
        # Before the first improvement no best leaves are kept, and the current ones stand in.
        before = self._put_best_leaves(leaves) or leaves
        mask = _tree.device_put_like(is_better, state.active)
        self._best_leaves = where_active(mask, leaves, before)

    def _best_state(self, state: Any) -> Any:
        leaves, structure = jax.tree.flatten(state.states)
        # A member whose values were all NaN has no best state and keeps its last one.
        had_one = _tree.device_put_like(self._best_step >= 0, state.active)
        best = where_active(had_one, self._put_best_leaves(leaves), leaves)
        return state.replace(states=jax.tree.unflatten(structure, best))
