"""Programs in jax's compilation cache, for devices that are not there."""

import os
from typing import Any

from functrain.common._types import PyTree, Step
from functrain.engine import _placement
from functrain.engine._cache import compilation_cache
from functrain.inspect._fit_program import compile_program, lower_fit
from functrain.rewrites import Mode
from functrain.targets._target import Target


def precompile(
    state: PyTree,
    step: Step[Any],
    batch: PyTree,
    *,
    target: Target,
    directory: str | os.PathLike[str],
    fuse: int | None = None,
    sharding: _placement.ShardingArg = None,
    rewrites: Mode = "auto",
) -> int:
    """Compiles the program of a fit for a target into jax's compilation cache.

    A run on that device should then start without compiling.

    On the device, call ``functrain.enable_compilation_cache(directory)`` before the fit, with the
    same `fuse`: ``fuse="auto"`` takes fewer steps if an epoch is shorter. For a Keras model, pass
    ``bridge.keras_state(model, batch)`` and ``bridge.train_step(model)``.

    The key of an entry depends on the program, the versions of jaxlib and of the compiler, XLA's
    flags, and the kind, number and arrangement of the devices; all of them have to agree. That a
    TPU or a GPU loads the entry has not been tried. Without the device, a second process finds it
    but cannot load it: jax warns and compiles again.

    Args:
      state: As for `memory`.
      step: As for `memory`.
      batch: As for `memory`.
      target: The devices to compile for, from `functrain.target`.
      directory: The folder of the cache; it is made if it is missing.
      fuse: Steps per program; by default, what ``fuse="auto"`` chooses.
      sharding: As for `memory`.
      rewrites: As in `fit`.

    Returns:
      The number of files that the cache has now.

    Raises:
      MemoryError: The program is larger than the memory of the device; see `memory`.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp, tempfile
      >>> def step(state, batch):
      ...     return state + jnp.mean(batch), {}
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     count = ft.inspect.precompile(
      ...         jnp.zeros(()), step, jnp.ones(8), target=ft.target(), directory=directory
      ...     )
      >>> count > 0
      True
    """
    with compilation_cache(directory):
        program = lower_fit(
            "precompile",
            state,
            step,
            batch,
            fuse=fuse,
            target=target,
            sharding=sharding,
            rewrites=rewrites,
            is_new=True,
        )
        compile_program(program)
    return len(os.listdir(directory))
