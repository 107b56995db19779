"""The loop most people want: epochs, evaluation, progress, history."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple

import jax

from functrain.common._types import PyTree, StateT, Step
from functrain.engine._feed import FuseArg, steps_per_epoch
from functrain.engine._interrupt import deferred_interrupt
from functrain.hooks._evaluate import Evaluate
from functrain.hooks._hook import HookLike, HookRunner
from functrain.loop._run import run
from functrain.rewrites import Mode
from functrain.step._step import MeteredStep
from functrain.trainer._history import History, Recorder
from functrain.trainer._progress import ProgressReport, Verbose


class FitResult(NamedTuple, Generic[StateT]):
    """What `fit` returns.

    Attributes:
      state: The trained state.
      history: What every step and epoch reported.

    Examples:
      >>> state, history = FitResult(state=(), history=History({}, {}))
      >>> history.steps
      {}
    """

    state: StateT
    history: History


def fit(
    state: StateT,
    step: Step[Any],
    data: Any,
    *,
    epochs: int = 1,
    first_epoch: int = 0,
    eval_data: Any = None,
    eval_step: MeteredStep | None = None,
    fuse: FuseArg = "auto",
    rewrites: Mode = "auto",
    hooks: Sequence[HookLike] = (),
    sharding: jax.sharding.NamedSharding | None = None,
    jit: bool = True,
    verbose: Verbose = "auto",
) -> FitResult[StateT]:
    """Trains a state for some epochs.

    Args:
      state: Any pytree of arrays, usually a `TrainState`. Copied once: the caller's stays alive.
      step: ``(state, batch) -> (state, logs)``, not jitted, usually from `train_step`.
      data: An `ArrayLoader` or an iterable of batches, as for `run`.
      epochs: How many times to go through the data.
      first_epoch: Number of the first one, to go on where another fit ended; see `run`.
      eval_data: Evaluated at the end of each epoch; its values appear under ``val_``.
      eval_step: From `functrain.eval_step`; needed with `eval_data`.
      fuse: Steps per program, or ``"auto"``; see `run`. Results do not depend on it.
      rewrites: Which slow operations to rewrite on CPU; see `functrain.fuse`.
      hooks: Called with the run's events, in their order; see `functrain.hooks.Hook`. Chunks end
        exactly where one is due. Evaluation comes before them, the progress report after.
      sharding: Of one batch, as for `run`.
      jit: False runs the steps one by one and uncompiled, for debugging.
      verbose: ``"auto"``: a progress bar in a terminal or notebook, a line per epoch elsewhere.
        ``"bar"`` or 1, ``"lines"`` or 2, 0 for silence.

    Returns:
      FitResult(state, history).

    Raises:
      ValueError: As `run`; or one of `eval_data` and `eval_step` comes without the other.
      TypeError: As `run`; or `eval_step` carries no metrics, or trains.

    Whatever is raised once training has begun, Ctrl-C included, carries the state and history so
    far as an attribute `fit_result` (in a notebook: ``sys.last_value.fit_result``). The first
    Ctrl-C waits for the program under way; a second one does not.

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
        raise ValueError(
            "eval_data and eval_step: expected both or neither. The step comes from "
            "functrain.eval_step(loss_fn, metrics=...)."
        )
    if epochs > 1 and isinstance(eval_data, Iterator):
        raise ValueError(
            f"eval_data: expected something that can be iterated {epochs} times, got an iterator, "
            "which is exhausted after one pass. Pass a list, an ArrayLoader or a loader object."
        )
    due = HookRunner(hooks)
    if eval_step is not None:
        due.put_first(Evaluate(eval_step, eval_data, rewrites=rewrites, jit=jit))
    events = run(
        state,
        step,
        data,
        epochs=epochs,
        first_epoch=first_epoch,
        fuse=fuse,
        boundaries=due.boundaries,
        rewrites=rewrites,
        sharding=sharding,
        jit=jit,
    )
    recorder = Recorder()
    try:
        with (
            deferred_interrupt() as interrupted,
            due,
            ProgressReport(epochs, steps_per_epoch(data), verbose, first_epoch) as progress,
        ):
            for event in events:
                state = event.state
                recorder.before(event)
                due(event)
                recorder.after(event)
                progress(event, recorder)
                state = event.state
                if interrupted():
                    raise KeyboardInterrupt
    except BaseException as error:
        _attach(error, state, recorder)
        raise
    return FitResult(state, recorder.history())


def _attach(error: BaseException, state: PyTree, recorder: Recorder) -> None:
    """Lets an error carry what was trained until it came."""
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state)):
        return  # the error came in the midst of a program that had taken the state over
    error.fit_result = FitResult(state, recorder.history())  # type: ignore[attr-defined]
    error.add_note("What was trained until then is in this error's `fit_result`.")
