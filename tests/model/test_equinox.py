"""from_equinox, held against the same modules trained with Equinox and optax alone."""

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

from ..conftest import digest

KEY = jax.random.key(7)
X = np.linspace(-1, 1, 32 * 5, dtype=np.float32).reshape(32, 5)
Y = np.sin(X @ np.ones((5, 2), np.float32))


class Stateful(eqx.Module):
    """Statistics of the batch, dropout, and an array of whole numbers that is not trained."""

    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    order: jax.Array

    def __init__(self, key):
        self.hidden = eqx.nn.Linear(5, 2, key=key)
        self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)
        self.order = jnp.array([1, 0])

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.hidden(x)[self.order], state)
        return self.dropout(x, key=key), state


def test_training_equals_equinox_and_optax_by_hand() -> None:
    module, tx = eqx.nn.MLP(5, 2, 8, depth=2, key=KEY), optax.adam(1e-2)

    @eqx.filter_jit
    def step_by_hand(module, opt_state):
        loss_fn = lambda module: jnp.mean(optax.squared_error(jax.vmap(module)(X), Y))  # noqa: E731
        loss, grads = eqx.filter_value_and_grad(loss_fn)(module)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(module, updates), opt_state, loss

    expected, opt_state, losses = module, tx.init(eqx.filter(module, eqx.is_inexact_array)), []
    for _ in range(6):
        expected, opt_state, loss = step_by_hand(expected, opt_state)
        losses.append(loss)
    model = ft.from_equinox(module)
    params, model_state = model.init(KEY, X)
    state = ft.TrainState.create(params=params, model_state=model_state, tx=tx)
    step = ft.train_step(ft.supervised(model, optax.squared_error), tx)
    result = ft.fit(state, step, [(X, Y)] * 6, verbose=0)
    np.testing.assert_allclose(result.history.steps["loss"], losses, rtol=1e-6)
    trained = eqx.filter(eqx.combine(result.state.params, module), eqx.is_array)
    chex.assert_trees_all_close(trained, eqx.filter(expected, eqx.is_array), rtol=2e-5, atol=1e-6)


def test_statistics_and_dropout_equal_those_of_equinox_and_evaluation_has_no_dropout() -> None:
    module, eqx_state = eqx.nn.make_with_state(Stateful)(KEY)
    model = ft.from_equinox(module, eqx_state)
    params, model_state = model.init(KEY, X)
    outputs, new_state, losses = model.apply(params, model_state, X, rng=KEY, training=True)
    mapped = jax.vmap(
        lambda x, state, key: module(x, state, key=key),
        in_axes=(0, None, 0),
        out_axes=(0, None),
        axis_name="batch",
    )
    expected, expected_state = mapped(X, eqx_state, jax.random.split(KEY, len(X)))
    np.testing.assert_array_equal(outputs, expected)
    assert losses == ()
    assert digest(new_state["state"]) == digest(expected_state)
    evaluated = model.apply(params, model_state, X)
    inference = eqx.nn.inference_mode(module)
    expected = jax.vmap(lambda x: inference(x, eqx_state)[0], axis_name="batch")(X)
    np.testing.assert_array_equal(evaluated.outputs, expected)
    chex.assert_trees_all_equal(evaluated.model_state, model_state)


def test_a_stateful_module_trains_whatever_the_number_of_fused_steps(tmp_path) -> None:
    module, eqx_state = eqx.nn.make_with_state(Stateful)(KEY)
    model, tx = ft.from_equinox(module, eqx_state), optax.adam(1e-2)
    params, model_state = model.init(KEY, X)
    state = ft.TrainState.create(params=params, model_state=model_state, tx=tx, rng=KEY)
    step = ft.train_step(ft.supervised(model, optax.squared_error), tx)
    data = ft.ArrayLoader((X, Y), 8, shuffle=True)
    straight = ft.fit(state, step, data, epochs=4, fuse=3, verbose=0).state
    ft.fit(state, step, data, epochs=2, checkpointer=ft.Checkpointer(tmp_path), verbose=0)
    resumed = ft.fit(
        state, step, data, epochs=4, fuse=4, checkpointer=ft.Checkpointer(tmp_path), verbose=0
    ).state
    assert digest(straight) == digest(resumed)
    np.testing.assert_array_equal(straight.model_state["arrays"].order, [1, 0])


def test_a_module_that_takes_whole_batches_is_not_mapped() -> None:
    class Whole(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return (x - x.mean(0)) @ self.weight

    model = ft.from_equinox(Whole(jnp.ones((5, 2))), axis_name=None)
    params, model_state = model.init(KEY, X)
    expected = (X - X.mean(0)) @ np.ones((5, 2), np.float32)
    np.testing.assert_allclose(model.apply(params, model_state, X).outputs, expected, atol=1e-6)


def test_a_training_leaves_the_module_unchanged_and_usable() -> None:
    module, eqx_state = eqx.nn.make_with_state(Stateful)(KEY)
    before = jax.tree.map(np.asarray, eqx.filter((module, eqx_state), eqx.is_array))
    model, tx = ft.from_equinox(module, eqx_state), optax.sgd(0.1)
    params, model_state = model.init(KEY, X)
    state = ft.TrainState.create(params=params, model_state=model_state, tx=tx, rng=KEY)
    step = ft.train_step(ft.supervised(model, optax.squared_error), tx)
    ft.fit(state, step, [(X, Y)] * 2, donate=True, verbose=0)
    after = eqx.filter((module, eqx_state), eqx.is_array)
    chex.assert_trees_all_equal(before, after)


def test_a_function_is_initialized_from_the_key() -> None:
    model = ft.from_equinox(lambda key: eqx.nn.make_with_state(Stateful)(key))
    structures = set()
    for seed in (0, 1):
        module, module_state = eqx.nn.make_with_state(Stateful)(jax.random.key(seed))
        of_instance = ft.from_equinox(module, module_state)
        params, model_state = model.init(jax.random.key(seed), X)
        expected_params, expected_state = of_instance.init(jax.random.key(5), X)
        got = model.apply(params, model_state, X, rng=KEY, training=True)
        expected = of_instance.apply(expected_params, expected_state, X, rng=KEY, training=True)
        for a, b in [(params, expected_params), (got, expected)]:
            chex.assert_trees_all_equal(a, b)
        structures.add(jax.tree.structure((params, model_state)))
    # So that the states of several keys can be stacked, in spite of what differs in each module.
    assert len(structures) == 1


def test_a_loss_of_a_module_that_lacks_a_key_is_told_where_it_comes_from() -> None:
    model = ft.from_equinox(eqx.nn.Sequential([eqx.nn.Dropout(0.5)]))
    loss_fn = ft.supervised(model, optax.squared_error)
    state = ft.TrainState.create(params=model.init(KEY, X)[0], tx=optax.sgd(0.1))
    state = state.replace(model_state=model.init(KEY, X)[1])
    with pytest.raises(RuntimeError, match="requires a key") as error:
        ft.update(state, loss_fn, optax.sgd(0.1), (X, X))
    assert "Pass rng=jax.random.key(seed) to TrainState.create" in "".join(error.value.__notes__)


class Two(eqx.Module):
    def __call__(self, x, mask, *, key):
        return x * mask


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([None], "module: expected an instance of equinox.Module, or a function"),
        ([lambda key: (X, None)], "module: expected an instance of equinox.Module, or a function"),
        ([Two()], r"got Two\(x, mask, key\).*self, inputs, key"),
        ([lambda key: eqx.nn.make_with_state(Stateful)(key)[0]], r"make_with_state\(Net\)\(key\)"),
        ([eqx.nn.Identity(), {}], "state: expected an equinox.nn.State, got dict"),
    ],
)
def test_something_that_makes_no_model_is_refused(arguments, message) -> None:
    with pytest.raises(TypeError, match=message):
        ft.from_equinox(*arguments).init(KEY, X)
