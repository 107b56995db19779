"""Which variable is which: complete, unique, readable, and the same in every instance."""

import jax
import keras
import numpy as np
import optax
import pytest
from keras import layers

import bridge
import functrain as ft
from bridge.model import _names, _variables


def paths(model):
    where = _variables.layout(model)
    return [*where.params, *where.model_state]


def all_variables(model):
    """Keras's own lists, each variable once, and the metrics that layers hold."""
    found = {id(v): v for v in model.variables}
    stack = [model]
    while stack:
        layer = stack.pop()
        found |= {id(v): v for metric in layer._metrics for v in metric.variables}
        stack += layer._layers
    return list(found.values())


def assert_same_values(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True)


def test_every_variable_has_one_path_in_keras_order(build):
    model, _ = build()
    layout = _variables.layout(model)
    params, model_state = (list(map(id, part.values())) for part in layout[:2])
    variables = all_variables(model)
    assert sorted([*params, *model_state]) == sorted(map(id, variables))
    assert len(set(paths(model))) == len(variables)
    assert params == list(map(id, model.trainable_variables))
    expected = list(dict.fromkeys(map(id, model.non_trainable_variables)))
    assert [v for v in model_state if v in set(expected)] == expected
    seeds = [v for v in variables if v.name == "seed_generator_state"]
    assert set(map(id, layout.seeds)) == set(map(id, seeds))


def test_another_instance_takes_the_state_and_predicts_the_same(build):
    (source, x), (target, _) = build(), build()
    state = bridge.create_state(source, optax.sgd(0.1))
    outputs = [
        bridge.from_keras(m).apply(state.params, state.model_state, x) for m in (source, target)
    ]
    assert jax.tree.structure(outputs[1].model_state) == jax.tree.structure(state.model_state)
    assert_same_values(*(jax.tree.leaves(out.outputs) for out in outputs))
    bridge.to_keras(state, target)
    assert_same_values(all_variables(source), all_variables(target))


NAMES = [("dense_1", "dense_2"), ("dense_2", "dense_1"), ("conv2d_1", "dense"), ("a b", "a_1")]


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("kind", ["sequential", "functional", "nested"])
def test_paths_have_the_names_that_the_model_shows(kind, names) -> None:
    inputs = keras.Input((4,))
    members = [layers.Dense(4, name=name) for name in names]
    if kind == "sequential":
        model = keras.Sequential([inputs, *members])
    else:
        model = keras.Model(inputs, members[1](members[0](inputs)), name="dense_9")
    if kind == "nested":
        model = keras.Model(inputs, model(inputs))
    params = bridge.create_state(model, optax.sgd(0.1)).params
    inner = params["dense_9"] if kind == "nested" else params
    assert set(inner) == set(names)
    for layer in members:
        kernel = inner[layer.name]["kernel"]
        np.testing.assert_array_equal(kernel, layer.kernel.value)


# Keras asks jax for float64.
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_a_state_of_float64_variables_trains_and_is_written_back() -> None:
    # Without jax_enable_x64 their values have the dtype float32.
    models = []
    for dtype in ("float32", "float64"):
        net = [layers.Dense(2, dtype=dtype), layers.BatchNormalization(dtype=dtype)]
        models.append(keras.Sequential([keras.Input((3,), dtype=dtype), *net]))
    assert models[1].variables[0].dtype == "float64"
    models[1].set_weights(models[0].get_weights())
    batch = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    tx = optax.sgd(0.1)
    written = []
    for m in models:
        loss_fn = ft.supervised(bridge.from_keras(m), bridge.loss("mse"))
        state, _ = ft.train_step(loss_fn, tx)(bridge.create_state(m, tx), batch)
        bridge.to_keras(state, m)
        written.append(m.get_weights())
    assert_same_values(*written)


def test_paths_read_like_the_attributes_of_a_subclassed_model(builders):
    model, _ = builders["subclassed"]()
    kernels = ["/".join(p) for p in paths(model) if p[-1] != "bias"]
    assert kernels == [
        "scale",
        "fc1/kernel",
        "blocks_0/kernel",
        "blocks_1/kernel",
        "heads_a/kernel",
        "heads_b/kernel",
        "dense_5/kernel",
        "drop/seed_generator",
    ]


def test_paths_of_wrapped_layers_do_not_carry_the_wrapped_name(builders):
    model, _ = builders["recurrent"]()
    found = {"/".join(p[:-1]) for p in paths(model)}
    assert {
        "bidirectional/forward_layer/cell",
        "bidirectional_1/backward_layer/cell",
        "rnn/cell/cells_0",
        "rnn/cell/cells_1",
    } <= found


def test_one_name_for_layers_variables_and_seeds_gives_distinct_paths(builders):
    model, _ = builders["same_names"]()
    assert ["/".join(p) for p in paths(model)][:6] == [
        "twins/x",
        "twins/x_2/kernel",
        "twins/x_2/bias",
        "twins/x_3/kernel",
        "twins/x_3/bias",
        "twins_1/x",
    ]


def test_freezing_moves_a_variable_and_keeps_its_path(builders):
    free, _ = builders["batch_norm"]()
    keras.utils.clear_session(free_memory=False)
    frozen, _ = builders["frozen"]()
    assert sorted(paths(free)) == sorted(paths(frozen))
    assert ("conv2d", "kernel") in _variables.layout(free).params
    assert ("conv2d", "kernel") in _variables.layout(frozen).model_state


def test_an_unnamed_variable_is_named_by_its_attribute():
    class Scale(layers.Layer):
        def __init__(self):
            super().__init__()
            self.factor = keras.Variable(np.ones((), np.float32))

    layer = Scale()
    assert _names.keys(layer, [layer.factor]) == ["factor"]


def test_a_number_never_collides_with_a_name_that_has_one():
    members = [layers.Dense(1, name=name) for name in ("a", "a", "a_1", "a")]
    assert _names.keys(layers.Layer(), members) == ["a", "a_1", "a_1_1", "a_2"]


def narrower(state: ft.TrainState) -> ft.TrainState:
    kernel = np.zeros((4, 9), np.float32)
    layer = {**state.params["dense_2"], "kernel": kernel}
    return state.replace(params={**state.params, "dense_2": layer})


def of_another_model(state: ft.TrainState) -> ft.TrainState:
    return state.replace(params={"conv2d": state.params["dense"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_another_model, r"params/dense/kernel: missing \(expected float32\["),
        (narrower, r"dense_2/kernel: expected float32\[4, 2\], got float32\[4, 9\]"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_anything_is_written(
    change, message, builders
) -> None:
    model, _ = builders["sequential"]()
    before = [np.asarray(v) for v in all_variables(model)]
    state = change(bridge.create_state(model, optax.sgd(0.1)))
    with pytest.raises(ValueError, match=message):
        bridge.to_keras(state, model)
    assert_same_values(before, all_variables(model))


def test_writing_from_inside_a_trace_is_refused(builders):
    model, _ = builders["sequential"]()
    before = [np.asarray(v) for v in all_variables(model)]
    state = bridge.create_state(model, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"params/dense/.*tracer.*outside"):
        jax.jit(lambda s: (bridge.to_keras(s, model), 0)[1])(state)
    assert_same_values(before, all_variables(model))
