"""bridge.OptaxOptimizer: optax inside `model.compile`, to the bit."""

import bridge  # isort: skip  # before keras: it chooses the backend

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import optax.contrib
import pytest
from keras import layers

from bridge._labels import paths

C = optax.contrib
X = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(32, 2)).astype(np.float32)

NOT_OPTIMIZERS = {  # pieces, wrappers and clippings; a few are among the cases below
    "chain", "named_chain", "identity", "set_to_zero", "keep_params_nonnegative", "zero_nans",
    "centralize", "add_decayed_weights", "apply_every", "normalize_by_update_norm", "masked",
    "normalize", "reduce_on_plateau", "inject_hyperparams", "inject_stateful_hyperparams", "trace",
    "multi_transform", "partition", "flatten", "freeze", "ema", "snapshot", "stateless",
    "stateless_with_tree_map", "with_extra_args_support", "clip", "clip_by_block_rms",
    "clip_by_global_norm", "adaptive_grad_clip", "add_noise", "apply_if_finite",
    "conditionally_mask", "conditionally_transform", "measure_with_ema", "lookahead",
    "selective_transform", "differentially_private_aggregate", "scale",
    "dpsgd",  # takes the gradients of single examples
    "optimistic_adam",  # deprecated for optimistic_adam_v2
}  # fmt: skip
SGD = optax.sgd(1e-2, momentum=0.9)


def by_layer(params: Any) -> Any:
    return {layer: jax.tree.map(lambda _, k=layer: k, held) for layer, held in params.items()}


COMPOSED: dict[str, Callable[[], Any]] = {
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 6)),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.set_to_zero()}, by_layer
    ),
    "masked": lambda: optax.chain(
        SGD, optax.add_decayed_weights(0.1, lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 3),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "apply_if_finite": lambda: optax.apply_if_finite(SGD, 3),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), SGD),
    "flatten": lambda: optax.flatten(SGD),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=jax.random.key(1)),
    "mechanize": lambda: C.mechanize(SGD),
    "sam": lambda: C.sam(SGD, optax.chain(C.normalize(), optax.sgd(0.05))),
    "schedule_free": lambda: C.schedule_free(SGD, 1e-2),
    "split_real_and_imaginary": lambda: C.split_real_and_imaginary(SGD),
    "low-precision momentum": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
}
MORE = {"polyak_sgd", "momo", "momo_adam", "sophia", "lbfgs"}  # need more than gradients
QUICK = {"adamw", "muon", "multi_transform", "MultiSteps", "add_noise", "prodigy"}


def optimizers() -> dict[str, Callable[[], Any]]:
    """Every function of optax and optax.contrib that makes an optimizer, with its defaults."""
    found: dict[str, Callable[[], Any]] = dict(COMPOSED)
    for module in (optax, C):
        for name, function in vars(module).items():
            left_out = name in NOT_OPTIMIZERS | MORE or name in COMPOSED
            if left_out or not inspect.isfunction(function) or name.startswith(("_", "scale_by_")):
                continue
            signature = inspect.signature(function)
            if "GradientTransformation" in str(signature.return_annotation):
                needs_rate = "learning_rate" in signature.parameters
                arguments = {"learning_rate": 1e-2} if needs_rate else {}
                found[name] = lambda f=function, a=arguments: f(**a)
    return found


ALL = optimizers()


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    net = [keras.Input((6,)), layers.Dense(8, "relu", name="a"), layers.Dense(2, name="b")]
    return keras.Sequential(net)


def fitted(optimizer: Any, fit: Any = keras.Model.fit) -> keras.Model:
    model = make_model()
    model.compile(optimizer, "mse")
    fit(model, X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return model


def by_hand(tx: Any) -> tuple[Any, Any]:
    """The same 8 steps, in jax and optax alone."""
    model = make_model()
    variables = model.trainable_variables
    keys = [tuple(v.path.split("/")[-2:]) for v in variables]

    def loss(params: Any, x: Any, y: Any) -> Any:
        values = [params[layer][name] for layer, name in keys]
        outputs, _ = model.stateless_call(values, [], x)
        return jnp.mean(jnp.mean((y - outputs) ** 2, -1))

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    params: Any = {"a": {}, "b": {}}
    for (layer, name), v in zip(keys, variables, strict=True):
        params[layer][name] = v.value
    state = tx.init(params)
    for i in range(8):
        rows = slice(i % 4 * 8, i % 4 * 8 + 8)
        params, state = step(params, state, X[rows], Y[rows])
    return [params[layer][name] for layer, name in keys], state


def same(a: Any, b: Any) -> bool:
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for tree in (a, b)
        for x in map(jnp.asarray, jax.tree.leaves(tree))
    ]
    half = len(leaves) // 2
    return all(map(np.array_equal, leaves[:half], leaves[half:]))


# Their step size comes of one sum over all params, whose last bit is the compiler's.
SUM_OVER_ALL = ("dadapt_adamw", "prodigy")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in ALL]
)
def test_fit_equals_optax_by_hand_to_the_bit(name: str) -> None:
    model = fitted(bridge.OptaxOptimizer(ALL[name]()))
    values, state = by_hand(ALL[name]())
    ours = [v.value for v in model.trainable_variables]
    if name in SUM_OVER_ALL:
        for a, b in zip(ours, values, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-10)
        return
    assert same(ours, values)
    assert jax.tree.structure(model.optimizer.opt_state) == jax.tree.structure(state)
    assert same(model.optimizer.opt_state, state)


@pytest.mark.parametrize("make", [lambda: optax.adamw(1e-2), COMPOSED["MultiSteps"]])
def test_bridge_fit_equals_fit_to_the_bit(make: Any) -> None:
    a, b = fitted(bridge.OptaxOptimizer(make())), fitted(bridge.OptaxOptimizer(make()), bridge.fit)
    assert same([v.value for v in a.variables], [v.value for v in b.variables])
    assert same(a.optimizer.opt_state, b.optimizer.opt_state)


@pytest.mark.smoke
def test_a_function_with_a_learning_rate_equals_what_it_makes() -> None:
    a = fitted(bridge.OptaxOptimizer(optax.adamw, learning_rate=1e-2, b1=0.8))
    b = fitted(bridge.OptaxOptimizer(optax.adamw(1e-2, b1=0.8)))
    assert same([v.value for v in a.trainable_variables], [v.value for v in b.trainable_variables])


def injected() -> list[Any]:
    ready_made = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(0.5))
    return [
        bridge.OptaxOptimizer(optax.sgd, learning_rate=0.5),
        bridge.OptaxOptimizer(ready_made),
    ]


@pytest.mark.parametrize("fit", [keras.Model.fit, bridge.fit])
@pytest.mark.parametrize("form", [0, 1])
def test_callbacks_change_the_injected_learning_rate(form: int, fit: Any) -> None:
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.1, patience=1, min_delta=1e9)
    model = make_model()
    model.compile(injected()[form], "mse")
    history = fit(model, X, Y, epochs=3, verbose=0, callbacks=[schedule, plateau])
    np.testing.assert_allclose(history.history["learning_rate"], [0.25, 0.125, 0.00625], rtol=1e-6)
    rate = optax.tree.get(model.optimizer.opt_state, "learning_rate")
    np.testing.assert_allclose(rate, 0.000625, rtol=1e-6)


def test_a_schedule_is_the_learning_rate_that_keras_sees() -> None:
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 1.0)
    for given in (schedule, bridge.schedule(schedule)):
        model = fitted(bridge.OptaxOptimizer(optax.sgd, learning_rate=given))
        np.testing.assert_allclose(model.optimizer.learning_rate, 0.5 / 9, rtol=1e-6)
        with pytest.raises(TypeError, match="schedule"):
            model.optimizer.learning_rate = 0.1


def test_the_learning_rate_can_be_set_before_and_after_the_build() -> None:
    optimizer = injected()[0]
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    optimizer.build(make_model().trainable_variables)
    assert float(optimizer.learning_rate) == 0.25
    optimizer.learning_rate = 0.125
    assert float(optax.tree.get(optimizer.opt_state, "learning_rate")) == 0.125


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_state_is_saved_and_training_goes_on(tmp_path: Any, suffix: str) -> None:
    def make() -> Any:
        return bridge.OptaxOptimizer(
            optax.adam, learning_rate=1e-2, mu_dtype=jnp.bfloat16, nesterov=True
        )

    model = fitted(make())
    file = str(tmp_path / f"model{suffix}")
    if suffix == ".keras":
        model.save(file)
        again = keras.models.load_model(file)
    else:
        model.save_weights(file)
        again = make_model()
        again.compile(make(), "mse")
        again.optimizer.build(again.trainable_variables)
        again.load_weights(file)
    assert same(model.optimizer.opt_state, again.optimizer.opt_state)
    assert int(again.optimizer.iterations) == 8
    for each in (model, again):
        each.fit(X, Y, epochs=1, verbose=0, shuffle=False)
    assert same([v.value for v in model.variables], [v.value for v in again.variables])


@keras.saving.register_keras_serializable("tests")
def two_rates(low: float, schedule: Any) -> optax.GradientTransformation:
    return optax.multi_transform({"a": optax.sgd(low), "b": optax.sgd(schedule)}, by_layer)


def test_a_registered_function_and_schedules_by_name_are_saved(tmp_path: Any) -> None:
    rate = bridge.schedule(optax.linear_schedule, init_value=0.1, end_value=0.0, transition_steps=9)
    model = fitted(bridge.OptaxOptimizer(two_rates, low=1e-3, schedule=rate))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert same(model.optimizer.opt_state, again.optimizer.opt_state)


def test_a_fresh_process_trains_on(tmp_path: Any) -> None:
    model = fitted(bridge.OptaxOptimizer(optax.contrib.muon, learning_rate=1e-2))
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    model.fit(X, Y, epochs=1, verbose=0, shuffle=False)
    code = (
        "import sys, bridge, keras, numpy as np\n"
        "model, data = keras.models.load_model(sys.argv[1]), np.load(sys.argv[2])\n"
        "model.fit(data['x'], data['y'], epochs=1, verbose=0, shuffle=False)\n"
        "np.save(sys.argv[3], np.concatenate([np.ravel(v.value) for v in model.variables]))\n"
    )
    files = [str(tmp_path / name) for name in ("model.keras", "data.npz", "out.npy")]
    subprocess.run([sys.executable, "-c", code, *files], check=True)
    expected = np.concatenate([np.ravel(v.value) for v in model.variables])
    np.testing.assert_array_equal(np.load(files[2]), expected)


def test_loss_scaling_and_constraints_stay_kerass() -> None:
    layer = layers.Dense(2, kernel_constraint="non_neg")
    model = keras.Sequential([keras.Input((6,)), layer])
    model.compile(keras.optimizers.LossScaleOptimizer(bridge.OptaxOptimizer(optax.sgd(0.5))), "mse")
    model.fit(X, Y, epochs=2, verbose=0)
    assert np.all(np.asarray(layer.kernel) >= 0)
    assert int(model.optimizer.inner_optimizer.iterations) == 2


def test_frozen_layers_are_not_in_the_params() -> None:
    model = make_model()
    model.layers[0].trainable = False
    seen = []
    tx = optax.stateless_with_tree_map(lambda g, p: -0.1 * g)
    spy = optax.GradientTransformation(lambda p: seen.append(p) or tx.init(p), tx.update)
    model.compile(bridge.OptaxOptimizer(spy), "mse")
    model.fit(X, Y, verbose=0)
    assert jax.tree.map(jnp.shape, seen[0]) == {"b": {"bias": (2,), "kernel": (8, 2)}}


def test_slots_lie_where_their_variables_lie() -> None:
    devices = keras.distribution.DeviceMesh((2,), ["model"], keras.distribution.list_devices()[:2])
    layout = keras.distribution.LayoutMap(devices)
    layout["a/kernel"] = (None, "model")
    layout[".*a/kernel"] = (None, "model")
    with keras.distribution.ModelParallel(layout_map=layout).scope():
        model = fitted(bridge.OptaxOptimizer(optax.adam(1e-2)))
        adam = model.optimizer.opt_state[0]
        spec = jax.sharding.PartitionSpec(None, "model")
        assert model.layers[0].kernel.value.sharding.spec == spec
        assert adam.mu["a"]["kernel"].sharding.spec == spec
        assert adam.nu["b"]["kernel"].sharding.is_fully_replicated


class TestPaths:
    def test_they_are_those_of_create_state_where_layers_have_names_or_numbers(self, builders):
        for kind in ("sequential", "sequential_built_by_a_call", "functional"):
            for _ in range(2):
                model, _ = builders[kind]()
                keys = set(paths(model.trainable_variables))
                state = bridge.create_state(model, optax.sgd(0.1))
                expected = jax.tree_util.tree_leaves_with_path(state.params)
                assert keys == {tuple(entry.key for entry in path) for path, _ in expected}

    def test_they_are_unique_and_the_same_in_every_instance_of_every_model(self, build):
        first, second = (paths(build()[0].trainable_variables) for _ in range(2))
        assert first == second
        assert len(set(first)) == len(first)


@keras.saving.register_keras_serializable("tests")
def inner_frozen(learning_rate):
    """Freezes the layers of an inner model."""

    def label(params):
        return {key: "frozen" if key == "sequential" else "trained" for key in params}

    parts = {"trained": optax.adam(learning_rate), "frozen": optax.set_to_zero()}
    return optax.multi_transform(parts, label)


def nested(optimizer):
    """One whose layers Keras names otherwise when it loads them."""
    keras.utils.set_random_seed(0)
    inner = keras.Sequential([keras.layers.Dense(3)])
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(3)])
    model.compile(optimizer, "mse")
    return model


DATA = np.random.default_rng(0).normal(size=(2, 32, 3)).astype(np.float32)


@pytest.mark.parametrize("make", [optax.adam, inner_frozen])
def test_a_nested_model_goes_on_as_it_was_after_loading(make, tmp_path):
    model = nested(bridge.OptaxOptimizer(make, learning_rate=0.01))
    model.fit(*DATA, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        each.fit(*DATA, verbose=0, shuffle=False, epochs=3)
    for ours, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_slots_in_a_file_of_weights_do_not_depend_on_names(tmp_path):
    model, other = (nested(bridge.OptaxOptimizer(optax.adam(0.01))) for _ in range(2))
    model.fit(*DATA, verbose=0, shuffle=False)
    model.save_weights(tmp_path / "model.weights.h5")
    for number, variable in enumerate(other.trainable_variables):
        variable._path = f"layer_{9 - number}/{variable.name}"
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "model.weights.h5")
    for each in (model, other):
        each.fit(*DATA, verbose=0, shuffle=False, epochs=3)
    for ours, theirs in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_schedule_with_steps_as_keys_comes_back_from_a_file(tmp_path):
    schedule = bridge.schedule(
        optax.piecewise_constant_schedule, init_value=0.1, boundaries_and_scales={2: 0.1, 10: 0.5}
    )
    model = nested(keras.optimizers.SGD(schedule))
    model.fit(*DATA, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.fit(*DATA, verbose=0)
    assert [float(loaded.optimizer.learning_rate)] == pytest.approx([0.01])


@pytest.mark.parametrize("kind", [float, np.float32, jnp.float32, np.asarray])
def test_a_config_has_the_learning_rate_of_now(kind):
    optimizer = bridge.OptaxOptimizer(optax.sgd, learning_rate=kind(0.5))
    nested(optimizer).fit(*DATA, verbose=0)
    optimizer.learning_rate = 0.25
    again = bridge.OptaxOptimizer.from_config(optimizer.get_config())
    assert float(again.learning_rate) == 0.25


class TestErrors:
    @pytest.mark.parametrize("name", sorted(MORE | {"scale_by_polyak"}))
    def test_what_needs_more_than_gradients_says_what_before_training(self, name):
        function = getattr(optax, name, None) or getattr(C, name)
        tx = function(1e-2) if name == "sophia" else function()
        needed = "obj_fn" if name == "sophia" else "'value'"
        with pytest.raises(TypeError, match=f"needs more than gradients and params: .*{needed}"):
            fitted(bridge.OptaxOptimizer(tx))

    def test_no_learning_rate_to_be_seen(self):
        optimizer = fitted(bridge.OptaxOptimizer(optax.adam(1e-2))).optimizer
        assert not hasattr(optimizer, "learning_rate")
        with pytest.raises(AttributeError, match=r"found none.*learning_rate=1e-3\)"):
            optimizer.learning_rate  # noqa: B018
        with pytest.raises(TypeError, match="no single learning rate"):
            optimizer.learning_rate = 0.1

    def test_saving_a_ready_made_transformation(self, tmp_path):
        model = fitted(bridge.OptaxOptimizer(optax.adam(1e-2)))
        with pytest.raises(ValueError, match=r"a file can name.*OptaxOptimizer\(optax.adam, "):
            model.save(tmp_path / "model.keras")
        model.save_weights(tmp_path / "model.weights.h5")

    def test_saving_a_closure_as_an_argument(self):
        ours = bridge.OptaxOptimizer(optax.sgd, learning_rate=optax.linear_schedule(1.0, 0.0, 9))
        with pytest.raises(ValueError, match="'learning_rate'"):
            ours.get_config()
        nested = bridge.OptaxOptimizer(C.mechanize, base_optimizer=SGD)
        with pytest.raises(ValueError, match="'base_optimizer' is an optax transformation"):
            nested.get_config()

    def test_arguments_with_a_ready_made_transformation(self):
        with pytest.raises(TypeError, match=r"ready-made.*\['b1'\]"):
            bridge.OptaxOptimizer(optax.adam(1e-3), b1=0.8)

    def test_what_is_no_transformation(self):
        with pytest.raises(TypeError, match="expected an optax transformation"):
            bridge.OptaxOptimizer(0.1)
        with pytest.raises(TypeError, match="expected an optax transformation"):
            bridge.OptaxOptimizer(lambda: 0.1)

    def test_a_schedule_in_the_transformation_s_place(self):
        keras_schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
        for schedule in (optax.cosine_decay_schedule(0.1, 100), keras_schedule):
            with pytest.raises(TypeError, match=r"or a schedule as .*, got .*no arguments"):
                bridge.OptaxOptimizer(schedule)

    def test_an_argument_that_the_function_does_not_take(self):
        with pytest.raises(TypeError, match=r"OptaxOptimizer\(optax.adam, .*learning_rates"):
            bridge.OptaxOptimizer(optax.adam, learning_rates=0.1)

    def test_a_name_that_optax_does_not_have(self):
        config = {"name": "x", "tx": "optax.base64", "arguments": {}}
        with pytest.raises(ValueError, match=r"'optax.base64'"):
            bridge.OptaxOptimizer.from_config(config)
