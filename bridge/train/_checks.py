"""Checks of the arguments of fit, evaluate and predict, before anything is done."""

import warnings
import weakref
from typing import Any

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge.optim import OptaxOptimizer
from bridge.state._keras_state import KerasState, variable_values
from bridge.train._batches import keras_batches
from bridge.train._callbacks import flat
from bridge.train._steps import KerasStep, described
from functrain import FitResult, Model, TrainState
from functrain.internal import (
    PyTree,
    mode,
    require,
    require_fuse,
    require_integer,
    require_no_number_lists,
    require_one_of,
    require_unmasked,
    require_untraced,
)

_warned: weakref.WeakSet[type] = weakref.WeakSet()


def require_model(model: Any) -> None:
    """Raises an error for an object that is no Keras model, or prepares its data in own loops.

    Raises:
      TypeError: It is no Keras model.
      ValueError: It has a preprocessor, as tasks of keras_hub do.
    """
    if not keras_private.trainer.is_trainer(model):
        raise TypeError(
            f"model: expected a keras.Model, got {type(model).__name__}{_instead_of(model)}"
        )
    _refuse_preprocessor(model)
    _warn_of_overrides(model)


def _instead_of(model: Any) -> str:
    """Returns what to do with an object of functrain that was passed as a model."""
    if isinstance(model, Model):
        return (
            ", a pair of functions. Pass the Keras model that it was made of; or train the pair by "
            "functrain.fit(state, step, data)."
        )
    if isinstance(model, TrainState | KerasState | FitResult):
        state = "result.state" if isinstance(model, FitResult) else "state"
        return (
            f". Pass the Keras model, into which bridge.to_keras({state}, model) writes it; or "
            f"continue from it by functrain.fit({state}, step, data)."
        )
    return "."


def _refuse_preprocessor(model: Any) -> None:
    """Raises ValueError for models that prepare samples in their own fit, evaluate and predict.

    keras_hub.models.Task does so in `preprocess_samples`, with data pipelines of grain or tf.data
    whose order cannot be repeated here.
    """
    prepares = callable(getattr(model, "preprocess_samples", None))
    if prepares and getattr(model, "preprocessor", model) is not None:
        raise ValueError(
            f"model: expected one that takes its data as they are, got {type(model).__name__}, "
            "whose own fit, evaluate and predict prepare them by model.preprocess_samples. "
            "Prepare all data first, those for validation too, and switch that off:\n"
            "    data = model.preprocess_samples(x, y)\n"
            "    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)\n"
            "    model.preprocessor = None\n"
            "    bridge.fit(model, x, y)"
        )


def _warn_of_overrides(model: keras.Model) -> None:
    """Warns once for a class that its own loops are not run."""
    cls = type(model)
    methods = ("fit", "evaluate", "predict", "make_train_function", "make_test_function")
    own = [name for name in methods if getattr(cls, name) is not getattr(keras.Model, name, None)]
    if own and isinstance(model, keras.Model) and cls not in _warned:
        _warned.add(cls)
        warnings.warn(
            f"{cls.__name__} overrides {', '.join(own)}, which bridge.fit, evaluate and predict "
            "do not call: the loop is theirs. Overrides of train_step, test_step, compute_loss and "
            "the like are called. To run your own loop, call the model's method.",
            stacklevel=4,
        )


def require_arguments(
    x: Any, y: Any, fuse: Any, rewrites: Any, verbose: Any, callbacks: Any, **numbers: Any
) -> None:
    """Checks the arguments that fit, evaluate and predict share.

    Args:
      x: The data.
      y: Their labels, or None.
      fuse: Steps per program.
      rewrites: Which operations to rewrite.
      verbose: How to show the progress.
      callbacks: Those of Keras.
      **numbers: None or integers from 1 on, by the names of the arguments.
    """
    require_fuse(fuse)
    mode(rewrites)
    require_untraced("x and y", (x, y))
    require_one_of("verbose", verbose, ("auto", 0, 1, 2))
    if x is None:
        raise ValueError(
            "x: expected arrays, a dataset, a loader or a generator, got None. A generator of "
            "batches goes into x, and yields (inputs, targets)."
        )
    for name, data in (("x", x), ("y", y)):
        if isinstance(data, list | tuple | dict):
            # Keras does too, with all the numbers in its message
            require_no_number_lists(data, name)
        for leaf in keras.tree.flatten(data):
            require_unmasked(leaf, name)
    _refuse_texts(x=x, y=y)
    for name, number in numbers.items():
        if number is not None:
            require_integer(name, number)
    _require_callbacks(callbacks)


def _refuse_texts(**data: Any) -> None:
    """Raises TypeError if arrays hold texts, by the names of the arguments."""
    for name, tree in data.items():
        for x in keras.tree.flatten(tree):
            if getattr(getattr(x, "dtype", None), "kind", "") not in {"O", "S", "U"}:
                continue
            first = np.asarray(x[:1] if np.ndim(x) else x).reshape(-1)[:1].tolist()
            if first and isinstance(first[0], str | bytes):
                advice = "Give each text numbers first, such as the ids of its tokens."
                if name.endswith("y"):
                    advice = (
                        "Number the classes first: classes, y = np.unique(y, return_inverse=True), "
                        "or map them with keras.layers.StringLookup."
                    )
                count = len(x) if np.ndim(x) else 1
                raise TypeError(
                    f"{name}: expected numbers, got {count:,} texts, such as {first[0]!r}. {advice}"
                )


def _require_callbacks(callbacks: Any) -> None:
    """Raises TypeError for a class instead of an object of it, or a hook of functrain."""
    for callback in flat(callbacks):
        if isinstance(callback, type) and issubclass(callback, keras.callbacks.Callback):
            raise TypeError(
                f"callbacks: expected callbacks, got the class {callback.__name__}. Pass one made "
                f"of it: {callback.__name__}(...)."
            )
        if not hasattr(callback, "on_epoch_end"):
            raise TypeError(
                f"callbacks: expected those of Keras, got {callback!r}. Hooks of functrain go into "
                "functrain.fit(hooks=), but for its loggers (TensorBoard, JSONLines, WandB), which "
                "bridge.fit takes as well."
            )


def require_no_other_backup(callbacks: Any) -> None:
    """Raises ValueError if Keras's own callback saves the fit too."""
    for callback in flat(callbacks):
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "callbacks: expected no BackupAndRestore beside checkpointer=, got one. Both bring "
                "back where a fit was: leave it out."
            )


_SET_RATES = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)


def require_rate(model: keras.Model, callbacks: Any) -> None:
    """Raises ValueError for callbacks that need a learning rate which the optimizer does not have.

    Keras finds out at the end of the first epoch, or later.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)  # of a loss scale's
    if not isinstance(optimizer, OptaxOptimizer):
        return
    for callback in flat(callbacks):
        sets_rate = isinstance(callback, _SET_RATES)
        if not sets_rate and not isinstance(callback, keras.callbacks.TensorBoard):
            continue
        name = type(callback).__name__
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


def require_together(model: keras.Model, callbacks: Any) -> None:
    """Raises ValueError if several processes cannot fit a model together.

    Its variables lie on the devices of this process alone, or a callback of Keras's would do
    something else in each process.
    """
    if jax.process_count() == 1:
        return
    local = [v for v in model.variables if getattr(v.value, "is_fully_addressable", True)]
    if keras.distribution.distribution() is None or local:
        what = f"{local[0].path} on the devices of one" if local else "no distribution"
        raise ValueError(
            f"model: expected one that lies on the devices of all {jax.process_count()} processes, "
            f"got {what}: each would fit a model of its own. Before the model is made: "
            "keras.utils.set_random_seed(0), and "
            "keras.distribution.set_distribution(keras.distribution.DataParallel())."
        )
    is_divided = not all(v.value.is_fully_replicated for v in model.variables)
    for callback in flat(callbacks):
        saves_part = is_divided and isinstance(callback, keras.callbacks.ModelCheckpoint)
        if saves_part or isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                f"callbacks: expected no {type(callback).__name__} where several processes fit a "
                f"model{', of which each has but parts' * saves_part}, got one. Pass "
                "checkpointer=functrain.Checkpointer(directory), into which all of them write."
            )


def require_validation_arguments(split: Any, freq: Any) -> None:
    """Checks `validation_split` and `validation_freq`."""
    is_number = isinstance(split, int | float) and not isinstance(split, bool)
    is_share = split is None or (is_number and 0 <= split < 1)
    expected = "a share of the arrays, from 0 to below 1"
    require(is_share, "validation_split", expected, split)
    is_frequency = isinstance(freq, list) or (isinstance(freq, int) and freq >= 1)
    expected = "a whole number of epochs of at least 1, or a list of epochs"
    require(is_frequency, "validation_freq", expected, freq)


def require_validation(
    model: keras.Model, data: Any, training: Any, batch_size: Any, steps: Any
) -> None:
    """Raises ValueError for arrays that the model's test_step cannot evaluate.

    Arrays only: other data might be used up by looking at them. A step is traced if a batch does
    not look like one of the training data.

    Args:
      model: A compiled model, built as far as the training data go.
      data: What `fit` got as `validation_data`.
      training: x, y and sample_weight of training.
      batch_size: Examples per step of an evaluation, or None.
      steps: Steps per evaluation, or None.

    Raises:
      ValueError: There is no batch, the step cannot be traced, or what Keras raises.
    """
    if isinstance(data, tuple | list) and not 1 <= len(data) <= 3:
        raise ValueError(
            "validation_data: expected (x, y), (x, y, sample_weight) or what yields batches of "
            f"these, got a {type(data).__name__} of length {len(data)}"
        )
    validation = keras.utils.unpack_x_y_sample_weight(data)
    _refuse_texts(**{"validation_data's x": validation[0], "validation_data's y": validation[1]})
    if not _are_arrays(validation):
        return
    if not jax.tree.leaves(validation[0]):
        raise ValueError(f"validation_data: expected (x, y) of arrays, got x={validation[0]!r}")
    try:
        # Finds lengths that differ, and that there is no batch at all.
        keras_batches(model, validation, batch_size, steps, trains=False)
    except ValueError as error:
        raise ValueError(f"validation_data: {error}") from error
    batch = _batch(validation, batch_size)
    expected = _batch(training, batch_size) if _are_arrays(training) else None
    is_compiled = model.jit_compile and not model.run_eagerly
    is_distributed = keras.distribution.distribution() is not None
    if _form(batch) != _form(expected) and is_compiled and not is_distributed:
        _require_traced(model, batch, expected)


def _are_arrays(data: Any) -> bool:
    leaves = [x for x in keras.tree.flatten(data) if x is not None]
    return all(
        isinstance(x, np.ndarray | jax.Array) and x.ndim > 0 and x.dtype.kind in "biufV"
        for x in leaves
    )


def _batch(arrays: Any, size: int | None) -> PyTree:
    """Returns the shapes of the first batch, as a step gets it."""

    def first(x: Any) -> jax.ShapeDtypeStruct:
        rows = min(size or 32, len(x))
        dtype = keras.config.floatx() if x.dtype.kind == "f" else x.dtype
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), jax.dtypes.canonicalize_dtype(dtype))

    return jax.tree.map(first, tuple(arrays))


def _form(batch: PyTree) -> Any:
    """Returns the structure of a batch, and the shapes and dtypes of an example."""
    leaves = [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(batch)]
    return jax.tree.structure(batch), leaves


def _require_traced(model: keras.Model, batch: PyTree, expected: PyTree) -> None:
    data = keras.utils.pack_x_y_sample_weight(*batch)
    try:
        jax.eval_shape(KerasStep(model, trains=False), variable_values(model), data)
    except Exception as error:
        training = f", as training has {described(expected)}" if expected is not None else ""
        raise ValueError(
            f"validation_data: expected what the model can evaluate{training}; got "
            f"{described(batch)}. No step was taken. Its test_step says:\n{error}"
        ) from error
    finally:
        keras_private.layers.forget_losses(model)
