"""Evaluation during training."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from functrain.common._checks import require
from functrain.engine import _times
from functrain.engine._placement import ShardingArg
from functrain.engine._plan import FuseArg
from functrain.engine._trigger import Every, Trigger, as_trigger
from functrain.loop._events import Event
from functrain.loop._passes import Evaluation
from functrain.rewrites import Mode
from functrain.step._metered import MeteredStep


@dataclasses.dataclass(eq=False)
class Evaluate:
    """A hook that evaluates the state and adds the results to the event's values.

    A loss that is not finite causes a warning.

    Args:
      step: From `functrain.eval_step`.
      data: The data to evaluate on, as for `functrain.evaluate`.
      every: A number of steps, or a trigger such as ``ft.every(seconds=60)``. The end of each epoch
        by default.
      prefix: The prefix of the names of the values. Evaluations that are due at the same event need
        different ones.
      fuse: Batches per program.
      rewrites: As for `functrain.evaluate`.
      sharding: The sharding of one batch, as for `functrain.evaluate`.
      jit: False evaluates uncompiled, for debugging.

    Raises:
      TypeError: The step has no metrics, or trains.
      ValueError: The loader drops examples; or (in `fit`) another value of the event has the name
        of one of these, or `every` counts seconds although there are several processes.

    Examples:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> import functrain as ft
      >>> def loss_fn(params, model_state, batch, *, rng, training):
      ...     return jnp.mean((batch - params["w"]) ** 2), ft.Aux(model_state)
      >>> tx = optax.sgd(0.5)
      >>> loader = ft.ArrayLoader(np.ones(8, np.float32), batch_size=2)
      >>> result = ft.fit(
      ...     ft.TrainState.create(params={"w": jnp.zeros(())}, tx=tx),
      ...     ft.train_step(loss_fn, tx),
      ...     loader,
      ...     hooks=[ft.hooks.Evaluate(ft.eval_step(loss_fn), loader, every=ft.every(steps=2))],
      ...     verbose=0,
      ... )
      >>> steps, values = result.history.within_epochs["val_loss"]
      >>> print(steps, values)
      [2 4] [0. 0.]
    """

    step: MeteredStep
    data: Any
    _: dataclasses.KW_ONLY
    every: int | Trigger | None = None
    prefix: str = "val_"
    fuse: FuseArg = "auto"
    rewrites: Mode = "auto"
    sharding: ShardingArg = None
    jit: bool = True

    def __post_init__(self) -> None:
        options = {"rewrites": self.rewrites, "sharding": self.sharding, "jit": self.jit}
        self.evaluation = Evaluation(self.step, self.data, fuse=self.fuse, **options)
        self.batches = self.evaluation.batches
        self.every = as_trigger(self.every, Every(epochs=1))

    def __call__(self, event: Event, /) -> None:
        """Evaluates the event's state."""
        with _times.spent("evaluation"):
            values = self.evaluation.measure(event.state)
        prefixed = {f"{self.prefix}{name}": value for name, value in values.items()}
        self.require_new(prefixed, event.values)
        event.values |= prefixed

    def require_new(self, names: Iterable[str], earlier: Iterable[str]) -> None:
        """Raises ValueError if an evaluation would replace earlier values of an event."""
        clashes = sorted(set(names).intersection(earlier))
        expected = f"one that gives names other than {clashes}, which the event has already"
        advice = "Give each evaluation its own, such as Evaluate(step, data, prefix='test_')."
        require(not clashes, "prefix", expected, self.prefix, advice)
