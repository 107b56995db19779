"""Checks of the arguments of fit, evaluate and predict, before anything is done."""

import numbers
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge.optim import OptaxOptimizer
from bridge.state._keras_state import KerasState, variable_values
from bridge.train._batches import keras_batches
from bridge.train._callbacks import flat
from bridge.train._steps import KerasStep, describe_batch
from functrain import ArrayLoader, Checkpointer, FitResult, Model, NoData, TrainState
from functrain.internal import (
    Local,
    PyTree,
    brief,
    require,
    require_fuse,
    require_integer,
    require_no_number_lists,
    require_one_of,
    require_unmasked,
    require_untraced,
    resolve_mode,
)

# Classes whose user has been told that their loops are not called.
_warned: weakref.WeakSet[type] = weakref.WeakSet()


def require_model(model: Any) -> None:
    """Raises TypeError for an object that is not a Keras model.

    Warns if the model's class overrides loops that are not called.
    """
    if not keras_private.trainer.is_trainer(model):
        raise TypeError(
            f"model: expected a keras.Model, got {type(model).__name__}{_advice_for(model)}"
        )
    _warn_of_overrides(model)


def _advice_for(thing: Any) -> str:
    """Returns what to do with an object of functrain that was passed as a model."""
    if isinstance(thing, Model):
        return (
            ", a pair of functions. Pass the Keras model that it was made from; or train the pair "
            "with functrain.fit(state, step, data)."
        )
    if isinstance(thing, TrainState | KerasState | FitResult):
        state = "result.state" if isinstance(thing, FitResult) else "state"
        return (
            f". Pass the Keras model, into which bridge.to_keras({state}, model) writes it; or "
            f"continue from it with functrain.fit({state}, step, data)."
        )
    return "."


def _warn_of_overrides(model: keras.Model) -> None:
    """Warns once for each class that its own loops are not called."""
    cls = type(model)
    # Of a class that prepares data in these methods, that part of them is called.
    base = keras_private.pipelines.preparing_class(model) or keras.Model
    # Keras calls make_train_function and make_test_function in its own loops only.
    methods = ("fit", "evaluate", "predict", "make_train_function", "make_test_function")
    overridden = [name for name in methods if getattr(cls, name) is not getattr(base, name)]
    # A layer with a trainer mixed in has these methods from another class than keras.Model.
    if overridden and isinstance(model, keras.Model) and cls not in _warned:
        _warned.add(cls)
        warnings.warn(
            f"{cls.__name__} overrides {', '.join(overridden)}, which bridge.fit, evaluate and "
            "predict do not call, since they have their own loop. Overrides of train_step, "
            "test_step, compute_loss and the like are called. To run your own loop, call the "
            "model's method.",
            stacklevel=4,
        )


def require_arguments(
    x: Any, fuse: Any, rewrites: Any, verbose: Any, callbacks: Any, **counts: Any
) -> None:
    """Raises an error for wrong values of the arguments that fit, evaluate and predict share.

    `counts` are, by the names of the arguments, None or whole numbers. 0 is None, as in Keras.
    """
    require_fuse(fuse)
    resolve_mode(rewrites)
    is_number = isinstance(verbose, numbers.Integral)
    require_one_of("verbose", int(verbose) if is_number else verbose, ("auto", 0, 1, 2))
    advice = "A generator of batches goes into x, and yields (inputs, targets)."
    require(x is not None, "x", "arrays, a dataset, a loader or a generator", x, advice)
    _require_no_loader("x", x)
    for name, number in counts.items():
        if number is not None:
            require_integer(name, number, 0)
    _require_callbacks(callbacks)


def require_data(x: Any, y: Any = None, class_weight: Any = None) -> None:
    """Raises an error for strings, lists of numbers, traced and masked arrays."""
    if class_weight is not None:
        expected = "a dict from the number of each class to its weight, such as {0: 1.0, 1: 2.5}"
        is_dict = isinstance(class_weight, Mapping)
        require(is_dict, "class_weight", expected, class_weight, error=TypeError)
    require_untraced("x and y", (x, y))
    _require_no_strings(x=x, y=y)
    for name, data in (("x", x), ("y", y)):
        # Keras rejects lists of numbers as well, with all the numbers in its message.
        if isinstance(data, list | tuple | dict):
            require_no_number_lists(data, name)
        for leaf in keras.tree.flatten(data):
            require_unmasked(leaf, name)


def _require_no_loader(name: str, data: Any) -> None:
    """Raises TypeError for data of functrain's own loops, which Keras cannot iterate."""
    advice = (
        "Pass the arrays themselves and batch_size=, as in bridge.fit(model, x, y, batch_size=32); "
        "or train with functrain.fit(state, step, data)."
    )
    own_data = data.data if isinstance(data, Local) else data
    is_known = not isinstance(own_data, ArrayLoader | NoData)
    require(is_known, name, "data that Keras accepts", data, advice, error=TypeError)


def _require_no_strings(**arguments: Any) -> None:
    """Raises TypeError if data hold strings. Keras would raise "Invalid dtype: str96"."""
    for name, data in arguments.items():
        for leaf in keras.tree.flatten(data):
            string = _first_string(leaf)
            if string is not None:
                raise TypeError(
                    f"{name}: expected numbers, got strings, such as {string!r}. A model cannot be "
                    "trained on strings. Convert them to integers first: labels with "
                    "keras.layers.StringLookup or classes, y = np.unique(y, return_inverse=True); "
                    "text with keras.layers.TextVectorization. (Both layers need TensorFlow.)"
                )


def _first_string(leaf: Any) -> str | bytes | None:
    """Returns the first string in the first rows of an array or a table; None without one."""
    if isinstance(leaf, str | bytes):
        return leaf
    # A DataFrame has a dtype for each column. Other kinds of arrays hold no strings.
    is_table = hasattr(leaf, "dtypes") and hasattr(leaf, "columns")
    if is_table or getattr(getattr(leaf, "dtype", None), "kind", "") in {"O", "S", "U", "T"}:
        rows = np.asarray(leaf[:8] if np.ndim(leaf) else leaf)
        for value in rows.reshape(-1).tolist():
            if isinstance(value, str | bytes):
                return value
    return None


def _require_callbacks(callbacks: Any) -> None:
    """Raises TypeError for a class instead of an object of it, or a hook of functrain."""
    for callback in flat(callbacks):
        if isinstance(callback, type) and issubclass(callback, keras.callbacks.Callback):
            raise TypeError(
                f"callbacks: expected callbacks, got the class {callback.__name__}. Pass an object "
                f"of it: {callback.__name__}(...)."
            )
        if not hasattr(callback, "on_epoch_end"):
            raise TypeError(
                f"callbacks: expected those of Keras, got {brief(callback)}. "
                f"{_advice_for_hook(callback)}"
            )


def _advice_for_hook(hook: Any) -> str:
    """Returns what to do with an object of functrain that was passed as a callback."""
    if isinstance(hook, Checkpointer):
        return "Pass it to bridge.fit as checkpointer=."
    name = type(hook).__name__
    advice = f"Use keras.callbacks.{name}. " if hasattr(keras.callbacks, name) else ""
    return (
        f"{advice}Hooks of functrain go into functrain.fit(hooks=). Only its loggers (TensorBoard, "
        "JSONLines, WandB) can be passed to bridge.fit as well."
    )


def require_no_other_backup(callbacks: Any) -> None:
    """Raises ValueError if Keras's own callback saves the fit as well as the checkpointer."""
    expected = "no BackupAndRestore beside checkpointer="
    advice = "Both restore an interrupted fit: leave it out."
    for callback in flat(callbacks):
        is_backup = isinstance(callback, keras.callbacks.BackupAndRestore)
        require(not is_backup, "callbacks", expected, callback, advice)


_RATE_SETTERS = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)


def require_rate(model: keras.Model, callbacks: Any) -> None:
    """Raises ValueError for callbacks that ask an OptaxOptimizer for what it does not have.

    That is a learning rate, or the settings that the file of a whole model has. Keras would raise
    it at the end of the first epoch, or later.
    """
    # A LossScaleOptimizer has the optimizer inside it.
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if not isinstance(optimizer, OptaxOptimizer):
        return
    for callback in flat(callbacks):
        _require_settings(optimizer, callback)
        sets_rate = isinstance(callback, _RATE_SETTERS)
        if not sets_rate and not isinstance(callback, keras.callbacks.TensorBoard):
            continue
        name = type(callback).__name__
        # An OptaxOptimizer without a learning rate raises an error that says how to make it one.
        try:
            _ = optimizer.learning_rate
        except AttributeError as error:
            raise ValueError(
                f"callbacks: {name} asks the optimizer for its learning rate. {error} Or leave "
                f"{name} out. No step was taken."
            ) from error
        if sets_rate and optimizer.follows_schedule:
            raise ValueError(
                f"callbacks: expected an optimizer with one learning rate for {name} to set, got "
                "one that follows a schedule. Pass a number, bridge.OptaxOptimizer(optax.adam, "
                f"learning_rate=1e-3), or leave {name} out. No step was taken."
            )


def _require_settings(optimizer: OptaxOptimizer, callback: Any) -> None:
    """Raises ValueError if a callback saves whole models, and the optimizer cannot be saved."""
    is_checkpoint = isinstance(callback, keras.callbacks.ModelCheckpoint)
    if not is_checkpoint or callback.save_weights_only:
        return
    try:
        optimizer.get_config()
    except ValueError as error:
        raise ValueError(
            "callbacks: expected ModelCheckpoint(save_weights_only=True) or an optimizer that a "
            f"file of the whole model can hold. {error} No step was taken."
        ) from error


def require_together(model: keras.Model, callbacks: Any) -> None:
    """Raises ValueError if several processes cannot fit a model together.

    Its variables are on the devices of this process alone, or a callback of Keras's would act
    differently in each process.
    """
    if jax.process_count() == 1:
        return
    # Variables made without a distribution are on this process's devices only.
    local = [v for v in model.variables if getattr(v.value, "is_fully_addressable", True)]
    if keras.distribution.distribution() is None or local:
        problem = f"{local[0].path} on the devices of one" if local else "no distribution"
        raise ValueError(
            f"model: expected a model on the devices of all {jax.process_count()} processes, "
            f"got {problem}: each would fit its own model. Before the model is made: "
            "keras.utils.set_random_seed(0), and "
            "keras.distribution.set_distribution(keras.distribution.DataParallel())."
        )
    is_sharded = not all(v.value.is_fully_replicated for v in model.variables)
    for callback in flat(callbacks):
        # Each process would save only the shards on its own devices.
        saves_shards = is_sharded and isinstance(callback, keras.callbacks.ModelCheckpoint)
        is_backup = isinstance(callback, keras.callbacks.BackupAndRestore)
        model_kind = "sharded model" if saves_shards else "model"
        expected = f"no {type(callback).__name__} where several processes fit a {model_kind}"
        advice = "Pass checkpointer=functrain.Checkpointer(directory), to which all of them write."
        require(not saves_shards and not is_backup, "callbacks", expected, callback, advice)


def require_validation_arguments(split: Any, freq: Any) -> None:
    """Raises ValueError for wrong values of `validation_split` and `validation_freq`."""
    # True is an int in Python, and a mistake here.
    is_scalar = isinstance(split, numbers.Real) or getattr(split, "shape", None) == ()
    is_number = is_scalar and not isinstance(split, bool)
    is_fraction = split is None or (is_number and 0 <= split < 1)
    expected = "a fraction of the arrays, from 0 to below 1"
    require(is_fraction, "validation_split", expected, split)
    is_frequency = isinstance(freq, list) or (isinstance(freq, int) and freq >= 1)
    expected = "a whole number of epochs of at least 1, or a list of epochs"
    require(is_frequency, "validation_freq", expected, freq)


def require_validation(
    model: keras.Model, data: Any, training: Any, batch_size: Any, steps: Any
) -> None:
    """Raises ValueError for arrays that the model's test_step cannot evaluate.

    Only arrays are checked, since looking at other data might use them up. A step is traced if a
    batch has another form than one of the training data: x, y and sample_weight in `training`.
    """
    if isinstance(data, tuple | list) and not 1 <= len(data) <= 3:
        raise ValueError(
            "validation_data: expected (x, y), (x, y, sample_weight) or an iterable of such "
            f"batches, got a {type(data).__name__} of length {len(data)}"
        )
    _require_no_loader("validation_data", data)
    validation = keras.utils.unpack_x_y_sample_weight(data)
    x, y, _ = validation
    _require_no_strings(**{"validation_data's x": x, "validation_data's y": y})
    if not _are_arrays(validation):
        return
    if not jax.tree.leaves(x):
        raise ValueError(f"validation_data: expected (x, y) of arrays, got x={x!r}")
    try:
        # This raises if lengths differ, or if there is no batch.
        keras_batches(model, validation, batch_size, steps, trains=False)
    except ValueError as error:
        raise ValueError(f"validation_data: {error}") from error
    batch = _batch_shapes(validation, batch_size)
    training_batch = _batch_shapes(training, batch_size) if _are_arrays(training) else None
    # A test_step that runs uncompiled may be correct although it cannot be traced.
    is_compiled = model.jit_compile and not model.run_eagerly
    is_distributed = keras.distribution.distribution() is not None
    if _form(batch) != _form(training_batch) and is_compiled and not is_distributed:
        _require_traceable(model, batch, training_batch)


def _are_arrays(data: Any) -> bool:
    leaves = [x for x in keras.tree.flatten(data) if x is not None]
    return all(
        isinstance(x, np.ndarray | jax.Array) and x.ndim > 0 and x.dtype.kind in "biufV"
        for x in leaves
    )


def _batch_shapes(arrays: Any, size: int | None) -> PyTree:
    """Returns the shapes and dtypes of the first batch, as a step gets it."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        # 32 is Keras's default, and Keras casts floats to floatx.
        rows = min(size or 32, len(x))
        dtype = keras.config.floatx() if x.dtype.kind == "f" else x.dtype
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), jax.dtypes.canonicalize_dtype(dtype))

    return jax.tree.map(shape, tuple(arrays))


def _form(batch: PyTree) -> Any:
    """Returns the structure of a batch, and the shapes and dtypes of an example."""
    leaves = [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(batch)]
    return jax.tree.structure(batch), leaves


def _require_traceable(model: keras.Model, batch: PyTree, training_batch: PyTree) -> None:
    """Raises ValueError if the model's test_step cannot be traced with a batch."""
    data = keras.utils.pack_x_y_sample_weight(*batch)
    try:
        jax.eval_shape(KerasStep(model, "test"), variable_values(model), data)
    except Exception as error:
        training = ""
        if training_batch is not None:
            training = f", as training has {describe_batch(training_batch)}"
        raise ValueError(
            f"validation_data: expected data that the model can evaluate{training}; got "
            f"{describe_batch(batch)}. No step was taken. Its test_step raised:\n{error}"
        ) from error
    finally:
        keras_private.layers.forget_losses(model)
