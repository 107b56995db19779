"""Runs of a model's own steps in functrain's loop, with Keras's state, batches and callbacks."""

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
    accelerator_of,
    begin_run,
    copy_arrays,
    fetch_outputs,
    longest_interval,
    nbytes,
    prediction_interval,
)
from functrain.internal import tree as _tree


class Options(NamedTuple):
    """Options of a run that a fit and its evaluations share."""

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
    """Begins a run in functrain's loop that takes a model's own steps over the hook's batches."""
    model, kind, batches = hook.model, hook.kind, hook.batches
    # The cached step keeps its compiled programs.
    step = cached_for(model, kind, lambda: KerasStep(model, kind))
    state, is_jitted = hook.values.read(), not runs_uncompiled(model)
    fuse = _fuse(options.fuse, hook)
    # The plan keeps its functions, and must not keep the model's arrays in memory.
    state_shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)

    def row_bytes(batch: PyTree) -> int:
        """Returns the size of a step's outputs: those of a whole chunk are in memory together."""
        predicts = kind == "predict" and is_jitted
        return nbytes(step.output_shapes(state_shapes, batch)) if predicts else 0

    def intervals(batch: PyTree) -> list[int | None]:
        """Returns the steps between pauses (epochs, callbacks, saves), for the choice of K."""
        # Uncompiled steps gain nothing from a chunk, and an error would lose those before it.
        if not is_jitted:
            return [1]
        steps = batches.full_steps
        if kind == "predict" and fuse == "auto":
            steps = prediction_interval(steps)
        saving_interval = None if saving is None else longest_interval([saving.trigger])
        return [steps, hook.calls.action_interval(), saving_interval]

    plan = Plan(
        fuse,
        state_bytes=nbytes(state),
        row_bytes=row_bytes,
        intervals=intervals,
        chip=accelerator_of(state),
    )

    return begin_run(
        state,
        step,
        batches,
        epochs=epochs,
        start=Position(0, first_epoch),
        boundaries=[hook],
        rewrites=options.rewrites,
        jit=is_jitted,
        # The hook gives the run copies of the variables' arrays before the first step.
        donate=True,
        # Fetching the logs of every step costs time, and only loggers read them.
        late_logs=bool(hook.loggers),
        saving=saving,
        plan=plan,
        # Yields EpochBegin and ChunkBegin as well, at which the hook calls Keras's callbacks.
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
    """Trains a model and returns its history. The model is whole afterwards, also after errors."""
    model = hook.model
    # As in Keras 3.15.1, a fit of no epochs leaves the weights as they are.
    hook.finalizes = epochs > 0
    with contextlib.ExitStack() as stack:
        # BackupAndRestore sets the epoch to continue from when it begins. A fit with a checkpointer
        # does not have it, and its callbacks begin after the files that they write were restored.
        if saving is None:
            hook.begin()
        first_epoch = keras_private.trainer.initial_epoch(model) or initial_epoch
        with _note_variable_paths(model):
            run = begin(hook, options, epochs=epochs, first_epoch=first_epoch, saving=saving)
        stack.enter_context(contextlib.closing(run))
        if run.resumed is not None:
            _resume(run, hook, evaluation, quiet=quiet)
            if run.resumed.finished:
                return model.history
            assert hook.memory is not None
            stack.enter_context(hook.memory.files_restored())
        if saving is not None:
            hook.begin()
        if evaluation is not None:
            hook.is_evaluation_due = evaluation.is_due
            hook.evaluate = _evaluator(hook, evaluation, options, run, signals)
            # The function refers to the hook and to the run, which refer to it.
            stack.callback(setattr, hook, "evaluate", dict)
        with _finish_at_end(hook, run):
            for _ in run.handle_events(hook, hook.take_logs, signals=signals):
                pass
    return model.history


def run_evaluate(
    hook: KerasHook, options: Options, act_on_signals: Callable[[], None]
) -> dict[str, Any]:
    """Evaluates a built model and returns its metrics; calls `act_on_signals` after each chunk."""
    hook.begin()
    run = begin(hook, options)
    with contextlib.closing(run), _finish_at_end(hook, run):
        for event in run.handle_events(hook):
            if isinstance(event, ChunkEnd):
                act_on_signals()
        logs = keras_private.callbacks.as_floats(hook.logs)
        hook.callbacks.on_test_end(logs)
    return logs


def run_predict(hook: KerasHook, options: Options, signals: DeferredSignals) -> Any:
    """Predicts with a built model and returns NumPy arrays."""
    hook.begin()
    run = begin(hook, options)

    def chunks() -> Iterator[tuple[PyTree, int]]:
        for event in run.handle_events(hook, signals=signals):
            if isinstance(event, ChunkEnd):
                yield event.rows, event.steps

    with contextlib.closing(run), _finish_at_end(hook, run):
        outputs = fetch_outputs(chunks())
        hook.callbacks.on_predict_end()
    signals.handle_pending()
    if not outputs:
        raise ValueError("x: expected at least one batch to predict from, got none")
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *outputs)


def _resume(run: Run, hook: KerasHook, evaluation: Evaluation | None, *, quiet: bool) -> None:
    """Restores from a checkpoint all that must be restored before the callbacks begin."""
    assert run.resumed is not None
    assert hook.memory is not None
    if not quiet:
        print(run.resumed.describe())
    if run.resumed.finished:
        write_keras_state(run.state, hook.model)
        hook.memory.restore_history()
    else:
        _warn_of_inexact_resuming(run, hook, evaluation)


@contextlib.contextmanager
def _finish_at_end(hook: KerasHook, run: Run) -> Iterator[None]:
    """Context manager: leaves the model with all its values, however the run ends."""
    try:
        yield
    except BaseException as error:
        if not hook.finish(run):
            error.add_note(
                "The program that failed had consumed the model's values. Load its weights again; "
                "bridge.fit(checkpointer=) and keras.callbacks.BackupAndRestore keep some on disk."
            )
        raise
    hook.finish(run)


def _evaluator(
    hook: KerasHook, evaluation: Evaluation, options: Options, fit: Run, signals: DeferredSignals
) -> Callable[[], dict[str, Any]]:
    """Returns a function that evaluates at the end of an epoch of a fit.

    If a signal comes meanwhile, the fit saves itself as it was before the end of the epoch.
    """

    def evaluate() -> dict[str, Any]:
        batches = evaluation.batches()
        # As in Keras, the callbacks of the fit are called, and its progress bar is not shown.
        test_hook = KerasHook(hook.model, "test", batches, hook.callbacks, quiet=True)
        if hook.memory is not None:
            # The evaluation donates the model's arrays, and a signal saves those of the fit. The
            # optimizer's are not among them.
            test_hook.values.push(copy_arrays(test_hook.values.read()))
        return run_evaluate(test_hook, options, lambda: fit.handle_signal_in_epoch_end(signals))

    return evaluate


def _fuse(fuse: FuseArg, hook: KerasHook) -> FuseArg:
    """Returns K. "auto" becomes the model's own, or 1 if a callback may act on every step."""
    if fuse != "auto":
        return fuse
    # The user's way to tell Keras how many steps to take between two batch events.
    if hook.model.steps_per_execution > 1:
        return int(hook.model.steps_per_execution)
    return "auto" if hook.calls.fusible else 1


@contextlib.contextmanager
def _note_variable_paths(model: keras.Model) -> Iterator[None]:
    """Context manager: adds to errors about a checkpoint the paths of the variables they name."""
    try:
        yield
    except CheckpointMismatchError as error:
        # A KerasState numbers its leaves, such as trainable/3.
        paths = variable_paths(model)
        leaf_names = re.findall(r"\b\w+/\d+", str(error))
        lines = [f"{name} is {paths[name]}" for name in leaf_names if name in paths]
        if lines:
            error.add_note(f"In this model:\n{_tree.bullets(lines)}")
        raise


def _warn_of_inexact_resuming(run: Run, hook: KerasHook, evaluation: Evaluation | None) -> None:
    """Warns of data and callbacks that cannot resume exactly."""
    problems: list[str] = []
    if run.position.step and "examples" not in keras_private.data.fingerprint(hook.batches.data):
        problems.append(
            "x: only arrays are known to give the same batches again. These data are iterated "
            "from their start, and the batches of the epoch before the checkpoint are skipped."
        )
    if run.position.epoch and evaluation is not None and evaluation.is_iterator:
        problems.append(
            "validation_data: expected arrays, or data that can be iterated again, got an "
            "iterator. It starts from its beginning, so evaluations may have other batches."
        )
    missing = [] if hook.memory is None else hook.memory.missing_callbacks()
    if missing:
        problems.append(f"callbacks: the checkpoint has {missing}, which this fit does not have.")
    for problem in problems:
        warnings.warn(problem, stacklevel=4)
