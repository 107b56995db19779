"""Ask and tell: Optuna proposes as many members as there are, a population answers for all."""

import numpy as np
import pytest

import functrain as ft

from .setting import EVAL, PLAIN, loader, of_all, population

optuna = pytest.importorskip("optuna")
pytestmark = pytest.mark.adapters


def test_optuna_asks_and_a_population_tells() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    begin, told = population(), []
    for _ in range(3):
        trials = [study.ask() for _ in range(len(begin))]
        rates = [trial.suggest_float("learning_rate", 1e-3, 1, log=True) for trial in trials]
        members = ft.population.with_hyperparameters(begin, {"learning_rate": rates})
        _, history = ft.fit(
            members,
            of_all(PLAIN),
            loader(),
            eval_data=loader(shuffle=False),
            eval_step=of_all(EVAL),
            verbose=0,
        )
        for trial, rate, loss in zip(trials, rates, history.epochs["val_loss"][-1], strict=True):
            study.tell(trial, loss)
            told.append((loss, rate))
    assert len(study.trials) == 9
    best, rate = min(told)
    assert study.best_value == best
    np.testing.assert_allclose(study.best_params["learning_rate"], rate)
