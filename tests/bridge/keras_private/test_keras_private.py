"""The private Keras names mean what the bridge takes them to mean (checked with Keras 3.15.1)."""

import ast
import inspect
import itertools
import pathlib
from unittest import mock

import jax
import keras
import numpy as np
import pytest
from keras import layers

import bridge
from bridge import keras_private
from bridge.train import _feed as _keras_feed


class Holder(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = layers.Dense(1)
        self.seed = keras.random.SeedGenerator(0)
        self.mean = keras.metrics.Mean()
        self.rest = [layers.Dense(1)]

    def build(self, input_shape):
        self.frozen = self.add_weight(shape=(), trainable=False)
        self.free = self.add_weight(shape=())

    def call(self, x):
        return self.rest[0](self.first(x))


def test_layers_is_what_a_layer_tracks_in_order():
    model = Holder()
    assert keras_private.sublayers(model) == [model.first, model.rest[0]]


def test_layers_of_a_functional_model_has_those_attached_as_attributes():
    x = keras.Input((3,))
    model = keras.Model(x, layers.Dense(2)(x))
    model.extra = layers.Dense(3)
    assert model.extra in keras_private.sublayers(model)
    assert model.extra not in model.layers


def test_trainable_variables_and_non_trainable_variables_are_a_layers_own():
    model = Holder()
    model(np.ones((1, 3)))
    model.frozen.trainable = True  # the lists are those of the time of creation
    assert [id(v) for v in keras_private.own_variables(model)] == [
        id(model.free),
        id(model.frozen),
    ]


def test_seed_generators_is_a_layers_own():
    model = Holder()
    assert keras_private.seed_generators(model) == [model.seed]


def test_metrics_has_those_of_attributes_and_not_those_of_compile():
    model = Holder()
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(np.ones((2, 3)), np.ones((2, 1)), verbose=0)
    assert keras_private.own_metrics(model) == [model.mean]


def test_losses_override_hides_the_losses_of_a_call():
    layer = layers.Dense(1, kernel_regularizer="l2")
    layer.build((None, 3))
    layer._losses_override.append("left behind")
    assert layer.losses == ["left behind"]
    keras_private.forget_losses(layer)
    assert float(layer.losses[0]) > 0


def test_no_other_file_of_the_bridge_touches_a_private_name_of_keras():
    for file in pathlib.Path(bridge.__file__).parent.rglob("*.py"):
        if "keras_private" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                owner = ast.unparse(node.value)
                ours = owner in {"self", "found", "where", "bridge"} or node.attr.startswith("__")
                assert ours, f"{file.name}: {owner}.{node.attr}"


def compiled(**kwargs):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    model.compile("sgd", "mse", metrics=["mae"], **kwargs)
    return model


def epochs(**kwargs):
    data = {"x": np.arange(30.0).reshape(10, 3), "y": np.zeros((10, 2)), "batch_size": 4}
    return keras_private.epochs(_keras_feed.passes, **{**data, **kwargs})


def test_trainer_is_what_keras_makes_models_of():
    assert keras_private.is_trainer(compiled())
    assert not keras_private.is_trainer(layers.Dense(1))


def test_assert_compile_called_raises_keras_s_own_error():
    with pytest.raises(ValueError, match=r"You must call `compile\(\)`"):
        keras_private.require_compiled(keras.Sequential([layers.Dense(1)]), "fit")


def test_epoch_iterator_yields_steps_and_an_iterator_of_batches():
    steps = [(begin, end, next(items).take()[0].shape) for begin, end, items in epochs()]
    assert steps == [(0, 0, (4, 3)), (1, 1, (4, 3)), (2, 2, (2, 3))]


def test_symbolic_build_takes_no_batch_where_all_is_built():
    def once():
        yield np.ones((4, 3)), np.ones((4, 2))

    model = compiled()
    keras_private.build_from(model, epochs())
    assert keras_private.is_built(model)
    source = keras_private.epochs(_keras_feed.passes, x=once())
    keras_private.build_from(model, source)
    assert len([next(items) for _, _, items in itertools.islice(source, 1)]) == 1


def test_flatten_layers_finds_a_layer_that_is_not_built():
    model = Holder()
    assert not keras_private.layers_built(model)
    model(np.ones((1, 3)))
    assert keras_private.layers_built(model)


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_array_adapter_is_read_in_the_order_of_its_own_iterator(shuffle):
    adapter = epochs(shuffle=shuffle).data_adapter
    np.random.seed(0)
    theirs = [x for x, _ in adapter.get_jax_iterator()]
    np.random.seed(0)
    arrays = keras_private.array_batches(adapter)
    ours = [arrays.take(rows)[0] for rows, _ in arrays]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_whole_batches_leaves_a_smaller_last_one_out():
    assert keras_private.whole_batches(epochs()) == 2
    assert keras_private.whole_batches(epochs(batch_size=5)) == 2
    assert keras_private.whole_batches(epochs(steps_per_epoch=2)) == 2


def test_train_validation_split_takes_the_last_part():
    kept, left = keras_private.split((np.arange(10), None), 0.3)
    assert [len(kept[0]), len(left[0])] == [7, 3]


def test_jax_state_is_assigned_when_a_callback_reads_its_model():
    model = compiled()
    keras_private.build_from(model, epochs())
    callback = keras.callbacks.Callback()
    callback.set_model(model)
    new = [v.value + 1 for v in model.trainable_variables]
    keras_private.publish(model, {"trainable_variables": new})
    keras_private.purge(model, ["trainable"])
    assert not keras_private.is_synced(model)
    assert callback.model is model
    assert keras_private.is_synced(model)
    np.testing.assert_array_equal(model.trainable_variables[0].value, new[0])


def test_sync_assigns_once():
    model = compiled()
    keras_private.publish(model, {"trainable_variables": [v.value + 1 for v in model.variables]})
    keras_private.sync(model)
    before = np.asarray(model.variables[0].value)
    keras_private.sync(model)
    np.testing.assert_array_equal(model.variables[0].value, before)
    assert keras_private.is_synced(model)


def test_initial_epoch_is_what_backup_and_restore_sets(tmp_path):
    model = compiled()
    assert keras_private.initial_epoch(model) is None
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
    model.fit(np.ones((4, 3)), np.ones((4, 2)), epochs=2, verbose=0, callbacks=[backup])
    backup.on_train_begin()
    assert keras_private.initial_epoch(model) == 2


def test_metrics_result_or_logs_prefers_metrics_of_the_same_names():
    model = compiled()
    model.evaluate(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    found = keras_private.epoch_logs(model, {"loss": -1.0, "mae": -1.0})
    assert found["loss"] >= 0
    assert keras_private.epoch_logs(model, {"other": -1.0}) == {"other": -1.0}


def test_flatten_metrics_in_order_returns_a_list():
    model = compiled()
    model.evaluate(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
    assert keras_private.in_order(model, {"mae": 2.0, "loss": 1.0}) == [1.0, 2.0]


def test_should_eval_knows_numbers_and_lists():
    model = compiled()
    assert [keras_private.is_due(model, i, 2) for i in range(4)] == [False, True, False, True]
    assert [keras_private.is_due(model, i, [1, 4]) for i in range(4)] == [True, False, False, True]


def test_pythonify_logs_flattens():
    found = keras_private.to_python({"b": np.float32(2), "a": {"c": np.ones(())}})
    assert found == {"b": 2.0, "c": 1.0}
    assert all(type(value) is float for value in found.values())


def test_is_default_tells_overridden_methods():
    changed = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    assert keras_private.overrides(changed, "on_train_batch_end")
    assert not keras_private.overrides(keras.callbacks.Callback(), "on_train_batch_end")


def test_batches_seen_since_last_saving_counts_to_save_freq(tmp_path):
    save = keras.callbacks.ModelCheckpoint(
        tmp_path / "x.weights.h5", save_weights_only=True, save_freq=3
    )
    save.set_model(compiled())
    save.on_epoch_begin(0)
    found = []
    for batch in range(4):
        found.append(keras_private.batches_until_due(save))
        save.on_train_batch_end(batch, {})
    assert found == [3, 2, 1, 3]
    epochly = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    assert keras_private.batches_until_due(epochly) is None
    assert keras_private.batches_between(save) == 3
    assert keras_private.batches_between(epochly) is None
    assert [keras_private.only_epochs(callback) for callback in (save, epochly)] == [False, True]


def test_tensorboard_counts_batches_and_knows_which_it_profiles(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path, update_freq=4, write_graph=False)
    board._summary_module = mock.MagicMock()
    board.set_model(compiled())
    board._start_batch, board._stop_batch, board._should_trace = 3, 6, True
    board._start_trace = board._stop_trace = lambda: None
    board.on_train_begin()
    found = []
    for batch in range(7):
        found.append(keras_private.batches_until_due(board))
        board.on_train_batch_begin(batch)
        board.on_train_batch_end(batch, {})
    assert found == [2, 1, 2, 1, 2, 1, 2]
    epochly = keras.callbacks.TensorBoard(tmp_path)
    assert keras_private.batches_until_due(epochly) is None
    timing = keras.callbacks.TensorBoard(tmp_path, update_freq=4, write_steps_per_second=True)
    assert [keras_private.batches_between(x) for x in (board, epochly, timing)] == [4, None, 1]
    assert [keras_private.only_epochs(x) for x in (board, epochly, timing)] == [False, True, False]


def test_running_means_are_told_from_other_metrics():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    def plain(*metrics, kind=model):
        kind.compile("sgd", "mse", metrics=list(metrics))
        keras_private.build(kind, (np.ones((2, 2)), np.ones((2, 1))))
        return keras_private.only_running_means(kind)

    class Resets(keras.metrics.MeanAbsoluteError):
        def reset_state(self):
            super().reset_state()

    class Own(keras.Sequential):
        def get_metrics_result(self):
            return super().get_metrics_result()

    assert plain()
    assert plain(
        "mae", keras.metrics.MeanSquaredError(), keras.metrics.MeanMetricWrapper(keras.ops.subtract)
    )
    assert not plain(keras.metrics.RootMeanSquaredError())
    assert not plain(keras.metrics.AUC())
    assert not plain(Resets())
    assert not plain(kind=Own([keras.Input((2,)), keras.layers.Dense(1)]))


def test_compiled_parts_are_other_objects_after_compile():
    model = compiled()
    before = keras_private.compiled_parts(model)
    model.compile("adam", "mae", metrics=["mse"])
    assert all(a is not b for a, b in zip(before, keras_private.compiled_parts(model), strict=True))


def test_value_of_a_variable_can_be_lent():
    variable = keras.Variable(np.zeros(2))
    before = keras_private.lend(variable, np.ones(2))
    np.testing.assert_array_equal(variable.value, np.ones(2))
    keras_private.lend(variable, before)
    np.testing.assert_array_equal(variable.value, np.zeros(2))


def test_get_loss_and_get_metric_are_what_compile_makes():
    y, outputs = np.zeros(3), np.ones((3, 4))
    loss = keras_private.get_loss("crossentropy", y, outputs)
    assert isinstance(loss, keras.Loss)
    assert loss.reduction == "sum_over_batch_size"
    metric = keras_private.get_metric("accuracy", y, outputs)
    assert type(metric) is keras.metrics.SparseCategoricalAccuracy


def test_losses_times_weights_add_up_to_the_loss():
    y, outputs, weight = np.zeros((4, 1)), np.arange(4.0)[:, None], np.array([1.0, 2.0, 3.0, 0.0])
    loss = keras.losses.MeanSquaredError()
    assert not keras_private.calls_itself(loss)
    values, factor = keras_private.losses_and_weight(loss, y, outputs, weight)
    np.testing.assert_array_equal(values * factor, [0.0, 2.0, 12.0, 0.0])
    assert loss(y, outputs, sample_weight=weight) == np.mean(values * factor)


def test_metrics_that_build_late_say_so():
    late = keras.metrics.R2Score()
    assert not keras_private.is_built_metric(late)
    late.update_state(np.zeros((2, 1)), np.ones((2, 1)))
    assert keras_private.is_built_metric(late)
    assert keras_private.is_built_metric(keras.metrics.Mean())


def test_learning_rate_of_an_optimizer_is_its_schedule_or_function():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    assert keras_private.learning_rate(keras.optimizers.SGD(schedule)) is schedule
    assert keras_private.learning_rate(keras.optimizers.SGD(float)) is float
    assert keras_private.learning_rate(keras.optimizers.SGD(0.1)) is None


def test_optimizer_map_is_what_a_multi_optimizer_was_given():
    chosen = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    assert keras_private.optimizer_map(keras.optimizers.MultiOptimizer(chosen)) is chosen


def test_excluded_from_weight_decay_are_ids_and_a_pattern():
    optimizer, variable = keras.optimizers.AdamW(), keras.Variable(0.0)
    assert keras_private.excluded_from_weight_decay(optimizer) == (set(), "")
    optimizer.exclude_from_weight_decay(var_list=[variable], var_names=["bias"])
    assert keras_private.excluded_from_weight_decay(optimizer) == ({id(variable)}, "bias")


def test_trained_are_the_variables_of_build_in_order():
    optimizer, variables = keras.optimizers.Adam(), [keras.Variable(0.0), keras.Variable(1.0)]
    assert keras_private.trained(optimizer) == []
    optimizer.build(variables)
    assert list(map(id, keras_private.trained(optimizer))) == list(map(id, variables))


def test_a_variable_can_be_made_outside_of_scopes():
    with keras.StatelessScope():
        with pytest.raises(ValueError, match="stateless scope"):
            keras.Variable(1.0)
        with keras_private.outside_scopes():
            variable = keras.Variable(1.0)
        variable.assign(2.0)
    assert float(variable.value) == 1.0


def test_backend_apply_gradients_is_called_once_with_all_that_have_gradients():
    class Spy(keras_private.GradientsOnly):
        def update_all(self, grads, variables):
            self.seen = grads, [v.name for v in variables]

    spy = Spy(learning_rate=float)
    held = [keras.Variable(0.0, name="a"), keras.Variable(0.0, name="b")]
    held[1].overwrite_with_gradient = True
    spy.build(held)
    spy.apply([np.float32(1), np.float32(2)], held)
    assert spy.seen == ([1], ["a"])
    assert float(held[1].value) == 2
    assert int(spy.iterations) == 1


def test_layout_of_a_variable_is_what_it_was_made_with():
    assert keras_private.layout(keras.Variable(0.0)) is None
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert keras_private.layout(keras.Variable(0.0, layout=sharding)) is sharding


def test_functional_is_what_keras_makes_of_inputs_and_outputs():
    x = keras.Input((3,))
    assert keras_private.is_functional(keras.Model(x, layers.Dense(1)(x)))

    class Own(keras.Model):
        pass

    assert not keras_private.is_functional(Own(x, layers.Dense(1)(x)))
    assert not keras_private.is_functional(keras.Sequential())


def test_compile_is_written_down_and_otherwise_as_it_was():
    def rotating():
        return keras.Sequential([layers.RandomRotation(0.1), layers.Dense(1)])

    model = rotating()
    assert keras_private.jit_compile_asked(model) is None
    model.compile("sgd", "mse")
    assert (model.jit_compile, keras_private.jit_compile_asked(model)) == (False, "auto")
    model.compile("sgd", "mse", jit_compile=False)
    assert (model.jit_compile, keras_private.jit_compile_asked(model)) == (False, False)
    model.compile("sgd", "mse", None, None, None, False, 1, "auto")
    assert keras_private.jit_compile_asked(model) == "auto"
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        model.compile(nothing=1)
    assert "jit_compile" in inspect.signature(model.compile).parameters
    assert keras.Model.compile.__doc__.startswith("Configures the model for training")
