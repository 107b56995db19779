"""Both storages under one interface, operations on them that fail or die, and a training."""

import contextlib
import os
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft
from functrain.checkpoint import _files, _object_store

STORE = fsspec.filesystem("memory")
OPERATIONS = ("scandir", "open", "fsync", "replace", "rename", "remove", "rmdir")

Tell = Callable[[str, str], object]


class Killed(BaseException):
    """A kill: nothing catches it."""


def files(place: str) -> list[str]:
    """The files below a place, without those of writers and without the ids of saves."""
    if "://" in place:
        root = STORE._strip_protocol(place)
        names = [name.removeprefix(root).lstrip("/") for name in STORE.find(place)]
    else:
        paths = pathlib.Path(place).rglob("*")
        names = [str(path.relative_to(place)) for path in paths if path.is_file()]
    without_ids = (name.rpartition("-0-")[0] if "arrays" in name else name for name in names)
    return sorted(name for name in without_ids if name[0] != ".")


def whole(*steps: int) -> list[str]:
    """What `files` returns if there is nothing but complete checkpoints."""
    return [f"{step:012d}/{name}" for step in steps for name in ("arrays", "checkpoint.json")]


def array_file(place: str) -> str:
    """The array file of process 0 in a checkpoint."""
    if "://" in place:
        (name,) = STORE.glob(f"{place}/arrays-0-*")
        return f"memory://{name}"
    (path,) = pathlib.Path(place).glob("arrays-0-*")
    return str(path)


def change(path: str, edit: Callable[[bytes], bytes]) -> None:
    """Rewrites a file or an object."""
    with fsspec.open(path, "rb") as file:
        content = file.read()
    with fsspec.open(path, "wb") as file:
        file.write(edit(content))


class _Faulty:
    """A store whose operations go through a function, which may raise, before or after them."""

    def __init__(self, tell: Tell, *, after: bool) -> None:
        self._tell, self._after = tell, after

    def __getattr__(self, name: str) -> Any:
        method = getattr(STORE, name)
        return method if name.startswith("_") else through(self._tell, method, name, self._after)


def through(tell: Tell, method: Any, name: str, after: bool = False) -> Any:
    def act(*args: Any, **options: Any) -> Any:
        if not after:
            tell(name, str(args[0]))
        result = method(*args, **options)
        if after:
            tell(name, str(args[0]))
        return result

    return act


@contextlib.contextmanager
def telling(tell: Tell, *, after: bool = False) -> Iterator[None]:
    """Has a function called with the name and the path of each operation on a storage."""
    operations = {name: through(tell, getattr(os, name), name, after) for name in OPERATIONS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_files, "os", types.SimpleNamespace(**{**vars(os), **operations}))
        patch.setattr(_object_store, "_file_system", lambda *_: _Faulty(tell, after=after))
        yield


@contextlib.contextmanager
def killed_at(moment: int) -> Iterator[None]:
    """Lets the process die before an operation, counted from 0."""
    left = iter(range(moment))

    def die(*_: str) -> None:
        if next(left, None) is None:
            raise Killed

    with telling(die):
        yield


def train(place: Any, *hooks: Any, epochs: int = 3, every: int = 2) -> Any:
    """A training of three steps an epoch that saves itself."""

    def loss_fn(params, model_state, batch, *, rng, training):  # type: ignore[no-untyped-def]
        return jnp.mean((batch @ params["w"]) ** 2), ft.Aux(model_state)

    tx = optax.adam(0.1)
    start = ft.TrainState.create(params={"w": jnp.ones(4)}, tx=tx, rng=jax.random.key(0))
    data = np.random.default_rng(0).normal(size=(12, 4)).astype("f4")
    return ft.fit(
        start,
        ft.train_step(loss_fn, tx),
        ft.ArrayLoader(data, 4, shuffle=True),
        epochs=epochs,
        checkpointer=ft.Checkpointer(place, every=every, keep=None),
        hooks=hooks,
        fuse=1,
        verbose=0,
    )
