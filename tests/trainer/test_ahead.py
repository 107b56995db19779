"""What is wrong with an evaluation, or with a value to watch, is found before the first step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 3)).astype(np.float32)
Y = RNG.integers(0, 2, 20)
ONE_HOT = np.eye(2, dtype=np.float32)[Y]
LOADER = ft.ArrayLoader((X, Y), 8)
TX = optax.sgd(0.1)
MODEL = ft.Model(
    init=lambda key, x: ({"w": jnp.zeros((3, 2))}, {}),
    apply=lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(x @ p["w"], s),
)
LOSS = ft.supervised(MODEL, optax.softmax_cross_entropy_with_integer_labels)
EVAL = ft.eval_step(LOSS, metrics={"accuracy": ft.metrics.accuracy()})


def logging(params, model_state, batch, *, rng, training):
    loss, aux = LOSS(params, model_state, batch, rng=rng, training=training)
    return loss, aux.replace(logs={"extra": loss})


class Fit:
    """A fit that notes how many steps were dispatched."""

    def __init__(self, loss=LOSS, **metrics):
        self.steps = 0
        train = ft.train_step(loss, TX, metrics=metrics or None)

        def step(state, batch):
            jax.debug.callback(self.count)
            return train(state, batch)

        self.step = train if metrics else step

    def count(self):
        self.steps += 1

    def __call__(self, **how):
        state = ft.TrainState.create(params={"w": jnp.zeros((3, 2))}, tx=TX)
        return ft.fit(state, self.step, **{"data": LOADER, "epochs": 2, "verbose": 0, **how})


class Passes:
    """A re-iterable that is no list, and counts its passes."""

    def __init__(self, *batches):
        self.batches, self.passes = batches, 0

    def __iter__(self):
        self.passes += 1
        return iter(self.batches)


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        ((X, Y), TypeError, r"eval_data: expected an ArrayLoader.*got tuple\. For arrays"),
        ([], ValueError, r"eval_data: expected at least one batch, got \[\]"),
        (Passes(), ValueError, "eval_data: expected at least one batch, got none"),
        (ft.ArrayLoader(X, 8), ValueError, r"expected \(x, y\).*got float32\[8, 3\]"),
        (ft.ArrayLoader((X, ONE_HOT), 8), TypeError, "numpy.integer"),
        ([(X, ONE_HOT)], TypeError, "numpy.integer"),
        (Passes((X, ONE_HOT)), TypeError, "numpy.integer"),
        (ft.ArrayLoader((X[:, :2], Y), 8), TypeError, "dot_general"),
    ],
)
def test_what_cannot_be_evaluated_is_found_before_the_first_step(data, kind, words) -> None:
    fit = Fit()
    with pytest.raises(kind, match=words) as error:
        fit(eval_data=data, eval_step=EVAL)
    assert fit.steps == 0
    assert not hasattr(error.value, "fit_result")


def test_so_is_what_a_hook_cannot_evaluate() -> None:
    fit = Fit()
    hook = ft.hooks.Evaluate(EVAL, ft.ArrayLoader((X, ONE_HOT), 8), every=ft.every(epochs=2))
    with pytest.raises(TypeError) as error:
        fit(hooks=[hook])
    assert fit.steps == 0
    assert "got float32[8, 2] and float32[8, 2]" in error.value.__notes__[0]
    assert any("evaluation of data was traced" in note for note in error.value.__notes__)


def test_looking_ahead_takes_no_batch_and_no_pass_from_the_evaluation() -> None:
    fit = Fit()
    whole = fit(eval_data=LOADER, eval_step=EVAL).history.epochs["val_loss"].tolist()
    data = Passes((X[:12], Y[:12]), (X[12:], Y[12:]))
    again = fit(eval_data=data, eval_step=EVAL).history.epochs["val_loss"]
    assert again == pytest.approx(whole)
    assert data.passes == 2
    once = fit(epochs=1, eval_data=iter(data), eval_step=EVAL).history.epochs["val_loss"]
    assert once == pytest.approx(whole[:1])


def test_data_may_reuse_the_memory_of_a_batch_that_was_looked_at() -> None:
    memory = np.empty_like(X[:4]), np.empty_like(Y[:4])

    class Reused(Passes):
        def __iter__(self):
            for batch in self.batches:
                jax.tree.map(np.copyto, memory, batch)
                yield memory

    data = Reused(*((X[i : i + 4], Y[i : i + 4]) for i in range(0, 20, 4)))
    found, expected = (
        Fit()(data=data, epochs=1, eval_data=x, eval_step=EVAL).history.epochs["val_loss"]
        for x in (data, data.batches)
    )
    assert found == expected


@pytest.mark.parametrize("how", [{}, {"eval_data": LOADER, "eval_step": ft.eval_step(LOSS)}])
def test_a_value_nobody_provides_is_found_before_the_first_step(how, tmp_path) -> None:
    stopping = ft.hooks.EarlyStopping("val_accuracy")
    keeping = ft.Checkpointer(tmp_path, monitor="val_accuracy")
    log = ft.hooks.CSVLogger(tmp_path / "log.csv")
    others = [log, ft.hooks.JSONLines(tmp_path / "log.jsonl"), ft.hooks.TerminateOnNaN()]
    others.append(ft.hooks.Watchdog(600))
    for watching in ({"hooks": [*others, stopping]}, {"checkpointer": keeping}):
        fit = Fit(logging)
        with pytest.raises(ValueError, match=r"\['extra', 'loss'.*got 'val_accuracy'\..*eval_d"):
            fit(**how, **watching)
        assert fit.steps == 0


def test_a_value_that_somebody_provides_can_be_watched(tmp_path) -> None:
    late = ft.hooks.Evaluate(EVAL, LOADER, prefix="late_")
    names = ["loss", "extra", "accuracy", "val_accuracy", "late_accuracy"]
    watching = [ft.hooks.EarlyStopping(name, mode="max", patience=9) for name in names]
    fit = Fit(logging, accuracy=ft.metrics.accuracy())
    keeping = ft.Checkpointer(tmp_path, monitor="extra", mode="max")
    fit(eval_data=LOADER, eval_step=EVAL, hooks=[late, *watching], checkpointer=keeping)
    assert all(hook.best_step is not None for hook in watching)


@pytest.mark.parametrize(("prefix", "name"), [("val_", "val_accuracy"), ("", "accuracy")])
def test_an_evaluation_that_would_replace_a_value_is_refused(prefix, name) -> None:
    fit = Fit(accuracy=ft.metrics.accuracy())
    how = {"eval_data": LOADER, "eval_step": EVAL}
    words = rf"prefix: expected one that gives names other than \['{name}'.*prefix='test_'"
    with pytest.raises(ValueError, match=words) as error:
        fit(**how, hooks=[ft.hooks.Evaluate(EVAL, LOADER, prefix=prefix)])
    assert not hasattr(error.value, "fit_result")  # raised before the first step
    often = [ft.hooks.Evaluate(EVAL, LOADER, every=n, prefix="val_") for n in (2, 3)]
    fit(**how, hooks=often, epochs=1)  # steps 2 and 3, and the end of the epoch
    with pytest.raises(ValueError, match=words.replace(name, "val_accuracy")) as error:
        fit(**how, hooks=often)
    assert error.value.fit_result.state.step == 6


def test_a_value_may_come_from_a_function_of_the_user_s() -> None:
    def add(event):
        event.values["score"] = 1.0

    stopping = ft.hooks.EarlyStopping("score", mode="max", patience=9)
    Fit()(hooks=[add, stopping])
    assert stopping.best == 1.0


def test_an_uncompiled_step_is_not_traced_to_find_out() -> None:
    def loss(params, model_state, batch, *, rng, training):
        value = jnp.sum(params["w"]) * batch[0, 0]
        return value * (1 if training else bool(value >= 0)), ft.Aux(model_state)  # no tracing

    state = ft.TrainState.create(params={"w": jnp.zeros((3, 2))}, tx=TX)
    one = [X[:8]]
    how = {"eval_data": one, "eval_step": ft.eval_step(loss), "jit": False, "verbose": 0}
    assert "val_loss" in ft.fit(state, ft.train_step(loss, TX), one, **how).history.epochs


@pytest.mark.parametrize("is_of_hooks", [False, True])
def test_an_iterator_is_read_by_one(is_of_hooks) -> None:
    # Training and evaluation would each get a part of its batches.
    batches = iter([(X[:8], Y[:8]), (X[8:], Y[8:])] * 3)
    if is_of_hooks:
        hooks = [ft.hooks.Evaluate(EVAL, batches, prefix=prefix) for prefix in ("a_", "b_")]
        how = {"hooks": hooks}
    else:
        how = {"data": batches, "eval_data": batches, "eval_step": EVAL}
    fit = Fit()
    with pytest.raises(ValueError, match="data: expected an iterator that nothing else"):
        fit(epochs=1, **how)
    assert not fit.steps
    # The same list is read from its beginning by each.
    both = [(X[:8], Y[:8]), (X[8:], Y[8:])]
    same = fit(epochs=1, data=both, eval_data=both, eval_step=EVAL)
    expected = ft.evaluate(same.state, EVAL, both)["loss"]
    np.testing.assert_allclose(same.history.epochs["val_loss"], [expected], rtol=1e-6)


def test_metrics_may_begin_with_numbers() -> None:
    # Python could not divide the first values, 0.0 / 0; jax can.
    metric = ft.metrics.Metric(
        lambda: {"sum": 0.0, "count": 0},
        lambda m, batch, aux, loss: {
            "sum": m["sum"] + jnp.abs(aux.outputs).sum(),
            "count": m["count"] + len(batch[0]),
        },
        lambda m: m["sum"] / m["count"],
    )
    evaluation = ft.eval_step(LOSS, metrics={"size": metric})
    state, history = Fit(size=metric)(eval_data=LOADER, eval_step=evaluation)
    expected = np.abs(X.astype(np.float64) @ np.asarray(state.params["w"], np.float64)).sum() / 20
    assert history.epochs["val_size"][-1] == pytest.approx(expected, rel=1e-5)
