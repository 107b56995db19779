"""Members that are stopped: not a bit of them changes, and the run ends with the last."""

import logging
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft

from .setting import EVAL, MEMBERS, METERED, PLAIN, X, Y, bits, loader, of_all, population

OF_ALL = of_all(PLAIN)


@pytest.mark.parametrize(("member", "block"), [(PLAIN, None), (METERED, 2)])
def test_a_stopped_member_keeps_every_bit_and_the_others_go_on(member, block) -> None:
    start = population()
    start = start.replace(active=jnp.asarray([True, False, True]))
    step = of_all(member, block=block)
    state, history = ft.fit(start, step, loader(), epochs=2, verbose=0)
    straight = ft.fit(population(), step, loader(), epochs=2, verbose=0).state
    for i, active in enumerate(start.active):
        assert bits(state[i]) == bits(straight[i] if active else start[i])
    stopped = np.isnan(history.steps["loss"]).all(axis=0)
    np.testing.assert_array_equal(stopped, ~np.asarray(start.active))
    assert np.isnan(history.epochs["loss"][:, 1]).all()


def test_new_params_are_computed_from_the_moments_that_are_kept() -> None:
    # Otherwise XLA's CPU backend keeps old and new moments side by side, and copies them.
    jaxpr, results = jax.make_jaxpr(OF_ALL, return_shape=True)(population(), (X[:8], Y[:8]))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(results)]
    moments = [x for x, path in zip(jaxpr.jaxpr.outvars, paths, strict=True) if "trace" in path]
    used = [x for eqn in jaxpr.jaxpr.eqns for x in eqn.invars]
    assert len(moments) == 3
    assert all(any(x is moment for x in used) for moment in moments)


def test_a_member_that_is_stopped_costs_nothing_where_it_would_come_by_itself() -> None:
    counts = []

    def member(state, batch):
        jax.debug.callback(lambda _: counts.append(1), state)
        return state + 1, {"loss": state}

    state = ft.population.stack([jnp.float32(i) for i in range(3)])
    state = state.replace(active=jnp.asarray([True, False, True]))
    new, _ = jax.jit(ft.population.step(member, block=1))(state, jnp.ones(()))
    jax.effects_barrier()
    assert new.states.tolist() == [1, 1, 3]
    assert len(counts) == 2


def test_a_member_that_diverges_is_stopped_with_its_last_finite_state() -> None:
    rates = {"learning_rate": [0.01, 3e38, np.inf]}
    start = ft.population.with_hyperparameters(population(), rates)
    step = of_all(PLAIN, stop_non_finite=True)
    state, history = ft.fit(start, step, loader(), epochs=2, verbose=0)
    np.testing.assert_array_equal(state.active, [True, False, False])
    assert np.isfinite(state.states.params["a"]).all()
    assert bits(state[2].params) == bits(start[2].params)  # its first step was one too many
    losses = history.steps["loss"]
    assert np.isfinite(losses[:, 0]).all()
    assert np.isfinite(losses[0]).all()  # reported as it was
    assert np.isnan(losses[-1, 1:]).all()


def test_what_was_not_finite_from_the_beginning_stops_nobody() -> None:
    state = {"best": jnp.asarray(jnp.inf), "w": jnp.zeros(())}
    step = ft.population.step(
        lambda state, x: ({**state, "w": state["w"] + x}, {"loss": x}), stop_non_finite=True
    )
    new, _ = step(ft.population.stack([state] * 2), jnp.ones(()))
    assert new.active.all()


@pytest.mark.parametrize(("name", "stops"), [("g_loss", True), ("c/loss", True), ("norm", False)])
def test_a_member_is_stopped_by_any_loss_that_is_not_finite(name, stops) -> None:
    step = ft.population.step(
        lambda state, x: (state, {"g_loss": 0.0, name: x}), data="per_member", stop_non_finite=True
    )
    new, _ = step(ft.population.stack([0.0] * 2), jnp.array([1.0, jnp.nan]))
    assert new.active.tolist() == [True, not stops]


def early(**how) -> ft.population.EarlyStopping:
    return ft.population.EarlyStopping("val_loss", **{"patience": 2, "restore_best": True, **how})


def fitted(hooks, epochs=12, **how):
    rates = {"learning_rate": [2.0, 1.0, 0.01]}  # two of which are too large
    return ft.fit(
        ft.population.with_hyperparameters(population(), rates),
        OF_ALL,
        loader(),
        epochs=epochs,
        eval_data=loader(batch_size=96, shuffle=False),
        eval_step=of_all(EVAL),
        hooks=hooks,
        verbose=0,
        **how,
    )


def test_members_that_stop_have_no_program_compiled_again(caplog) -> None:
    fitted([early()])  # whatever is compiled for the first time
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        state, _ = fitted([early()])
    assert not state.active.all()
    assert not any(x.committed for x in jax.tree.leaves(state))
    assert "jit(run)" not in caplog.text


def test_each_member_stops_by_itself_and_gets_its_best_state_back() -> None:
    hook = early()
    state, history = fitted([hook])
    losses = history.epochs["val_loss"]
    assert losses.shape[1] == MEMBERS
    stopped_at = []
    for i, of_one in enumerate(losses.T):
        best, failures, end = np.inf, 0, None
        for epoch, loss in enumerate(of_one):
            failures = 0 if loss < best else failures + 1
            best = min(best, loss)
            if failures == 2:
                end = epoch
                break
        stopped_at.append(end)
        assert hook.best[i] == best
        assert bool(state.active[i]) == (end is None)
        assert (np.isnan(history.epochs["loss"][:, i]).sum() > 0) == (
            end is not None and end + 1 < len(losses)
        )
    assert len({end for end in stopped_at if end is not None}) > 1  # not all in one epoch
    now = ft.evaluate(state, of_all(EVAL), loader(batch_size=96, shuffle=False))
    np.testing.assert_allclose(now["loss"], hook.best, rtol=1e-6)


def test_the_run_ends_when_all_members_have_stopped() -> None:
    state, history = fitted([early(patience=0, min_delta=10.0)], epochs=9)
    assert len(history.epochs["loss"]) == 2
    assert not state.active.any()


def test_terminate_on_nan_ends_a_run_when_no_member_is_left() -> None:
    def steps(rates, step):
        start = ft.population.with_hyperparameters(population(), {"learning_rate": rates})
        hooks = [ft.hooks.TerminateOnNaN()]
        _, history = ft.fit(start, step, loader(), epochs=3, hooks=hooks, fuse=2, verbose=0)
        return len(history.steps["loss"])

    assert steps([0.01, np.inf, np.inf], OF_ALL) == 18
    with pytest.warns(UserWarning, match="TerminateOnNaN"):
        assert steps([np.inf] * 3, of_all(PLAIN, stop_non_finite=True)) < 18


def test_an_early_stopping_goes_on_after_a_kill(tmp_path: pathlib.Path) -> None:
    hook, killed = early(), early()
    straight = fitted([hook])

    def kill(event: ft.events.Event) -> None:
        if isinstance(event, ft.events.EpochEnd) and event.epoch == 3:
            raise KeyboardInterrupt

    def checkpointer() -> ft.Checkpointer:
        return ft.Checkpointer(tmp_path / "run", every=ft.every(epochs=1))

    with pytest.raises(KeyboardInterrupt):
        fitted([killed, kill], checkpointer=checkpointer())
    again = early()
    resumed = fitted([again], checkpointer=checkpointer())
    assert bits(resumed.state) == bits(straight.state)
    np.testing.assert_array_equal(again.best, hook.best)
    np.testing.assert_array_equal(again.best_step, hook.best_step)
