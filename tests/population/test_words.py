"""What is refused, in words and before a step is taken."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

from .setting import EVAL, KEY, LOSS, MODEL, PLAIN, RATES, X, Y, loader, make_state, of_all, refused
from .setting import population as make

P = ft.population


def with_width(width):
    params = {"a": jnp.zeros((8, width)), "b": jnp.zeros((width, 2))}
    return ft.TrainState.create(params=params, tx=optax.sgd(0.1))


def test_members_of_another_structure_are_named_with_the_first_leaf_that_differs() -> None:
    with pytest.raises(ValueError, match=r"member 1 .*\n  params/a: expected float32\[8, 4\], got"):
        P.stack([with_width(4), with_width(5)])
    refused(ValueError, "at least one", P.stack, [])


def test_an_index_out_of_range_is_refused_with_those_that_are_taken() -> None:
    population = P.stack([1.0, 2.0])
    assert float(population[-2]) == 1.0
    with pytest.raises(IndexError, match="expected an index from -2 to 1, got -3"):
        population[-3]


def test_stacked_states_without_leaves_or_axes_are_refused() -> None:
    refused(ValueError, r"stacked: expected at least one leaf .*got \{\}", P.PopulationState.of, {})
    refused(ValueError, "whose first axis .*\n  a: float", P.PopulationState.of, {"a": 1.0})


def test_hyperparameters_of_different_lengths_are_refused_before_a_state_is_made() -> None:
    def never(key):
        raise AssertionError

    rates = {"learning_rate": RATES, "momentum": [0.9]}
    with pytest.raises(ValueError, match="learning_rate: 3, momentum: 1"):
        P.create(never, KEY, hyperparameters=rates)
    with pytest.raises(ValueError, match="members: 4, learning_rate: 3"):
        P.create(never, KEY, members=4, hyperparameters={"learning_rate": RATES})
    with pytest.raises(ValueError, match=r"\['learning_rate'\]: expected a sequence .*got 0\.1"):
        P.create(never, KEY, members=4, hyperparameters={"learning_rate": 0.1})
    refused(ValueError, "neither", P.create, never, KEY)


def test_a_hyperparameter_without_a_place_lists_those_there_are() -> None:
    made = []

    def make_one(key):
        made.append(key)
        return make_state(key)

    injected = "Injected hyperparameters: learning_rate, momentum"
    with pytest.raises(ValueError, match=f"got 'lr'. {injected}"):
        P.create(make_one, KEY, hyperparameters={"lr": RATES})
    assert len(made) == 1
    refused(ValueError, r"params/a", P.with_hyperparameters, make(), {"params/x": RATES})
    with pytest.raises(ValueError, match=r"Injected hyperparameters: none; .*inject_hyperparams"):
        P.with_hyperparameters(P.stack([with_width(4)]), {"learning_rate": [0.1]})


def test_a_hyperparameter_with_two_places_is_named_by_its_path() -> None:
    gan = P.stack([{"g": make_state(KEY), "d": make_state(KEY)}])
    with pytest.raises(ValueError, match=r"(?s)d/opt_state/hyper.*g/opt_state/hyperparams"):
        P.with_hyperparameters(gan, {"learning_rate": [0.5]})
    one = P.with_hyperparameters(gan, {"g/opt_state/hyperparams/learning_rate": [0.5]})
    found = P.hyperparameters(one)
    assert found["g/opt_state/hyperparams/learning_rate"] == 0.5
    np.testing.assert_allclose(found["d/opt_state/hyperparams/learning_rate"], 0.1)
    both = P.with_hyperparameters(gan, {"**/hyperparams/learning_rate": [0.25]})
    assert [x.item() for name, x in P.hyperparameters(both).items() if "rate" in name] == [0.25] * 2


def test_a_schedule_is_no_place_for_a_hyperparameter() -> None:
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(1.0, 0.0, 10))
    state = ft.TrainState.create(params={"w": jnp.zeros(2)}, tx=tx)
    with pytest.raises(ValueError, match="schedule"):
        P.with_hyperparameters(P.stack([state]), {"learning_rate": [0.5]})


def test_values_that_are_not_one_a_member_are_refused() -> None:
    with pytest.raises(ValueError, match=r"float32\[3\]"):
        P.with_hyperparameters(make(), {"learning_rate": [0.1, 0.2]})
    with pytest.raises(ValueError, match=r"int32\[3\], got float32\[3\]"):
        P.with_hyperparameters(make(), {"model_state/seen": [0.5, 1.0, 1.5]})


def test_a_state_that_is_no_population_is_refused_with_the_way_to_one() -> None:
    step = of_all(PLAIN)
    for state in (make_state(KEY), make().states):
        with pytest.raises(TypeError, match=r"PopulationState, got TrainState. Create one"):
            ft.fit(state, step, loader(), verbose=0)
    refused(TypeError, "PopulationState", ft.evaluate, make_state(KEY), of_all(EVAL), loader())
    with pytest.raises(ValueError, match=r"b: float32\[3\]"):
        P.PopulationState.of({"a": jnp.zeros((2, 3)), "b": jnp.zeros(3)})


def test_arguments_of_create_that_are_mixed_up_are_named() -> None:
    with pytest.raises(TypeError, match=r"make_state: expected a function.* got key<fry>\[\]"):
        P.create(KEY, make_state, members=2)
    with pytest.raises(TypeError, match=r"key: expected one typed key.* got 0\. Make it with jax"):
        P.create(make_state, 0, members=2)


def test_steps_that_are_none_are_refused() -> None:
    refused(TypeError, "loss", P.step, LOSS)
    refused(TypeError, "of one member", P.step, P.step(PLAIN))
    refused(ValueError, "'shared'", P.step, PLAIN, data="mine")
    refused(ValueError, "block", P.step, PLAIN, block=0)
    refused(ValueError, "combine", P.predict_step, ft.predict_step(MODEL), combine="median")


def test_a_shared_batch_for_own_data_is_refused_before_a_step() -> None:
    with pytest.raises(ValueError, match=r"each of the 3 members(?s:.*)float32\[16, 8\]"):
        ft.fit(make(), of_all(PLAIN, data="per_member"), loader(), verbose=0)


def test_loaders_of_members_that_do_not_match_are_refused() -> None:
    refused(ValueError, "one for each member, got", P.Loader, [])
    refused(TypeError, r"for member 1(?s:.*)numpy\.stack", P.Loader, [loader(), [(X, Y)]])
    with pytest.raises(ValueError, match=r"member 1.*\n  batch_size: expected 16, got 8"):
        P.Loader([loader(16), loader(8)])
    with pytest.raises(ValueError, match=r"float32\[1, 8\](?s:.*)float64\[1, 8\]"):
        P.Loader([loader(), ft.ArrayLoader((X.astype("f8"), Y), 16)])
    whole = [ft.ArrayLoader((X[:n], Y[:n]), 16, drop_remainder=True) for n in (95, 80)]
    assert len(P.Loader(whole)) == 5


def test_batches_for_each_member_are_refused_where_all_would_see_all_of_them() -> None:
    own = P.Loader([loader(seed=i) for i in range(3)])
    with pytest.raises(ValueError, match=r"data: (?s:.*)data=\"per_member\""):
        ft.fit(make(), of_all(PLAIN), own, verbose=0)
    step = of_all(PLAIN, data="per_member")
    with pytest.raises(ValueError, match=r"eval_data: (?s:.*)data=\"per_member\""):
        ft.fit(make(), step, own, eval_data=own, eval_step=of_all(EVAL), verbose=0)


def test_values_to_select_by_are_one_a_member() -> None:
    with pytest.raises(ValueError, match=r"each of the 3 members"):
        P.select(make(), values=np.ones((4, 3)), mode="min")
    refused(ValueError, "mode", P.select, make(), values=np.ones(3), mode="auto")
    refused(ValueError, "only NaN", P.select, make(), values=np.full(3, np.nan), mode="min")
    refused(ValueError, "fraction", P.resample, make(), np.ones(3), KEY, mode="min", fraction=0.75)
    with pytest.raises(ValueError, match="the name of a leaf"):
        P.resample(make(), np.ones(3), KEY, mode="min", perturb={"decay": (0.5, 2)})
    for factors in (1.25, (), [[0.8, 1.25]]):
        with pytest.raises(ValueError, match=r"perturb\['learning_rate'\]: expected a sequence"):
            P.resample(make(), np.ones(3), KEY, mode="min", perturb={"learning_rate": factors})
    with pytest.raises(ValueError, match=r"seen.*int32\[3\], got float32"):
        P.resample(make(), np.ones(3), KEY, mode="min", perturb={"model_state/seen": (0.8, 2)})


def watched(**how):
    how |= {"eval_data": loader(shuffle=False), "eval_step": of_all(EVAL), "epochs": 2}
    return ft.fit(make(), of_all(PLAIN), loader(), verbose=0, **how)


def test_a_value_a_member_is_not_one_value(tmp_path) -> None:
    with pytest.raises(ValueError, match=re.escape("functrain.population.EarlyStopping")):
        watched(hooks=[lambda event: None, ft.hooks.EarlyStopping("val_loss")])
    with pytest.raises(ValueError, match=r"watches each member.* got ReduceLROnPlateau"):
        watched(hooks=[ft.hooks.ReduceLROnPlateau("val_loss")])
    with pytest.raises(ValueError, match="'val_loss/0'"):
        watched(checkpointer=ft.Checkpointer(tmp_path / "run", monitor="val_loss"))
    with pytest.raises(ValueError, match=r"watches one value.* got EarlyStopping"):
        ft.fit(make_state(KEY), PLAIN, loader(), hooks=[P.EarlyStopping("loss")], verbose=0)
    checkpointer = ft.Checkpointer(
        tmp_path / "of one", monitor="val_loss/1", every=ft.every(epochs=1)
    )
    _, history = watched(checkpointer=checkpointer)
    assert checkpointer.best() == 6 * (1 + np.argmin(history.epochs["val_loss"][:, 1]))


def test_leaves_of_one_path_keep_their_values_beside_a_new_hyperparameter() -> None:
    # Both are named "a/b/c".
    state = {"a/b": {"c": jnp.zeros(2)}, "a": {"b": {"c": jnp.ones(2)}}, "rate": jnp.zeros(())}
    members = ft.population.with_hyperparameters(
        ft.population.stack([state] * 3), {"rate": np.arange(3.0, dtype=np.float32)}
    )
    for i, member in enumerate(members):
        jax.tree.map(np.testing.assert_array_equal, member, {**state, "rate": np.float32(i)})
