"""A member of a population is what it would be alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

from .setting import (
    EVAL,
    KEY,
    LOSS,
    MEMBERS,
    METERED,
    MODEL,
    PLAIN,
    X,
    Y,
    alone,
    assert_close,
    bits,
    loader,
    of_all,
    population,
)


def test_members_begin_as_they_would_alone_to_the_bit() -> None:
    made = population()
    for i in range(MEMBERS):
        assert bits(made[i]) == bits(alone(i))


@pytest.mark.parametrize("block", [None, 1, 2])
def test_a_member_trains_as_it_would_alone(block: int | None) -> None:
    step = of_all(METERED, block=block)
    together = ft.fit(population(), step, loader(), epochs=3, verbose=0)
    for i in range(MEMBERS):
        state, history = ft.fit(alone(i), METERED, loader(), epochs=3, verbose=0)
        assert_close(together.state[i], state)
        for kind in ("steps", "epochs"):
            members, of_one = getattr(together.history, kind), getattr(history, kind)
            assert members.keys() == of_one.keys()
            for name in of_one.keys() - {"seconds"}:
                np.testing.assert_allclose(members[name][:, i], of_one[name], rtol=1e-4, atol=1e-6)
                assert members[name].dtype == of_one[name].dtype


@pytest.mark.parametrize("block", [None, 2])
def test_how_steps_are_fused_changes_no_bit(block: int | None) -> None:
    step = of_all(METERED, block=block)
    ks = (1, 4, 6) if block is None else (2, 6)
    results = [ft.fit(population(), step, loader(), epochs=2, fuse=k, verbose=0) for k in ks]
    for result in results[1:]:
        assert bits(result.state) == bits(results[0].state)
        np.testing.assert_array_equal(
            result.history.steps["loss"], results[0].history.steps["loss"]
        )


def test_the_step_is_a_pure_function_for_plain_jit() -> None:
    step = of_all(PLAIN)
    start = population()
    new, logs = jax.jit(step)(start, (X[:16], Y[:16]))
    fused, rows = ft.fuse(step, 1)(jax.tree.map(jnp.copy, start), (X[None, :16], Y[None, :16]))
    assert logs["loss"].shape == (MEMBERS,)
    assert_close(fused, new)
    np.testing.assert_allclose(rows["loss"][0], logs["loss"], rtol=1e-5)


def test_own_data_are_a_part_for_each_member() -> None:
    order = np.stack([np.random.default_rng(i).permutation(96)[:48] for i in range(MEMBERS)], 1)
    batches = [(X[rows].swapaxes(0, 1), Y[rows].T) for rows in order.reshape(3, 16, MEMBERS)]
    step = of_all(PLAIN, data="per_member")
    together, history = ft.fit(population(), step, batches, verbose=0)
    blocked = ft.fit(population(), of_all(PLAIN, data="per_member", block=2), batches, verbose=0)
    assert_close(blocked.state, together)
    for i in range(MEMBERS):
        own = [(x[i], y[i]) for x, y in batches]
        state, alone_history = ft.fit(alone(i), PLAIN, own, verbose=0)
        assert_close(together[i], state)
        np.testing.assert_allclose(
            history.steps["loss"][:, i], alone_history.steps["loss"], rtol=1e-5
        )


@pytest.mark.parametrize(
    ("placement", "fuse"), [("host", 5), pytest.param("device", 1, marks=pytest.mark.long)]
)
def test_a_loader_for_each_member_is_what_the_member_would_see_alone(placement, fuse) -> None:
    own = [loader(20, seed=i, placement=placement) for i in range(MEMBERS)]  # the last is smaller
    together = ft.fit(
        population(),
        of_all(METERED, data="per_member"),
        ft.population.Loader(own),
        epochs=2,
        fuse=fuse,
        verbose=0,
        eval_data=ft.population.Loader(own[::-1]),
        eval_step=of_all(EVAL, data="per_member"),
    )
    for i in range(MEMBERS):
        evaluated = {"eval_data": own[::-1][i], "eval_step": EVAL}
        state, history = ft.fit(alone(i), METERED, own[i], epochs=2, verbose=0, **evaluated)
        assert_close(together.state[i], state)
        for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
            np.testing.assert_allclose(
                together.history.epochs[name][:, i], history.epochs[name], rtol=1e-4
            )


def test_a_list_of_batches_for_each_member_may_end_with_a_smaller_one() -> None:
    own = ft.population.Loader([loader(20, seed=i) for i in range(MEMBERS)])
    batches = [own.batch(epoch=0, index=i) for i in range(len(own))]
    how = {"eval_step": of_all(EVAL, data="per_member"), "verbose": 0}
    by_loader, by_list = (
        ft.fit(population(), of_all(METERED, data="per_member"), data, eval_data=data, **how)
        for data in (own, batches)
    )
    assert bits(by_list.state) == bits(by_loader.state)
    for name in ("loss", "accuracy", "val_loss"):  # means over examples, not over members
        np.testing.assert_array_equal(by_list.history.epochs[name], by_loader.history.epochs[name])


def test_a_run_on_loaders_of_members_goes_on_to_the_bit(tmp_path) -> None:
    step = of_all(METERED, data="per_member")
    data = ft.population.Loader([loader(seed=i) for i in range(MEMBERS)])
    straight = ft.fit(population(), step, data, epochs=2, verbose=0)

    def die(event: ft.events.Event) -> None:
        if event.step == 8:
            raise KeyboardInterrupt

    saved = ft.Checkpointer(tmp_path, every=ft.every(steps=4))
    hooks = [ft.every(steps=8)(die)]
    with pytest.raises(KeyboardInterrupt):
        ft.fit(population(), step, data, epochs=2, checkpointer=saved, hooks=hooks, verbose=0)
    resumed = ft.fit(population(), step, data, epochs=2, checkpointer=saved, verbose=0)
    assert bits(resumed.state) == bits(straight.state)
    for kind in ("steps", "epochs"):
        for name, values in getattr(straight.history, kind).items():
            if name != "seconds":
                np.testing.assert_array_equal(getattr(resumed.history, kind)[name], values)
    other = ft.population.Loader([loader(seed=i + 1) for i in range(MEMBERS)])
    with pytest.raises(ValueError, match="seed"):
        ft.fit(population(), step, other, epochs=3, checkpointer=saved, verbose=0)


def test_each_member_is_evaluated_as_it_would_be_alone() -> None:
    data = loader(batch_size=20, shuffle=False)
    values = ft.evaluate(population(), of_all(EVAL), data)
    assert values.keys() == {"loss", "accuracy"}
    for i in range(MEMBERS):
        for name, value in ft.evaluate(alone(i), EVAL, data).items():
            assert values[name].shape == (MEMBERS,)
            np.testing.assert_allclose(values[name][i], value, rtol=1e-5)


def test_a_population_of_one_is_a_population() -> None:
    one = ft.population.stack([alone(2)])
    result = ft.fit(one, of_all(PLAIN), loader(), verbose=0)
    assert result.history.steps["loss"].shape == (6, 1)
    assert_close(result.state[0], ft.fit(alone(2), PLAIN, loader(), verbose=0).state)


def test_members_lie_on_several_devices_and_stay_there() -> None:
    mesh = ft.sharding.mesh({"members": -1})
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("members"))
    two = ft.population.stack([alone(0), alone(1)])
    step = of_all(METERED)
    divided = ft.fit(jax.device_put(two, where), step, loader(), epochs=2, verbose=0)
    straight = ft.fit(two, step, loader(), epochs=2, verbose=0)
    for leaf in jax.tree.leaves(divided.state):
        assert leaf.sharding.spec[0] == "members"
    assert_close(divided.state, straight.state)
    np.testing.assert_allclose(
        divided.history.epochs["accuracy"], straight.history.epochs["accuracy"], rtol=1e-5
    )


def test_members_on_an_explicit_axis_are_refused_with_the_mesh_to_take() -> None:
    mesh = ft.sharding.mesh({"members": -1}, explicit=True)
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("members"))
    two = jax.device_put(ft.population.stack([alone(0), alone(1)]), where)
    with pytest.raises(ValueError, match=r"automatic axes.*functrain.sharding.mesh"):
        ft.fit(two, of_all(PLAIN), loader(), verbose=0)


def test_each_member_follows_a_schedule_of_its_own_peak() -> None:
    def schedule(peak: float) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(0.0, peak, 2, 6)

    def make(key: jax.Array, tx: optax.GradientTransformation) -> ft.TrainState:
        params, model_state = MODEL.init(key, X)
        return ft.TrainState.create(params=params, model_state=model_state, tx=tx)

    shape, peaks = schedule(1.0), [1e-3, 1e-2, 0.1]
    injected = optax.inject_hyperparams(lambda peak: optax.adam(lambda n: peak * shape(n)))
    tx = injected(peak=1e-3)
    members = ft.population.create(lambda key: make(key, tx), KEY, hyperparameters={"peak": peaks})
    step = ft.population.step(ft.train_step(LOSS, tx))
    state = ft.fit(members, step, loader(), verbose=0).state
    for i, peak in enumerate(peaks):
        own = optax.adam(schedule(peak))
        single = make(jax.random.fold_in(KEY, i), own)
        expected = ft.fit(single, ft.train_step(LOSS, own), loader(), verbose=0).state
        assert_close(state[i].params, expected.params)
