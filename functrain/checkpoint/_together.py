"""A checkpoint that several processes write, into a directory that all of them see.

Orbax writes each process's parts of the arrays. Each process writes down the digests of its own
parts; when all have, the first one says what the checkpoint is, and gives it its name. The others
wait for that, so that all of them know whether a save went well. Whoever fails leaves word of it,
or, if it is the first, takes everything away: while they wait, all of them look for that.

What they tell each other stands in a directory of notes, whose name is another in each save: who
is late with a save that failed writes nothing into the next one.
"""

import contextlib
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any

import jax

from functrain.checkpoint._about import ARRAYS, read_about, write_about
from functrain.checkpoint._arrays import (
    failing_to_write,
    release,
    save_options,
    turn_to_save,
)
from functrain.checkpoint._background import threaded
from functrain.checkpoint._directory import Directory
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._leaves import Leaf, path_of
from functrain.checkpoint._place import put, remove, staged, staging
from functrain.checkpoint._processes import all_or_none, is_first, on_first
from functrain.checkpoint._store import (
    arrays_of,
    digests,
    file_digests,
    said_of,
    sync_directory,
)
from functrain.common import _tree

_LOOK = 0.01, 1.0  # seconds between two looks at the directory: at first, and after long
_PATIENCE = 600.0  # seconds to wait for the others, whose disks may be slower
_SEEN = 60.0  # seconds after which a disk on a network shows to one machine what another wrote


def begin(
    target: str, leaves: Mapping[str, Leaf], check: Callable[[], object]
) -> Callable[[Mapping[str, Any]], None]:
    """Begins to write; all processes call it, in the thread that runs their programs.

    Args:
      target: Where the checkpoint is to stand.
      leaves: By name; the same names in all processes.
      check: Called by the first process before anything is written.

    Returns:
      What ends it, in any thread: it takes what goes with the arrays, and raises an OSError in all
      processes where it went wrong in one.

    Raises:
      ValueError: The processes do not save the same to the same place; all of them raise.
    """
    from orbax.checkpoint import v1 as ocp

    specs = {name: leaf.spec for name, leaf in leaves.items()}

    def make() -> list[str]:
        check()
        where = staged(target)
        notes = os.path.join(where, f"notes-{os.urandom(8).hex()}")
        os.makedirs(notes)
        _leave(notes, "leaves", specs)
        return [where, notes]

    with contextlib.ExitStack() as turn:
        # All processes begin their saves in one order, so no turn waits for a later one elsewhere.
        turn.enter_context(turn_to_save())
        where, notes = on_first(make)
        with _undone(where, notes):
            with all_or_none():
                _require_same_place(target, where, notes)
                _require_same_leaves(target, notes, specs)
            with all_or_none(), save_options():
                response = ocp.save_async(os.path.join(where, ARRAYS), arrays_of(leaves))
        rest_of_turn = turn.pop_all()

    def end(about: Mapping[str, Any]) -> None:
        mark = os.path.basename(notes)
        with _undone(where, notes):
            with _unless_first_failed(target, notes):
                with rest_of_turn:
                    _wait_for_orbax(response, where, notes)
                release(leaves)
                _leave(notes, "digests", {name: digests(leaf) for name, leaf in leaves.items()})
            if is_first():
                found = _digests_of_all(where, notes)
                said = {n: said_of(leaf, found.get(n, {})) for n, leaf in leaves.items()}
                write_about(where, {**about, "mark": mark, "files": file_digests(where)}, said)
                sync_directory(where)
                put(target)
                shutil.rmtree(os.path.join(target, mark), ignore_errors=True)
            else:
                _wait_for(target, notes)

    return end


@contextlib.contextmanager
def _undone(where: str, notes: str) -> Iterator[None]:
    """Lets the others know of what goes wrong within it."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):
            if is_first():
                remove(where)  # that it is gone, at once, tells the others
            else:
                _leave(notes, "failure", f"{type(error).__name__}: {error}")
        raise


@contextlib.contextmanager
def _unless_first_failed(target: str, notes: str) -> Iterator[None]:
    """Says of what goes wrong within it where that is so, as the first has taken all away."""
    try:
        yield
    except Exception as error:
        if is_first() or os.path.exists(notes):
            raise
        raise _another_failed(target) from error


def _another_failed(target: str) -> OSError:
    return OSError(f"{target}: another process failed to write the checkpoint: see what it says")


def _require_same_leaves(target: str, notes: str, own: Mapping[str, str]) -> None:
    """Refuses leaves that not all processes have: of those, parts would be lost in silence."""
    first = json.loads(_of(notes, "leaves", 0).read_text(encoding="utf-8"))
    lines = [
        f"{path_of(n)}: {own.get(n, 'none')} in this one, {first.get(n, 'none')} in the first"
        for n in sorted({**own, **first})
        if own.get(n) != first.get(n)
    ]
    if lines:
        raise ValueError(
            f"{target}: expected a state of the same leaves in all processes, got\n"
            f"{_tree.bullets(lines)}\nNothing was saved."
        )


def _require_same_place(target: str, where: str, notes: str) -> None:
    """Refuses a place that is another for this process than for the first."""
    if staging(target) != where:
        raise ValueError(
            f"{target}: expected the same path and the same step in all processes, got another in "
            f"the first, which was to write to {where}. Nothing was saved."
        )
    if not _until(_of(notes, "leaves", 0).exists, _SEEN):
        raise ValueError(
            f"{target}: expected a directory that all processes see, got one in which process "
            f"{jax.process_index()} does not find what the first wrote. Nothing was saved."
        )


def require_same_steps(directory: Directory) -> None:
    """Refuses a directory that not all processes see: some would go on, and others begin.

    Raises:
      ValueError: It is another for this process than for the first, or one of another machine.
    """
    path, steps = on_first(lambda: [directory.path, directory.steps()])
    with all_or_none():
        if directory.path != path or not _until(lambda: directory.steps() == steps, _SEEN):
            raise ValueError(
                f"{directory.path}: expected a directory that all processes see, got "
                f"{path} in the first, with checkpoints of the steps {steps or 'none'}, and "
                f"{directory.steps() or 'none'} in process {jax.process_index()}."
            )


def _until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Waits until something is so; returns whether it came to be."""
    begun = time.monotonic()
    while not (found := is_so()) and (waited := time.monotonic() - begun) < seconds:
        # Less and less often, so that many processes do not keep a disk busy by looking.
        time.sleep(min(max(_LOOK[0], waited / 10), _LOOK[1]))
    return found


def _wait_for_orbax(response: Any, where: str, notes: str) -> None:
    """Waits for the arrays to be written, or for another process to fail.

    Orbax itself would wait for that one, for twenty minutes.
    """
    done, thread = threaded(response.result, daemon=True)
    thread.start()
    while not futures.wait([done], _LOOK[1]).done:
        _require_no_failure(notes)
        if not os.path.exists(notes):
            raise FileNotFoundError(f"{where}: was removed while it was being written")
    with failing_to_write(where):
        done.result()


def _require_no_failure(notes: str) -> None:
    """Raises an OSError if a process has left word that it failed."""
    for path in pathlib.Path(notes).glob("failure-*.json"):
        said = json.loads(path.read_text(encoding="utf-8"))
        raise OSError(f"process {path.stem.removeprefix('failure-')} failed to write: {said}")


def _leave(notes: str, kind: str, what: Any) -> None:
    """Leaves something for the others to read, whole or not at all."""
    path = _of(notes, kind, jax.process_index())
    new = path.with_suffix(".new")
    new.write_text(json.dumps(what), encoding="utf-8")
    new.replace(path)


def _of(notes: str, kind: str, process: int) -> pathlib.Path:
    return pathlib.Path(notes, f"{kind}-{process}.json")


def _digests_of_all(where: str, notes: str) -> dict[str, dict[str, str]]:
    """Waits until all processes have left their digests, and puts them together.

    Raises:
      OSError: One of them failed, or nothing was heard of it.
    """
    found: dict[str, dict[str, str]] = {}
    for process in range(jax.process_count()):
        path = _of(notes, "digests", process)

        def is_here(path: pathlib.Path = path) -> bool:
            _require_no_failure(notes)
            return path.exists()

        if not _until(is_here, _PATIENCE):
            raise OSError(f"{where}: process {process} has written nothing for {_PATIENCE:g} s")
        for name, own in json.loads(path.read_text(encoding="utf-8")).items():
            found.setdefault(name, {}).update(own)
    return found


def _wait_for(target: str, notes: str) -> None:
    """Waits for the checkpoint to have its name.

    The next one may be begun in the same place at once: it has another mark.

    Raises:
      OSError: It got none.
    """
    _until(lambda: not os.path.exists(notes), _PATIENCE)
    with contextlib.suppress(CheckpointCorruptError, CheckpointMismatchError):
        if read_about(target).get("mark") == os.path.basename(notes):
            return
    raise _another_failed(target)
