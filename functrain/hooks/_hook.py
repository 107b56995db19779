"""Hooks: functions that a loop calls with its events."""

import contextlib
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import jax

from functrain.common import _repr
from functrain.common._arguments import accepts, describe_signature
from functrain.common._checks import require
from functrain.common._warnings import warn
from functrain.engine._trigger import Trigger, is_trigger, without_schedule
from functrain.loop._events import ChunkEnd, EpochEnd, Event, RunEnd


class Hook(Protocol):
    """A function of events. It gets the events at which its `every` is due, or all events.

    A plain function is a hook. It may read the event (and wait for the device if it reads arrays),
    add to `event.values`, assign `event.state`, and call `event.stop()`.

    A hook may have these methods: `begin()` is called when a run begins, `close()` when it ends,
    also after an error, and `logs(event)` with every `functrain.events.ChunkEnd` one program later,
    when its `host_logs()` have arrived: the device does not wait for the hook.

    With `state()` and `restore(state)`, a hook resumes together with a run that has a
    `functrain.Checkpointer`. `state` returns dicts, lists and tuples of numbers, texts and arrays,
    which are saved beside the training state. They are restored unchanged, except that arrays
    become NumPy arrays. `restore` is called before `begin`. A state is restored into the hook with
    the same class name and the same `resume_key`, in whatever order the hooks are. `resume_key` is
    an optional attribute: a text that names what the hook watches or writes. That of
    `EarlyStopping` is the name of its value, that of `CSVLogger` the name of its file. Hooks of one
    class must have different keys.

    If there are several processes, hooks are called in all of them, so that they may compute
    together. A hook with an attribute `only_first = True`, such as a logger, is called only in the
    first process. One with `acts_at_end = True`, such as `EarlyStopping`, gets the end of the run
    whatever its `every`. A stop in one process stops all: at the same event if all call
    `event.stop()` there, otherwise a few programs later.

    Examples:
      >>> import functrain as ft
      >>> @ft.every(steps=100)
      ... def show(event):
      ...     print(event.step, event.latest()["loss"])
      >>> def stop_early(event):
      ...     if event.step >= 1_000:
      ...         event.stop()
      >>> hooks = [show, stop_early]  # for fit(hooks=...)
    """

    def __call__(self, event: Event, /) -> None:
        """Handles an event."""
        ...


HookLike: TypeAlias = Hook | Callable[[Any], None]


def by_identity(
    hooks: Iterable[Any], argument: str = "hooks", default_key: Callable[[Any], str] = lambda _: ""
) -> dict[str, Any]:
    """Returns hooks by class name and `resume_key`, such as ``EarlyStopping(val_loss)``.

    Args:
      hooks: Hooks that have a state to save.
      argument: The name of their argument, for errors.
      default_key: Returns the key of a hook without a `resume_key`.

    Raises:
      ValueError: Two hooks have the same identity: a resumed run could mix up their states.
    """
    identified: dict[str, Any] = {}
    for hook in hooks:
        name, key = type(hook).__name__, getattr(hook, "resume_key", "") or default_key(hook)
        identity = f"{name}({key})" if key else name
        if identity in identified:
            raise ValueError(
                f"{argument}: expected hooks whose states can be told apart when the run resumes, "
                f"got {identity} twice. Give each its own key, such as hook.resume_key = 'first'."
            )
        identified[identity] = hook
    return identified


def is_resumable(hook: Any) -> bool:
    """Returns True if a hook can resume in another process: it has `state` and `restore`."""
    return hasattr(hook, "state") and hasattr(hook, "restore")


def _require_hook(hook: Any, name: str) -> None:
    advice = "Pass an object and no class, a Checkpointer as checkpointer=, and callbacks of Keras "
    advice += "to bridge.fit."
    is_hook = callable(hook) and not isinstance(hook, type)
    require(is_hook, name, "a function of one event", hook, advice, error=TypeError)
    function = without_schedule(hook)
    if not accepts(function, 1):
        got = describe_signature(function)
        raise TypeError(f"{name}: expected a function of one event, got {got}.")
    # A call would not run its body.
    is_run = not (inspect.iscoroutinefunction(hook) or inspect.isgeneratorfunction(hook))
    expected = "a function of one event without async and yield"
    require(is_run, name, expected, hook, error=TypeError)
    every = getattr(hook, "every", None)
    is_valid = every is None or is_trigger(every)
    expected = f"`every` of {_repr.name(hook)} to be a trigger, such as functrain.every(steps=100)"
    require(is_valid, name, expected, every, error=TypeError)


def _is_called_here(hook: Any) -> bool:
    """Returns True if a hook is called in this process."""
    return jax.process_index() == 0 or not getattr(without_schedule(hook), "only_first", False)


class HookRunner:
    """Calls hooks when they are due, in their order, within `running`.

    Attributes:
      hooks: The hooks. Others may be inserted until the run begins.
      triggers: The triggers of those that have one; the others are called with every event.
    """

    def __init__(self, hooks: Sequence[HookLike]) -> None:
        advice = "For one hook, write hooks=[hook]."
        is_iterable = isinstance(hooks, Iterable)
        require(is_iterable, "hooks", "a sequence of hooks", hooks, advice, error=TypeError)
        self.hooks: list[Any] = list(hooks)
        for i, hook in enumerate(self.hooks):
            _require_hook(without_schedule(hook), f"hooks[{i}]")
        schedules = (getattr(hook, "every", None) for hook in self.hooks)
        self.triggers: list[Trigger] = [every for every in schedules if every is not None]

    def unscheduled(self) -> list[Any]:
        """Returns the hooks without their schedules; once for a hook that has several."""
        hooks = map(without_schedule, self.hooks)
        return list({id(hook): hook for hook in hooks}.values())

    def __call__(self, event: Event) -> None:
        """Calls the hooks that are due; those without a schedule with every event."""
        step, epoch, _ = event.position
        epochs = epoch + 1 if isinstance(event, EpochEnd) else None
        for i, hook in enumerate(self._called_hooks):
            every: Trigger | None = getattr(hook, "every", None)
            seconds = time.perf_counter() - self._last_call_times[i]
            if every is None:
                is_due = True
            elif isinstance(event, RunEnd):
                is_due = getattr(without_schedule(hook), "acts_at_end", False)
            else:
                is_due = every.due(step, epochs, seconds)
            if is_due:
                # Set before the call, so that the time a hook takes counts towards its interval.
                self._last_call_times[i] = time.perf_counter()
                hook(event)

    def state(self) -> dict[str, Any]:
        """Returns the states of this process's hooks by their identities, for the checkpoint."""
        hooks = self.resumable()
        return {name: hooks[name].state() for name in hooks if _is_called_here(hooks[name])}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned, hook by hook."""
        hooks = self.resumable()
        if hooks.keys() != state.keys():
            expected = f"those with a state in the checkpoint, {sorted(state)}"
            warn(f"hooks: expected {expected}, got {sorted(hooks)}. The others start anew.")
        for name in hooks.keys() & state.keys():
            # A logger truncates its file, which is one file for all processes.
            if _is_called_here(hooks[name]):
                hooks[name].restore(state[name])

    def resumable(self) -> dict[str, Any]:
        """Returns the hooks that have a state to save, by their identities.

        Raises:
          ValueError: Two of them have the same identity.
        """
        # By class and key, not by position: hooks may be added, removed or reordered between runs.
        return by_identity(filter(is_resumable, self.unscheduled()))

    def logs(self, event: ChunkEnd) -> None:
        """Passes the logs of a chunk to the hooks that have a method `logs`."""
        for hook in self._hooks_with_logs:
            hook.logs(event)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: calls `begin` of the hooks, and at the exit `close`."""
        self._called_hooks = list(filter(_is_called_here, self.hooks))
        # An interval in seconds begins with the run.
        self._last_call_times = [time.perf_counter()] * len(self._called_hooks)
        hooks = list(filter(_is_called_here, self.unscheduled()))
        self._hooks_with_logs = [hook for hook in hooks if hasattr(hook, "logs")]
        with contextlib.ExitStack() as closing:
            # The stack closes the last one first, and hooks are closed in their order. All are
            # registered before the first begins, so that an error in `begin` closes them too.
            for hook in reversed(hooks):
                if hasattr(hook, "close"):
                    closing.callback(hook.close)
            for hook in hooks:
                if hasattr(hook, "begin"):
                    hook.begin()
            yield
