"""from_linen and from_nnx, held against the same modules called by hand."""

import functools

import chex
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from functrain import TrainState, from_linen, from_nnx

X = jnp.linspace(-1.0, 1.0, 24).reshape(8, 3)
Y = jnp.sin(X @ jnp.ones((3, 2)))
KEY = jax.random.key(7)


class LinenNet(nn.Module):
    """Dropout, batch statistics, a sown loss and a sown intermediate."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        self.sow("intermediates", "normalized", x)
        self.sow("losses", "activity", 1e-2 * jnp.sum(x**2))
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=not train)(x))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(3, 4, rngs=rngs)
        self.shift = jnp.arange(4.0)  # an array that is no variable
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropouts = nnx.List([nnx.Dropout(0.3, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)])
        self.out = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        x = self.norm(self.hidden(x) + self.shift)
        for dropout in self.dropouts:
            x = dropout(x)
        return self.out(x)


def equal(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(*map(plain, pair))
        for pair in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def plain(leaf):
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def rest_of(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))


# --- linen ---------------------------------------------------------------------------------------


@pytest.fixture
def linen():
    model = from_linen(LinenNet())
    return model, *model.init(jax.random.key(0), X)


def test_linen_init_is_the_modules_own_without_losses_and_intermediates(linen):
    _, params, model_state = linen
    by_hand = LinenNet().init(jax.random.key(0), X, train=False)
    assert set(by_hand) >= {"losses", "params", "batch_stats"}
    assert equal(params, by_hand["params"])
    assert equal(model_state, {"batch_stats": by_hand["batch_stats"]})


def test_linen_apply_in_training_is_module_apply_with_mutable_collections(linen):
    model, params, model_state = linen
    got = model.apply(params, model_state, X, rng=KEY, training=True)
    outputs, changed = LinenNet().apply(
        {"params": params, **model_state},
        X,
        train=True,
        rngs={"dropout": KEY},
        mutable=["batch_stats", "losses"],
    )
    assert equal(got.outputs, outputs)
    assert equal(got.model_state, {"batch_stats": changed["batch_stats"]})
    assert equal(got.losses, changed["losses"]["activity"])
    assert not equal(got.model_state, model_state)


def test_linen_apply_outside_training_leaves_model_state_untouched_and_needs_no_rng(linen):
    model, params, model_state = linen
    got = model.apply(params, model_state, X)
    assert equal(got.outputs, LinenNet().apply({"params": params, **model_state}, X, train=False))
    assert got.model_state is model_state
    assert len(got.losses) == 1


@pytest.mark.parametrize("name", ["training", "train", "deterministic", "use_running_average"])
def test_linen_switch_is_given_under_the_name_the_call_takes(name):
    scope = {}
    exec(f"def call(self, x, {name}): return x, {name}", scope)
    module = type("Net", (nn.Module,), {"__call__": scope["call"]})()
    on = name.startswith("train")
    for training in (True, False):
        assert from_linen(module).apply({}, {}, X, training=training).outputs[1] is (training == on)


def test_linen_switch_held_as_a_field_is_left_alone():
    model = from_linen(nn.BatchNorm(use_running_average=True))
    params, model_state = model.init(jax.random.key(0), X)
    assert equal(model.apply(params, model_state, X, training=True).model_state, model_state)


def test_linen_module_without_state_keeps_the_model_state_it_is_given():
    model = from_linen(nn.Dense(2))
    params, model_state = model.init(jax.random.key(0), X)
    assert model_state == {}
    for given in ((), {}):
        got = model.apply(params, given, X, training=True)
        assert got.model_state == given
        assert got.losses == ()


@pytest.mark.parametrize("is_configured", [True, False])
def test_linen_takes_the_frozen_dicts_of_flax(linen, is_configured):
    model, params, model_state = linen
    before = flax.config.flax_return_frozendict
    flax.config.update("flax_return_frozendict", is_configured)
    try:
        assert equal(model.init(jax.random.key(0), X), (params, model_state))
        frozen = flax.core.freeze(model_state)
        got = model.apply(flax.core.freeze(params), frozen, X, rng=KEY, training=True)
    finally:
        flax.config.update("flax_return_frozendict", before)
    want = model.apply(params, model_state, X, rng=KEY, training=True)
    assert equal(got.outputs, want.outputs)
    assert equal(got.model_state, flax.core.freeze(want.model_state))


def test_linen_inputs_is_one_pytree():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, inputs):
            return nn.Dense(2)(inputs["a"]) + inputs["b"]

    model = from_linen(Two())
    params, state = model.init(jax.random.key(0), {"a": X, "b": Y})
    assert model.apply(params, state, {"a": X, "b": Y}).outputs.shape == (8, 2)


def test_linen_training_in_a_scan_is_the_loop_by_hand(linen):
    model, params, model_state = linen
    tx = optax.adam(1e-2)
    state = TrainState.create(params=params, model_state=model_state, tx=tx, rng=KEY)

    def step(state, _):
        def loss(params):
            rng = jax.random.fold_in(state.rng, state.step)
            out = model.apply(params, state.model_state, X, rng=rng, training=True)
            return jnp.mean((out.outputs - Y) ** 2) + sum(out.losses), out.model_state

        (_, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads, tx).replace(model_state=new), None

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

    got = jax.jit(lambda s: jax.lax.scan(step, s, None, length=5)[0])(state)
    by_hand = jax.jit(lambda c: jax.lax.scan(step_by_hand, c, jnp.arange(5))[0])(
        (params, model_state, tx.init(params))
    )
    assert equal((got.params, got.model_state, got.opt_state), by_hand)


def test_linen_module_that_draws_without_rng_is_refused(linen):
    model, params, model_state = linen
    with pytest.raises(ValueError, match=r"LinenNet: expected a key.*rng=jax\.random\.key\(seed\)"):
        model.apply(params, model_state, X, training=True)


def test_linen_loss_that_is_no_scalar_is_refused():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("losses", "each", x)
            return x

    with pytest.raises(ValueError, match=r"losses/each/0: expected a scalar.*float32\[8, 3\]"):
        from_linen(Net()).apply({}, {}, X)


@pytest.mark.parametrize("thing", [LinenNet, NnxNet(nnx.Rngs(0)), lambda x: x, None])
def test_from_linen_refuses_what_is_no_linen_module(thing):
    with pytest.raises(TypeError, match=r"expected an instance of flax\.linen\.Module.*from_nnx"):
        from_linen(thing)


class Pair(nn.Module):
    """Two inputs, by position and by keyword."""

    @nn.compact
    def __call__(self, x, *, mask, train):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(2)(x) * mask)


class NnxPair(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x, *, mask, train):
        return self.dense(x) * mask


@pytest.mark.parametrize(
    ("convert", "module", "path"),
    [(from_linen, Pair(), "net/Dense_0"), (from_nnx, NnxPair(nnx.Rngs(0)), "net/dense")],
)
def test_a_module_with_two_inputs_is_refused_with_a_wrapper_that_works(convert, module, path):
    with pytest.raises(TypeError, match=r"got \w*Pair\(x, mask, train\)") as error:
        convert(module)
    scope = {"nn": nn, "nnx": nnx}
    exec(str(error.value).split("\n\n", 1)[1], scope)
    model = convert(scope["OneInput"](module))
    inputs = {"x": X, "mask": jnp.arange(8.0)[:, None]}
    params, model_state = model.init(KEY, inputs)
    layer = params
    for name in path.split("/"):
        layer = layer[name]
    by_hand = inputs["mask"] * (X @ layer["kernel"] + layer["bias"])
    got = model.apply(params, model_state, inputs)
    np.testing.assert_allclose(got.outputs, by_hand, rtol=1e-6)


class LinenEncoder(nn.Module):
    def encode(self, x):
        return x


class NnxEncoder(nnx.Module):
    def encode(self, x):
        return x


@pytest.mark.parametrize(
    "make", [lambda: from_linen(LinenEncoder()), lambda: from_nnx(NnxEncoder())]
)
def test_a_module_without_a_call_is_refused(make):
    with pytest.raises(TypeError, match=r"a method __call__\(self, inputs\), got \w+Encoder"):
        make()


@pytest.mark.parametrize("collection", ["metrics", "state"])
def test_linen_state_has_no_values_of_one_batch(collection):
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
    assert equal(model_state, {"state": {"pair": (jnp.float32(1), X.sum())}})
    half = X[:4]
    got = jax.jit(functools.partial(model.apply, training=True))(params, model_state, half)
    np.testing.assert_allclose(got.model_state["state"]["pair"], (2, half.sum()), rtol=1e-6)
    assert jax.tree.structure(got.model_state) == jax.tree.structure(model_state)
    kernel = params["Dense_0"]["kernel"]
    np.testing.assert_allclose(got.outputs, half @ kernel, rtol=1e-6)


def test_linen_variable_that_is_updated_in_evaluation_is_refused_with_the_guard():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.variable("counter", "n", lambda: jnp.zeros((), jnp.int32)).value += 1
            return x

    model = from_linen(Net())
    params, model_state = model.init(KEY, X)
    with pytest.raises(flax.errors.ModifyScopeVariableError) as error:
        model.apply(params, model_state, X)
    assert "self.is_mutable_collection(name)" in "".join(error.value.__notes__)


# --- nnx -----------------------------------------------------------------------------------------


@pytest.fixture
def net():
    return NnxNet(nnx.Rngs(0, dropout=1))


@pytest.mark.parametrize("function", [lambda rngs: X, lambda rngs: LinenNet()])
def test_nnx_function_that_returns_something_else_is_refused(function):
    with pytest.raises(TypeError, match=r"expected an instance of flax\.nnx\.Module.*must return"):
        from_nnx(function).init(KEY, X)


def test_nnx_init_copies_the_present_values_as_nested_dicts(net):
    model = from_nnx(net)
    net.hidden.kernel[...] += 1.0
    params, model_state = model.init(KEY, X)
    assert equal(params, nnx.to_pure_dict(nnx.state(net, nnx.Param)))
    assert equal(model_state, rest_of(net))
    assert params["hidden"]["kernel"] is not net.hidden.kernel[...]


@pytest.mark.parametrize("training", [True, False])
def test_nnx_apply_without_rng_is_the_module_called_directly(net, training):
    model = from_nnx(net)
    params, model_state = model.init(KEY, X)
    got = model.apply(params, model_state, X, training=training)
    net.train() if training else net.eval()
    outputs = net(X)
    assert equal(got.outputs, outputs)
    assert equal(got.model_state, rest_of(net))
    assert equal(got.model_state, model_state) is not training
    assert got.losses == ()


def test_nnx_module_is_never_changed(net):
    model = from_nnx(net)
    before = jax.tree.map(jnp.array, nnx.to_pure_dict(nnx.state(net)))
    mode = net.norm.use_running_average
    params, model_state = model.init(KEY, X)
    jax.jit(lambda p: model.apply(p, model_state, X, rng=KEY).outputs)(params)
    jax.grad(lambda p: model.apply(p, model_state, X, training=True).outputs.sum())(params)
    assert equal(nnx.to_pure_dict(nnx.state(net)), before)
    assert net.norm.use_running_average is mode


def test_nnx_streams_come_back_as_given_where_rng_seeds_them_anew(net):
    model = from_nnx(net)
    params, model_state = model.init(KEY, X)
    got = model.apply(params, model_state, X, rng=KEY, training=True)
    assert equal(got.model_state["dropouts"], model_state["dropouts"])
    assert not equal(got.model_state["norm"], model_state["norm"])


def test_nnx_randomness_is_a_function_of_rng_alone(net):
    model = from_nnx(net)
    params, model_state = model.init(KEY, X)
    moved = model.apply(params, model_state, X, training=True).model_state
    moved = {**moved, "norm": model_state["norm"]}
    first = model.apply(params, model_state, X, rng=KEY, training=True).outputs
    assert equal(model.apply(params, moved, X, rng=KEY, training=True).outputs, first)
    other = model.apply(params, model_state, X, rng=jax.random.key(8), training=True).outputs
    assert not equal(other, first)


def test_nnx_streams_of_one_name_get_keys_of_their_own():
    class Masks(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.a(x), self.b(x)

    model = from_nnx(Masks(nnx.Rngs(0)))
    params, model_state = model.init(KEY, X)
    a, b = model.apply(params, model_state, jnp.ones((8, 8)), rng=KEY, training=True).outputs
    assert not equal(a, b)


def test_nnx_stacked_streams_are_seeded_too():
    class Stack(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda rngs: nnx.Dropout(0.5, rngs=rngs))
            self.layers = make(nnx.Rngs(0).split(3))

        def __call__(self, x):
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x)

    model = from_nnx(Stack())
    params, model_state = model.init(KEY, X)
    masks = model.apply(params, model_state, jnp.ones((8, 8)), rng=KEY, training=True).outputs
    assert len(np.unique(np.asarray(masks), axis=0)) == 3


def test_nnx_training_in_a_scan_is_nnx_value_and_grad_by_hand(net):
    model, tx = from_nnx(net), optax.adam(1e-2)
    params, model_state = model.init(KEY, X)
    state = TrainState.create(params=params, model_state=model_state, tx=tx)

    def step(state, _):
        def loss(params):
            out = model.apply(params, state.model_state, X, training=True)
            return jnp.mean((out.outputs - Y) ** 2), out.model_state

        (_, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads, tx).replace(model_state=new), None

    got = jax.jit(lambda s: jax.lax.scan(step, s, None, length=5)[0])(state)

    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    net.train()

    @nnx.jit
    def step_by_hand(net, optimizer):
        _, grads = nnx.value_and_grad(lambda net: jnp.mean((net(X) - Y) ** 2))(net)
        optimizer.update(net, grads)

    for _ in range(5):
        step_by_hand(net, optimizer)
    chex.assert_trees_all_close(
        got.params, nnx.to_pure_dict(nnx.state(net, nnx.Param)), rtol=1e-5, atol=1e-6
    )
    dropouts = got.model_state["dropouts"]
    assert equal(dropouts, rest_of(net)["dropouts"])


def test_nnx_gradients_are_those_of_nnx_value_and_grad(net):
    model = from_nnx(net)
    params, model_state = model.init(KEY, X)

    def loss(params):
        return jnp.mean((model.apply(params, model_state, X, training=True).outputs - Y) ** 2)

    got = jax.value_and_grad(loss)(params)
    net.train()
    value, grads = nnx.value_and_grad(lambda net: jnp.mean((net(X) - Y) ** 2))(net)
    assert equal(got, (value, nnx.to_pure_dict(grads)))


def test_nnx_call_that_takes_a_switch_is_given_it():
    class Net(nnx.Module):
        def __call__(self, x, train):
            return x, train

    model = from_nnx(Net())
    assert model.apply({}, {}, X, training=True).outputs[1] is True
    assert model.apply({}, (), X).outputs[1] is False
    assert model.apply({}, (), X).model_state == ()


@pytest.mark.filterwarnings(
    # flax >= 0.12.8 wants sow inside nnx.capture, where there are no gradients to take.
    "ignore:Using 'Module.sow:DeprecationWarning"
)
@pytest.mark.parametrize("is_called", [False, True])
def test_nnx_variables_that_a_call_makes_are_dropped(is_called):
    class Net(nnx.Module):
        def __init__(self):
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.sow(nnx.Intermediate, "x", x)
            self.calls[...] += 1
            return x

    net = Net()
    if is_called:
        net(X)
    model = from_nnx(net)
    params, model_state = model.init(KEY, X)
    got = model.apply(params, model_state, X[:2], training=True)
    assert equal(got.model_state, {"calls": jnp.full((), 1 + is_called, jnp.int32)})


def test_nnx_function_is_initialized_from_the_key():
    model, other = from_nnx(lambda rngs: NnxNet(rngs)), from_nnx(lambda rngs: NnxNet(rngs))
    for seed in (0, 1):
        by_hand = NnxNet(nnx.Rngs(jax.random.key(seed)))
        params, model_state = model.init(jax.random.key(seed), X)
        assert equal(params, nnx.to_pure_dict(nnx.state(by_hand, nnx.Param)))
        assert equal(model_state, rest_of(by_hand))
        by_hand.eval()
        assert equal(model.apply(params, model_state, X).outputs, by_hand(X))
        # The other one has not been initialized, and is made within a trace.
        got = jax.jit(other.apply)(params, model_state, X)
        np.testing.assert_allclose(got.outputs, by_hand(X), rtol=1e-5)
        got = model.apply(params, model_state, X, training=True)
        by_hand.train()
        assert equal(got.outputs, by_hand(X))
        assert equal(got.model_state, rest_of(by_hand))


def test_nnx_values_of_another_structure_are_refused_by_name(net):
    model = from_nnx(net)
    params, model_state = model.init(KEY, X)
    del params["out"]["bias"]
    with pytest.raises(ValueError, match=r"params: expected(.|\n)*out/bias: missing"):
        model.apply(params, model_state, X)


@pytest.mark.parametrize("thing", [NnxNet, LinenNet(), None])
def test_from_nnx_refuses_what_is_no_nnx_module(thing):
    with pytest.raises(TypeError, match=r"expected an instance of flax\.nnx\.Module.*from_linen"):
        from_nnx(thing)


def test_linen_statistics_that_the_state_was_not_given_are_missed_in_words() -> None:
    model = from_linen(nn.BatchNorm(use_running_average=True))
    params, model_state = model.init(jax.random.key(0), jnp.ones((4, 3)))
    state = TrainState.create(params=params, tx=optax.sgd(0.1))
    message = r"BatchNorm: expected the collections .*model_state \[\].*model_state=model_state"
    with pytest.raises(ValueError, match=message):
        model.apply(state.params, state.model_state, jnp.ones((4, 3)))
    assert model.apply(params, model_state, jnp.ones((4, 3))).outputs.shape == (4, 3)
