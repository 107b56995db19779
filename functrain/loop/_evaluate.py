"""Passes over data that leave the state as it is."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from functrain import rewrites as _rewrites
from functrain.common import _tree
from functrain.common._types import PyTree, Step
from functrain.data._loader import ArrayLoader
from functrain.engine._feed import Chunk, Feed, FuseArg
from functrain.engine._loop import repeat
from functrain.engine._programs import Program, cached
from functrain.loop._run import RUN_AHEAD
from functrain.metrics._metric import Metered
from functrain.rewrites import Mode
from functrain.step._step import MeteredStep


def evaluate(
    state: PyTree,
    step: MeteredStep,
    data: Any,
    *,
    fuse: FuseArg = "auto",
    rewrites: Mode = "auto",
    jit: bool = True,
) -> dict[str, float]:
    """Returns the loss and metrics of a state over all of the data.

    Exact for a smaller last batch: every example counts once.

    Args:
      state: The state, as `fit` returns it. Neither changed nor consumed.
      step: From `eval_step`.
      data: An `ArrayLoader` or an iterable of batches, as for `run`.
      fuse: Batches per program.
      rewrites: As for `fuse`.
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
    check_eval_step(step)
    metrics = _tree.copy(step.metrics.init())
    in_flight: collections.deque[jax.Array] = collections.deque()
    mode = _rewrites.mode(rewrites)
    program = cached(step, ("evaluate", mode), lambda get: _evaluate_program(get, mode))
    for chunk in Feed(data, fuse).epoch(0):
        if jit:
            metrics, token = program(state, metrics, chunk.batches, np.int32(chunk.steps))
            in_flight.append(token)
            if len(in_flight) > RUN_AHEAD:
                jax.block_until_ready(in_flight.popleft())
        else:
            for batch in _unstack(chunk):
                with jax.disable_jit():
                    metrics = step(Metered(state, metrics), batch)[0].metrics
    return _tree.to_floats(step.metrics.compute(metrics))


def predict(
    state: PyTree,
    step: Step[Any],
    data: Any,
    *,
    fuse: FuseArg = "auto",
    rewrites: Mode = "auto",
    jit: bool = True,
) -> PyTree:
    """Returns the outputs for all of the data, in its order, in host memory.

    Args:
      state: The state; neither changed nor consumed.
      step: From `predict_step`.
      data: Batches of inputs alone: ``ArrayLoader(x, batch_size)`` without shuffling, or an
        iterable.
      fuse: Batches per program.
      rewrites: As for `fuse`.
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
    if isinstance(data, ArrayLoader) and (data.shuffle or data.drop_remainder):
        what = "shuffles" if data.shuffle else "drops the remainder"
        raise ValueError(
            f"data: expected all of the data in its order, got an ArrayLoader that {what}. "
            "Make one with shuffle=False and drop_remainder=False."
        )
    mode = _rewrites.mode(rewrites)
    program = cached(step, ("predict", mode), lambda get: _predict_program(get, mode))
    parts: list[PyTree] = []
    for chunk in Feed(data, fuse).epoch(0):
        if jit:
            rows = jax.device_get(program(state, chunk.batches, np.int32(chunk.steps)))
            parts.append(jax.tree.map(lambda x, n=chunk.steps: _join(x[:n]), rows))
        else:
            with jax.disable_jit():
                parts += [jax.device_get(step(state, batch)[1]) for batch in _unstack(chunk)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def check_eval_step(step: Any) -> None:
    """Refuses a step without metrics, or one that trains."""
    if not isinstance(step, MeteredStep) or step.trains:
        raise TypeError(
            "eval_step: expected one from functrain.eval_step(loss_fn, metrics=...), got "
            f"{'a step that trains' if isinstance(step, MeteredStep) else repr(step)}"
        )


def _evaluate_program(get: Callable[[], Any], rewrites: Mode) -> Program:
    # The state is an argument beside the carry, not in it: nothing has to be copied or returned.
    def program(
        state: PyTree, metrics: PyTree, chunk: PyTree, n: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        step = _rewrites.optimize(get(), rewrites)

        def body(metrics: PyTree, batch: PyTree) -> tuple[PyTree, tuple[()]]:
            return step(Metered(state, metrics), batch)[0].metrics, ()

        # Metrics are donated to the next program: something else must say that this one is done.
        return repeat(body, metrics, chunk, n)[0], n + 0

    return jax.jit(program, donate_argnums=1)


def _predict_program(get: Callable[[], Any], rewrites: Mode) -> Program:
    def program(state: PyTree, chunk: PyTree, n: jax.Array) -> PyTree:
        step = _rewrites.optimize(get(), rewrites)
        return repeat(lambda _, batch: ((), step(state, batch)[1]), (), chunk, n)[1]

    return jax.jit(program)


def _join(x: np.ndarray) -> np.ndarray:
    if x.ndim < 2:
        raise ValueError("outputs: expected one per example, [B, ...], got a scalar per batch")
    return x.reshape(-1, *x.shape[2:])


def _unstack(chunk: Chunk) -> list[PyTree]:
    return [jax.tree.map(lambda x, i=i: x[i], chunk.batches) for i in range(chunk.steps)]
