"""Evaluation in the midst of training."""

from typing import Any

from functrain.common import _repr
from functrain.common._checks import require_flags
from functrain.data._adapt import as_batches
from functrain.engine._placement import ShardingArg, batch_sharding
from functrain.engine._plan import FuseArg
from functrain.engine._trigger import Every, Trigger, as_trigger
from functrain.loop._evaluate import active_members, evaluated
from functrain.loop._events import Event
from functrain.loop._finite import warn_of_loss
from functrain.loop._require import require_all_examples, require_eval_step
from functrain.rewrites import Mode
from functrain.step._metered import MeteredStep


class Evaluate:
    """A hook that evaluates the state and adds the values to the event's.

    A loss that is not finite is warned of once in a run.

    Args:
      step: From `functrain.eval_step`.
      data: What to evaluate on, as for `functrain.evaluate`.
      every: A number of steps, or a trigger such as ``ft.every(seconds=60)``. The end of each epoch
        by default.
      prefix: In front of the names of the values.
      fuse: Batches per program.
      rewrites: As for `functrain.evaluate`.
      sharding: Of one batch, as for `functrain.evaluate`.
      jit: False for debugging.

    Raises:
      TypeError: The step carries no metrics, or trains.
      ValueError: The loader drops examples, or the devices belong to several processes while
        `every` asks the clock.

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
      >>> steps, values = result.history.points["val_loss"]
      >>> print(steps, values)
      [2 4] [0. 0.]
    """

    def __init__(
        self,
        step: MeteredStep,
        data: Any,
        *,
        every: int | Trigger | None = None,
        prefix: str = "val_",
        fuse: FuseArg = "auto",
        rewrites: Mode = "auto",
        sharding: ShardingArg = None,
        jit: bool = True,
    ) -> None:
        require_eval_step(step)
        require_flags(jit=jit)
        self.batches = as_batches(data)
        where = batch_sharding(sharding)
        require_all_examples(self.batches)
        if getattr(every, "seconds", None) is not None and where and not where.is_fully_addressable:
            raise ValueError(
                "every: expected functrain.every(steps=...) or epochs= where there are several "
                f"processes, which evaluate together and whose clocks differ, got {every!r}"
            )
        self.step = step
        self.data = self.batches.data
        self.every = as_trigger(every, Every(epochs=1))
        self.prefix = prefix
        self.how: dict[str, Any] = {
            "fuse": fuse,
            "rewrites": rewrites,
            "sharding": sharding,
            "jit": jit,
        }
        self._has_warned = False

    def __repr__(self) -> str:
        return _repr.call(self, data=self.data, every=self.every, prefix=self.prefix)

    def begin(self) -> None:
        """Lets the run that begins warn once more."""
        self._has_warned = False

    def __call__(self, event: Event, /) -> None:
        """Evaluates the event's state."""
        values = evaluated(event.state, self.step, self.batches, **self.how)
        if not self._has_warned:
            active = active_members(event.state, self.step)
            # The line that called fit: HookRunner, three functions of fit, and its decorator are
            # between.
            self._has_warned = warn_of_loss(values, active, stacklevel=7)
        event.values |= {f"{self.prefix}{name}": value for name, value in values.items()}
