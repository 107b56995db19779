"""A checkpoint that several processes write, into a directory that all of them see.

Orbax writes each process's parts of the arrays. Each process writes down the digests of its own
parts; when all have, the first one says what the checkpoint is, and gives it its name. The others
wait for that, so that all of them know whether a save went well. Whoever fails leaves word of it,
or, if it is the first, takes everything away: while they wait, all of them look for that.
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
from functrain.checkpoint._background import threaded
from functrain.checkpoint._directory import Directory
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._leaves import Leaf, path_of
from functrain.checkpoint._place import put, staged, staging
from functrain.checkpoint._processes import all_or_none, is_first, on_first
from functrain.checkpoint._store import (
    arrays_of,
    digests,
    failing_to_write,
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
        os.makedirs(where)
        mark = os.urandom(8).hex()
        pathlib.Path(where, mark).write_text(json.dumps(specs), encoding="utf-8")
        return [where, mark]

    where, mark = on_first(make)
    with _undone(where):
        with all_or_none():
            _require_same_place(target, where, mark)
            _require_same_leaves(target, os.path.join(where, mark), specs)
        with all_or_none():
            response = ocp.save_async(os.path.join(where, ARRAYS), arrays_of(leaves))

    def end(about: Mapping[str, Any]) -> None:
        with _undone(where):
            _wait_for_orbax(response, where, mark)
            _leave(where, "digests", {name: digests(leaf) for name, leaf in leaves.items()})
            if not is_first():
                _wait_for(target, where, mark)
                return
            found = _digests_of_all(where)
            said = {n: said_of(leaf, found.get(n, {})) for n, leaf in leaves.items()}
            write_about(where, {**about, "mark": mark}, said)
            sync_directory(where)
            put(target)
            with contextlib.suppress(OSError):
                os.remove(os.path.join(target, mark))

    return end


@contextlib.contextmanager
def _undone(where: str) -> Iterator[None]:
    """Lets the others know of what goes wrong within it."""
    try:
        yield
    except Exception as error:
        if is_first():  # that it is gone tells the others
            shutil.rmtree(where, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                _leave(where, "failure", f"{type(error).__name__}: {error}")
        raise


def _require_same_leaves(target: str, path: str, own: Mapping[str, str]) -> None:
    """Refuses leaves that not all processes have: of those, parts would be lost in silence."""
    first = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
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


def _require_same_place(target: str, where: str, mark: str) -> None:
    """Refuses a place that is another for this process than for the first."""
    if staging(target) != where:
        raise ValueError(
            f"{target}: expected the same path and the same step in all processes, got another in "
            f"the first, which was to write to {where}. Nothing was saved."
        )
    if not _until(lambda: os.path.exists(os.path.join(where, mark)), _SEEN):
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


def _wait_for_orbax(response: Any, where: str, mark: str) -> None:
    """Waits for the arrays to be written, or for another process to fail.

    Orbax itself would wait for that one, for twenty minutes.
    """
    done, thread = threaded(response.result, daemon=True)
    thread.start()
    while not futures.wait([done], _LOOK[1]).done:
        _require_no_failure(where)
        if not os.path.exists(os.path.join(where, mark)) and not done.done():
            raise OSError(f"{where}: the first process failed to write: see what it says")
    with failing_to_write(where):
        done.result()


def _require_no_failure(where: str) -> None:
    """Raises an OSError if a process has left word that it failed."""
    for path in pathlib.Path(where).glob("failure-*.json"):
        said = json.loads(path.read_text(encoding="utf-8"))
        raise OSError(f"process {path.stem.removeprefix('failure-')} failed to write: {said}")


def _leave(where: str, kind: str, what: Any) -> None:
    """Leaves something for the others to read, whole or not at all."""
    path = _of(where, kind, jax.process_index())
    new = path.with_suffix(".new")
    new.write_text(json.dumps(what), encoding="utf-8")
    new.replace(path)


def _of(where: str, kind: str, process: int) -> pathlib.Path:
    return pathlib.Path(where, f"{kind}-{process}.json")


def _digests_of_all(where: str) -> dict[str, dict[str, str]]:
    """Waits until all processes have left their digests; takes them away, and puts them together.

    Raises:
      OSError: One of them failed, or nothing was heard of it.
    """
    found: dict[str, dict[str, str]] = {}
    for process in range(jax.process_count()):
        path = _of(where, "digests", process)

        def is_here(path: pathlib.Path = path) -> bool:
            _require_no_failure(where)
            return path.exists()

        if not _until(is_here, _PATIENCE):
            raise OSError(f"{where}: process {process} has written nothing for {_PATIENCE:g} s")
        for name, own in json.loads(path.read_text(encoding="utf-8")).items():
            found.setdefault(name, {}).update(own)
        path.unlink()
    return found


def _wait_for(target: str, where: str, mark: str) -> None:
    """Waits for the checkpoint to have its name.

    The next one may be begun in the same place at once: it has another mark.

    Raises:
      OSError: It got none.
    """
    _until(lambda: not os.path.exists(os.path.join(where, mark)), _PATIENCE)
    with contextlib.suppress(CheckpointCorruptError, CheckpointMismatchError):
        if read_about(target).get("mark") == mark:
            return
    raise OSError(f"{target}: another process failed to write the checkpoint: see what it says")
