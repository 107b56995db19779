"""from_linen, held against the same modules called by hand."""

import functools

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from functrain import TrainState, from_linen, supervised, train_step, update

from ..conftest import digest

X = jnp.linspace(-1.0, 1.0, 24).reshape(8, 3)
Y = jnp.sin(X @ jnp.ones((3, 2)))
KEY = jax.random.key(7)


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and digest(a) == digest(b)


class LinenNet(nn.Module):
    """Dropout, batch statistics, a sown loss and a sown intermediate."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        self.sow("intermediates", "normalized", x)
        self.sow("losses", "activity", 1e-2 * jnp.sum(x**2))
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=not train)(x))


@pytest.fixture
def linen():
    model = from_linen(LinenNet())
    return model, *model.init(jax.random.key(0), X)


def test_init_is_the_modules_own_without_losses_and_intermediates(linen):
    _, params, model_state = linen
    by_hand = LinenNet().init(jax.random.key(0), X, train=False)
    assert set(by_hand) >= {"losses", "params", "batch_stats"}
    assert same(params, by_hand["params"])
    assert same(model_state, {"batch_stats": by_hand["batch_stats"]})


def test_apply_outside_training_leaves_model_state_untouched_and_needs_no_rng(linen):
    model, params, model_state = linen
    got = model.apply(params, model_state, X)
    assert same(got.outputs, LinenNet().apply({"params": params, **model_state}, X, train=False))
    assert got.model_state is model_state
    assert len(got.losses) == 1


@pytest.mark.parametrize("name", ["training", "train", "deterministic", "use_running_average"])
def test_switch_is_given_under_the_name_the_call_takes(name):
    scope = {}
    exec(f"def call(self, x, {name}): return x, {name}", scope)
    module = type("Net", (nn.Module,), {"__call__": scope["call"]})()
    on = name.startswith("train")
    for training in (True, False):
        assert from_linen(module).apply({}, {}, X, training=training).outputs[1] is (training == on)


def test_switch_held_as_a_field_is_left_alone():
    model = from_linen(nn.BatchNorm(use_running_average=True))
    params, model_state = model.init(jax.random.key(0), X)
    assert same(model.apply(params, model_state, X, training=True).model_state, model_state)


def called(signature, body="x"):
    """Returns a module with dropout and batch statistics, of the given signature."""
    layers = {
        "norm": lambda x, on: nn.BatchNorm(use_running_average=not on)(x),
        "drop": lambda x, on: nn.Dropout(0.5, deterministic=not on)(x),
        "nn": nn,
    }
    exec(f"@nn.compact\ndef call(self, x, {signature}): return {body}", layers)
    return type("Net", (nn.Module,), {"__call__": layers["call"]})()


@pytest.mark.parametrize("layer", ["norm", "drop"])
@pytest.mark.parametrize(
    ("signature", "on", "advice"),
    [
        ("is_training=False", "is_training", "is_training=train"),
        ("*, mask=None, update_stats: bool | None = None", "update_stats", "update_stats=train"),
        ("inference=True", "not inference", "inference=not train"),
        ("**options", "options.get('train', False)", "train=train"),
    ],
)
def test_a_switch_of_another_name_that_keeps_evaluation_mode_is_warned_of(
    layer, signature, on, advice
):
    model = from_linen(called(signature, f"{layer}(x, {on})"))
    variables = model.init(KEY, X)
    with pytest.warns(UserWarning, match=rf"named training, train, .*got Net\(x, .*{advice}\."):
        model.apply(*variables, X, rng=KEY, training=True)
    model.apply(*variables, X)


def test_a_switch_of_another_name_that_keeps_training_mode_is_warned_of():
    model = from_linen(called("is_training=True", "drop(x, is_training)"))
    variables = model.init(KEY, X)
    model.apply(*variables, X, rng=KEY, training=True)
    with pytest.warns(UserWarning, match=r"In evaluation, .* in training mode, .*=train\."):
        model.apply(*variables, X, rng=KEY)


@pytest.mark.parametrize(
    ("signature", "body"),
    [
        ("features=False", "norm(drop(x, False), False)"),
        ("head=False", "nn.Dense(2)(x) if head else norm(x, False)"),
        ("decode=False", "self.variable('cache', 'x', lambda: x).value if decode else x"),
        ("train, frozen=True", "drop(norm(x, not frozen), train)"),
        ("fail=False", "x.fail() if fail else drop(x, False)"),
        ("is_frozen=False", "norm(x, not is_frozen)"),
        ("sample=False", "x + self.make_rng('noise')[0] if sample else norm(x, False)"),
    ],
)
def test_flags_that_are_no_switch_or_already_train_are_left_alone(signature, body):
    model = from_linen(called(signature, body))
    model.apply(*model.init(KEY, X), X, rng=KEY, training=True)


@pytest.mark.parametrize("empty", [(), {}])
def test_module_without_state_keeps_the_model_state_it_is_given(empty):
    model = from_linen(nn.Dense(2))
    params, _ = model.init(jax.random.key(0), X)
    assert model.apply(params, empty, X, training=True).model_state == empty


@pytest.mark.parametrize("is_configured", [True, False])
def test_takes_the_frozen_dicts_of_flax(linen, is_configured):
    model, params, model_state = linen
    before = flax.config.flax_return_frozendict
    flax.config.update("flax_return_frozendict", is_configured)
    try:
        assert same(model.init(jax.random.key(0), X), (params, model_state))
        frozen = flax.core.freeze(model_state)
        got = model.apply(flax.core.freeze(params), frozen, X, rng=KEY, training=True)
    finally:
        flax.config.update("flax_return_frozendict", before)
    want = model.apply(params, model_state, X, rng=KEY, training=True)
    assert same(got.outputs, want.outputs)
    assert same(got.model_state, flax.core.freeze(want.model_state))


def test_training_in_a_scan_is_the_loop_by_hand(linen):
    model, params, model_state = linen
    tx = optax.adam(1e-2)
    state = TrainState.create(params=params, model_state=model_state, tx=tx, rng=KEY)
    step = train_step(supervised(model, lambda outputs, y: (outputs - y) ** 2), tx)

    def step_by_hand(carry, i):
        params, stats, opt_state = carry

        def loss(params):
            outputs, new = LinenNet().apply(
                {"params": params, **stats},
                X,
                train=True,
                rngs={"dropout": jax.random.fold_in(KEY, i)},
                mutable=["batch_stats", "losses"],
            )
            activity = new["losses"]["activity"][0]
            return jnp.mean((outputs - Y) ** 2) + activity, {"batch_stats": new["batch_stats"]}

        (_, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), stats, opt_state), None

    got, _ = jax.jit(lambda s: jax.lax.scan(lambda s, _: step(s, (X, Y)), s, length=5))(state)
    by_hand = jax.jit(lambda c: jax.lax.scan(step_by_hand, c, jnp.arange(5))[0])(
        (params, model_state, tx.init(params))
    )
    assert same((got.params, got.model_state, got.opt_state), by_hand)


@pytest.mark.parametrize("collection", ["metrics", "state"])
def test_state_has_no_values_of_one_batch(collection):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            pair = self.variable("state", "pair", lambda: (jnp.zeros(()), jnp.zeros(())))
            if self.is_mutable_collection("state"):
                pair.value = (pair.value[0] + 1, x.sum())
            x = self.perturb("h", nn.Dense(2)(x))
            self.sow(collection, "outputs", x)
            return x

    model = from_linen(Net())
    params, model_state = model.init(KEY, X)
    assert same(model_state, {"state": {"pair": (jnp.float32(1), X.sum())}})
    half = X[:4]
    got = jax.jit(functools.partial(model.apply, training=True))(params, model_state, half)
    np.testing.assert_allclose(got.model_state["state"]["pair"], (2, half.sum()), rtol=1e-6)
    assert jax.tree.structure(got.model_state) == jax.tree.structure(model_state)
    kernel = params["Dense_0"]["kernel"]
    np.testing.assert_allclose(got.outputs, half @ kernel, rtol=1e-6)


def test_a_call_that_lacks_something_is_told_where_it_comes_from(linen):
    model, params, model_state = linen
    tx = optax.sgd(0.1)
    state = TrainState.create(params=params, model_state=model_state, tx=tx)
    with pytest.raises(flax.errors.InvalidRngError) as error:
        update(state, supervised(model, optax.squared_error), tx, (X, Y))
    assert "Pass rng=jax.random.key(seed) to TrainState.create" in "".join(error.value.__notes__)
    with pytest.raises(flax.errors.ScopeCollectionNotFound) as error:
        model.apply(params, (), X)
    assert "TrainState.create(params=params, model_state" in "".join(error.value.__notes__)


class TwoInputs(nn.Module):
    def __call__(self, x, mask, *, train):
        return x * mask


class Encoder(nn.Module):
    def encode(self, x):
        return x


def test_a_module_that_cannot_be_a_model_is_refused():
    with pytest.raises(TypeError, match=r"got TwoInputs\(x, mask, train\).*self, inputs, train"):
        from_linen(TwoInputs())
    with pytest.raises(TypeError, match=r"called as module\(inputs\).*got Encoder\(\)"):
        from_linen(Encoder())
    with pytest.raises(TypeError, match=r"expected an instance of flax\.linen\.Module.*from_nnx"):
        from_linen(LinenNet)
