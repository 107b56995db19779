"""What fit, evaluate and predict have in common: a model's state on its way through programs."""

import collections
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import keras

from bridge import keras_private
from bridge.state._keras_state import KerasState
from bridge.train._callbacks import BatchCallbacks, row
from bridge.train._feed import Chunk, Feed
from bridge.train._kept import kept
from bridge.train._running_means import RunningMeans
from bridge.train._steps import KerasStep, Layouts, layouts, pinned
from functrain.internal import Fused, Mode, PyTree, auto_steps, fuse

FuseArg: TypeAlias = int | Literal["auto"]
_FIELDS = {
    "train": ("trainable", "non_trainable", "optimizer", "metrics"),
    "test": ("trainable", "non_trainable", "metrics"),
    "predict": ("trainable", "non_trainable"),
}
_STOP = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}
RUN_AHEAD = 2
# While a model of no more than this is fitted, its values at the beginning of the epoch, or after a
# callback last saw the model, are kept, and put back should a program fail in the middle (out of
# memory, an error in a host callback). A larger one has no second copy, as under Keras.
SPARE_BYTES = 256 * 2**20


class Loop:
    """Runs chunks with the variables of a model, and tells the model where their values are.

    It ends where a callback sets `model.stop_training`, `stop_evaluating` or `stop_predicting`.

    Args:
      model: The model; built, as is everything that `compile` made.
      kind: "train", "test" or "predict".
      fuse: Steps per program.
      rewrites: As for `functrain.fuse`.
      interrupted: Tells whether somebody pressed Ctrl-C.
    """

    def __init__(
        self,
        model: keras.Model,
        kind: str,
        fuse: FuseArg,
        rewrites: Mode,
        interrupted: Callable[[], bool],
    ) -> None:
        self._model = model
        self._kind = kind
        self._fuse = fuse
        self._rewrites = rewrites
        self._interrupted = interrupted
        self._step = compiled_step(model, kind)
        self._means = None if kind == "predict" else RunningMeans.of(model)
        self._programs: dict[int, Fused[Any]] = {}
        self._state: KerasState | None = None
        self._spare: KerasState | None = None
        self._last: tuple[Chunk, PyTree] | None = None
        self._read: dict[str, jax.Array] | None = None  # the metrics, on their way to the host

    def feed(self, epochs: Any, calls: BatchCallbacks) -> Feed:
        """Returns the chunks of an EpochIterator, of as many steps as there may be."""

        def choose(batch: PyTree) -> int:
            if self._is_eager(batch):
                return 0
            if self._fuse != "auto":
                return self._fuse
            if self._model.steps_per_execution > 1:
                return int(self._model.steps_per_execution)
            return self._auto(batch, epochs, calls)

        return Feed(epochs, choose, calls.until)

    def _is_eager(self, batch: PyTree) -> bool:
        """Whether a step runs operation by operation, as in Keras.

        Keras compiles no model with a layer that one of its backends cannot compile, such as
        RandomRotation. JAX can compile most of them; which, a trace shows.
        """
        if self._model.run_eagerly or self._model.jit_compile:
            return bool(self._model.run_eagerly)
        if self._rewrites == "exact" or keras_private.supports_jit(self._model):
            return True
        try:
            jax.eval_shape(self._step, originals(self._model, self._kind), batch)
        except Exception:  # Keras makes others of jax's errors; the model's own comes once more
            return True
        return False

    def _auto(self, batch: PyTree, epochs: Any, calls: BatchCallbacks) -> int:
        if not calls.fusible:
            return 1
        size = _nbytes(batch)
        if self._kind == "predict":  # the outputs of a chunk are in memory, too
            size += _nbytes(
                jax.eval_shape(self._step, originals(self._model, self._kind), batch)[1]
            )
        state = sum(v.value.nbytes for v in self._model.variables)
        return auto_steps(size, state, [keras_private.whole_batches(epochs), calls.between()])

    def reset_metrics(self) -> None:
        """Resets the metrics, wherever their values are."""
        if self._means is None:
            self._model.reset_metrics()
        elif held := self._held():
            self._state = held.replace(metrics=self._means.reset(held.metrics))
            self._publish()
        else:
            _assign(self._model.metrics_variables, self._means.reset(self._means.values()))

    def run(self, feed: Feed, calls: BatchCallbacks) -> Iterator[tuple[Chunk, PyTree]]:
        """Runs an epoch; yields every chunk with what its steps reported, on the device."""
        in_flight: collections.deque[PyTree] = collections.deque()
        self._begin()
        for chunk in feed.epoch():
            calls.before(chunk)
            if chunk.batches is None:
                continue
            rows = self._run(chunk)
            calls.after(chunk, rows)
            in_flight.append(rows)
            if len(in_flight) > RUN_AHEAD:
                jax.block_until_ready(in_flight.popleft())
            self._last = chunk, rows
            yield chunk, rows
            if self._interrupted():
                raise KeyboardInterrupt
            if getattr(self._model, _STOP[self._kind]):
                break
        if self._means is not None and (held := self._held()):
            self._read = self._means.read(held.metrics)
        calls.flush()

    def _begin(self) -> None:
        """Makes the state ready for an epoch."""
        self._read = None
        held = self._held()
        if held is None:
            keras_private.publish(self._model, {})
            self._state = None
        elif _nbytes(held) <= SPARE_BYTES:
            self._spare = _copy(held)

    def _held(self) -> KerasState | None:
        """Returns the model's values where no callback has seen or changed them since."""
        return None if keras_private.is_synced(self._model) else self._state

    def logs(self) -> dict[str, Any]:
        """Returns the metrics, or what the last step reported where that is something else.

        Waits for the device, and brings the model up to date where its metrics need that.
        """
        if self._read is None or self._held() is None:
            self.sync()
            return keras_private.epoch_logs(self._model, self._reported())
        rows = self._last[1] if self._last else {}
        same = isinstance(rows, dict) and rows.keys() == self._read.keys()
        return dict(jax.device_get(self._read) if same else self._reported())

    def _reported(self) -> PyTree:
        """Returns what the last step reported."""
        if self._last is None:
            return {}
        chunk, rows = self._last
        return row(jax.device_get(rows), chunk, chunk.steps - 1)

    def sync(self) -> None:
        """Brings the model up to date."""
        held = self._held()
        if held is not None and not whole(held):
            self._state = self._spare  # a program failed with the state in its hands
            self._publish()
        keras_private.sync(self._model)
        keras_private.forget_losses(self._model)

    def _publish(self) -> None:
        """Tells the model where its values are, should somebody ask for them."""
        lists = {f"{name}_variables": getattr(self._state, name) for name in _FIELDS[self._kind]}
        keras_private.publish(self._model, lists)

    def _run(self, chunk: Chunk) -> PyTree:
        if self._held() is None:
            self._take()
        assert self._state is not None
        if chunk.k == 0:
            self._state, rows = self._step(self._state, chunk.batches)
        else:
            program = self._program(chunk.k)
            self._state, rows = program.dispatch(self._state, chunk.batches, chunk.steps)
        if self._step.layouts:  # where they were already, but as Keras spells it
            places = self._step.layouts
            self._state = self._state.replace(
                **{
                    n: jax.device_put(getattr(self._state, n), places[n])
                    for n in _FIELDS[self._kind]
                }
            )
        self._publish()
        return rows

    def _take(self) -> None:
        """Takes the state out of the model, which a callback may have changed."""
        distributed = keras.distribution.distribution() is not None
        self._step.layouts = layouts(self._model) if distributed else None
        self._spare = originals(self._model, self._kind)
        self._state = _copy(self._spare)
        if _nbytes(self._state) > SPARE_BYTES:
            self._spare = self._state
        self._publish()
        keras_private.purge(self._model, _FIELDS[self._kind])

    def _program(self, k: int) -> Fused[Any]:
        if k not in self._programs:
            self._programs[k] = fuse(self._step, k, rewrites=self._rewrites)
        return self._programs[k]


def originals(model: keras.Model, kind: str) -> KerasState:
    """Returns the variables that a step of this kind takes, as they are."""
    lists: dict[str, list[Any]] = {name: [] for name in _FIELDS["train"]}
    lists["trainable"] = [v.value for v in model.trainable_variables]
    lists["non_trainable"] = [v.value for v in model.non_trainable_variables]
    if kind != "predict":
        lists["metrics"] = [v.value for v in model.metrics_variables]
    if kind == "train":
        lists["optimizer"] = [v.value for v in model.optimizer.variables]
    return KerasState(**lists)


def whole(state: KerasState) -> bool:
    """Whether all arrays have values: none was given to a program that failed. Waits for them."""
    try:
        jax.block_until_ready(state)
    except Exception:
        return False
    return not any(x.is_deleted() for x in jax.tree.leaves(state))


@jax.jit
def _copy(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.array(x, dtype=x.dtype, copy=True), tree)


def _assign(variables: list[Any], values: list[jax.Array]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _nbytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in map(_spec, jax.tree.leaves(tree)))


def _spec(x: Any) -> Any:
    return x if hasattr(x, "dtype") else jnp.asarray(x)


def compiled_step(model: keras.Model, kind: str) -> Any:
    """Returns the model's step. Programs live as long as their step."""

    def make() -> Any:
        return PredictStep(model) if kind == "predict" else KerasStep(model, trains=kind == "train")

    return kept(model, kind, make)


class PredictStep:
    """A model's own `predict_step` as a functrain step."""

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.layouts: Layouts | None = None

    def __call__(self, state: KerasState, batch: PyTree, /) -> tuple[KerasState, PyTree]:
        """Takes one step."""
        outputs, rest = self.model.predict_step((state.trainable, state.non_trainable), batch)
        old = state.non_trainable
        new = [jnp.asarray(x, dtype=v.dtype) for v, x in zip(old, rest, strict=True)]
        return pinned(state.replace(non_trainable=new), self.layouts), outputs
