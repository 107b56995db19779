"""What fit, evaluate and predict have in common: a model's state on its way through the engine."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import keras

from bridge import keras_private
from bridge.state._keras_state import FIELDS, KerasState, originals
from bridge.train import _feed
from bridge.train._cached import cached_for
from bridge.train._callbacks import BatchCallbacks
from bridge.train._compiling import runs_uncompiled
from bridge.train._running_means import RunningMeans
from bridge.train._saving import KerasSaving
from bridge.train._steps import KerasStep, PredictStep
from functrain.internal import (
    SPARE_BYTES,
    Chunk,
    Driver,
    FuseArg,
    HeldSignals,
    Mode,
    Plan,
    PyTree,
    StopAgreement,
    chunked,
    copied,
    nbytes,
    on_host,
    row,
    stretch_of_prediction,
)
from functrain.internal import tree as _tree

_FIELDS = {
    "train": FIELDS,
    "test": ("trainable", "non_trainable", "metrics"),
    "predict": ("trainable", "non_trainable"),
}
_STOP = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}


class Options(NamedTuple):
    """How to run: the same for a fit and its evaluations."""

    fuse: FuseArg
    rewrites: Mode
    signals: HeldSignals
    saving: KerasSaving | None = None
    stopping: StopAgreement | None = None
    within_fit: bool = False
    """Whether this is an evaluation in the middle of a fit: its progress bar is not shown, and the
    fit acts on signals after it."""

    def until(self) -> int | None:
        """Returns how many steps a chunk may take, apart from what callbacks say."""
        return None if self.saving is None else self.saving.until()

    def agree_to_stop(self, model: keras.Model) -> None:
        """Sets `model.stop_training` to what all processes of the fit agree on."""
        if self.stopping is not None:
            model.stop_training = self.stopping.is_last(bool(model.stop_training))

    def act(self) -> None:
        """Acts on a signal, if one came and the fit can be saved before; else it waits."""
        if self.saving is None:
            self.signals.act()
        else:
            self.saving.act(self.signals)


class Loop:
    """Runs a model's steps over its data, and tells the model where its values are.

    It ends where a callback sets `model.stop_training`, `stop_evaluating` or `stop_predicting`.

    Args:
      model: The model; built, as is everything that `compile` made.
      kind: "train", "test" or "predict".
      source: Keras's EpochIterator.
      callbacks: Keras's list, whose batch methods are called.
      options: How to run.
    """

    def __init__(
        self, model: keras.Model, kind: str, source: Any, callbacks: Any, options: Options
    ) -> None:
        self._model, self._kind, self._source, self._options = model, kind, source, options
        self._calls = BatchCallbacks(callbacks, kind, quiet=options.within_fit)
        self._step = cached_for(model, kind, self._make_step)  # programs live as long as it
        self._means = None if kind == "predict" else RunningMeans.of(model)
        self._plan = Plan(
            self._fuse(options.fuse),
            state_bytes=nbytes(self._originals()),
            row_bytes=self._row_bytes,
            stretches=self._stretches,
        )
        self._state: KerasState | None = None
        self._last: tuple[Chunk, PyTree] | None = None
        self._reported_before: PyTree = {}  # by the last step before a checkpoint
        self._pass: Any = None
        self._read: dict[str, jax.Array] | None = None  # the metrics, on their way to the host

    def _make_step(self) -> Any:
        if self._kind == "predict":
            return PredictStep(self._model)
        return KerasStep(self._model, trains=self._kind == "train")

    @functools.cached_property
    def _driver(self) -> Driver:
        """Takes chunks through programs, or uncompiled: made when the first batch is known."""
        rewrites = self._options.rewrites
        return Driver(
            self._step,
            rewrites=rewrites,
            jit=not runs_uncompiled(self._model, rewrites, lambda: self._shapes(self._plan.batch)),
            uncompiled=contextlib.nullcontext,
            place=_feed.placement(trains=self._kind == "train"),
        )

    def run(self, resume: _feed.Resume | None = None) -> Iterator[tuple[Chunk, PyTree]]:
        """Runs an epoch, or its rest; yields every chunk with what its steps reported."""
        self._begin_epoch()
        if resume is not None:
            self._reported_before = resume.reported
        self._pass = _feed.epoch(self._source, resume)
        for chunk in chunked(self._pass, self._plan, self._until, ragged="alone"):
            self._calls.before(chunk)
            if not chunk.steps:
                continue
            rows = self._run(chunk)
            self._calls.after(chunk, rows)
            self._last = chunk, rows
            yield chunk, rows
            self._options.act()
            if self._kind == "train":
                self._options.agree_to_stop(self._model)
            if self._stopped:
                break
        if self._means is not None and (held := self._held()):
            self._read = self._means.read(held.metrics)
        self._calls.flush()

    def reset_metrics(self) -> None:
        """Resets the metrics, wherever their values are."""
        if self._means is None:
            self._model.reset_metrics()
        elif held := self._held():
            self._begin(held.replace(metrics=self._means.reset(held.metrics)))
        else:
            values = self._means.reset(self._means.values())
            for variable, value in zip(self._model.metrics_variables, values, strict=True):
                variable.assign(value)

    def logs(self) -> dict[str, Any]:
        """Returns the metrics, or what the last step reported where that is something else.

        Waits for the device, and brings the model up to date where its metrics need that.
        """
        if self._read is None or self._held() is None:
            self.sync()
            return keras_private.trainer.epoch_logs(self._model, self.reported())
        rows = self._last[1] if self._last else {}
        same = isinstance(rows, dict) and rows.keys() == self._read.keys()
        return dict(jax.device_get(self._read) if same else self.reported())

    def reported(self) -> PyTree:
        """Returns what the last step reported."""
        if self._last is None:
            return self._reported_before
        chunk, rows = self._last
        return row(on_host(rows, chunk.steps), chunk.steps - 1)

    def values(self) -> KerasState:
        """Returns the model's values, wherever they are; the next program takes them over."""
        held = self._held()
        return self._originals() if held is None else held

    @property
    def ahead(self) -> int:
        """How many batches were fetched to look at, and not taken yet."""
        return int(self._pass.ahead)

    def sync(self) -> bool:
        """Brings the model up to date; whether it is whole.

        If a program failed it goes back to the epoch's beginning, or to where a callback last saw
        it; a model above `SPARE_BYTES`, of which there is no second copy, has lost its values.
        """
        found: tuple[PyTree, Any] | None = ((), None)
        if self._held() is not None:
            found = self._driver.last_whole(None)
            if found is not None and found[0] is not self._state:
                self._state = found[0]
                self._publish()
        keras_private.trainer_state.sync(self._model)
        keras_private.layers.forget_losses(self._model)
        return found is not None

    @property
    def _stopped(self) -> bool:
        return bool(getattr(self._model, _STOP[self._kind]))

    def _until(self, _: int) -> int | None:
        """Returns how many steps the next chunk may take; see `chunked`."""
        if self._stopped:  # before an epoch's first batch: Keras looks after its first program
            return int(self._model.steps_per_execution)
        return min((n for n in (self._calls.until(), self._options.until()) if n), default=None)

    def _fuse(self, fuse: FuseArg) -> FuseArg:
        if fuse != "auto":
            return fuse
        if self._model.steps_per_execution > 1:
            return int(self._model.steps_per_execution)
        return "auto" if self._calls.fusible else 1

    def _stretches(self) -> list[int | None]:
        whole = keras_private.data.whole_batches(self._source)
        if self._kind == "predict":
            whole = stretch_of_prediction(whole)
        return [whole, self._calls.between(), self._options.until()]

    def _row_bytes(self, batch: PyTree) -> int:
        """Returns the bytes of a batch's outputs: those of a chunk are in memory together."""
        return nbytes(self._shapes(batch)[1]) if self._kind == "predict" else 0

    def _shapes(self, batch: PyTree) -> PyTree:
        """Traces a step; returns what its results look like."""
        return jax.eval_shape(self._step, self._originals(), batch)

    def _begin_epoch(self) -> None:
        self._read = None
        if self._held() is None:
            keras_private.trainer_state.publish(self._model, {})
            self._state = None
        else:
            self._driver.keep_spare(None, now=True)

    def _held(self) -> KerasState | None:
        """Returns the model's values where no callback has seen or changed them since."""
        return None if keras_private.trainer_state.is_synced(self._model) else self._state

    def _run(self, chunk: Chunk) -> PyTree:
        if self._held() is None:
            self._take()
        stopping = self._options.stopping if self._kind == "train" else None
        if stopping is not None:
            stopping.begun += chunk.steps
        rows = self._driver.run(chunk)
        if stopping is not None:
            stopping.dispatched += chunk.steps
        self._state = self._driver.carry
        self._publish()
        return rows

    def _begin(self, state: KerasState) -> None:
        self._state = state
        self._driver.begin(state)
        self._publish()

    def _take(self) -> None:
        """Takes the state out of the model, which a callback may have changed.

        A large one is not copied, as it is not by Keras's own fit.
        """
        originals = self._originals()
        if nbytes(originals) <= SPARE_BYTES:
            self._begin(copied(originals))
            self._driver.adopt_spare(originals, None)
        else:
            self._begin(_tree.own(originals))
        keras_private.trainer_state.purge(self._model, _FIELDS[self._kind])

    def _publish(self) -> None:
        """Tells the model where its values are, for callbacks that read it."""
        lists = {f"{name}_variables": getattr(self._state, name) for name in _FIELDS[self._kind]}
        keras_private.trainer_state.publish(self._model, lists)

    def _originals(self) -> KerasState:
        """Returns the variables that a step of this kind takes, as they are."""
        return originals(self._model, _FIELDS[self._kind])
