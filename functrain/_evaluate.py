"""Passes over data that leave the state as it is."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from functrain import _tree
from functrain._metrics import Metered
from functrain._step import MeteredStep
from functrain._types import PyTree, Step
from functrain.data._feed import Chunk, Feed, FuseArg
from functrain.data._loader import ArrayLoader
from functrain.fusion._fuse import check_carry
from functrain.fusion._programs import Program, cached


def evaluate(
    state: PyTree, step: MeteredStep, data: Any, *, fuse: FuseArg = "auto", jit: bool = True
) -> dict[str, float]:
    """Returns the loss and metrics of a state over all of the data.

    Exact for a smaller last batch: every example counts once.

    Args:
      state: The state, as `fit` returns it. Neither changed nor consumed.
      step: From `eval_step`.
      data: An `ArrayLoader` or an iterable of batches, as for `run`.
      fuse: Batches per program.
      jit: False for debugging, as in `run`.

    Returns:
      ``{"loss": ..., "accuracy": ...}``, the values of the step's metrics; nested ones are
      joined by ``/``.

    Raises:
      TypeError: The step carries no metrics.
      ValueError: No batches, or batches that differ.

    Examples:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> from functrain import ArrayLoader, Aux, TrainState, eval_step
      >>> def loss_fn(params, model_state, batch, *, rng, training):
      ...     return jnp.mean(batch * params["w"]), Aux(model_state)
      >>> state = TrainState.create(params={"w": jnp.ones(())}, tx=optax.sgd(0.1))
      >>> evaluate(state, eval_step(loss_fn), ArrayLoader(np.arange(5.0), batch_size=2))
      {'loss': 2.0}
    """
    if not isinstance(step, MeteredStep):
        raise TypeError(
            f"step: expected one with metrics, from functrain.eval_step, got {step!r}. A "
            "train_step would change the state."
        )
    metrics = _tree.copy(step.metrics.init())
    for chunk in Feed(data, fuse).epoch(0):
        if jit:
            program = cached(step, ("evaluate", chunk.steps), _evaluate_program)
            metrics = program(state, metrics, chunk.batches)
        else:
            for batch in _unstack(chunk):
                with jax.disable_jit():
                    metrics = step(Metered(state, metrics), batch)[0].metrics
    return _tree.to_floats(step.metrics.compute(metrics))


def predict(
    state: PyTree, step: Step[Any], data: Any, *, fuse: FuseArg = "auto", jit: bool = True
) -> PyTree:
    """Returns the outputs for all of the data, in its order, in host memory.

    Args:
      state: The state; neither changed nor consumed.
      step: From `predict_step`.
      data: Batches of inputs alone: ``ArrayLoader(x, batch_size)`` without shuffling, or an
        iterable.
      fuse: Batches per program.
      jit: False for debugging, as in `run`.

    Returns:
      NumPy arrays `[N, ...]` in the outputs' structure.

    Raises:
      ValueError: The loader shuffles, or there are no batches, or they differ.

    Examples:
      >>> import numpy as np
      >>> from functrain import ArrayLoader
      >>> def step(state, x):
      ...     return state, x * state
      >>> predict(2.0, step, ArrayLoader(np.arange(5.0), batch_size=2))
      array([0., 2., 4., 6., 8.], dtype=float32)
    """
    if isinstance(data, ArrayLoader) and data.shuffle:
        raise ValueError(
            "data: expected batches in the order of the data, got an ArrayLoader that shuffles. "
            "Make one with shuffle=False."
        )
    parts: list[PyTree] = []
    for chunk in Feed(data, fuse).epoch(0):
        if jit:
            program = cached(step, "predict", _predict_program)
            stacked = program(state, chunk.batches)
            parts.append(jax.tree.map(_join, jax.device_get(stacked)))
        else:
            with jax.disable_jit():
                parts += [jax.device_get(step(state, batch)[1]) for batch in _unstack(chunk)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _evaluate_program(get: Callable[[], Any]) -> Program:
    # The state is an argument beside the carry, not in it: nothing has to be copied or returned.
    def program(state: PyTree, metrics: PyTree, chunk: PyTree) -> PyTree:
        step = get()

        def body(metrics: PyTree, batch: PyTree) -> tuple[PyTree, None]:
            new = step(Metered(state, metrics), batch)[0].metrics
            check_carry(metrics, new)
            return new, None

        return lax.scan(body, metrics, chunk)[0]

    return jax.jit(program, donate_argnums=1)


def _predict_program(get: Callable[[], Any]) -> Program:
    def program(state: PyTree, chunk: PyTree) -> PyTree:
        step = get()
        return lax.scan(lambda _, batch: ((), step(state, batch)[1]), (), chunk)[1]

    return jax.jit(program)


def _join(x: np.ndarray) -> np.ndarray:
    if x.ndim < 2:
        raise ValueError("outputs: expected one per example, [B, ...], got a scalar per batch")
    return x.reshape(-1, *x.shape[2:])


def _unstack(chunk: Chunk) -> list[PyTree]:
    return [jax.tree.map(lambda x, i=i: x[i], chunk.batches) for i in range(chunk.steps)]
