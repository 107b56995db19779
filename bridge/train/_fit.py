"""fit, evaluate and predict: replacements for the methods of a Keras model."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import keras

from bridge import keras_private
from bridge.train import _checks
from bridge.train._batches import keras_batches
from bridge.train._callbacks import files_written, with_loggers
from bridge.train._hook import KerasHook
from bridge.train._memory import Memory
from bridge.train._runs import Evaluation, Options, run_evaluate, run_fit, run_predict
from bridge.train._steps import cached_step
from functrain import Checkpointer
from functrain.internal import Batches, DeferredSignals, FuseArg, Mode, Saving


def fit(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: Any = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
    *,
    fuse: FuseArg = "auto",
    rewrites: Mode = "auto",
    checkpointer: Checkpointer | None = None,
) -> Any:
    """Trains as ``model.fit(x, y, ...)`` does, with many steps in one program.

    Every step is the model's own `train_step`, so that all features of Keras work. With
    ``rewrites="exact"`` the results equal those of `model.fit` to the bit in the configurations
    that are tested; the page "Keras" names two cases that differ.

    Models that Keras compiles are compiled. Models that it leaves uncompiled run uncompiled, such
    as those with a layer like RandomRotation, which another backend cannot compile. To compile one,
    set ``layer.supports_jit = True`` for those layers that have False, and call `compile` again. A
    compiled step is kept as long as Keras keeps its own: until `compile` or
    `make_train_function(force=True)`. Until then, changes of a layer's attributes or of variables
    that a loss refers to have no effect.

    Your callbacks that override a train-batch method (`on_train_batch_end`, ...) make "auto" take
    one step at a time, as does TerminateOnNaN, which may end training at any batch. With
    ``chunk_safe = True`` in the callback's class, or a number as `fuse`, it is called for every
    batch with that batch's logs, after the chunk; its changes (weights, learning rate,
    `stop_training`) take effect at the next chunk. With a number, TerminateOnNaN therefore leaves
    the weights from the end of its chunk. If several processes fit and only some of them set
    `stop_training`, all stop together, a few programs later. Overrides of `fit`, `evaluate`,
    `predict` or `make_train_function` and the like in the model's class are not called, since this
    function has its own loop; overrides of steps, losses and metrics are.

    Tasks of keras_hub take strings, images and so on as in their own `fit`: its first part, which
    splits off validation data and maps the preprocessor over batches, is called. As there, the
    order of the examples is that of the data, whatever `shuffle` says.

    Args:
      model: A compiled model.
      x: The data. This and all arguments up to `validation_freq` are those of `model.fit`.
      y: Targets.
      batch_size: Examples per step; 32 if the data do not determine it.
      epochs: Number of the epoch to stop before.
      verbose: "auto", 0, 1 or 2.
      callbacks: Keras callbacks, and of `functrain.hooks` the loggers `TensorBoard` and `JSONLines`
        and every `Tracker`, such as `WandB`.
      validation_split: Fraction of the arrays to evaluate on.
      validation_data: Data to evaluate on.
      shuffle: True to shuffle arrays before each epoch, or "batch".
      class_weight: Weights by class.
      sample_weight: Weights by example.
      initial_epoch: Number of the first epoch.
      steps_per_epoch: Steps per epoch, if the data do not determine it.
      validation_steps: Steps per evaluation.
      validation_batch_size: Examples per step of an evaluation.
      validation_freq: Number of epochs between evaluations, or a list of epochs that have one.
      fuse: Steps per program. "auto" takes `model.steps_per_execution` if that is above 1, else at
        most 128, depending on the sizes of batches and state, and 1 if steps run uncompiled. On
        CPU, results do not depend on it.
      rewrites: Slow operations to rewrite; see `functrain.fuse`.
      checkpointer: A `functrain.Checkpointer`. The fit resumes from its last checkpoint, if there
        is one, also in the middle of an epoch, as if it had never been interrupted. Restored are
        variables, seeds, metrics, history, NumPy's and Python's global random generators, the
        states of Keras's callbacks, and those of your callbacks that have `state()` and
        `restore(state)`. The fit is saved whenever the checkpointer is due, at its end, on
        Ctrl-C, and on SIGTERM, after which the process ends with status 143. Resuming is exact for
        arrays; other data are iterated from their start, and batches already taken are skipped.

    Returns:
      `model.history`. However the fit ends (by an error, a callback or Ctrl-C), the model has its
      weights, optimizer and metrics. If a program fails on the device, they are lost, as in
      Keras's own fit, and a note of the error says so.

    Raises:
      ImportError: a callback is Keras's TensorBoard, and TensorFlow is not installed.
      TypeError: `model` is not a Keras model, a callback is neither a Keras callback nor one of
        these loggers, or data in memory are not arrays of numbers.
      ValueError: `model.fit` would raise it; an argument is out of its range; arrays in
        `validation_data` cannot be evaluated; an RNN has ``stateful=True``; or the optimizer was
        built for other variables than the model trains now.

    Examples:
      >>> import keras, numpy as np
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
      >>> model.compile("adam", "mse", metrics=["mae"])
      >>> data = np.ones((64, 3), np.float32), np.ones((64, 4), np.float32)
      >>> sorted(fit(model, *data, epochs=2, verbose=0).history)
      ['loss', 'mae']
    """
    # A fit that one of the checks refuses has called no callback, and taken no step.
    _checks.require_epoch_arguments(epochs, initial_epoch, validation_split, validation_freq)
    # Keras offers this limit for debugging, and applies it in its own fit.
    epochs = min(epochs, keras.config.max_epochs() or epochs)
    prepared = _checks.prepared(
        model,
        "fit",
        (fuse, rewrites, verbose),
        x=x,
        y=y,
        batch_size=batch_size,
        # A task of keras_hub repeats its dataset for so many epochs.
        epochs=epochs,
        callbacks=with_loggers(callbacks),
        validation_split=validation_split,
        validation_data=validation_data,
        class_weight=class_weight,
        sample_weight=sample_weight,
        steps_per_epoch=steps_per_epoch,
        validation_steps=validation_steps,
        validation_batch_size=validation_batch_size,
    )
    data = prepared.x, prepared.y, prepared.sample_weight
    validation_data = prepared.validation_data
    if prepared.validation_split and validation_data is None:
        data, validation_data = keras_private.data.split_validation(data, prepared.validation_split)
    batches = keras_batches(
        model,
        data,
        prepared.batch_size,
        prepared.steps_per_epoch,
        trains=True,
        shuffle=shuffle,
        class_weight=prepared.class_weight,
    )
    # The checks from here on need a built model.
    keras_private.trainer.build_from(model, batches.data)
    cached_step(model, "train")
    _checks.warn_of_labels(model, prepared.y)
    _checks.warn_of_outputs(model)
    options = Options(fuse, rewrites)
    evaluation: Evaluation | None = None
    if validation_data is not None:
        validation_batches = _validation_batches(model, validation_data, prepared, batches)
        evaluation = Evaluation(validation_batches, validation_freq, options)
    callbacks = prepared.callbacks
    _checks.require_fit(model, callbacks, has_checkpointer=checkpointer is not None)
    with files_written(callbacks):
        callbacks = _callback_list(
            model, callbacks, verbose, batches, epochs=epochs, add_history=True
        )
        hook = KerasHook(model, "train", batches, callbacks, evaluation=evaluation)
        saving: Saving | None = None
        if checkpointer is not None:
            hook.memory = Memory(model, callbacks)
            saving = Saving(checkpointer, batches, {"keras": hook})
        return run_fit(
            hook,
            options,
            epochs=epochs,
            initial_epoch=initial_epoch,
            saving=saving,
            # One process prints from which step the run resumes.
            quiet=verbose == 0 or jax.process_index() > 0,
        )


def evaluate(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    *,
    fuse: FuseArg = "auto",
    rewrites: Mode = "auto",
) -> Any:
    """Evaluates as ``model.evaluate(x, y, ...)`` does, with many steps in one program.

    Args:
      model: A compiled model.
      x: The data. This and all arguments up to `return_dict` are those of `model.evaluate`.
      y: Targets.
      batch_size: Examples per step.
      verbose: "auto", 0, 1 or 2.
      sample_weight: Weights by example.
      steps: Steps to take, if the data do not determine it.
      callbacks: Keras callbacks.
      return_dict: True to return a dict.
      fuse: As for `fit`.
      rewrites: As for `fit`.

    Returns:
      The metrics, as a list, a scalar or a dict, as `model.evaluate` returns them.

    Raises:
      TypeError: As for `fit`.
      ValueError: `model.evaluate` would raise it, or an argument is out of its range.

    Examples:
      >>> import keras, numpy as np
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
      >>> model.compile("adam", "mse")
      >>> x, y = np.zeros((64, 3), np.float32), np.ones((64, 4), np.float32)
      >>> evaluate(model, x, y, verbose=0, return_dict=True)
      {'loss': 1.0}
    """
    prepared = _checks.prepared(
        model,
        "evaluate",
        (fuse, rewrites, verbose),
        x=x,
        y=y,
        batch_size=batch_size,
        callbacks=callbacks,
        sample_weight=sample_weight,
        steps=steps,
    )
    arrays = prepared.x, prepared.y, prepared.sample_weight
    batches = keras_batches(model, arrays, prepared.batch_size, prepared.steps, trains=False)
    callbacks = _callback_list(model, callbacks, verbose, batches, epochs=1)
    logs = run_evaluate(model, batches, callbacks, Options(fuse, rewrites))
    return logs if return_dict else keras_private.trainer.metrics_in_order(model, logs)


def predict(
    model: keras.Model,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
    *,
    fuse: FuseArg = "auto",
    rewrites: Mode = "auto",
) -> Any:
    """Predicts as ``model.predict(x, ...)`` does, with many steps in one program.

    Args:
      model: A model, compiled or not.
      x: The data. This and all arguments up to `callbacks` are those of `model.predict`.
      batch_size: Examples per step.
      verbose: "auto", 0, 1 or 2.
      steps: Steps to take, if the data do not determine it.
      callbacks: Keras callbacks.
      fuse: As for `fit`.
      rewrites: As for `fit`.

    Returns:
      NumPy arrays in the structure of the model's outputs, as `model.predict` returns them.

    Raises:
      TypeError: As for `fit`.
      ValueError: `model.predict` would raise it, or an argument is out of its range.

    Examples:
      >>> import keras, numpy as np
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
      >>> predict(model, np.ones((40, 3), np.float32), verbose=0).shape
      (40, 4)
    """
    arguments = {"x": x, "batch_size": batch_size, "callbacks": callbacks, "steps": steps}
    prepared = _checks.prepared(model, "predict", (fuse, rewrites, verbose), **arguments)
    batches = keras_batches(
        model, (prepared.x, None, None), prepared.batch_size, prepared.steps, trains=False
    )
    # A model that was not compiled has no loss or metrics, so calling it builds all there is.
    if not all(layer.built for layer in keras_private.layers.all_layers(model)):
        _build_by_call(model, batches.data)
    callbacks = _callback_list(model, callbacks, verbose, batches, epochs=1)
    return run_predict(model, batches, callbacks, Options(fuse, rewrites))


def _validation_batches(
    model: keras.Model, data: Any, prepared: Any, training: Batches
) -> Callable[[], Batches]:
    """Returns a function that returns the batches of `validation_data`, and makes them once."""
    size = prepared.validation_batch_size or prepared.batch_size
    arguments = model, data, size, prepared.validation_steps, training
    make_batches = functools.cache(functools.partial(_checks.validation_batches, *arguments))
    # As in Keras, a generator is not asked for a batch before the first evaluation.
    if not isinstance(data, types.GeneratorType):
        make_batches()
    return make_batches


def _build_by_call(model: keras.Model, epochs: Any) -> None:
    """Builds a model by calling it on the first batch of `epochs`, and resets them."""
    _, _, items = next(iter(epochs))
    batch = epochs.batch_of(next(items))
    # In a StatelessScope the call builds variables, and updates such as BatchNormalization's are
    # dropped.
    with DeferredSignals(), keras.StatelessScope():
        model(keras.utils.unpack_x_y_sample_weight(batch)[0])
    epochs.reset()


def _callback_list(
    model: keras.Model, callbacks: Any, verbose: Any, batches: Batches, **options: Any
) -> Any:
    """Returns Keras's list of callbacks, with a progress bar in the first process."""
    # As in Keras, a CallbackList is used as it is, with or without a progress bar.
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    shown = {"add_progbar": verbose != 0 and jax.process_index() == 0, "verbose": verbose}
    return keras.callbacks.CallbackList(
        callbacks, steps=batches.steps, model=model, **shown, **options
    )
