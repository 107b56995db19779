"""What members are worth together: predictions, the best of them, copies of the best."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft

from .setting import KEY, MODEL, X, alone, bits, population

P = ft.population
ONE = ft.predict_step(MODEL)
INPUTS = ft.ArrayLoader(X[:50], 20)


def each() -> np.ndarray:
    return np.stack([ft.predict(alone(i), ONE, INPUTS) for i in range(3)])


@pytest.mark.parametrize("block", [None, 2])
def test_the_mean_is_that_of_the_outputs(block) -> None:
    together = ft.predict(population(), P.predict_step(ONE, block=block), INPUTS)
    np.testing.assert_allclose(together, each().mean(0), rtol=1e-5, atol=1e-6)


def test_each_member_predicts_as_it_would_alone() -> None:
    found = ft.predict(population(), P.predict_step(ONE, combine="each"), INPUTS)
    assert found.shape == (50, 3, 2)
    np.testing.assert_allclose(found, each().swapaxes(0, 1), rtol=1e-5, atol=1e-6)


def test_a_function_combines_probabilities() -> None:
    def mean_probabilities(logits):
        return jax.nn.softmax(logits).mean(0)

    found = ft.predict(population(), P.predict_step(ONE, combine=mean_probabilities), INPUTS)
    logits = each().astype(np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(found, expected.mean(0), rtol=1e-5)


def test_a_vote_takes_the_class_of_most_and_the_smaller_of_two() -> None:
    votes = jnp.array([[0, 2, 1, 1], [0, 2, 0, 2], [1, 0, 2, 0], [3, 3, 2, 3]]).T  # [members, B]
    step = P.predict_step(lambda v, x: (v, jax.nn.one_hot(v[x], 4)), combine="vote")
    found = ft.predict(P.stack(list(votes)), step, ft.ArrayLoader(np.arange(4), 4))
    np.testing.assert_array_equal(found, [1, 0, 0, 3])


def test_a_vote_without_classes_is_refused() -> None:
    step = P.predict_step(lambda state, x: (state, jnp.ones((2, 1))), combine="vote")
    with pytest.raises(ValueError, match=r"combine: expected outputs \[N, B, ..., C\] with scores"):
        ft.predict(P.stack([0.0, 1.0]), step, [np.ones(2)])


def test_the_best_member_comes_out_as_it_is() -> None:
    made = population()
    assert bits(P.select(made, [0.2, 0.1, np.nan], mode="min")) == bits(alone(1))
    assert bits(P.select(made, [0.2, 0.1, np.nan], mode="max")) == bits(alone(0))
    assert isinstance(P.select(made, [0.2, 0.1, 0.3], mode="min"), ft.TrainState)


def eight():
    states = [{"w": jnp.full(2, i, jnp.float32), "n": jnp.int32(i)} for i in range(8)]
    for i, state in enumerate(states):
        state["rng"] = jax.random.key(i)
        state["opt_state"] = {"hyperparams": {"rate": jnp.float32(1)}}
    return P.stack(states)


def test_copies_of_the_best_replace_the_worst_and_keep_their_own_keys() -> None:
    by = [3, 7, 1, 0, 5, 6, 2, np.nan]
    made = eight()
    made = made.replace(active=made.active.at[3].set(False))
    for seed in range(5):
        new = P.resample(made, by, jax.random.key(seed), mode="min")
        assert new.states["n"].tolist()[:1] + new.states["n"].tolist()[2:7] == [0, 2, 3, 4, 5, 6]
        copies = [int(new.states["n"][i]) for i in (1, 7)]  # the worst, and the one with NaN
        assert set(copies) <= {3, 2}
        for i, source in zip((1, 7), copies, strict=True):
            assert new.states["w"][i].tolist() == [source] * 2
            assert bool(new.active[i]) == (source != 3)
        assert bits(new.states["rng"]) == bits(made.states["rng"])
        one_left = P.resample(made, [np.nan] * 7 + [1], jax.random.key(seed), mode="min")
        assert sorted(one_left.states["n"].tolist()) == [0, 1, 2, 3, 4, 7, 7, 7]
    largest = P.resample(made, by, KEY, mode="max", fraction=0.5)
    assert set(largest.states["n"].tolist()) <= {0, 1, 4, 5}


def test_only_copies_are_perturbed_each_by_one_of_the_factors() -> None:
    by = np.arange(8.0)
    drawn = set()
    for seed in range(8):
        new = P.resample(
            eight(), by, jax.random.key(seed), mode="min", perturb={"rate": (0.5, 2.0)}
        )
        rates = P.hyperparameters(new)["rate"].tolist()
        assert not any(x.committed for x in jax.tree.leaves(new))  # or all would compile again
        assert rates[:6] == [1.0] * 6
        assert set(rates[6:]) <= {0.5, 2.0}
        drawn |= set(rates[6:])
    assert drawn == {0.5, 2.0}


def test_members_with_convolutions_come_one_after_another_on_cpu() -> None:
    def dense(state, x):
        return state, x @ state

    def convolving(state, x):
        return state, jax.lax.conv(x[None, None], state[None, None], (1, 1), "SAME")

    population, x = P.stack([jnp.ones((3, 3))] * 4), jnp.ones((3, 3))
    for step, loops in ((dense, False), (convolving, True)):
        text = str(jax.make_jaxpr(P.step(step))(population, x))
        assert ("scan[" in text) == loops
        assert "scan[" not in str(jax.make_jaxpr(P.step(step, block=None))(population, x))
