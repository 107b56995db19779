"""Lowers the learning rate when a monitored value no longer improves."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _direction, _repr, _tree
from functrain.common._checks import is_number, require
from functrain.common._types import PyTree
from functrain.hooks._early_stopping import EarlyStopping, require_not_negative
from functrain.loop._events import Event


class ReduceLROnPlateau(EarlyStopping):
    """A hook that multiplies the learning rate by a factor when a value no longer improves.

    It changes the rate that `optax.inject_hyperparams` keeps in the state, as in
    ``optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)``; all of them if there are several.
    The arguments mean what they mean in ``keras.callbacks.ReduceLROnPlateau``, and the rate falls
    after the same value. Its state is saved in checkpoints. `optax.contrib.reduce_on_plateau` does
    this by the training loss, inside the program.

    Args:
      monitor: Name of the value, such as ``"val_loss"``.
      factor: The factor by which the rate is multiplied, above 0 and below 1.
      patience: The number of values in a row without an improvement after which the rate falls.
      mode: ``"min"`` or ``"max"``, the better direction. ``"auto"`` takes it from the name, as in
        `EarlyStopping`.
      min_delta: The value must be better than the best one by more than this to count as an
        improvement.
      cooldown: The number of values after a reduction that are not counted.
      min_lr: The rate does not fall below this.

    Attributes:
      best: The best value so far. NaN is never best, as in `EarlyStopping`.
      resume_key: The name of the value; see `functrain.hooks.Hook`.

    Raises:
      ValueError: An argument is out of range, or the name does not imply a direction; (before the
        first step) the state has no injected learning rate, or one that follows a schedule.

    Warns:
      UserWarning: As `EarlyStopping`.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp, optax
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
      >>> state = ft.TrainState.create(params={"w": jnp.zeros(3)}, tx=tx)
      >>> hook = ReduceLROnPlateau("val_loss", factor=0.1, patience=2)
      >>> for loss in (0.5, 0.4, 0.4, 0.6):
      ...     event = ft.events.EpochEnd(
      ...         position=ft.Position(step=1), state=state, values={"val_loss": loss}
      ...     )
      ...     hook(event)
      ...     state = event.state
      ...     print(loss, ft.tx.logged(state)["learning_rate"])
      0.5 0.5
      0.4 0.5
      0.4 0.5
      0.6 0.05
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        factor: float = 0.1,
        patience: int = 10,
        mode: _direction.Mode = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        is_factor = is_number(factor) and 0 < factor < 1
        require(is_factor, "factor", "a number above 0 and below 1", factor)
        require_not_negative(cooldown=cooldown, min_lr=min_lr)
        self.factor = factor
        self.cooldown = cooldown
        self.min_lr = min_lr
        super().__init__(monitor, patience=patience, min_delta=min_delta, mode=mode)

    def __repr__(self) -> str:
        return _repr.call(self, monitor=self.monitor, factor=self.factor, patience=self.patience)

    def _reset(self) -> None:
        super()._reset()
        self._cooldown_left = 0

    def state(self) -> dict[str, Any]:
        """Returns the best value, the values since, and those that are not counted yet."""
        return {**super().state(), "cooldown_left": self._cooldown_left}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned, for the run that begins next."""
        super().restore(state)
        self._cooldown_left = int(state["cooldown_left"])

    @staticmethod
    def require_rates(state: PyTree) -> None:
        """Raises ValueError unless a state has a learning rate that can be set."""
        expected = "a state with a learning rate that is injected as a number"
        advice = "Create the optimizer as optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
        if not _rate_paths(state):
            raise ValueError(f"ReduceLROnPlateau: expected {expected}, got none. {advice}")

    def _compare(self, event: Event, value: Any) -> None:
        self._cooldown_left = max(0, self._cooldown_left - 1)
        super()._compare(event, value)
        if self._cooldown_left:
            self._failures = np.asarray(0)

    def _handle_plateau(self, event: Event) -> None:
        """Lowers the rates, unless those of a reduction before are still new."""
        if not self._cooldown_left:
            self._reduce(event)
            self._cooldown_left = int(self.cooldown)
            self._failures = np.asarray(0)

    def _reduce(self, event: Event) -> None:
        """Lowers the rates in the state of an event that are above `min_lr`."""
        self.require_rates(event.state)
        leaves = dict(_tree.leaves_with_path(event.state))
        for path in _rate_paths(event.state):
            # In Python's floats, as in Keras, and rounded once.
            rate = float(leaves[path])
            if rate > np.float32(self.min_lr):
                new_rate = jnp.asarray(max(rate * self.factor, self.min_lr), leaves[path].dtype)
                leaves[path] = _tree.device_put_like(new_rate, leaves[path])
        event.state = jax.tree.unflatten(_tree.structure(event.state), leaves.values())


def _rate_paths(state: PyTree) -> list[str]:
    """Returns the paths of the learning rates in a state that can be set."""
    paths = [path for path, _ in _tree.leaves_with_path(state)]
    ends = "hyperparams/learning_rate", "scalars/learning_rate"
    return [x for x in paths if x.endswith(ends) and not is_scheduled(x, paths)]


def is_scheduled(path: str, paths: Iterable[str]) -> bool:
    """Returns True if a schedule sets the hyperparameter at one of the paths of a state."""
    # `optax.inject_hyperparams` keeps the state of a schedule beside the number that it sets.
    parent, _, name = path.rpartition("hyperparams/")
    return any(x.startswith(f"{parent}hyperparams_states/{name}/") for x in paths)
