"""The loop most people want: epochs, evaluation, progress, history."""

import contextlib
from collections.abc import Sequence
from typing import Any, Generic, Literal, NamedTuple

import jax

from functrain.checkpoint import Checkpointer
from functrain.common import _repr
from functrain.common._arguments import argument_advice
from functrain.common._checks import is_integer, require_flags, require_integer, require_one_of
from functrain.common._types import StateT, Step, traits_of
from functrain.data._adapt import as_batches
from functrain.data._batches import Batches
from functrain.data._epochs_of_steps import EpochsOfSteps
from functrain.engine import _placement
from functrain.engine._plan import FuseArg
from functrain.engine._position import Position, require_position
from functrain.engine._signals import DeferredSignals
from functrain.hooks._evaluate import Evaluate
from functrain.hooks._hook import HookLike, HookRunner, triggers_of
from functrain.hooks._terminate_on_nan import TerminateOnNaN
from functrain.loop._events import Event, LogsReady
from functrain.loop._require import require_state, require_training_step
from functrain.loop._run import Run, begin_run, steps_taken
from functrain.loop._saving import Saving
from functrain.rewrites import Mode
from functrain.step._metered import MeteredStep
from functrain.trainer._ahead import look_ahead
from functrain.trainer._history import History
from functrain.trainer._progress import ProgressReport, Verbose
from functrain.trainer._recorder import Recorder


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

    def __repr__(self) -> str:
        return f"FitResult(state={_repr.state_repr(self.state)}, history={self.history!r})"


@argument_advice(
    "It is fit(state, step, data): inputs and labels go into one loader, "
    "functrain.ArrayLoader((x, y), batch_size).",
    check_first=require_state,
    batch_size="It belongs to the data: functrain.ArrayLoader((x, y), batch_size).",
    shuffle="It belongs to the data: functrain.ArrayLoader((x, y), batch_size, shuffle=True).",
    validation_data="Pass eval_data=functrain.ArrayLoader((x, y), batch_size) and "
    "eval_step=functrain.eval_step(loss_fn).",
    validation_split="Cut the arrays in two, and pass one part as eval_data=functrain.ArrayLoader("
    "(x, y), batch_size) and eval_step=functrain.eval_step(loss_fn).",
    sample_weight="It belongs to the data: functrain.ArrayLoader((x, y, weight), batch_size).",
    callbacks="Pass hooks=[...], functions of an event; Keras's callbacks go into bridge.fit.",
    steps_per_epoch="Pass steps=, the number of all steps, and eval_every=.",
    first_epoch="Pass start=functrain.Position(step, epoch), and as epochs the number of the whole "
    "training.",
    initial_epoch="Pass start=functrain.Position(step, epoch).",
    metrics="They belong to the step: functrain.train_step(loss_fn, tx, metrics={...}).",
)
def fit(
    state: StateT,
    step: Step[Any],
    data: Any,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    eval_every: int | None = None,
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
    """Trains a state for some epochs, or some steps.

    Args:
      state: Any pytree of arrays, usually a `TrainState`. Copied once: the caller's stays alive.
      step: ``(state, batch) -> (state, logs)``, not jitted, usually from `train_step`.
      data: An `ArrayLoader` or an iterable of batches, as for `run`.
      epochs: The number of epochs in the whole training, counted from its beginning. That is this
        call unless `start` says otherwise, whatever the state's step is: a trained state is
        trained for so many more epochs. 1 where neither `epochs` nor `steps` is given.
      steps: Instead of `epochs`, the number of steps in the whole training, counted in the same
        way. The data may have no end; others are passed over as often as it takes.
      eval_every: With `steps`, how many of them make up what is an epoch everywhere else: for
        evaluation, means, metrics, lines, the history, hooks and checkpoints. It divides `steps`;
        all of them by default.
      start: The position to continue from, as where another fit ended; see `run`. With `steps`,
        only its step is used. With None, steps and epochs count from 0, and an `ArrayLoader`
        continues with the orders that come after ``state.step``: a loop of
        ``fit(state, ..., epochs=1)`` sees a new order each time, and trains as one longer fit
        does. `Position()` begins with the first order.
      eval_data: Evaluated at the end of each epoch; its values appear under ``val_``.
      eval_step: From `functrain.eval_step`; needed with `eval_data`.
      checkpointer: A `Checkpointer`. The fit goes on from its last checkpoint, if there is one, in
        mid-epoch too: with the same batches, randomness and logs, as if it had never ended; a
        history, early stopping and files of logs go on as well. It saves itself whenever that is
        due, at its end, on Ctrl-C, and on SIGTERM, after which the process ends with 143. Of a fit
        that is over already, state and history are returned.
      hooks: Called with the run's events, in their order; see `functrain.hooks.Hook`. Chunks end
        exactly where one is due. Evaluation comes before them, the progress report after.
      fuse: Steps per program, or ``"auto"``; see `run`. Results do not depend on it.
      rewrites: Which slow operations to rewrite on CPU; see `functrain.fuse`.
      sharding: Of one batch, as for `run`; of a batch of `eval_data` as well.
      jit: False runs the steps one by one and uncompiled, for debugging.
      donate: Take over the state instead of copying it; see `run`. The one passed in is CONSUMED.
      verbose: ``"auto"``: a progress bar in a terminal or notebook, a line per epoch elsewhere.
        ``"bar"`` or 1, ``"lines"`` or 2, 0 for silence.
      history: ``"steps"`` keeps the logs of every step and epoch, in memory and in every
        checkpoint. ``"epochs"`` keeps those of epochs: `history.steps` and `history.points` are
        empty, and memory and checkpoints do not grow with the number of steps. The steps of an
        epoch are kept until its end, for their means; with `steps`, `eval_every` makes epochs.

    Returns:
      FitResult(state, history).

    Raises:
      ValueError: As `run`; or one of `eval_data` and `eval_step` comes without the other; `epochs`
        and `steps` are both given, or `eval_every` does not divide `steps`; there is nothing to
        evaluate on, or a value is watched that nobody provides.
      TypeError: As `run`; or `eval_step` carries no metrics, or trains.

    What tracing an evaluation with its first batch raises is raised before the first step.

    Whatever is raised once something has been trained, Ctrl-C included, carries the last whole
    state and the history up to it as an attribute `fit_result` (in a notebook:
    ``sys.last_value.fit_result``). Where a program fails, that is the state of at most some
    seconds before, if it has no more than 256 MiB. The first Ctrl-C, and a SIGTERM that Python
    handles, wait for the program under way; a second one does not.

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
    require_flags(jit=jit, donate=donate)
    require_one_of("history", history, ("steps", "epochs"))
    due = HookRunner(hooks)
    batches, epochs, begin = _counted(data, epochs, steps, eval_every, require_position(start))
    if (eval_data is None) != (eval_step is None):
        raise ValueError(
            "eval_data and eval_step: expected both or neither. The step comes from "
            "functrain.eval_step(loss_fn, metrics=...)."
        )
    require_training_step(step)
    if start is None:
        batches.continue_after(steps_taken(state))
    how: dict[str, Any] = {"rewrites": rewrites, "sharding": sharding, "jit": jit}
    if eval_step is not None:
        held_out = as_batches(eval_data, "eval_data")
        held_out.require_epochs(epochs - begin.epoch)
        due.hooks.insert(0, Evaluate(eval_step, held_out, **how))
    traces = jit and not _placement.is_explicit(_placement.batch_sharding(sharding))
    look_ahead(state, step, batches, due.hooks, checkpointer, traces=traces)
    # A hook of the user's may read logs that are arrays; functrain's own read numbers.
    all_own = all(type(hook).__module__.startswith("functrain.") for hook in due.hooks)
    is_population = traits_of(step).is_population
    recorder = Recorder(
        begin.step, is_population, keeps_steps=history == "steps", warns_of_arrays=all_own
    )
    saving: Saving | None = None
    if checkpointer is not None:
        due.resumable()  # refuses two hooks that a checkpoint could not tell apart
        saving = Saving(
            checkpointer, batches, {"history": recorder, "hooks": due, "losses": recorder.losses}
        )
    events = begin_run(
        state,
        step,
        batches,
        epochs=epochs,
        start=begin,
        fuse=fuse,
        boundaries=triggers_of(due.hooks),
        donate=donate,
        late_logs=True,
        saving=saving,
        **how,
    )
    first = events.position
    own = verbose if jax.process_index() == 0 else 0
    try:
        with (
            contextlib.closing(events),
            # A run that saves itself holds back SIGTERM: it saves before that is acted on.
            DeferredSignals(terminate="handled" if checkpointer is None else "none") as signals,
            due.running(),
            ProgressReport(epochs, batches.steps, own, first, resumed=events.resumed) as progress,
        ):

            def handle(event: Event) -> None:
                recorder.before(event)
                due(event)
                recorder.after(event)
                progress(event, recorder)

            def handle_logs(event: LogsReady) -> None:
                recorder.logs(event)
                due.logs(event)

            for _ in events.handled(handle, handle_logs, signals=signals):
                pass
    except BaseException as error:
        _attach_result(error, events, recorder, first)
        if checkpointer is not None and (saved := checkpointer.latest()) is not None:
            error.add_note(f"The same fit goes on after step {saved}: {checkpointer.directory}")
        raise
    if not any(isinstance(hook, TerminateOnNaN) for hook in due.hooks):  # it warns by itself
        active = events.state.active if is_population else None
        recorder.losses.warn(
            by_epochs=steps is None, epochs_before=batches.epochs_before, active=active
        )
    return FitResult(events.state, recorder.history())


def _counted(
    data: Any, epochs: int | None, steps: int | None, eval_every: int | None, start: Position
) -> tuple[Batches, int, Position]:
    """Returns data, the number of epochs and where they begin, for a fit by steps as well."""
    if steps is None:
        if eval_every is not None:
            raise ValueError(
                f"eval_every: expected it together with steps, got {eval_every!r} alone. A fit by "
                "epochs evaluates at the end of each; for other steps, functrain.hooks.Evaluate."
            )
        epochs = 1 if epochs is None else epochs
        require_integer("epochs", epochs)
        return as_batches(data), epochs, start
    if epochs is not None:
        raise ValueError(
            f"epochs and steps: expected one of them, got {epochs!r} and {steps!r}. Both are "
            "numbers of the whole training; to evaluate now and then, fit(steps=, eval_every=)."
        )
    stretch = steps if eval_every is None else eval_every
    if not is_integer(steps, 1) or not is_integer(stretch, 1) or steps % stretch:
        raise ValueError(
            "steps and eval_every: expected an integer of at least 1, and one that divides it, got "
            f"{steps!r} and {eval_every!r}"
        )
    return (
        EpochsOfSteps(as_batches(data), stretch),
        steps // stretch,
        Position.of(start.step, stretch),
    )


def _attach_result(error: BaseException, events: Run, recorder: Recorder, begin: Position) -> None:
    """Lets an error carry what was trained until it came."""
    if events.position == begin:
        return
    found = events.last_whole()
    if found is None:
        error.add_note(
            f"A program failed in the steps up to {events.position.step} of epoch "
            f"{events.position.epoch}, and took the state along: there is no copy of a state of "
            "this size. A checkpointer saves it now and then: fit(checkpointer=)."
        )
        return
    state, at = found
    if at.step == begin.step:
        return
    error.fit_result = FitResult(state, recorder.history(at.step))  # type: ignore[attr-defined]
    error.add_note(
        f"What was trained until step {at.step} is in this error's `fit_result`."
        + ("" if at == events.position else " The program after that failed.")
    )
