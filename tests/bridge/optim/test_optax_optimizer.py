"""bridge.OptaxOptimizer: optax inside `model.compile`, to the bit."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import jax
import keras
import numpy as np
import optax
import optax.contrib
import pytest
from keras import layers

from tests.bridge.optax_cases import (
    ALL,
    MORE,
    QUICK,
    SGD,
    C,
    X,
    Y,
    by_hand,
    fitted,
    make_model,
    same,
)

# Their step size comes of one sum over all params, whose last bit is the compiler's.
SUM_OVER_ALL = ("dadapt_adamw", "prodigy")
# Their updates need more than gradients and params.
NEEDY = sorted(MORE - {"sophia"})


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


@pytest.mark.parametrize("make", [lambda: optax.adamw(1e-2), ALL["MultiSteps"]])
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


def test_loss_scaling_and_constraints_stay_kerass() -> None:
    layer = layers.Dense(2, kernel_constraint="non_neg")
    model = keras.Sequential([keras.Input((6,)), layer])
    model.compile(keras.optimizers.LossScaleOptimizer(bridge.OptaxOptimizer(optax.sgd(0.5))), "mse")
    model.fit(X, Y, epochs=2, verbose=0)
    assert np.all(np.asarray(layer.kernel) >= 0)
    assert int(model.optimizer.inner_optimizer.iterations) == 2


def test_the_paths_of_params_are_those_of_keras_in_every_model(build) -> None:
    seen: list[str] = []

    def mask(params: Any) -> Any:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        seen[:] = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        return jax.tree.map(lambda _: True, params)

    model, _ = build()
    optimizer = bridge.OptaxOptimizer(optax.adamw, learning_rate=1e-3, mask=mask)
    optimizer.build(model.trainable_variables)
    paths = [v.path for v in model.trainable_variables]
    assert len(seen) == len(set(seen)) == len(paths)
    # Layers of one name may share paths; then a number is added.
    if len(set(paths)) == len(paths):
        assert sorted(seen) == sorted(paths)


SETTINGS = ("weight_decay", "clipnorm", "global_clipnorm", "clipvalue", "use_ema")


@pytest.mark.parametrize("name", [*SETTINGS, "gradient_accumulation_steps"])
def test_a_setting_without_an_effect_is_refused(name: str) -> None:
    optimizer = bridge.OptaxOptimizer(optax.sgd, learning_rate=0.5)
    with pytest.raises(ValueError, match=rf"OptaxOptimizer.{name}.*Let the transformation do it"):
        setattr(optimizer, name, 2)
    with pytest.raises(ValueError, match=r"exclude_from_weight_decay.*mask="):
        optimizer.exclude_from_weight_decay(var_names=["bias"])


def test_a_checkpoint_of_the_whole_model_is_refused_before_the_first_step(tmp_path: Any) -> None:
    model = make_model()
    model.compile(bridge.OptaxOptimizer(optax.sgd(0.5)), "mse")
    before = model.get_weights()
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "model.keras")
    with pytest.raises(ValueError, match=r"ModelCheckpoint cannot be used here.*cannot be written"):
        bridge.fit(model, X, Y, callbacks=[checkpoint], verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    path = str(tmp_path / "model.weights.h5")
    weights_only = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    bridge.fit(model, X, Y, callbacks=[weights_only], verbose=0)
    model.compile(bridge.OptaxOptimizer(optax.sgd, learning_rate=0.5), "mse")
    bridge.fit(model, X, Y, callbacks=[checkpoint], verbose=0)
    assert (tmp_path / "model.keras").exists()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5), AttributeError, "fast"),
        (lambda: optax.monitor({"norm": optax.tree.norm}), TypeError, "keeps its structure"),
        (lambda: C.sophia(0.1), ValueError, "obj_fn"),
        (lambda: C.sam(SGD, SGD, opaque_mode=True), ValueError, "grad_fn"),
        *((getattr(optax, name, None) or getattr(C, name), TypeError, "value") for name in NEEDY),
    ],
)
def test_what_keras_cannot_give_is_refused_before_the_first_step(
    make: Any, error: type[Exception], message: str
) -> None:
    optimizer = bridge.OptaxOptimizer(make())
    with pytest.raises(error, match=message) as caught:
        fitted(optimizer)
    if "structure" not in message:
        notes = "".join(caught.value.__notes__)
        assert "train without Keras: bridge.create_state" in notes
    assert not optimizer.built
    assert [v.name for v in optimizer.variables] == ["iteration"]
