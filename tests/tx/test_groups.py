import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

PARAMS = {
    "encoder": {"kernel": np.ones((2, 2), np.float32), "bias": np.ones(2, np.float32)},
    "head": {"kernel": np.ones((2, 1), np.float32), "bias": np.ones(1, np.float32)},
}
GRADS = jax.tree.map(lambda x: x * 0.5, PARAMS)


def test_each_param_is_trained_by_the_first_group_that_means_it() -> None:
    tx = ft.tx.param_groups(
        {"**/bias": optax.sgd(1.0), "encoder/**": optax.set_to_zero(), "**": optax.adam(0.1)}
    )
    state = ft.TrainState.create(params=PARAMS, tx=tx)
    new = state.apply_gradients(GRADS, tx).params
    np.testing.assert_array_equal(new["encoder"]["bias"], [0.5, 0.5])
    np.testing.assert_array_equal(new["head"]["bias"], [0.5])
    np.testing.assert_array_equal(new["encoder"]["kernel"], PARAMS["encoder"]["kernel"])
    adam = optax.adam(0.1)
    updates, _ = adam.update(GRADS["head"]["kernel"], adam.init(PARAMS["head"]["kernel"]))
    np.testing.assert_array_equal(new["head"]["kernel"], 1 + updates)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == (2, 1)]
    assert len(moments) == 2  # adam's, of one kernel
    assert not [x for x in jax.tree.leaves(state.opt_state) if x.shape == (2, 2)]


def test_groups_train_under_guards_averages_and_multi_steps() -> None:
    tx = optax.MultiSteps(ft.tx.param_groups({"**/bias": optax.sgd(1.0), "**": optax.sgd(0.1)}), 2)
    tx = ft.tx.skip_non_finite(optax.chain(tx, ft.tx.ema(0.5)))
    state = ft.TrainState.create(params=PARAMS, tx=tx)
    for _ in range(2):
        state = jax.jit(lambda s: s.apply_gradients(GRADS, tx))(state)
    np.testing.assert_allclose(state.params["head"]["bias"], 0.5)
    np.testing.assert_allclose(state.params["head"]["kernel"], 0.95)
    np.testing.assert_allclose(ft.tx.ema_params(state)["head"]["bias"], 0.75)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["**/bias"], r"expected a pattern for every param, got\n  encoder/kernel\n"),
        (["**/biass", "**"], r"first one that matches .*\n  \*\*/biass: perhaps .*bias"),
        (
            ["**", "**/bias"],
            r"first one that matches .*\n  \*\*/bias: .*\n.*narrower patterns first",
        ),
    ],
)
def test_patterns_without_params_and_params_without_a_pattern_are_named(patterns, message) -> None:
    tx = ft.tx.param_groups(dict.fromkeys(patterns, optax.sgd(0.1)))
    with pytest.raises(ValueError, match=message):
        ft.TrainState.create(params=PARAMS, tx=tx)


def test_rates_are_logged_by_group_as_they_are_applied() -> None:
    def loss_fn(params, model_state, batch, *, rng, training):
        return optax.tree.sum(params), ft.Aux(model_state)

    falling = optax.linear_schedule(1.0, 0.0, 10)
    sgd = optax.inject_hyperparams(optax.sgd)
    tx = ft.tx.param_groups({"**/bias": sgd(falling), "head/*": sgd(0.5), "**": optax.sgd(0.25)})
    step = ft.train_step(loss_fn, tx)
    state = ft.TrainState.create(params=PARAMS, tx=tx)
    data = ft.ArrayLoader(np.zeros(3, np.float32), 1)
    state, history = ft.fit(state, step, data, verbose=0)
    np.testing.assert_allclose(history.steps["bias/learning_rate"], [1, 0.9, 0.8], rtol=1e-6)
    assert history.epochs["bias/learning_rate"][0] == pytest.approx(0.8)
    np.testing.assert_allclose(history.steps["head/learning_rate"], [0.5] * 3)
    np.testing.assert_allclose(state.params["head"]["bias"], 1 - 2.7, rtol=1e-6)


@pytest.mark.parametrize("patterns", [["x_2/*", "x/*", "**"], ["x/*", "x_3/*", "*/x/*"]], ids=str)
def test_each_group_has_its_optimizer_also_if_patterns_end_with_numbers(patterns) -> None:
    rates = {pattern.replace("*", "a"): 1.0 + i for i, pattern in enumerate(patterns)}
    tx = ft.tx.param_groups(dict(zip(patterns, map(optax.sgd, rates.values()), strict=True)))
    params = dict.fromkeys(rates, jnp.ones(()))
    updates, _ = tx.update(params, tx.init(params), params)
    assert updates == {path: -rate for path, rate in rates.items()}
