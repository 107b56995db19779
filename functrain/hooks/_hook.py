"""Hooks: what happens when something is due."""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import jax

from functrain.common import _repr
from functrain.engine._trigger import Trigger
from functrain.loop._events import ChunkEnd, EpochEnd, Event, LogsReady


class Hook(Protocol):
    """Called with events: with those at which its `every` is due, or with all if it has none.

    A plain function is a hook. One may read the event (waiting for the device where it looks at
    arrays), add to `event.values`, assign `event.state`, and call `event.stop()`.

    These methods are called if it has them: `begin()` when a run begins, `close()` when it ends,
    however it ends, and `logs(event)` with every `functrain.events.LogsReady`, which brings what
    each step reported to the host while the device computes.

    With `state()` and `restore(state)` a hook resumes with a run that has a
    `functrain.Checkpointer`. `state` returns dicts, lists and tuples of numbers, texts and arrays,
    which are saved beside the training's state. They come back as they were, but arrays come back
    as NumPy's. `restore` is called before `begin`. A state is restored into the hook that has the
    same class name and the same `resume_key`, in whatever order the hooks are. `resume_key` is an
    optional attribute: a text that names what the hook watches or writes. `EarlyStopping` has the
    name of its value, `CSVLogger` that of its file. Hooks of one class must have different ones.

    Where there are several processes, hooks are called in all of them, so that they may compute;
    one with an attribute `only_first = True`, as loggers have it, is called in the first alone.
    A stop in one process is a stop in all: at the same event if all call `event.stop()` there, else
    a few programs later.

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
        """Does what the hook does."""
        ...


HookLike: TypeAlias = Hook | Callable[[Any], None]


def by_identity(
    hooks: Iterable[Any], argument: str = "hooks", default_key: Callable[[Any], str] = lambda _: ""
) -> dict[str, Any]:
    """Returns hooks by class name and `resume_key`, such as ``EarlyStopping(val_loss)``.

    Args:
      hooks: Those that have a state to save.
      argument: The argument they came from, for errors.
      default_key: Returns the key of a hook that has no `resume_key`.

    Raises:
      ValueError: Two hooks have the same identity, so that a resumed run could mix up their states.
    """
    identified: dict[str, Any] = {}
    for hook in hooks:
        name, key = type(hook).__name__, getattr(hook, "resume_key", "") or default_key(hook)
        identity = f"{name}({key})" if key else name
        if identity in identified:
            raise ValueError(
                f"{argument}: expected that the state of each can be told from the others' when "
                f"the run resumes, got {identity} twice. Give each a key of its own, such as "
                "hook.resume_key = 'first'."
            )
        identified[identity] = hook
    return identified


def is_resumable(hook: Any) -> bool:
    """Returns True if a hook can resume in another process: it has `state` and `restore`."""
    return all(callable(getattr(hook, name, None)) for name in ("state", "restore"))


def _require_hook(hook: Any, name: str) -> None:
    if not callable(hook) or isinstance(hook, type):
        got = f"the class {hook.__name__}" if isinstance(hook, type) else _repr.brief(hook)
        raise TypeError(
            f"{name}: expected a function of one event, or an object that is called with one, got "
            f"{got}. Of a class pass an object, EarlyStopping(...). Callbacks of Keras go into "
            "bridge.fit(callbacks=)."
        )
    every = getattr(hook, "every", None)
    if every is not None and not (hasattr(every, "next_step") and hasattr(every, "due")):
        raise TypeError(
            f"{name}: expected its `every` to be a trigger, such as functrain.every(steps=100), "
            f"got {every!r}, in {_repr.brief(hook)}"
        )


def _is_called_here(hook: Any) -> bool:
    """Returns True if this process is one of those in which a hook is called."""
    return jax.process_index() == 0 or not getattr(hook, "only_first", False)


def triggers(hooks: Iterable[Any]) -> list[Trigger]:
    """Returns when hooks are due; some do not say, and are called with every event."""
    return [hook.every for hook in hooks if getattr(hook, "every", None) is not None]


class HookRunner:
    """Calls hooks when they are due, in their order, while `running`.

    Attributes:
      hooks: The hooks. Until the run begins, others may be put among them.
    """

    def __init__(self, hooks: Sequence[HookLike]) -> None:
        if not isinstance(hooks, Iterable):
            raise TypeError(
                f"hooks: expected a sequence of hooks, got {hooks!r}. For one: hooks=[hook]."
            )
        self.hooks: list[Any] = list(hooks)
        for i, hook in enumerate(self.hooks):
            _require_hook(hook, f"hooks[{i}]")

    def __call__(self, event: Event) -> None:
        """Calls the hooks that are due."""
        for i, hook in enumerate(self._called):
            if self._due(i, event):
                self._fired[i] = time.perf_counter()
                hook(event)

    def state(self) -> dict[str, Any]:
        """Returns the states of the hooks by their identities, to be saved."""
        return {name: hook.state() for name, hook in self.resumable().items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned, hook by hook."""
        hooks = self.resumable()
        for name in hooks.keys() - state.keys():
            warnings.warn(
                f"hooks: {name} begins afresh: the checkpoint has {sorted(state) or 'no hooks'}.",
                stacklevel=2,
            )
        for name in state.keys() - hooks.keys():
            warnings.warn(
                f"hooks: the checkpoint has {name}, which is not among the hooks of this run.",
                stacklevel=2,
            )
        for name in hooks.keys() & state.keys():
            if _is_called_here(hooks[name]):  # a logger restores its file, which all processes see
                hooks[name].restore(state[name])

    def resumable(self) -> dict[str, Any]:
        """Returns the hooks that have a state to save, by their identities.

        Raises:
          ValueError: Two of them have the same identity.
        """
        return by_identity(filter(is_resumable, self.hooks))

    def logs(self, event: LogsReady) -> None:
        """Hands the logs of a chunk to the hooks that want them."""
        for hook in self._called:
            if callable(getattr(hook, "logs", None)):
                hook.logs(event)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Lets hooks begin that want to know; closes, at the exit, those that can be closed."""
        self._called = list(filter(_is_called_here, self.hooks))
        self._fired = [time.perf_counter()] * len(self._called)
        with contextlib.ExitStack() as closing:
            for hook in reversed(self._called):  # the stack closes the last one first
                if getattr(hook, "close", None) is not None:
                    closing.callback(hook.close)
            for i, hook in enumerate(self._called):
                if getattr(hook, "comes_after", None) is not None:
                    hook.comes_after(self._called[:i])
                if getattr(hook, "begin", None) is not None:
                    hook.begin()
            yield

    def _due(self, i: int, event: Event) -> bool:
        every: Trigger | None = getattr(self._called[i], "every", None)
        if every is None or not isinstance(event, ChunkEnd | EpochEnd):
            return every is None
        epochs = event.epoch + 1 if isinstance(event, EpochEnd) else None
        return every.due(event.step, epochs, time.perf_counter() - self._fired[i])
