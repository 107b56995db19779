"""Triggers: schedules by steps, epochs or seconds."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from functrain.common import _repr
from functrain.common._checks import is_integer, is_positive, require


class Trigger(Protocol):
    """A schedule: decides when a hook, a save or a pause is due. `every` and `at` make triggers.

    Examples:
      >>> class AtPowersOfTwo:
      ...     def next_step(self, step):
      ...         return 1 << step.bit_length()
      ...
      ...     def due(self, step, epoch, seconds):
      ...         return epoch is None and step & (step - 1) == 0
      >>> AtPowersOfTwo().next_step(5)
      8
    """

    def next_step(self, step: int) -> int | None:
        """Returns the first due step after `step`, or None if the schedule is not by steps."""
        ...

    def due(self, step: int, epoch: int | None, seconds: float) -> bool:
        """Returns True if the trigger is due now.

        Args:
          step: Steps taken so far.
          epoch: Epochs completed, if one has just ended; None within an epoch.
          seconds: Time since the trigger was last due, or since the run began.
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledHook:
    """A hook with its schedule, as ``@every(steps=100)`` makes it. It can be called like the hook.

    Attributes:
      hook: The function, which does not change: it may have several schedules.
      every: The trigger.
    """

    hook: Callable[[Any], Any]
    every: Trigger

    def __call__(self, event: Any) -> Any:
        """Calls the hook, due or not."""
        return self.hook(event)

    def __repr__(self) -> str:
        return f"{self.every!r}({_repr.name(self.hook)})"


def without_schedule(hook: Any) -> Any:
    """Returns the hook within a `ScheduledHook`, or the hook itself."""
    return hook.hook if isinstance(hook, ScheduledHook) else hook


class _Decorator:
    """Base of triggers that turn a function into a hook, as in ``@every(steps=100)``."""

    def __call__(self: Any, hook: Callable[[Any], Any]) -> ScheduledHook:
        """Returns a hook that is called when the trigger is due.

        Raises:
          TypeError: It is not a function of an event, but a class, for example; or it has a
            schedule already.
        """
        is_hook = callable(hook) and not isinstance(hook, type) and not hasattr(hook, "every")
        expected = "a function of one event, without a schedule"
        advice = (
            "In a class of hooks, write every = functrain.every(steps=100); pass every= to "
            "functrain's own hooks. For two schedules, write "
            "hooks=[functrain.every(steps=50)(log), functrain.at(1)(log)]."
        )
        require(is_hook, repr(self), expected, hook, advice, error=TypeError)
        return ScheduledHook(hook, self)


@dataclasses.dataclass(frozen=True)
class Every(_Decorator):
    """The trigger that `every` returns; also a decorator that makes a function a hook."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    def __repr__(self) -> str:
        units = dataclasses.asdict(self).items()
        return f"every({', '.join(f'{name}={value}' for name, value in units if value)})"

    def next_step(self, step: int) -> int | None:
        """Returns the next multiple of `steps`."""
        return None if self.steps is None else (step // self.steps + 1) * self.steps

    def due(self, step: int, epoch: int | None, seconds: float) -> bool:
        """Returns True at multiples of the steps or epochs, or when the time has passed."""
        if epoch is not None:
            return self.epochs is not None and epoch % self.epochs == 0
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and seconds >= self.seconds


@dataclasses.dataclass(frozen=True)
class At(_Decorator):
    """The trigger that `at` returns; also a decorator that makes a function a hook."""

    steps: frozenset[int]

    def __repr__(self) -> str:
        return f"at({', '.join(map(str, sorted(self.steps)))})"

    def next_step(self, step: int) -> int | None:
        """Returns the first of its steps after `step`, or None if there is none."""
        return min((s for s in self.steps if s > step), default=None)

    def due(self, step: int, epoch: int | None, seconds: float) -> bool:
        """Returns True at each of its steps."""
        return epoch is None and step in self.steps


def every(
    *,
    steps: int | None = None,
    epochs: int | None = None,
    seconds: float | None = None,
    minutes: float | None = None,
) -> Every:
    """Returns a trigger that is due at regular intervals.

    Steps and epochs are exact: a chunk ends where a trigger is due, so hooks see the state of
    exactly that step. Seconds are checked when a chunk ends.

    Args:
      steps: Due after every `steps` steps of the run.
      epochs: Due at the end of every `epochs` epochs.
      seconds: Due at the end of the chunk in which this time has passed.
      minutes: As `seconds`.

    Returns:
      A trigger for a hook's `every`, or for `run(boundaries=...)`. It is a decorator as well:
      ``@every(steps=100)`` makes a hook of a function of one event, with the attributes `hook`,
      which is that function, and `every`. ``every(steps=100)(log)`` leaves `log` as it is.

    Raises:
      ValueError: Not exactly one argument is given, or it is not positive and finite.

    Examples:
      >>> every(steps=100).next_step(250)
      300
      >>> @every(epochs=2)
      ... def report(event):
      ...     print(event.epoch)
      >>> report.every.due(step=10, epoch=4, seconds=0.0)
      True
    """
    units = {"steps": steps, "epochs": epochs, "seconds": seconds, "minutes": minutes}
    passed = {name: value for name, value in units.items() if value is not None}
    require(len(passed) == 1, "every", "one of steps, epochs, seconds and minutes", passed or None)
    ((name, value),) = passed.items()
    if name in ("seconds", "minutes"):
        require(is_positive(value), "every", f"a positive, finite number of {name}", value)
    else:
        require(is_integer(value, 1), "every", f"a positive whole number of {name}", value)
    return Every(steps, epochs, seconds if minutes is None else 60 * minutes)


def as_trigger(every: Any, default: Trigger) -> Trigger:
    """Converts an argument `every` to a trigger.

    Args:
      every: A trigger, a number of steps, or None.
      default: The trigger to return for None.

    Raises:
      ValueError: `every` is something else.
    """
    if every is None:
        return default
    if is_integer(every, 1):
        return Every(steps=int(every))
    expected = "a number of steps from 1 on, or a trigger such as functrain.every(epochs=1)"
    require(is_trigger(every), "every", expected, every)
    trigger: Trigger = every
    return trigger


def is_trigger(x: Any) -> bool:
    """Returns True if an object has the methods of a trigger."""
    # Not isinstance: `Trigger` is a protocol, which a user's class need not inherit from.
    return hasattr(x, "next_step") and hasattr(x, "due") and not isinstance(x, type)


def at(*steps: int) -> At:
    """Returns a trigger that is due after each of the given steps of the run.

    Raises:
      ValueError: There are no steps, or one is not a positive integer.

    Examples:
      >>> at(1, 10, 100).next_step(10)
      100
    """
    are_valid = bool(steps) and all(is_integer(step, 1) for step in steps)
    require(are_valid, "at", "one or more steps from 1 on", steps)
    return At(frozenset(steps))


def steps_until_due(triggers: Iterable[Trigger], step: int) -> int | None:
    """Returns the number of steps until the first of the triggers is due; None if none is by steps.

    Raises:
      ValueError: The `next_step` of a trigger returned neither a later step nor None.
    """
    due_steps = []
    for trigger in triggers:
        due_step = trigger.next_step(step)
        if is_integer(due_step, step + 1):
            due_steps.append(due_step)
        elif due_step is not None:
            # The class may be a user's. A step in the past would give chunks without steps.
            source = f"next_step({step}) of {_repr.brief(trigger)}"
            raise ValueError(
                f"every: expected a step after {step}, or None, from {source}, got {due_step!r}."
            )
    return min(due_steps) - step if due_steps else None


def longest_interval(triggers: Sequence[Trigger]) -> int | None:
    """Returns the most steps between two of the first 32 pauses; None if there are fewer.

    A chunk with more rows would seldom be full.

    Examples:
      >>> longest_interval([every(steps=100), at(10)])
      100
      >>> print(longest_interval([at(1, 10)]))
      None
    """
    step = longest = 0
    # As many pauses as get past triggers that are due only at the first steps, to a regular one.
    for _ in range(32):
        interval = steps_until_due(triggers, step)
        if interval is None:
            return None
        step, longest = step + interval, max(longest, interval)
    return longest
