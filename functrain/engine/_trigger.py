"""When something is due: at steps, every so many steps, epochs or seconds."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from functrain.common import _repr
from functrain.common._checks import is_integer, is_positive

F = TypeVar("F", bound=Callable[..., Any])


class Trigger(Protocol):
    """Says when something is due. `every` and `at` make them.

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
        """Returns the first due step after `step`, or None if steps do not decide."""
        ...

    def due(self, step: int, epoch: int | None, seconds: float) -> bool:
        """Whether it is due now.

        Args:
          step: Steps taken so far.
          epoch: Epochs completed, if one has just ended; None within an epoch.
          seconds: Time since it was last due, or since the run began.
        """
        ...


class _Decorator:
    """A trigger that makes a function a hook, ``@every(steps=100)``."""

    def __call__(self, function: F) -> F:
        """Makes a function a hook that is called when due."""
        function.every = self  # type: ignore[attr-defined]  # a function is an object like others
        return function


@dataclasses.dataclass(frozen=True)
class Every(_Decorator):
    """What `every` returns: a Trigger, and a decorator that makes a function a hook."""

    steps: int | None = None
    epochs: int | None = None
    seconds: float | None = None

    def __repr__(self) -> str:
        given = {n: x for n, x in dataclasses.asdict(self).items() if x is not None}
        return f"every({', '.join(f'{name}={value}' for name, value in given.items())})"

    def next_step(self, step: int) -> int | None:
        """Returns the next multiple of `steps`."""
        return None if self.steps is None else (step // self.steps + 1) * self.steps

    def due(self, step: int, epoch: int | None, seconds: float) -> bool:
        """Whether a multiple has been reached, or the time is up."""
        if epoch is not None:
            return self.epochs is not None and epoch % self.epochs == 0
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and seconds >= self.seconds


@dataclasses.dataclass(frozen=True)
class At(_Decorator):
    """What `at` returns: a Trigger, and a decorator that makes a function a hook."""

    steps: frozenset[int]

    def __repr__(self) -> str:
        return f"at({', '.join(map(str, sorted(self.steps)))})"

    def next_step(self, step: int) -> int | None:
        """Returns the first of the steps after `step`."""
        return min((s for s in self.steps if s > step), default=None)

    def due(self, step: int, epoch: int | None, seconds: float) -> bool:
        """Whether this is one of the steps."""
        return epoch is None and step in self.steps


def every(
    *, steps: int | None = None, epochs: int | None = None, seconds: float | None = None
) -> Every:
    """Returns a trigger that is due again and again.

    Steps and epochs are exact: chunks end where something is due, so whoever waits sees the state
    of that very step. Seconds are looked at when a chunk ends.

    Args:
      steps: After every so many steps of the run.
      epochs: At the end of every so many epochs.
      seconds: At the end of the chunk in which so much time has passed.

    Returns:
      A trigger for a hook's `every`, or for `run(boundaries=...)`. It is a decorator as well:
      ``@every(steps=100)`` makes a function of one event a hook.

    Raises:
      ValueError: Not exactly one of them is given, or it is not positive and finite.

    Examples:
      >>> every(steps=100).next_step(250)
      300
      >>> @every(epochs=2)
      ... def report(event):
      ...     print(event.epoch)
      >>> report.every.due(step=10, epoch=4, seconds=0.0)
      True
    """
    given = {"steps": steps, "epochs": epochs, "seconds": seconds}
    named = {name: value for name, value in given.items() if value is not None}
    if len(named) != 1:
        raise ValueError(f"every: expected one of steps, epochs and seconds, got {named or None}")
    ((name, value),) = named.items()
    if not (is_positive(value) if name == "seconds" else is_integer(value, 1)):
        kind = "a positive, finite number" if name == "seconds" else "a positive whole number"
        raise ValueError(f"every: expected {kind} of {name}, got {value!r}")
    return Every(steps, epochs, seconds)


def as_trigger(every: Any, default: Trigger) -> Trigger:
    """Returns the trigger that an argument `every` stands for.

    Args:
      every: A trigger; or a number of steps; or None.
      default: The trigger that None stands for.

    Raises:
      ValueError: `every` is none of these.
    """
    if every is None:
        return default
    if is_integer(every, 1):
        return Every(steps=int(every))
    if not (hasattr(every, "next_step") and hasattr(every, "due")):
        raise ValueError(
            "every: expected a number of steps from 1 on, or a trigger such as "
            f"functrain.every(epochs=1), got {_repr.brief(every)}"
        )
    trigger: Trigger = every
    return trigger


def at(*steps: int) -> At:
    """Returns a trigger that is due after each of the given steps of the run.

    Raises:
      ValueError: No steps, or one that is not positive.

    Examples:
      >>> at(1, 10, 100).next_step(10)
      100
    """
    if not steps or not all(is_integer(s, 1) for s in steps):
        raise ValueError(f"at: expected one or more steps from 1 on, got {steps}")
    return At(frozenset(steps))


def steps_until_due(triggers: Iterable[Trigger], step: int) -> int | None:
    """Returns how many steps may be taken before the first of the triggers is due."""
    due = []
    for trigger in triggers:  # a user's own class may be among them
        found = trigger.next_step(step)
        if is_integer(found, step + 1):
            due.append(found)
        elif found is not None:
            raise ValueError(
                f"every: expected a step after {step}, or None, from next_step({step}) of "
                f"{_repr.brief(trigger)}, got {found!r}."
            )
    return min(due) - step if due else None


def longest_interval(triggers: Sequence[Trigger]) -> int | None:
    """Returns the most steps that are taken without a pause, looking at the first pauses.

    Examples:
      >>> longest_interval([every(steps=100), at(10)])
      100
      >>> print(longest_interval([at(1, 10)]))
      None
    """
    step = longest = 0
    for _ in range(_PAUSES):
        stretch = steps_until_due(triggers, step)
        if stretch is None:
            return None
        step, longest = step + stretch, max(longest, stretch)
    return longest


# Of one that is due every 100 steps and others that are due at first, as many are passed by.
_PAUSES = 32
