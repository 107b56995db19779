"""The loop most people want: epochs, evaluation, progress, history."""

from typing import Any, NamedTuple

from functrain import _tree
from functrain._evaluate import evaluate
from functrain._history import History, Recorder
from functrain._run import ChunkEnd, EpochEnd, run
from functrain._step import MeteredStep
from functrain._types import PyTree, Step
from functrain.data._feed import FuseArg, steps_per_epoch
from functrain.hooks._progress import ProgressReport, Verbose


class FitResult(NamedTuple):
    """What `fit` returns.

    Attributes:
      state: The trained state.
      history: What every step and epoch reported.

    Examples:
      >>> state, history = FitResult(state=(), history=History({}, {}))
      >>> history.steps
      {}
    """

    state: PyTree
    history: History


def fit(
    state: PyTree,
    step: Step[Any],
    data: Any,
    *,
    epochs: int = 1,
    eval_data: Any = None,
    eval_step: MeteredStep | None = None,
    fuse: FuseArg = "auto",
    jit: bool = True,
    verbose: Verbose = "auto",
) -> FitResult:
    """Trains a state for some epochs.

    Args:
      state: Any pytree of arrays, usually a `TrainState`. Copied once: the caller's stays alive.
      step: ``(state, batch) -> (state, logs)``, not jitted, usually from `train_step`.
      data: An `ArrayLoader` or an iterable of batches, as for `run`.
      epochs: How many times to go through the data.
      eval_data: Evaluated at the end of each epoch; its values appear under ``val_``.
      eval_step: From `functrain.eval_step`; needed with `eval_data`.
      fuse: Steps per program, or ``"auto"``; see `run`. Results do not depend on it.
      jit: False runs the steps one by one and uncompiled, for debugging.
      verbose: ``"auto"``: a progress bar in a terminal or notebook, a line per epoch elsewhere.
        ``"bar"`` or 1, ``"lines"`` or 2, 0 for silence.

    Returns:
      FitResult(state, history).

    Raises:
      ValueError: As `run`; or one of `eval_data` and `eval_step` comes without the other.
      TypeError: As `run`; or `eval_step` carries no metrics.

    Examples:
      >>> import jax.numpy as jnp, numpy as np, optax
      >>> from functrain import ArrayLoader, Aux, TrainState, train_step
      >>> def loss_fn(params, model_state, batch, *, rng, training):
      ...     x, y = batch
      ...     return jnp.mean((x * params["w"] - y) ** 2), Aux(model_state)
      >>> tx = optax.sgd(0.1)
      >>> x = np.linspace(-1, 1, 100, dtype=np.float32)
      >>> state, history = fit(
      ...     TrainState.create(params={"w": jnp.zeros(())}, tx=tx),
      ...     train_step(loss_fn, tx),
      ...     ArrayLoader((x, 3 * x), batch_size=10, shuffle=True),
      ...     epochs=20,
      ...     verbose=0,
      ... )
      >>> print(state.step, round(float(state.params["w"]), 3), len(history.steps["loss"]))
      200 3.0 200
    """
    if (eval_data is None) != (eval_step is None):
        raise ValueError("eval_data and eval_step: expected both or neither")
    if eval_step is not None and not isinstance(eval_step, MeteredStep):
        raise TypeError(f"eval_step: expected one from functrain.eval_step, got {eval_step!r}")
    events = run(state, step, data, epochs=epochs, fuse=fuse, jit=jit)
    recorder = Recorder()
    with ProgressReport(epochs, steps_per_epoch(data), verbose) as progress:
        for event in events:
            state = event.state
            match event:
                case ChunkEnd():
                    recorder.add(event)
                    progress.chunk(event, recorder.latest)
                case EpochEnd():
                    values = recorder.end_epoch(_tree.to_floats(event.metrics()))
                    if eval_step is not None:
                        found = evaluate(state, eval_step, eval_data, fuse=fuse, jit=jit)
                        values |= {f"val_{name}": value for name, value in found.items()}
                    recorder.add_epoch(values, progress.seconds)
                    progress.epoch(event, values)
    return FitResult(state, recorder.history())
