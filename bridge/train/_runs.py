"""Runs of a model's own steps: functrain's loop, with Keras's state, batches and callbacks."""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge.state._keras_state import write_keras_state
from bridge.train._callbacks import without_history_reading_model
from bridge.train._compiling import cached_for, runs_uncompiled
from bridge.train._hook import Evaluation, KerasHook
from bridge.train._memory import variable_paths
from bridge.train._steps import KerasStep
from functrain import CheckpointMismatchError, Position
from functrain.events import ChunkEnd
from functrain.internal import (
    DeferredSignals,
    FuseArg,
    Mode,
    Plan,
    PyTree,
    Run,
    Saving,
    begin_run,
    fetch_outputs,
    longest_interval,
    nbytes,
    prediction_interval,
)
from functrain.internal import tree as _tree


class Options(NamedTuple):
    """How to run: the same for a fit and its evaluations."""

    fuse: FuseArg
    rewrites: Mode


def begin(
    hook: KerasHook,
    options: Options,
    *,
    epochs: int = 1,
    first_epoch: int = 0,
    saving: Saving | None = None,
) -> Run:
    """Returns the run of a model's own steps over the hook's batches.

    Args:
      hook: Calls the callbacks.
      options: How to run.
      epochs: Number of the epoch to stop before.
      first_epoch: Number of the first one.
      saving: Saves the run, and resumes it.
    """
    model, kind, batches = hook.model, hook.kind, hook.batches

    # The cached step keeps its compiled programs.
    step = cached_for(model, kind, lambda: KerasStep(model, kind))
    state = hook.values.variable_values()

    def results(batch: PyTree) -> PyTree:
        return jax.eval_shape(step, hook.values.shapes, batch)

    def intervals() -> list[int | None]:
        whole = batches.full_steps
        if kind == "predict":
            whole = prediction_interval(whole)
        due = None if saving is None else longest_interval([saving.trigger])
        return [whole, hook.calls.between(), due]

    plan = Plan(
        _fuse(options.fuse, hook),
        state_bytes=nbytes(state),
        # The outputs of a chunk are in memory together.
        row_bytes=lambda batch: nbytes(results(batch)[1]) if kind == "predict" else 0,
        intervals=intervals,
    )
    return begin_run(
        state,
        step,
        batches,
        epochs=epochs,
        start=Position(0, first_epoch),
        boundaries=[hook.until_due],
        rewrites=options.rewrites,
        jit=lambda batch: not runs_uncompiled(model, options.rewrites, lambda: results(batch)),
        donate=True,
        late_logs=bool(hook.loggers),
        saving=saving,
        plan=plan,
        like_keras=True,
    )


def run_fit(
    hook: KerasHook,
    options: Options,
    signals: DeferredSignals,
    *,
    epochs: int,
    initial_epoch: int,
    saving: Saving | None,
    evaluation: Evaluation | None,
    quiet: bool,
) -> Any:
    """Trains a model; returns its history. The model is whole at the end, whatever happens."""
    model, callbacks = hook.model, hook.callbacks
    hook.finalizes = epochs > 0

    def begin_fit() -> Run:
        first = keras_private.trainer.initial_epoch(model) or initial_epoch
        return begin(hook, options, epochs=epochs, first_epoch=first, saving=saving)

    with contextlib.ExitStack() as stack:
        if saving is None:
            _begin_training(hook)  # where BackupAndRestore finds the epoch to continue in
            run = stack.enter_context(contextlib.closing(begin_fit()))
        else:
            with _named_variables(model):
                run = stack.enter_context(contextlib.closing(begin_fit()))
            if run.resumed is not None:
                _resume(run, hook, evaluation, quiet=quiet)
                if run.resumed.finished:
                    return model.history
            _begin_training(hook)
        if evaluation is not None:
            hook.evaluate = _evaluator(hook, evaluation, options, run, signals)
        if hook.is_lazy:
            stack.enter_context(without_history_reading_model(callbacks, model))
        with _kept_whole(hook, run):
            for _ in run.handled(hook, hook.take_logs, signals=signals):
                pass
    terminate = keras.callbacks.TerminateOnNaN  # it prints by itself
    if not any(isinstance(x, terminate) for x in getattr(callbacks, "callbacks", ())):
        _warn_of_loss(model.history)
    return model.history


def run_evaluate(hook: KerasHook, options: Options, act: Callable[[], None]) -> dict[str, Any]:
    """Evaluates a built model; returns its metrics.

    Args:
      hook: Calls the callbacks.
      options: How to run.
      act: Called after each chunk, acts on a signal.
    """
    hook.model.stop_evaluating = False
    hook.callbacks.on_test_begin()
    run = begin(hook, options)
    with contextlib.closing(run), _kept_whole(hook, run):
        for event in run.handled(hook):
            if isinstance(event, ChunkEnd):
                act()
    logs = keras_private.callbacks.as_floats(hook.logs)
    hook.callbacks.on_test_end(logs)
    return logs


def run_predict(hook: KerasHook, options: Options, signals: DeferredSignals) -> Any:
    """Predicts with a built model; returns NumPy arrays."""
    hook.model.stop_predicting = False
    hook.callbacks.on_predict_begin()
    run = begin(hook, options)

    def chunks() -> Iterator[tuple[PyTree, int]]:
        for event in run.handled(hook, signals=signals):
            if isinstance(event, ChunkEnd):
                yield event.rows, event.steps

    with contextlib.closing(run), _kept_whole(hook, run):
        outputs = fetch_outputs(chunks())
    hook.callbacks.on_predict_end()
    signals.handle_pending()
    if not outputs:
        raise ValueError("x: expected at least one batch to predict from, got none")
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *outputs)


def _begin_training(hook: KerasHook) -> None:
    hook.model.stop_training = False
    hook.callbacks.on_train_begin()


def _resume(run: Run, hook: KerasHook, evaluation: Evaluation | None, *, quiet: bool) -> None:
    """Continues from a checkpoint as far as that comes before the callbacks begin."""
    assert run.resumed is not None
    assert hook.memory is not None
    if not quiet:
        print(run.resumed.said())
    if run.resumed.finished:
        write_keras_state(run.state, hook.model)
        hook.memory.restore_history()
    else:
        hook.memory.restore_files()
        _warn_of_resuming(run, hook, evaluation)


@contextlib.contextmanager
def _kept_whole(hook: KerasHook, run: Run) -> Iterator[None]:
    """Context manager: assigns the values of a run to the model, however the run ends."""
    try:
        yield
    except BaseException as error:
        if not hook.finish(run):
            error.add_note(
                "The program that failed took the model's values along: there is no copy of a "
                "model of this size. Load its weights again; "
                "keras.callbacks.BackupAndRestore keeps some on disk."
            )
        raise
    hook.finish(run)


def _evaluator(
    hook: KerasHook, evaluation: Evaluation, options: Options, fit: Run, signals: DeferredSignals
) -> Callable[[int], dict[str, Any] | None]:
    """Returns a function that evaluates at the end of an epoch of a fit, if that is due.

    If a signal comes meanwhile, the fit saves itself as it was before the end of the epoch.
    """

    def evaluate(epoch: int) -> dict[str, Any] | None:
        if not evaluation.is_due(epoch):
            return None
        hook.values.assign()
        batches = evaluation.batches()
        within = KerasHook(hook.model, "test", batches, hook.callbacks, is_within_fit=True)
        return run_evaluate(within, options, lambda: fit.act_within_event(signals))

    return evaluate


def _fuse(fuse: FuseArg, hook: KerasHook) -> FuseArg:
    """Returns K: of "auto" the model's own, or 1 if a callback may have to act on every step."""
    if fuse != "auto":
        return fuse
    if hook.model.steps_per_execution > 1:
        return int(hook.model.steps_per_execution)
    return "auto" if hook.calls.fusible else 1


@contextlib.contextmanager
def _named_variables(model: keras.Model) -> Iterator[None]:
    """Context manager: notes the paths of variables that an error about a checkpoint numbers."""
    try:
        yield
    except CheckpointMismatchError as error:
        paths = variable_paths(model)
        numbered = re.findall(r"\b\w+/\d+", str(error))
        lines = [f"{name} is {paths[name]}" for name in numbered if name in paths]
        if lines:
            error.add_note(f"Of the model here:\n{_tree.bullets(lines)}")
        raise


def _warn_of_resuming(run: Run, hook: KerasHook, evaluation: Evaluation | None) -> None:
    """Warns of data and callbacks that do not resume exactly."""
    if run.position.step and "examples" not in hook.batches.fingerprint():
        warnings.warn(
            "x: only arrays are known to give the same batches again. These data are begun "
            "anew, and the batches of the epoch before the checkpoint left out.",
            stacklevel=4,
        )
    if run.position.epoch and evaluation is not None and evaluation.is_iterator:
        warnings.warn(
            "validation_data: expected arrays, or data that can be begun again, got an iterator. "
            "It is begun anew: the evaluations to come may have other batches.",
            stacklevel=4,
        )
    unknown = [] if hook.memory is None else hook.memory.missing_callbacks()
    if unknown:
        warnings.warn(
            f"callbacks: the checkpoint has {unknown}, which are not among those of this fit.",
            stacklevel=4,
        )


def _warn_of_loss(history: keras.callbacks.History) -> None:
    """Warns of the first epoch whose loss was not finite."""
    for epoch, loss in zip(history.epoch, history.history.get("loss", ()), strict=False):
        if not np.isfinite(loss):
            warnings.warn(
                f"bridge.fit: expected a finite loss, got {loss}, first in epoch {epoch}, counted "
                "from 0. Look for NaN in the data, and for labels outside of the classes. "
                "functrain.inspect.explain_nan(bridge.keras_state(model, batch), "
                "bridge.train_step(model), batch) names the operation that made it: pass a model "
                "from before.",
                stacklevel=5,  # the line that called fit
            )
            return
