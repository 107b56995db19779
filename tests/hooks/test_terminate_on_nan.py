import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft


def step(state, batch):
    return state + 1, {"loss": jnp.sum(batch)}


def train(bad, folder=None, last=None, fuse=4, value=np.nan, **how):
    data = np.zeros(40, np.float32)
    data[[n - 1 for n in bad]] = value
    hook = ft.hooks.TerminateOnNaN(**how)
    saves = None if folder is None else ft.Checkpointer(folder, every=ft.every(steps=3))
    hooks = [hook] if last is None else [hook, last]
    settings = {"hooks": hooks, "fuse": fuse, "verbose": 0, "checkpointer": saves}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        state, history = ft.fit(np.int32(0), step, ft.ArrayLoader(data, 1), **settings)
    assert len(history.steps["loss"]) == int(state)
    return int(state), hook.step, [str(warning.message) for warning in said]


def test_a_run_ends_in_the_program_after_the_one_whose_loss_was_not_finite() -> None:
    state, found, said = train([6], fuse=4)
    assert (state, found) == (12, 6)
    (text,) = said
    assert "'loss' was not finite in step 6; the run ended after step 12. Checkpointer" in text


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fuse", [1, 3, 40])
def test_so_many_steps_in_a_row_are_counted_across_programs(fuse, value) -> None:
    bad = [2, 3, 5, 6, 9, 10, 11, 30, 31, 32]
    state, found, said = train(bad, after=3, fuse=fuse, value=value)
    assert found == 11
    assert 11 <= state <= 11 + 2 * fuse
    assert "in 3 steps up to 11;" in said[0]


def test_a_run_without_them_is_left_alone() -> None:
    assert train([], after=1) == (40, None, [])
    assert train([2, 4, 6], after=2) == (40, None, [])


def test_counting_goes_on_where_a_run_was(tmp_path) -> None:
    @ft.at(7)
    def cut(event):
        raise KeyError

    with pytest.raises(KeyError):
        train([6, 7, 8], tmp_path, cut, after=3)
    assert ft.Checkpointer(tmp_path).latest() == 6
    assert train([6, 7, 8], tmp_path, after=3)[1] == 8


def test_a_step_that_was_found_before_a_checkpoint_stops_the_resumed_run(tmp_path) -> None:
    @ft.at(4)
    def cut(event):
        raise KeyError

    with pytest.raises(KeyError):
        train([3], tmp_path, cut)
    assert ft.Checkpointer(tmp_path).latest() == 3
    assert train([3], tmp_path)[:2] == (6, 3)


def test_the_warning_shows_the_line_that_called_fit() -> None:
    loader = ft.ArrayLoader(np.full(4, np.nan, np.float32), 1)
    with pytest.warns(UserWarning, match="step 1") as caught:
        ft.fit(jnp.zeros((), jnp.int32), step, loader, hooks=[ft.hooks.TerminateOnNaN()], verbose=0)
    assert [warning.filename for warning in caught] == [__file__]


def test_a_name_that_no_step_reports_is_refused() -> None:
    with pytest.raises(ValueError, match=r"monitor: expected one of .*got 'rec'"):
        train([], monitor="rec")
    with pytest.raises(ValueError, match="after: expected an integer of at least 1, got 0"):
        ft.hooks.TerminateOnNaN(after=0)


def loss_after(total, batch):
    total += batch.sum()
    return total, {"loss": total}


def loss_before(total, batch):
    """As a NaN in a gradient does, a NaN in a batch shows in the loss of the next step."""
    return total + batch.sum(), {"loss": total}


def fit_to_nan(folder, step, bad, hooks=(), value=np.nan, size=40, **how):
    data = np.ones(size, np.float32)
    data[[n - 1 for n in bad]] = value
    checkpoints = ft.Checkpointer(folder, every=how.pop("every", 3), keep=how.pop("keep", 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how |= {"checkpointer": checkpoints, "hooks": hooks, "verbose": 0}
        ft.fit(jnp.zeros(()), step, ft.ArrayLoader(data, 1), **how)
    return checkpoints


@pytest.mark.parametrize("hooks", [[], [ft.hooks.TerminateOnNaN()]], ids=["goes on", "stops"])
@pytest.mark.parametrize("step", [loss_after, loss_before])
@pytest.mark.parametrize("bad", [17, 18, 19])
@pytest.mark.parametrize("fuse", [1, 7])
def test_the_last_checkpoint_before_a_nan_is_kept(tmp_path, fuse, bad, step, hooks) -> None:
    keep = 1 if step is loss_after else 2  # of one, nobody knows yet whether its loss is finite
    checkpoints = fit_to_nan(tmp_path, step, [bad], hooks, fuse=fuse, keep=keep)
    good, *later = checkpoints.steps()
    assert bad - 6 <= good < bad
    assert checkpoints.restore(jnp.zeros(()), good).state == good
    assert 1 <= len(later) <= keep  # the newest
    assert np.isnan(checkpoints.restore(jnp.zeros(())).state)


def test_it_is_kept_by_a_run_that_resumes_with_a_nan(tmp_path) -> None:
    def fail(event):
        if event.step == 30:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fit_to_nan(tmp_path, loss_after, [17], [ft.every(steps=30)(fail)])
    checkpoints = fit_to_nan(tmp_path, loss_after, [17])
    assert checkpoints.steps() == [15, 40]


def test_it_is_dropped_once_losses_are_finite_again(tmp_path) -> None:
    checkpoints = fit_to_nan(tmp_path, step, [16, 17], value=np.inf, size=39)
    assert checkpoints.steps() == [39]
