"""from_nnx, held against the same modules called by hand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from functrain import TrainState, from_equinox, from_nnx, supervised, train_step

from .test_linen import KEY, X, Y, same


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


def rest_of(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))


@pytest.fixture
def net():
    return NnxNet(nnx.Rngs(0, dropout=1))


def test_init_copies_the_present_values_as_nested_dicts(net):
    model = from_nnx(net)
    net.hidden.kernel[...] += 1.0
    params, model_state = model.init(KEY, X)
    assert same(params, nnx.to_pure_dict(nnx.state(net, nnx.Param)))
    assert same(model_state, rest_of(net))
    assert params["hidden"]["kernel"] is not net.hidden.kernel[...]


def test_module_is_never_changed(net):
    model = from_nnx(net)
    before = jax.tree.map(jnp.array, nnx.to_pure_dict(nnx.state(net)))
    mode = net.norm.use_running_average
    params, model_state = model.init(KEY, X)
    jax.jit(lambda p: model.apply(p, model_state, X, rng=KEY).outputs)(params)
    jax.grad(lambda p: model.apply(p, model_state, X, training=True).outputs.sum())(params)
    assert same(nnx.to_pure_dict(nnx.state(net)), before)
    assert net.norm.use_running_average is mode


@pytest.mark.parametrize("layer", ["norm", "drop"])
def test_a_switch_of_another_name_that_keeps_evaluation_mode_is_warned_of(layer):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.drop = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x, is_training=False, scale=False):
            if layer == "norm":
                return self.norm(x * (1 + scale), use_running_average=not is_training)
            return self.drop(x * (1 + scale), deterministic=not is_training)

    model = from_nnx(Net(nnx.Rngs(0)))
    variables = model.init(KEY, X)
    with pytest.warns(UserWarning, match=r"got Net\(x, is_training, .*is_training=train\.") as seen:
        jax.jit(model.apply, static_argnames="training")(*variables, X, rng=KEY, training=True)
    assert len(seen) == 1
    model.apply(*variables, X, rng=KEY)


@pytest.mark.parametrize("rng", [None, KEY])
def test_a_flag_that_is_no_switch_is_left_alone(rng):
    class Net(NnxNet):
        def __call__(self, x, features=False):
            return super().__call__(x)

    model = from_nnx(lambda rngs: Net(rngs))
    model.apply(*model.init(KEY, X), X, rng=rng, training=True)


def test_randomness_is_a_function_of_rng_alone_and_streams_come_back_as_given(net):
    model = from_nnx(net)
    params, model_state = model.init(KEY, X)
    moved = model.apply(params, model_state, X, training=True).model_state
    moved = {**moved, "norm": model_state["norm"]}
    first = model.apply(params, model_state, X, rng=KEY, training=True)
    assert same(first.model_state["dropouts"], model_state["dropouts"])
    assert not same(first.model_state["norm"], model_state["norm"])
    assert same(model.apply(params, moved, X, rng=KEY, training=True).outputs, first.outputs)
    other = model.apply(params, model_state, X, rng=jax.random.key(8), training=True).outputs
    assert not same(other, first.outputs)


def test_streams_of_one_name_get_keys_of_their_own():
    class Masks(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.a(x), self.b(x)

    model = from_nnx(Masks(nnx.Rngs(0)))
    params, model_state = model.init(KEY, X)
    a, b = model.apply(params, model_state, jnp.ones((8, 8)), rng=KEY, training=True).outputs
    assert not same(a, b)


def test_stacked_streams_are_seeded_too():
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


def test_training_in_a_scan_is_nnx_value_and_grad_by_hand(net):
    model, tx = from_nnx(net), optax.adam(1e-2)
    params, model_state = model.init(KEY, X)
    state = TrainState.create(params=params, model_state=model_state, tx=tx)
    step = train_step(supervised(model, lambda outputs, y: (outputs - y) ** 2), tx)
    got, _ = jax.jit(lambda s: jax.lax.scan(lambda s, _: step(s, (X, Y)), s, length=5))(state)

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
    assert same(dropouts, rest_of(net)["dropouts"])


def test_call_that_takes_a_switch_is_given_it():
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
def test_variables_that_a_call_makes_are_dropped(is_called):
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
    assert same(got.model_state, {"calls": jnp.full((), 1 + is_called, jnp.int32)})


def test_function_is_initialized_from_the_key():
    # A class is such a function.
    model, other = from_nnx(lambda rngs: NnxNet(rngs)), from_nnx(NnxNet)
    for seed in (0, 1):
        by_hand = NnxNet(nnx.Rngs(jax.random.key(seed)))
        params, model_state = model.init(jax.random.key(seed), X)
        assert same(params, nnx.to_pure_dict(nnx.state(by_hand, nnx.Param)))
        assert same(model_state, rest_of(by_hand))
        by_hand.eval()
        assert same(model.apply(params, model_state, X).outputs, by_hand(X))
        # The other one has not been initialized, and is made within a trace.
        got = jax.jit(other.apply)(params, model_state, X)
        np.testing.assert_allclose(got.outputs, by_hand(X), rtol=1e-5)
        got = model.apply(params, model_state, X, training=True)
        by_hand.train()
        assert same(got.outputs, by_hand(X))
        assert same(got.model_state, rest_of(by_hand))


def test_values_of_another_structure_are_refused_by_name(net):
    model = from_nnx(net)
    params, model_state = model.init(KEY, X)
    del params["out"]["bias"]
    with pytest.raises(ValueError, match=r"params: expected(.|\n)*out/bias\n"):
        model.apply(params, model_state, X)


@pytest.mark.parametrize("function", [None, lambda rngs: X, lambda rngs: object()])
def test_something_that_makes_no_module_is_refused(function):
    with pytest.raises(TypeError, match=r"an instance of flax\.nnx\.Module, or a function"):
        from_nnx(function).init(KEY, X)


def test_a_module_of_another_library_is_sent_to_the_function_that_takes_it():
    with pytest.raises(
        TypeError, match=r"^module: expected .*flax\.nnx.*Use functrain\.from_linen"
    ):
        from_nnx(linen.Dense(3))
    with pytest.raises(TypeError, match=r"^module: expected .*equinox.*Use functrain\.from_nnx"):
        from_equinox(NnxNet(nnx.Rngs(0)))
    params, _ = from_nnx(nnx.jit(lambda rngs: NnxNet(rngs))).init(KEY, X)  # not a module of nnx
    chex.assert_shape(params["out"]["kernel"], (4, 2))
