"""Every private Keras name the bridge reads, one function each.

Nothing else in the package touches one. `tests/bridge/test_keras_private.py` holds a test for
each, which says first when a new Keras release moves something.
"""

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.backend import get_keras_mask
from keras.src.backend.common import global_state
from keras.src.backend.jax.trainer import JAXEpochIterator, JAXTrainer
from keras.src.losses.loss import apply_mask, squeeze_or_expand_to_same_rank
from keras.src.metrics import reduction_metrics
from keras.src.models.functional import Functional
from keras.src.trainers import compile_utils
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.trainer import Trainer
from keras.src.utils.python_utils import is_default, pythonify_logs


def sublayers(layer: keras.Layer) -> list[Any]:
    """Returns the layers a layer tracks itself, in Keras's own order.

    Reads `Layer._layers`; checked with Keras 3.15.1. The public `Model.layers` exists on models
    only, and in a Functional model leaves out layers attached as attributes. Without it no
    variable of a sublayer is found.
    """
    return list(layer._layers)


def own_variables(layer: keras.Layer) -> list[Any]:
    """Returns the variables a layer holds itself: trainable ones, then the others.

    Reads `Layer._trainable_variables` and `Layer._non_trainable_variables`; checked with Keras
    3.15.1. The public lists are flat over the whole tree; without these two it is unknown which
    layer holds which variable, and there are no stable paths.
    """
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def supports_jit(model: keras.Model) -> bool:
    """Whether Keras would compile a model, as far as its layers are concerned.

    Calls `Layer._flatten_layers`, as `model_supports_jit` does; checked with Keras 3.15.1. Without
    it a model that the user wants to run uncompiled looks like one that Keras does not compile.
    """
    return all(layer.supports_jit for layer in model._flatten_layers())


def seed_generators(layer: keras.Layer) -> list[Any]:
    """Returns the SeedGenerators a layer holds itself.

    Reads `Layer._seed_generators`; checked with Keras 3.15.1. Without it a seed counter cannot be
    told from any other variable, and nothing can be reseeded from a key.
    """
    return list(layer._seed_generators)


def own_metrics(layer: keras.Layer) -> list[Any]:
    """Returns the metrics a layer holds itself, without those of `compile`.

    Reads `Layer._metrics`; checked with Keras 3.15.1. The public `Model.metrics` mixes in the
    compiled ones and leaves out those of nested models. Without it a metric that is updated
    inside `call` is an update that no list holds.
    """
    return list(layer._metrics)


def forget_losses(layer: keras.Layer) -> None:
    """Drops the losses that a failed `fit` left behind.

    Clears `Layer._losses_override`; checked with Keras 3.15.1, which fills it during a train step
    and empties it only where the step succeeds. Without it `layer.losses` returns dead tracers
    of that step in place of this call's losses.
    """
    layer._losses_override.clear()


def build(model: keras.Model, batch: Any) -> None:
    """Builds a model and its compiled loss, metrics and optimizer for batches like this one.

    Calls `Trainer._symbolic_build`; checked with Keras 3.15.1. Without it compiled metrics have
    no variables before the first `fit`, and a state made before that lacks them.
    """
    model._symbolic_build(data_batch=batch)


def is_built(model: keras.Model) -> bool:
    """Whether nothing of a compiled model is left for its first batch to build.

    Reads `Trainer._compile_metrics` and `Trainer._compile_loss`; checked with Keras 3.15.1.
    Without it a state with missing metrics cannot be told from a whole one.
    """
    parts = (model, model._compile_metrics, model._compile_loss, model.optimizer)
    return all(part is None or part.built for part in parts)


def is_trainer(model: Any) -> bool:
    """Whether something has Keras's train_step, fit and so on: a keras.Model, or its like.

    Names `JAXTrainer`; checked with Keras 3.15.1. A layer with a trainer mixed in, which Keras
    takes for a model, is no keras.Model.
    """
    return isinstance(model, JAXTrainer)


def require_compiled(model: keras.Model, method: str) -> None:
    """Raises Keras's own error where `compile` was not called.

    Calls `Trainer._assert_compile_called`; checked with Keras 3.15.1. Without it the error of
    `bridge.fit` is not the one that `model.fit` raises.
    """
    model._assert_compile_called(method)


class _Epochs(JAXEpochIterator):  # type: ignore[misc]  # keras has no types
    """Keras's iterator over the steps of epochs, with batches left on the host.

    Attributes:
      begin: Makes the iterator over the batches of one pass.
    """

    begin: Callable[[], Iterator[Any]]

    def _get_iterator(self) -> Iterator[Any]:
        return self.begin()


def epochs(passes: Callable[[Any], Callable[[], Iterator[Any]]], **arguments: Any) -> Any:
    """Returns Keras's EpochIterator, which understands all data that `fit` does.

    Subclasses `JAXEpochIterator`, and overrides `_get_iterator`; checked with Keras 3.15.1.
    Without it bridge.fit has to know steps_per_epoch, generators that end early, PyDataset
    and the like by itself.

    Args:
      passes: Called with the data adapter, returns what begins a pass over its batches.
      **arguments: Of `EpochIterator`: x, y, sample_weight, batch_size, ...
    """
    found = _Epochs(**arguments)
    found.begin = passes(found.data_adapter)
    return found


def build_from(model: keras.Model, iterator: Any) -> None:
    """As `build`, for the first batch of `epochs`, which is then at its start again.

    Calls `Trainer._symbolic_build`, which asks for that batch only where something is not built:
    a generator loses no batch otherwise. Checked with Keras 3.15.1.
    """

    def batches() -> Iterator[Any]:
        for begin, end, items in iterator:
            yield begin, end, (item.arrays() for item in items)

    model._symbolic_build(iterator=batches())
    iterator.reset()


def layers_built(model: keras.Model) -> bool:
    """Whether all layers are built, in the words of `predict`.

    Calls `Layer._flatten_layers`; checked with Keras 3.15.1. `Model.built` alone may be True
    where sublayers are not.
    """
    return all(layer.built for layer in model._flatten_layers())


def array_batches(adapter: Any) -> "ArrayBatches | None":
    """Returns the data of an adapter where they are arrays held whole, else None.

    Reads `ArrayDataAdapter._inputs`, `_num_samples`, `_batch_size`, `_size` and `_shuffle`, and
    calls `array_slicing.convert_to_sliceable`; checked with Keras 3.15.1. Without it batches are
    made one by one and then stacked, which takes longer than a small model's step.
    """
    if type(adapter) is not ArrayDataAdapter:
        return None
    found = ArrayBatches(adapter)
    return found if found.dense else None


class ArrayBatches:
    """The arrays of an `ArrayDataAdapter`, and the order of one pass over them."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self._inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="jax")

    @property
    def dense(self) -> bool:
        """Whether batches of them can be stacked."""
        kinds = (
            array_slicing.NumpySliceable,
            array_slicing.PandasDataFrameSliceable,
            array_slicing.PandasSeriesSliceable,
        )
        return all(x is None or isinstance(x, kinds) for x in keras.tree.flatten(self._inputs))

    def __iter__(self) -> Iterator[Any]:
        """Yields every batch's rows, a slice or `i64[B]`, and B; draws them as Keras does."""
        adapter = self._adapter
        n, size, shuffle = adapter._num_samples, adapter._batch_size, adapter._shuffle
        order = np.random.permutation(n) if shuffle and shuffle != "batch" else None
        for i in range(adapter._size):
            start, stop = i * size, min((i + 1) * size, n)
            if order is not None:
                yield order[start:stop], stop - start
            elif shuffle:
                yield np.random.permutation(stop - start) + start, stop - start
            else:
                yield slice(start, stop), stop - start

    def take(self, rows: Any) -> Any:
        """Returns these rows of all arrays, as Keras hands them to a step."""

        def convert(array: Any) -> Any:
            return array.convert_to_jax_compatible(array[rows])

        return keras.tree.map_structure(convert, self._inputs, none_is_leaf=False)


def whole_batches(iterator: Any) -> int | None:
    """Returns how many batches of full size an epoch of `epochs` has, as far as that is known.

    Reads `ArrayDataAdapter.has_partial_batch`, which other adapters raise at; checked with Keras
    3.15.1. Without it "auto" may choose one step too many, whose row of a chunk is never used.
    """
    steps: int | None = iterator.num_batches
    adapter = iterator.data_adapter
    partial = type(adapter) is ArrayDataAdapter and adapter.has_partial_batch
    return max(1, steps - 1) if steps and partial and steps == adapter.num_batches else steps


def split(arrays: Any, validation_split: float) -> tuple[Any, Any]:
    """Returns the arrays without their last part, and that part.

    Calls `array_slicing.train_validation_split`; checked with Keras 3.15.1. Without it
    `validation_split` would need slicing of everything `fit` takes as an array.
    """
    kept, left = array_slicing.train_validation_split(arrays, validation_split=validation_split)
    return kept, left


def publish(model: keras.Model, lists: dict[str, Any]) -> None:
    """Tells a model where its variables' new values are, without assigning them.

    Sets `JAXTrainer._jax_state` and `_jax_state_synced`; checked with Keras 3.15.1. They are
    assigned when a callback reads `callback.model`, which calls `jax_state_sync`. Without it the
    values must be assigned before every callback, or callbacks see old ones.
    """
    vars(model).update(_jax_state=lists, _jax_state_synced=False)  # untracked, which takes longer


def purge(model: keras.Model, fields: Sequence[str]) -> None:
    """Takes the values out of the variables of a model that `publish` has told where they are.

    Calls `JAXTrainer._purge_model_variables`; checked with Keras 3.15.1. Without it the model
    keeps old values in memory while it trains, beside the new ones.
    """
    model._purge_model_variables(**{f"{name}_variables": True for name in fields})


def is_synced(model: keras.Model) -> bool:
    """Whether the model's variables have the values of `publish`, or newer ones.

    Reads `JAXTrainer._jax_state_synced`; checked with Keras 3.15.1. Without it changes made by a
    callback are overwritten.
    """
    return bool(model._jax_state_synced)


def sync(model: keras.Model) -> None:
    """Assigns the values of `publish`, unless that was done.

    Calls `JAXTrainer.jax_state_sync` and clears `_jax_state`; checked with Keras 3.15.1.
    """
    model.jax_state_sync()
    vars(model).update(_jax_state=None, _jax_state_synced=True)


def initial_epoch(model: keras.Model) -> int | None:
    """Returns the epoch that BackupAndRestore found, which wins over `initial_epoch`.

    Reads `Trainer._initial_epoch`; checked with Keras 3.15.1.
    """
    epoch: int | None = model._initial_epoch
    return epoch


def epoch_logs(model: keras.Model, logs: Any) -> dict[str, Any]:
    """Returns the model's metrics, or the logs where a step reports something else.

    Calls `Trainer._get_metrics_result_or_logs`; checked with Keras 3.15.1. Without it History
    lacks what Keras writes where a model has its own `train_step` or `metrics`.
    """
    return dict(model._get_metrics_result_or_logs(logs))


def only_running_means(model: keras.Model) -> bool:
    """Whether all metrics of a model are reset and read by Keras's own `Mean` or `Sum`.

    Compares with `reduction_metrics.Mean` and `Sum` and with `Trainer`, and looks into
    `CompileMetrics`; checked with Keras 3.15.1. Their results are a quotient, or a value as it
    is: the same bits in a program of its own, or in none. Without it every epoch resets and reads
    metrics one operation at a time.
    """
    owner = type(model)
    if any(
        getattr(owner, name) is not getattr(Trainer, name) or name in vars(model)
        for name in ("reset_metrics", "get_metrics_result")
    ):
        return False
    nested = [
        m.metrics if isinstance(m, compile_utils.CompileMetrics) else [m] for m in model.metrics
    ]
    kinds = (reduction_metrics.Mean, reduction_metrics.Sum)
    return all(
        any(type(m).result is k.result and type(m).reset_state is k.reset_state for k in kinds)
        for metrics in nested
        for m in metrics
    )


def in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns logs as the list, or the scalar, that `evaluate` returns.

    Calls `Trainer._flatten_metrics_in_order`; checked with Keras 3.15.1.
    """
    return model._flatten_metrics_in_order(logs)


def is_due(model: keras.Model, epoch: int, validation_freq: Any) -> bool:
    """Whether this epoch ends with an evaluation.

    Calls `Trainer._should_eval`; checked with Keras 3.15.1.
    """
    return bool(model._should_eval(epoch, validation_freq))


def to_python(logs: Any) -> dict[str, Any]:
    """Returns logs flat and as Python numbers, as callbacks get them.

    Calls `python_utils.pythonify_logs`; checked with Keras 3.15.1.
    """
    result: dict[str, Any] = pythonify_logs(logs)
    return result


def overrides(callback: Any, method: str) -> bool:
    """Whether a callback has its own version of a method.

    Calls `keras.src.utils.is_default`; checked with Keras 3.15.1. Without it every callback has
    to be called for every batch.
    """
    return not is_default(getattr(callback, method))


def batches_between(callback: Any) -> int | None:
    """Returns how many batches lie between two at which a callback of Keras's does something.

    Reads `update_freq` and `write_steps_per_second` of TensorBoard, which are public, and
    `_batches_seen_since_last_saving` of ModelCheckpoint, BackupAndRestore and OrbaxCheckpoint,
    which alone have a `save_freq` in batches; checked with Keras 3.15.1. None where it does
    nothing with batches, or with each of them, from their logs alone.
    """
    if isinstance(callback, keras.callbacks.TensorBoard):
        # It takes the time of single batches where it writes their number per second.
        every: Any = 1 if callback.write_steps_per_second else callback.update_freq
        return None if callback.update_freq == "epoch" else int(every)
    every = getattr(callback, "save_freq", "epoch")
    saves = hasattr(callback, "_batches_seen_since_last_saving")
    return every if saves and isinstance(every, int) else None


def batches_until_due(callback: Any) -> int | None:
    """Returns how many batches from now a callback of Keras's does something; None if never.

    Reads `_batches_seen_since_last_saving` as `batches_between` does, and `_global_train_batch`,
    `_should_trace`, `_start_batch` and `_stop_batch` of TensorBoard; checked with Keras 3.15.1.
    Without it they save, record and profile what the model was at the end of a chunk.
    """
    every = batches_between(callback)
    if not isinstance(callback, keras.callbacks.TensorBoard):
        return every and max(1, every - callback._batches_seen_since_last_saving)
    begun = int(callback._global_train_batch)
    due = [every - begun % every] if every else []
    if callback._should_trace:  # the batch before the first one that is profiled, and the last
        due += [n - begun for n in (callback._start_batch - 1, callback._stop_batch) if n > begun]
    return min(due, default=None)


def only_epochs(callback: Any) -> bool:
    """Whether a callback of Keras's that overrides batch methods does nothing in them.

    Reads `TensorBoard._should_trace`; checked with Keras 3.15.1. Without it logs are fetched
    after each chunk for nobody.
    """
    if isinstance(callback, keras.callbacks.TensorBoard):
        return bool(callback.update_freq == "epoch" and not callback._should_trace)
    return getattr(callback, "save_freq", None) == "epoch"


def compiled_parts(model: keras.Model) -> list[Any]:
    """Returns what `compile` made: other objects mean that a compiled step is out of date.

    Reads `Trainer._compile_loss`, `_compile_metrics` and `_loss_tracker`; checked with Keras
    3.15.1. Without it a step compiled before `model.compile` would run after it.
    """
    names = ("_compile_loss", "_compile_metrics", "_loss_tracker", "optimizer")
    return [getattr(model, name, None) for name in names]


def lend(variable: Any, value: Any) -> Any:
    """Gives a variable another value, traced or not, and returns the one it had.

    Sets `Variable._value`; checked with Keras 3.15.1. Without it a metric updated inside `call`
    starts from what it was before the step was traced.
    """
    before = variable._value
    variable._value = value
    return before


def get_loss(identifier: Any, y: Any, outputs: Any) -> Any:
    """Returns the `keras.losses.Loss` that `compile` makes of a name, a function or a loss.

    Calls `compile_utils.get_loss`; checked with Keras 3.15.1. Without it there is no class to
    wrap a function in, and "crossentropy" means nothing.
    """
    return compile_utils.get_loss(identifier, y, outputs)


def calls_itself(loss: Any) -> bool:
    """Whether a loss has a `__call__` of its own, of which nothing but the result is known.

    Names `keras.losses.Loss.__call__`.
    """
    return type(loss).__call__ is not keras.losses.Loss.__call__


def losses_and_weight(loss: Any, y: Any, outputs: Any, sample_weight: Any) -> tuple[Any, Any]:
    """Returns what `Loss.__call__` multiplies and takes the mean of; a weight may be None.

    Calls `losses.loss.apply_mask`, `squeeze_or_expand_to_same_rank` and `get_keras_mask`; checked
    with Keras 3.15.1. With `reduction=None` Keras leaves out the factor that makes the mean one
    over valid elements, so without this the values of examples do not add up to the loss.
    """
    before = get_keras_mask(outputs)
    with keras.name_scope(loss.name):
        y, outputs = keras.tree.map_structure(
            lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype), (y, outputs)
        )
        values = loss.call(y, outputs)
        masks = [mask for mask in (before, get_keras_mask(values)) if mask is not None]
        values = keras.ops.convert_to_tensor(values, dtype=loss.dtype)
        mask = functools.reduce(operator.and_, masks) if masks else None
        if mask is not None:
            mask = keras.ops.convert_to_tensor(mask, dtype=loss.dtype)
        if sample_weight is not None:
            sample_weight = keras.ops.convert_to_tensor(sample_weight, dtype=loss.dtype)
        weight = apply_mask(sample_weight, mask, values.dtype, loss.reduction)
        if weight is None:
            return values, None
        weight = keras.ops.cast(weight, values.dtype)
        return tuple(squeeze_or_expand_to_same_rank(values, weight))


def get_metric(identifier: Any, y: Any, outputs: Any) -> Any:
    """Returns the metric that `compile` makes of a name for such labels and outputs.

    Calls `compile_utils.get_metric`; checked with Keras 3.15.1. Without it "accuracy" means
    nothing.
    """
    return compile_utils.get_metric(identifier, y, outputs)


def is_built_metric(metric: Any) -> bool:
    """Whether a metric has all its variables.

    Reads `_built` of F1Score, FBetaScore, R2Score and AUC, which make some at their first batch;
    checked with Keras 3.15.1. Without it a state made before that batch is too short for it.
    """
    return bool(getattr(metric, "_built", True))


def learning_rate(optimizer: Any) -> Any:
    """Returns the schedule or function that an optimizer asks for its learning rate, else None.

    Reads `Optimizer._learning_rate`; checked with Keras 3.15.1. The public `learning_rate` calls
    the schedule. Without it a schedule of one's own would have to be serializable to be used.
    """
    rate = getattr(optimizer, "_learning_rate", None)
    return None if isinstance(rate, keras.Variable) or not callable(rate) else rate


def optimizer_map(optimizer: Any) -> Any:
    """Returns what a MultiOptimizer chooses by: an OptimizerMap, or a function.

    Reads `MultiOptimizer._optimizer_map`; checked with Keras 3.15.1. Without it a MultiOptimizer
    that holds a function cannot be copied.
    """
    return optimizer._optimizer_map


def excluded_from_weight_decay(optimizer: Any) -> tuple[set[int], str]:
    """Returns the ids of variables and the pattern of names that weight decay leaves out.

    Reads `Optimizer._exclude_from_weight_decay` and `_exclude_from_weight_decay_pattern`; checked
    with Keras 3.15.1, whose `get_config` leaves both out.
    """
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    ids: set[int] = getattr(optimizer, "_exclude_from_weight_decay", set())
    return set(ids), pattern.pattern if pattern else ""


def trained(optimizer: Any) -> list[Any]:
    """Returns the variables an optimizer was built for, in the order of its slots.

    Reads `Optimizer._trainable_variables`; checked with Keras 3.15.1. Without it slots cannot be
    told apart, nor can an optimizer that was built for another model.
    """
    return list(optimizer._trainable_variables)


@contextlib.contextmanager
def outside_scopes() -> Iterator[None]:
    """Leaves every StatelessScope for a while: inside one no variable can be made.

    Sets the global attribute "stateless_scope"; checked with Keras 3.15.1. Without it a step that
    uses an optimizer for the first time could not be traced under a guard against side effects.
    """
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


class GradientsOnly(keras.optimizers.Optimizer):  # type: ignore[misc]  # keras has no types
    """An optimizer that updates all variables at once, by `update_all`.

    Overrides `Optimizer._backend_apply_gradients`; checked with Keras 3.15.1. What `apply` does
    around it stays Keras's: constraints, float8 scales, the count of iterations. Without it an
    optimizer sees one variable at a time.
    """

    def update_all(self, grads: list[Any], variables: list[Any]) -> None:
        """Assigns new values to variables, some of those it was built for."""
        raise NotImplementedError

    def _backend_apply_gradients(self, grads: list[Any], trainable_variables: list[Any]) -> None:
        self.update_all(list(grads), list(trainable_variables))


def layout(variable: Any) -> Any:
    """Returns where `keras.distribution` puts a variable, or None.

    Reads `Variable._layout`; checked with Keras 3.15.1. Without it the slots of a sharded
    variable would be replicated.
    """
    return getattr(variable, "_layout", None)


def is_functional(layer: Any) -> bool:
    """Whether a layer is Keras's own Functional model, and none of a subclass.

    Compares with `keras.src.models.functional.Functional`, which has no public name; checked with
    Keras 3.15.1. Without it a model made of inputs and outputs cannot be told from a user's class.
    """
    return type(layer) is Functional


def jit_compile_asked(model: keras.Model) -> Any:
    """Returns the `jit_compile` that the last `compile` was given; None where that is not known.

    Wraps `Trainer.compile`, which keeps nothing but what it made of it: a False may have been
    asked for, or be what "auto" came to. The wrapper writes the argument down and changes nothing
    else; checked with Keras 3.15.1. Not known of models compiled before bridge was imported.
    """
    return vars(model).get("_bridge_jit_compile")


def _writing_down_jit_compile(compile_model: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(compile_model)

    @functools.wraps(compile_model)
    def compile_and_write_down(self: Any, *args: Any, **kwargs: Any) -> None:
        compile_model(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        vars(self)["_bridge_jit_compile"] = given.get("jit_compile", "auto")

    return compile_and_write_down


Trainer.compile = _writing_down_jit_compile(Trainer.compile)
