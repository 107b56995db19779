"""A loss that is not finite is named once, with its first step and what finds its cause."""

import re
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

DATA = np.ones(40, np.float32)
TX = optax.sgd(0.1)


def step(state: Any, batch: Any) -> Any:
    return state + 1, {"loss": jnp.sum(batch)}


def loader(*bad: int, value: float = np.nan) -> ft.ArrayLoader:
    """Forty batches of one number, some of which are bad, counted from 0."""
    data = DATA.copy()
    data[list(bad)] = value
    return ft.ArrayLoader(data, 1)


def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
    return jnp.sum(params * batch), ft.Aux(model_state)


TRAINING = ft.train_step(loss_fn, TX)


def trained(steps: int) -> ft.TrainState:
    return ft.TrainState.create(params=jnp.ones(()), tx=TX).replace(step=jnp.int32(steps))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("fuse", [1, 7, 40])
def test_a_fit_names_its_first_step_with_a_loss_that_is_not_finite(fuse: int, value: float) -> None:
    message = (
        r"loss: .* in step 58, batch 17 of epoch 1, .*functrain\.inspect\.explain_nan\(state, st"
    )
    passes = [[*DATA], [*loader(17, 30, value=value).data]]

    class Data:
        def __iter__(self) -> Any:
            return iter([np.full(1, x) for x in passes.pop(0)])

    with pytest.warns(UserWarning, match=message) as caught:
        ft.fit(jnp.zeros(()), step, Data(), epochs=2, fuse=fuse, verbose=0)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_loss_that_is_not_finite_is_told_at_the_end_of_its_epoch() -> None:
    epochs: list[int] = []
    hook = ft.every(epochs=1)(lambda event: epochs.append(event.epoch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="batch 5 of epoch 0") as error:
            ft.fit(jnp.zeros(()), step, loader(5), epochs=3, hooks=[hook], verbose=0)
    assert epochs == [0]
    assert int(error.value.fit_result.state) == 40  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", [{"steps": 60}, {"epochs": 2, "steps_per_epoch": 30}])
def test_no_batch_is_named_where_an_epoch_is_not_a_pass_over_the_data(how: dict[str, int]) -> None:
    with pytest.warns(UserWarning, match=r"first in step 36\. functrain\.inspect"):
        ft.fit(jnp.zeros(()), step, loader(35), verbose=0, **how)


def test_the_epoch_of_the_loader_is_named_where_the_state_had_taken_steps() -> None:
    data = np.arange(40, dtype=np.float32)
    data[5] = np.nan
    shuffled = ft.ArrayLoader(data, 1, shuffle=True)
    message = r"step \d+, batch (\d+) of epoch 0 \(the loader's epoch (\d+)\), counted from 0"
    with pytest.warns(UserWarning, match=message) as caught:
        ft.fit(trained(steps=50), TRAINING, shuffled, verbose=0)
    batch, epoch = re.search(message, str(caught[0].message)).groups()  # type: ignore[union-attr]
    assert int(epoch) == 2
    assert np.isnan(shuffled.batch(int(epoch), int(batch)))


def test_a_fit_by_steps_names_the_step_alone() -> None:
    with pytest.warns(UserWarning, match=r"first in step 46\. functrain\.inspect\.explain_nan"):
        ft.fit(jnp.zeros(()), step, loader(5), start=ft.Position(40), steps=80, verbose=0)


def test_the_first_step_is_that_of_the_first_life(tmp_path: Any) -> None:
    @ft.at(20)
    def cut(event: Any) -> None:
        raise KeyError

    def train(*hooks: Any) -> None:
        checkpointer = ft.Checkpointer(tmp_path, every=ft.every(steps=5))
        how = {"checkpointer": checkpointer, "hooks": hooks, "verbose": 0}
        ft.fit(jnp.zeros(()), step, loader(7, 30), **how)

    with pytest.raises(KeyError):
        train(cut)
    with pytest.warns(UserWarning, match="first in step 8, batch 7 of epoch 0"):
        train()


def test_members_of_a_population_are_named_but_those_that_were_stopped() -> None:
    def member(state: Any, batch: Any) -> Any:
        return state, {"loss": jnp.sum(batch) / state}  # 1 / 0

    state = ft.population.stack([jnp.float32(x) for x in (1.0, 0.0, 0.0, 2.0)])
    of_all = ft.population.step(member)
    with pytest.warns(UserWarning, match=r"of members \[1, 2\], first in step 1,"):
        ft.fit(state, of_all, loader(), verbose=0)
    stopped = state.replace(active=jnp.asarray([True, False, False, True]))
    ft.fit(stopped, of_all, loader(), verbose=0)


def test_an_evaluation_says_how_to_find_the_batch() -> None:
    def loss_fn(params: Any, model_state: Any, batch: Any, *, rng: Any, training: bool) -> Any:
        return jnp.sum(params * batch), ft.Aux(model_state)

    state = ft.TrainState.create(params=jnp.ones(()), tx=TX)
    evaluation = ft.eval_step(loss_fn)
    with pytest.warns(UserWarning, match=r"evaluate: expected a finite loss, .*explain_nan\("):
        ft.evaluate(state, evaluation, loader(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ft.evaluate(state, evaluation, loader())


def test_an_evaluation_names_no_members_that_were_stopped() -> None:
    of_all = ft.population.step(ft.eval_step(loss_fn))
    states = [trained(steps=0).replace(params=jnp.float32(x)) for x in (1.0, np.nan, np.nan)]
    population = ft.population.stack(states)
    with pytest.warns(UserWarning, match=r"evaluate: .* of members \[1, 2\]"):
        ft.evaluate(population, of_all, loader())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ft.evaluate(population.replace(active=jnp.asarray([True, False, False])), of_all, loader())


def test_evaluations_within_a_fit_warn_at_the_line_of_the_fit_which_python_shows_once() -> None:
    hook = ft.hooks.Evaluate(ft.eval_step(loss_fn), loader(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        ft.fit(trained(steps=0), TRAINING, loader(), epochs=3, hooks=[hook], verbose=0)
    assert [warning.filename for warning in caught] == [__file__]
    assert "evaluate: expected a finite loss" in str(caught[0].message)
