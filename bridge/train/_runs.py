"""Runs of a model's own steps in functrain's loop, with Keras's state, batches and callbacks."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import keras

from bridge import keras_private
from bridge.model._pure_layers import may_be_compiled
from bridge.state._keras_state import write_keras_state
from bridge.train._hook import KerasHook
from bridge.train._steps import cached_step
from functrain import Position
from functrain.events import ChunkEnd
from functrain.internal import (
    Batches,
    DeferredSignals,
    FuseArg,
    Loop,
    Mode,
    PyTree,
    RunArguments,
    Saving,
    accelerator_of,
    fetch_outputs,
    nbytes,
    prediction_plan,
    warn,
)


class Options(NamedTuple):
    """Options of a run that a fit and its evaluations share."""

    fuse: FuseArg
    rewrites: Mode


class Evaluation(NamedTuple):
    """The evaluations at the ends of epochs of a fit.

    Args:
      batches: Returns the data to evaluate on, the same for all evaluations, as in Keras.
      freq: Number of epochs between evaluations, or a list of epochs, counted from 1.
      options: The options of the fit.
    """

    batches: Callable[[], Batches]
    freq: Any
    options: Options

    def __call__(self, model: keras.Model, epoch: int, callbacks: Any) -> dict[str, Any]:
        """Returns the metrics after an epoch, counted from 0; none if it has no evaluation."""
        done = epoch + 1
        is_due = done in self.freq if isinstance(self.freq, list) else done % self.freq == 0
        if not is_due:
            return {}
        # As in Keras, the progress bar is not shown.
        return run_evaluate(model, self.batches(), callbacks, self.options, quiet=True)


def run_fit(
    hook: KerasHook,
    options: Options,
    *,
    epochs: int,
    initial_epoch: int,
    saving: Saving | None,
    quiet: bool,
) -> Any:
    """Trains a model and returns its history; see `KerasHook.whole_at_end` for its values."""
    model = hook.model
    # As in Keras 3.15.1, a fit of no epochs leaves the weights as they are.
    hook.finalizes = epochs > 0
    signals = DeferredSignals("fit", saves=saving is not None)
    with signals, contextlib.ExitStack() as stack:
        # BackupAndRestore sets the epoch to continue from when it begins. A fit with a checkpointer
        # does not have it, and its callbacks begin after the files that they write were restored.
        if saving is None:
            hook.begin()
        first_epoch = keras_private.trainer.initial_epoch(model) or initial_epoch
        run = _begin(hook, options, signals, epochs=epochs, first_epoch=first_epoch, saving=saving)
        stack.enter_context(contextlib.closing(run))
        if run.resumed is not None:
            assert hook.memory is not None
            if not quiet:
                print(run.resumed.describe())
            if run.resumed.finished:
                write_keras_state(run.state, model)
                hook.memory.restore_history()
                return model.history
            _warn_of_inexact_resuming(run, hook)
            stack.enter_context(hook.memory.files_restored())
        if saving is not None:
            hook.begin()
        with hook.whole_at_end(run):
            for event in run.events:
                hook(event)
    return model.history


def run_evaluate(
    model: keras.Model, batches: Batches, callbacks: Any, options: Options, *, quiet: bool = False
) -> dict[str, Any]:
    """Evaluates a model and returns its metrics."""
    keras_private.trainer.build_from(model, batches.data)
    cached_step(model, "test")
    # Ctrl-C between a program that donates the model's values and the assignment of the new ones
    # would lose both.
    with DeferredSignals() as signals:
        hook = KerasHook(model, "test", batches, callbacks, quiet=quiet)
        hook.begin()
        run = _begin(hook, options, signals)
        with hook.whole_at_end(run):
            for event in run.events:
                hook(event)
    return hook.logs


def run_predict(model: keras.Model, batches: Batches, callbacks: Any, options: Options) -> Any:
    """Predicts with a built model and returns NumPy arrays."""

    def chunks() -> Iterator[tuple[PyTree, int]]:
        for event in run.events:
            hook(event)
            if isinstance(event, ChunkEnd):
                yield event.rows, event.steps

    with DeferredSignals() as signals:
        hook = KerasHook(model, "predict", batches, callbacks)
        hook.begin()
        run = _begin(hook, options, signals)
        with hook.whole_at_end(run):
            outputs = fetch_outputs(chunks())
    if outputs is None:
        raise ValueError("x: expected at least one batch to predict from, got none")
    return outputs


def _begin(
    hook: KerasHook,
    options: Options,
    signals: DeferredSignals,
    *,
    epochs: int = 1,
    first_epoch: int = 0,
    saving: Saving | None = None,
) -> Loop:
    """Begins a run in functrain's loop that takes a model's own steps over the hook's batches."""
    model, kind, batches = hook.model, hook.kind, hook.batches
    step = cached_step(model, kind)
    state, is_jitted = hook.values.read(), not _runs_uncompiled(model)
    fuse, execution = options.fuse, int(model.steps_per_execution)
    if fuse == "auto" and execution > 1:
        # The user's way to tell Keras how many steps to take between two batch events.
        fuse = execution
    elif not is_jitted or (fuse == "auto" and not hook.calls.fusible):
        # Uncompiled steps gain nothing from a chunk, and an error would lose those before it.
        fuse = 1
    plan = None
    if kind == "predict" and is_jitted:
        # The plan keeps its functions, and must not keep the model's arrays in memory.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        plan = prediction_plan(
            fuse,
            batches,
            row_bytes=lambda batch: nbytes(step.output_shapes(shapes, batch)),
            chip=accelerator_of(state),
            state_bytes=nbytes(state),
        )
    arguments = RunArguments(
        batches=batches,
        epochs=epochs,
        position=Position(0, first_epoch),
        fuse=fuse,
        boundaries=(hook,),
        rewrites=options.rewrites,
        jit=is_jitted,
    )
    return Loop(
        state,
        step,
        arguments,
        receivers=hook.receivers,
        saving=saving,
        signals=signals,
        plan=plan,
        # Yields EpochBegin and ChunkBegin as well, at which the hook calls Keras's callbacks.
        like_keras=True,
    )


def _runs_uncompiled(model: keras.Model) -> bool:
    """Returns True if a model's steps run operation by operation, as they do in Keras.

    Warns of a model that does only because of layers that JAX may compile.
    """
    if model.run_eagerly:
        return True
    if model.jit_compile:
        return False
    layers = [x for x in keras_private.layers.all_layers(model) if not x.supports_jit]
    if layers and all(map(may_be_compiled, layers)):
        names = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        warn(
            f"model {model.name!r} runs uncompiled, which is slow: as in Keras, because of {names} "
            "with supports_jit=False. If the layers have no side effects in Python, which a "
            "compiled program has only once, set layer.supports_jit = True and compile the model "
            "again; otherwise use compile(run_eagerly=True)."
        )
    return True


def _warn_of_inexact_resuming(run: Loop, hook: KerasHook) -> None:
    """Warns of data and callbacks that cannot resume exactly."""
    assert hook.memory is not None
    if run.position.step and "examples" not in keras_private.data.fingerprint(hook.batches.data):
        warn(
            "x: only arrays are known to give the same batches again. These data are iterated "
            "from their start, and the batches of the epoch before the checkpoint are skipped."
        )
    missing = hook.memory.missing_callbacks()
    if missing:
        warn(f"callbacks: the checkpoint has {missing}, which this fit does not have.")
