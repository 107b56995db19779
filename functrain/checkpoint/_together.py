"""A checkpoint that several processes write, into a directory that all of them see.

Orbax writes each process's parts of the arrays. Each process writes down the digests of its own
parts; when all have, the first one says what the checkpoint is, and gives it its name. The others
wait for that, so that all of them know whether a save went well.
"""

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from functrain.checkpoint._about import ARRAYS, read_about, write_about
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._leaves import Leaf
from functrain.checkpoint._place import put, staged
from functrain.checkpoint._processes import is_first, on_first
from functrain.checkpoint._store import arrays_of, digests, said_of, sync_directory

_LOOK = 0.01  # seconds between two looks at the directory
_PATIENCE = 600.0  # seconds to wait for the others, whose disks may be slower


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
    """
    from orbax.checkpoint import v1 as ocp

    def make() -> list[str]:
        check()
        where = staged(target)
        os.makedirs(where)
        mark = secrets.token_hex(8)
        with open(os.path.join(where, mark), "w", encoding="utf-8"):
            return [where, mark]

    where, mark = on_first(make)
    response = ocp.save_async(os.path.join(where, ARRAYS), arrays_of(leaves))

    def end(about: Mapping[str, Any]) -> None:
        try:
            response.result()
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
        except Exception as error:
            if is_first():  # that it is gone tells the others
                shutil.rmtree(where, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    _leave(where, "failure", f"{type(error).__name__}: {error}")
            raise

    return end


def _leave(where: str, kind: str, what: Any) -> None:
    """Leaves something for the others to read, whole or not at all."""
    path = _of(where, kind, jax.process_index())
    with open(path + "~", "w", encoding="utf-8") as file:
        json.dump(what, file)
    os.replace(path + "~", path)


def _of(where: str, kind: str, process: int) -> str:
    return os.path.join(where, f"{kind}-{process}.json")


def _digests_of_all(where: str) -> dict[str, dict[str, str]]:
    """Waits until all processes have left their digests; takes them away, and puts them together.

    Raises:
      OSError: One of them failed, or nothing was heard of it.
    """
    found: dict[str, dict[str, str]] = {}
    until = time.monotonic() + _PATIENCE
    for process in range(jax.process_count()):
        path, failure = (_of(where, kind, process) for kind in ("digests", "failure"))
        while not os.path.exists(path):
            if os.path.exists(failure):
                with open(failure, encoding="utf-8") as file:
                    raise OSError(f"{where}: process {process} failed to write: {json.load(file)}")
            if time.monotonic() > until:
                raise OSError(f"{where}: process {process} has written nothing for {_PATIENCE} s")
            time.sleep(_LOOK)
        with open(path, encoding="utf-8") as file:
            for name, own in json.load(file).items():
                found.setdefault(name, {}).update(own)
        os.remove(path)
    return found


def _wait_for(target: str, where: str, mark: str) -> None:
    """Waits for the checkpoint to have its name.

    The next one may be begun in the same place at once: it has another mark.

    Raises:
      OSError: It got none.
    """
    until = time.monotonic() + _PATIENCE
    while os.path.exists(os.path.join(where, mark)) and time.monotonic() < until:
        time.sleep(_LOOK)
    with contextlib.suppress(CheckpointCorruptError, CheckpointMismatchError):
        if read_about(target).get("mark") == mark:
            return
    raise OSError(f"{target}: another process failed to write the checkpoint: see what it says")
