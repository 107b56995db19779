"""fit: a training loop with epochs, evaluation, progress and a history."""

import contextlib
from collections.abc import Sequence
from typing import Any, Generic, Literal, NamedTuple

import jax

from functrain.checkpoint._checkpointer import Checkpointer
from functrain.common import _repr
from functrain.common._checks import require_one_of
from functrain.common._types import StateT, Step, traits_of
from functrain.data._adapt import as_batches
from functrain.data._epochs_of_steps import EpochsOfSteps
from functrain.engine import _placement
from functrain.engine._plan import FuseArg
from functrain.engine._position import Position
from functrain.engine._signals import DeferredSignals
from functrain.hooks._evaluate import Evaluate
from functrain.hooks._hook import HookLike, HookRunner
from functrain.hooks._terminate_on_nan import TerminateOnNaN
from functrain.loop._arguments import run_arguments
from functrain.loop._events import EpochEnd
from functrain.loop._loop import Loop
from functrain.loop._saving import Saving
from functrain.rewrites import Mode
from functrain.step._metered import MeteredStep
from functrain.trainer._ahead import look_ahead
from functrain.trainer._history import History
from functrain.trainer._progress import ProgressReport, Verbose
from functrain.trainer._recorder import Recorder


class FitResult(NamedTuple, Generic[StateT]):
    """The result of `fit`.

    Attributes:
      state: The trained state.
      history: The logs of every step and the values of every epoch.

    Examples:
      >>> state, history = FitResult(state=(), history=History({}, {}))
      >>> history.steps
      {}
    """

    state: StateT
    history: History

    def __repr__(self) -> str:
        return f"FitResult(state={_repr.state_repr(self.state)}, history={self.history!r})"


def fit(
    state: StateT,
    step: Step[Any],
    data: Any,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    steps_per_epoch: int | None = None,
    start: Position | None = None,
    eval_data: Any = None,
    eval_step: MeteredStep | None = None,
    checkpointer: Checkpointer | None = None,
    hooks: Sequence[HookLike] = (),
    fuse: FuseArg = "auto",
    rewrites: Mode = "auto",
    sharding: _placement.ShardingArg = None,
    jit: bool = True,
    donate: bool = False,
    verbose: Verbose = "auto",
    history: Literal["steps", "epochs"] = "steps",
) -> FitResult[StateT]:
    """Trains a state for a number of epochs or steps.

    Args:
      state: Any pytree of arrays, usually a `TrainState`. It is copied, so yours stays valid. To
        resume from a checkpoint, shapes suffice: ``jax.eval_shape(create)``.
      step: ``(state, batch) -> (state, logs)``, not jitted, usually from `train_step`. As in
        `jax.jit`, what it takes from its closure is a constant of its programs, and a later fit
        uses these again: make a new step after a change. Numbers, strings and arrays among the
        attributes of an object that is the step, or has it as a method, are compared at each fit,
        unless an array was changed in place.
      data: An `ArrayLoader` or an iterable of batches, as for `run`.
      epochs: The total number of epochs of the training. The training begins with this call unless
        `start` is given, whatever the state's step is: a trained state is trained for this many
        more epochs. 1 if neither `epochs` nor `steps` is given; 0 returns the state as it is.
      steps: Instead of `epochs`, the total number of steps, counted in the same way. The data may
        be endless; finite data is repeated as often as needed.
      steps_per_epoch: The length of an epoch, if it is not one pass over the data: for evaluation,
        means, metrics, printed lines, the history, hooks and checkpoints. It must divide `steps`,
        which are one epoch without it.
      start: The position to continue from, such as the end of another fit; see `run`. With `steps`
        or `steps_per_epoch`, only its step is used. With None, steps and epochs count from 0, and
        an `ArrayLoader` continues with the orders after ``state.step``: a loop of
        ``fit(state, ..., epochs=1)`` sees a new order each time, and equals one longer fit.
        `Position()` begins with the first order.
      eval_data: Data for an evaluation at the end of each epoch; its values have the prefix
        ``val_``.
      eval_step: From `functrain.eval_step`; required with `eval_data`.
      checkpointer: A `Checkpointer`. If it has a checkpoint, the fit resumes from the last one,
        even in the middle of an epoch, with the same batches, randomness and logs as an
        uninterrupted fit. The history, early stopping and log files are resumed, too. The fit saves
        when the checkpointer's trigger fires, at its end, on Ctrl-C, and on SIGTERM, after which
        the process exits with status 143. If the fit has already finished, its state and history
        are returned.
      hooks: Called with the run's events, in their order; see `functrain.hooks.Hook`. Chunks end
        exactly at the steps where a hook is due. The evaluation runs before the hooks, the progress
        report after them.
      fuse: Steps per program, or ``"auto"``; see `run`. On CPU, results do not depend on it.
      rewrites: Which slow operations to rewrite; see `functrain.fuse`.
      sharding: The sharding of a batch of `data`, as for `run`, and of a batch of `eval_data`.
      jit: False runs the steps one by one and uncompiled, for debugging.
      donate: True donates the state instead of copying it; see `run`. Your state is CONSUMED.
      verbose: ``"auto"`` shows a progress bar in a terminal or notebook, and prints a line per
        epoch elsewhere. ``"bar"`` or 1, ``"lines"`` or 2 choose one of them; 0 is silent.
      history: ``"steps"`` keeps the logs of every step and epoch, in memory and in every
        checkpoint. ``"epochs"`` keeps the values of epochs only: `history.steps` and
        `history.within_epochs` are empty, and memory and checkpoints do not grow with the number of
        steps. The logs of an epoch's steps are kept until its end, for their means.

    Returns:
      FitResult(state, history).

    Raises:
      ValueError: As for `run`; or only one of `eval_data` and `eval_step` is given; both `epochs`
        and `steps` are given; `steps_per_epoch` does not divide `steps`; there is no data to
        evaluate on; or no log, metric or evaluation has the name of a monitored value.
      TypeError: As for `run`; or `eval_step` has no metrics, or trains.

    Evaluations are traced with their first batch before the first step, so that their errors
    surface at once.

    An exception during training, including Ctrl-C and errors of hooks and data, has an attribute
    `fit_result` with the last state and the history up to it (in a notebook:
    ``sys.last_value.fit_result``). A program that fails has consumed the state: a note of the
    exception says so, and names the last checkpoint. The first Ctrl-C, and a SIGTERM that Python
    handles, wait until the current program has finished; a second one does not.

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
    require_one_of("history", history, ("steps", "epochs"))
    require_one_of("verbose", verbose, ("auto", "bar", "lines", 0, 1, 2))
    runner = HookRunner(hooks)
    if (eval_data is None) != (eval_step is None):
        raise ValueError(
            "eval_data and eval_step: expected both or neither. The step comes from "
            "functrain.eval_step(loss_fn, metrics=...)."
        )
    arguments = run_arguments(
        state,
        step,
        data,
        epochs=epochs,
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        start=start,
        fuse=fuse,
        boundaries=runner.triggers,
        rewrites=rewrites,
        sharding=sharding,
        jit=jit,
        donate=donate,
    )
    if eval_step is not None:
        eval_batches = as_batches(eval_data, "eval_data")
        # An iterator can be used for one evaluation only.
        eval_batches.require_epochs(arguments.epochs - arguments.position.epoch)
        options: dict[str, Any] = {"rewrites": rewrites, "sharding": arguments.sharding, "jit": jit}
        # First, so that the other hooks see its values.
        runner.hooks.insert(0, Evaluate(eval_step, eval_batches, **options))
    look_ahead(state, step, arguments, runner.unscheduled(), checkpointer)
    is_population = traits_of(step).is_population
    recorder = Recorder(arguments.position.step, is_population, keeps_steps=history == "steps")
    saving: Saving | None = None
    if checkpointer is not None:
        # Raises an error if a checkpoint could not tell two hooks apart.
        runner.resumable()
        parts: dict[str, Any] = {"history": recorder, "hooks": runner, "losses": recorder.losses}
        saving = Saving(checkpointer, arguments.batches, parts, losses=recorder.losses)
    signals = DeferredSignals("fit", saves=saving is not None)
    receivers = [recorder.logs, runner.logs]
    loop = Loop(state, step, arguments, receivers=receivers, saving=saving, signals=signals)
    first_position = loop.position
    total_steps = steps if steps_per_epoch is None else None
    try:
        with signals:
            _handle_events(loop, runner, recorder, verbose, total_steps)
    except BaseException as error:
        if loop.position != first_position:
            _attach_result(error, loop, recorder)
        # The note is not worth another error, as of a store that cannot be reached.
        with contextlib.suppress(Exception):
            if checkpointer is not None and (saved_step := checkpointer.latest()) is not None:
                place = f"step {saved_step}: {checkpointer.directory}"
                error.add_note(f"The same call of fit resumes after {place}")
        raise
    _warn_of_losses(loop, runner, recorder)
    return FitResult(loop.state, recorder.history())


def _handle_events(
    loop: Loop, runner: HookRunner, recorder: Recorder, verbose: Verbose, total_steps: int | None
) -> None:
    """Calls hooks, recorder and progress report with the events of a run."""
    progress: ProgressReport | None = None
    # Of several processes, only one reports.
    if verbose != 0 and jax.process_index() == 0:
        progress = ProgressReport(
            loop.epochs,
            loop.batches.steps,
            verbose,
            loop.position,
            resumed=loop.resumed,
            total_steps=total_steps,
        )
    report = progress or contextlib.nullcontext()
    # The hooks of a finished fit have handled its end, and their values are in its history.
    if loop.resumed is not None and loop.resumed.finished:
        with contextlib.closing(loop), report:
            return
    # The run is closed first, which may save it with the states of the hooks.
    with runner.running(), report, contextlib.closing(loop):
        for event in loop.events:
            # Hooks see the means of an epoch, and the recorder keeps the values that hooks add.
            recorder.before(event)
            runner(event)
            recorder.after(event)
            if progress is not None:
                progress(event, recorder)
            # Members of a population may diverge later, and the end of the fit names all of them.
            if isinstance(event, EpochEnd) and not traits_of(loop.step).is_population:
                _warn_of_losses(loop, runner, recorder)


def _warn_of_losses(loop: Loop, runner: HookRunner, recorder: Recorder) -> None:
    """Warns of losses that are not finite, once, unless a hook does it."""
    if any(isinstance(hook, TerminateOnNaN) for hook in runner.unscheduled()):
        return
    is_population = traits_of(loop.step).is_population
    recorder.losses.warn(
        by_epochs=not isinstance(loop.batches, EpochsOfSteps),
        epochs_before=loop.batches.epochs_before,
        active=loop.state.active if is_population else None,
    )


def _attach_result(error: BaseException, loop: Loop, recorder: Recorder) -> None:
    """Attaches the last state and its history to an error."""
    last = loop.last_complete_state()
    if last is None:
        error.add_note(
            f"Nothing is left of the {loop.position.step:,} steps that were begun: a program "
            "had consumed the state. fit(checkpointer=) saves the state at intervals."
        )
        return
    state, position = last
    result = FitResult(state, recorder.history(position.step))
    # Exceptions accept new attributes, which type checkers do not know.
    error.fit_result = result  # type: ignore[attr-defined]
    error.add_note(
        f"The state and history after step {position.step} are in this error's attribute "
        "`fit_result`."
    )
