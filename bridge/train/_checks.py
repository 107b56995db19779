"""Checks of the arguments of fit, evaluate and predict, before the first callback and step."""

import functools
import importlib.util
import numbers
from typing import Any

import jax
import keras
import numpy as np

from bridge import keras_private
from bridge.optim._optax_optimizer import OptaxOptimizer
from bridge.state._distribution import require_use
from bridge.state._keras_state import require_compiled, variable_values
from bridge.train._batches import keras_batches
from bridge.train._callbacks import flat
from bridge.train._steps import KerasStep
from functrain.internal import (
    Batches,
    is_cheap_to_read,
    require,
    require_fuse,
    require_integer,
    require_one_of,
    resolve_mode,
    warn,
)
from functrain.internal import tree as _tree

# Labels that are compared with the number of classes: enough to find a mistake, quick to read.
_MAX_LABELS = 100_000
# The arguments that are whole numbers.
_COUNTS = ("batch_size", "steps", "steps_per_epoch", "validation_steps", "validation_batch_size")
_RATE_SETTERS = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)
# The losses of probabilities, or of logits with ``from_logits=True``.
_CROSSENTROPIES = {
    "binary_crossentropy": keras.losses.BinaryCrossentropy,
    "categorical_crossentropy": keras.losses.CategoricalCrossentropy,
    "sparse_categorical_crossentropy": keras.losses.SparseCategoricalCrossentropy,
}


def _require_model(model: Any) -> None:
    """Raises TypeError for an object that is not a Keras model.

    Warns of a class that overrides loops, which are not called.
    """
    if not keras_private.trainer.is_trainer(model):
        raise TypeError(
            f"model: expected a keras.Model, got {type(model).__name__}. functrain.fit(state, "
            "step, data) trains the states and models of functrain; bridge.to_keras(state, model) "
            "writes a state into its Keras model."
        )
    cls = type(model)
    # Of a class that prepares data in these methods, that part of them is called.
    base = keras_private.trainer.preparing_class(model) or keras.Model
    # Keras calls the functions that make its compiled steps in its own loops only.
    loops = ("fit", "evaluate", "predict")
    methods = (*loops, *(f"make_{kind}_function" for kind in ("train", "test", "predict")))
    overridden = [name for name in methods if getattr(cls, name) is not getattr(base, name)]
    # A layer with a trainer mixed in has these methods from another class than keras.Model.
    if overridden and isinstance(model, keras.Model):
        warn(
            f"{cls.__name__} overrides {', '.join(overridden)}, which bridge.fit, evaluate and "
            "predict do not call, since they have their own loop. Overrides of train_step, "
            "test_step, compute_loss and the like are called."
        )


def prepared(
    model: Any, method: str, options: tuple[Any, Any, Any], *, callbacks: Any, **arguments: Any
) -> Any:
    """Returns the arguments of fit, evaluate or predict as Keras's own method gets them.

    Args:
      model: The model.
      method: "fit", "evaluate" or "predict".
      options: fuse, rewrites and verbose.
      callbacks: Keras's callbacks.
      **arguments: The other arguments of the method that are about data. Those in `_COUNTS` are
        None or whole numbers; 0 is None, as in Keras.

    Raises:
      TypeError: `model` is no Keras model, or a callback none of Keras's.
      ValueError: The model is not compiled, or an argument is wrong.
    """
    _require_model(model)
    if method != "predict":
        require_compiled(model)
    fuse, rewrites, verbose = options
    require_fuse(fuse)
    resolve_mode(rewrites)
    is_number = isinstance(verbose, numbers.Integral)
    require_one_of("verbose", int(verbose) if is_number else verbose, ("auto", 0, 1, 2))
    for name in _COUNTS:
        if arguments.get(name) is not None:
            require_integer(name, arguments[name], 0)
    _require_callbacks(callbacks)
    arguments["callbacks"] = callbacks
    return keras_private.trainer.prepared(model, method, **arguments)


def _require_callbacks(callbacks: Any) -> None:
    """Raises TypeError for a class instead of an object of it, or a hook of functrain."""
    advice = (
        "Pass objects, not classes. Hooks of functrain go into functrain.fit(hooks=), except for "
        "the loggers TensorBoard, JSONLines and the trackers, which bridge.fit takes as well; a "
        "Checkpointer goes into bridge.fit(checkpointer=)."
    )
    for callback in flat(callbacks):
        is_callback = hasattr(callback, "on_epoch_end") and not isinstance(callback, type)
        require(is_callback, "callbacks", "those of Keras", callback, advice, error=TypeError)


def require_epoch_arguments(epochs: Any, initial_epoch: Any, split: Any, freq: Any) -> None:
    """Raises ValueError for wrong values of the arguments about epochs and their evaluations."""
    require_integer("epochs", epochs, 0)
    require_integer("initial_epoch", initial_epoch, 0)
    expected = "a fraction of the arrays, from 0 to below 1"
    require(split is None or 0 <= split < 1, "validation_split", expected, split)
    is_frequency = isinstance(freq, list) or (isinstance(freq, int) and freq >= 1)
    expected = "a whole number of epochs of at least 1, or a list of epochs"
    require(is_frequency, "validation_freq", expected, freq)


def validation_batches(
    model: keras.Model, data: Any, batch_size: Any, steps: Any, training: Batches
) -> Batches:
    """Returns the batches of `validation_data`.

    Raises:
      ValueError: They are no data for Keras, or arrays that the model's test_step cannot evaluate.
    """
    try:
        data = keras.utils.unpack_x_y_sample_weight(data)
        batches = keras_batches(model, data, batch_size, steps, trains=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"validation_data: {error}") from error
    _require_evaluation(model, batches, training)
    return batches


def _require_evaluation(model: keras.Model, validation: Batches, training: Batches) -> None:
    """Raises ValueError for arrays that the model's test_step cannot evaluate.

    Only arrays are checked, since looking at other data might use them up. The step is traced if
    examples have other shapes than those of the training data.
    """
    shapes = validation.known_shapes()
    of_example = functools.partial(jax.tree.map, lambda x: (x.shape[1:], x.dtype))
    # A test_step that runs uncompiled may be correct although it cannot be traced.
    is_compiled = model.jit_compile and not model.run_eagerly
    is_distributed = keras.distribution.distribution() is not None
    is_known = not shapes or of_example(shapes) == of_example(training.known_shapes())
    if is_known or is_distributed or not is_compiled:
        return
    # With the dtypes that arrays have in jax, which warns of others when it traces a step.
    batch = _tree.shapes(shapes[0])
    try:
        jax.eval_shape(KerasStep(model, "test"), variable_values(model), batch)
    except Exception as error:
        specs = ", ".join(map(_tree.spec, jax.tree.leaves(batch)))
        raise ValueError(
            f"validation_data: expected data that the model can evaluate, got batches of {specs}. "
            f"No step was taken. Its test_step raised:\n{error}"
        ) from error
    finally:
        keras_private.trainer.forget_losses(model)


def require_fit(model: keras.Model, callbacks: Any, *, has_checkpointer: bool) -> None:
    """Raises ValueError for callbacks and models that cannot be fitted together."""
    if keras.distribution.distribution() is not None:
        require_use()
    is_one_of_several = jax.process_count() > 1
    if is_one_of_several:
        _require_distributed(model)
    # A LossScaleOptimizer has the optimizer inside it.
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    # Each process would save only the shards on its own devices.
    is_sharded = is_one_of_several and not all(v.value.is_fully_replicated for v in model.variables)
    for callback in flat(callbacks):
        is_backup = isinstance(callback, keras.callbacks.BackupAndRestore)
        saves_shards = isinstance(callback, keras.callbacks.ModelCheckpoint) and is_sharded
        conflicts = saves_shards or (is_backup and (has_checkpointer or is_one_of_several))
        expected = f"no {type(callback).__name__} beside checkpointer= or in several processes"
        advice = "Pass checkpointer=functrain.Checkpointer(directory) alone."
        require(not conflicts, "callbacks", expected, callback, advice)
        if isinstance(optimizer, OptaxOptimizer):
            _require_optimizer(optimizer, callback)
        _require_tensorflow(callback)


def _require_tensorflow(callback: Any) -> None:
    """Raises ImportError for Keras's TensorBoard if TensorFlow is missing."""
    is_board = isinstance(callback, keras.callbacks.TensorBoard)
    if is_board and importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "callbacks: keras.callbacks.TensorBoard needs TensorFlow, which is not installed. "
            "functrain.hooks.TensorBoard(directory) is a callback that does not need it."
        )


def _require_distributed(model: keras.Model) -> None:
    """Raises ValueError if the variables of a model are not on the devices of all processes."""
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


def _require_optimizer(optimizer: OptaxOptimizer, callback: Any) -> None:
    """Raises ValueError if a callback asks an OptaxOptimizer for what it does not have.

    That is a learning rate, or the settings that the file of a whole model has. Keras would raise
    it at the end of the first epoch, or later.
    """
    name, sets_rate = type(callback).__name__, isinstance(callback, _RATE_SETTERS)
    try:
        if sets_rate or isinstance(callback, keras.callbacks.TensorBoard):
            _ = optimizer.learning_rate
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and not callback.save_weights_only:
            optimizer.get_config()
    # Both errors of an OptaxOptimizer say how to make it one that has these.
    except (AttributeError, ValueError) as error:
        raise ValueError(f"callbacks: {name} cannot be used here. {error}") from error
    if sets_rate:
        expected = f"an optimizer with one learning rate for {name} to set, not a schedule"
        advice = "Pass a number, bridge.OptaxOptimizer(optax.adam, learning_rate=1e-3)."
        require(not optimizer.follows_schedule, "callbacks", expected, optimizer, advice)


def warn_of_labels(model: keras.Model, y: Any) -> None:
    """Warns of labels in memory that are outside of the classes: their loss means nothing."""
    loss, shape = model.loss, getattr(model, "output_shape", None)
    is_object = isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
    settings = loss.get_config() if is_object else {}
    has_classes = is_object or loss == "sparse_categorical_crossentropy"
    classes = shape[-1] if has_classes and isinstance(shape, tuple) else None
    is_array = isinstance(y, np.ndarray) and y.ndim and y.dtype.kind in "iu" and is_cheap_to_read(y)
    if not is_array or not isinstance(classes, int) or settings.get("axis", -1) != -1:
        return
    labels = y[:_MAX_LABELS]
    is_wrong = ((labels < 0) | (labels >= classes)) & (labels != settings.get("ignore_class"))
    if is_wrong.any():
        warn(
            f"y: expected labels from 0 to {classes - 1}, since the model has {classes} outputs, "
            f"got {labels[is_wrong][0]}. Such a label has no class, and its loss means nothing."
        )


def warn_of_outputs(model: keras.Model) -> None:
    """Warns of a crossentropy of logits after a softmax or sigmoid, or of probabilities without."""
    loss, outputs = model.loss, getattr(model, "outputs", None)
    loss = _CROSSENTROPIES[loss]() if isinstance(loss, str) and loss in _CROSSENTROPIES else loss
    if type(loss) not in _CROSSENTROPIES.values() or not outputs or len(outputs) > 1:
        return
    layer = model.layers[-1]
    activation = getattr(layer, "activation", None) if layer.output is outputs[0] else None
    takes_logits = loss.get_config()["from_logits"]
    if takes_logits and activation in (keras.activations.softmax, keras.activations.sigmoid):
        warn(
            f"loss: expected logits for from_logits=True, got the {activation.__name__} of layer "
            f"{layer.name!r}. Leave out from_logits=True or the activation."
        )
    # A linear Activation, which ends models in mixed precision, passes on what came before it.
    has_kernel = hasattr(layer, "kernel")
    if not takes_logits and has_kernel and activation is keras.activations.linear:
        warn(
            f"loss: expected probabilities, got layer {layer.name!r} without an activation. Write "
            f"keras.losses.{type(loss).__name__}(from_logits=True)."
        )
