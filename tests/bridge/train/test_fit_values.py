"""The model always has its values: in callbacks, in data, and after whatever ends a run."""

import bridge  # isort: skip  # before keras: it chooses the backend

from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
import numpy as np
import pytest

import functrain as ft
from tests.bridge.fitting import X, Y, assert_same, fit, fresh, values

RATES = [0.1, 0.01, 0.001]


def reads(model: keras.Model, calls: int) -> Any:
    return [x.sum() for x in model.get_weights()], float(model.optimizer.learning_rate)


def predicts(model: keras.Model, calls: int) -> Any:
    return model.predict(X[:8], verbose=0).sum()


def predicts_by_bridge(model: keras.Model, calls: int) -> Any:
    # Keras's own where Keras is the judge: both leave the model as it is.
    return bridge.predict(model, X[:8], verbose=0, rewrites="exact").sum()


LOOKS = {
    "sets rate": lambda model, calls: setattr(model.optimizer, "learning_rate", RATES[calls % 3]),
    "sets weights": lambda model, _: model.set_weights([0.5 * x for x in model.get_weights()]),
    "reads": reads,
    "predicts": predicts,
    "predicts by bridge": predicts_by_bridge,
    "evaluates": lambda model, _: model.evaluate(X[:8], Y[:8], verbose=0),
}


class Looking(keras.utils.PyDataset):
    """Looks at the model when an epoch of its data begins or ends, or when a batch is fetched."""

    def __init__(self, model: keras.Model, look: Callable[..., Any], place: str = "begin") -> None:
        super().__init__()
        self.model, self.look, self.place, self.seen = model, look, place, []

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> Any:
        self._look_at("item")
        return X[i * 10 : i * 10 + 10], Y[i * 10 : i * 10 + 10]

    def on_epoch_begin(self) -> None:
        self._look_at("begin")

    def on_epoch_end(self) -> None:
        self._look_at("end")

    def _look_at(self, place: str) -> None:
        # Not while Keras's first look at the data builds the model.
        if place == self.place and self.model.metrics_variables:
            self.seen.append(self.look(self.model, len(self.seen)))


FITS = {"epochs": 3, "shuffle": False, "verbose": 0}
USES = {
    "fit": lambda owner, model, data, **more: owner.fit(model, data, **FITS, **more).history,
    "fit on validation data": lambda owner, model, data, **more: (
        owner.fit(model, X, Y, validation_data=data, **FITS, **more).history
    ),
    "evaluate": lambda owner, *data, **more: owner.evaluate(*data, verbose=0, **more),
    "predict": lambda owner, *data, **more: owner.predict(*data, verbose=0, **more),
}
EACH_USE = pytest.mark.parametrize("use", USES.values(), ids=USES)


def used(owner: Any, use: Any, look: Any, place: str) -> tuple[keras.Model, Any, Any]:
    model = fresh()
    model.train_on_batch(X[:10], Y[:10])
    data = Looking(model, look, place)
    more = {"rewrites": "exact"} if owner is bridge else {}
    return model, use(owner, model, data, **more), data.seen


@EACH_USE
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_data_that_look_at_the_model_find_what_they_find_in_keras(look: Any, use: Any) -> None:
    ours, result, seen = used(bridge, use, look, "begin")
    theirs, expected, seen_by_keras = used(keras.Model, use, look, "begin")
    np.testing.assert_equal(result, expected)
    np.testing.assert_equal(seen, seen_by_keras)
    assert_same(ours, theirs)


@pytest.mark.parametrize("place", ["item", "end"])
@EACH_USE
def test_data_may_look_at_the_model_where_keras_has_taken_its_values(use: Any, place: str) -> None:
    quiet, expected, _ = used(bridge, use, lambda model, calls: None, place)
    for look in (reads, predicts, predicts_by_bridge):
        model, result, seen = used(bridge, use, look, place)
        np.testing.assert_equal(result, expected)
        assert seen
        assert_same(model, quiet)


class BrokenError(RuntimeError):
    """An error of the user's code."""


def raises(*_: Any, **__: Any) -> None:
    raise BrokenError


def interrupts(model: keras.Model, calls: int) -> None:
    raise KeyboardInterrupt


def breaks_a_predict(model: keras.Model, calls: int) -> None:
    breaking = keras.callbacks.Callback()
    breaking.on_predict_batch_end = raises
    model.predict(X, verbose=0, callbacks=[breaking])


BREAKS = [raises, interrupts, breaks_a_predict]


@pytest.mark.parametrize("place", ["begin", "item", "end"])
@EACH_USE
@pytest.mark.parametrize("look", BREAKS)
def test_the_model_has_its_values_after_an_error_of_the_data(
    look: Any, use: Any, place: str
) -> None:
    model = fresh()
    model.train_on_batch(X[:10], Y[:10])
    before = values(model)
    # Not before the second epoch, and the second batch.
    data = Looking(model, lambda model, n: look(model, n) if n > 6 else None, place)

    def use_often() -> None:
        for _ in range(9):
            use(bridge, model, data)

    with pytest.raises((BrokenError, KeyboardInterrupt)):
        use_often()
    after = values(model)
    assert [x.shape for x in after] == [x.shape for x in before]
    assert all(np.isfinite(x).all() for x in after)
    np.testing.assert_array_equal(model.predict(X[:4], verbose=0), model(X[:4]))


PLACES = [
    f"on_{kind}_{place}"
    for kind in ("train", "test")
    for place in ("begin", "batch_begin", "batch_end", "end")
] + ["on_epoch_begin", "on_epoch_end"]


@pytest.mark.parametrize("saves", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("look", BREAKS)
@pytest.mark.parametrize("place", PLACES)
def test_the_model_has_its_values_after_an_error_of_a_callback(
    place: str, look: Any, saves: bool, tmp_path: Any
) -> None:
    model, steps = fresh(), []

    class Breaking(keras.callbacks.Callback):
        pass

    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        steps.append(int(model.optimizer.iterations))
        comes_once = place in {"on_train_begin", "on_train_end"}
        if comes_once or len(steps) > 1:
            look(model, 0)

    setattr(Breaking, place, broken)
    more = {"checkpointer": ft.Checkpointer(tmp_path)} if saves else {}
    with pytest.raises((BrokenError, KeyboardInterrupt)):
        fit(model, callbacks=[Breaking()], validation_data=(X[:20], Y[:20]), **more)
    assert int(model.optimizer.iterations) == steps[-1]
    assert all(np.isfinite(x).all() for x in values(model))
    model.evaluate(X, Y, verbose=0)


def test_averaged_weights_are_in_the_model_after_an_error_as_in_keras() -> None:
    models = []
    for way in (bridge.fit, keras.Model.fit):
        model = fresh(optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
        with pytest.raises(BrokenError):
            fit(model, way, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=raises)])
        models.append(model)
    assert_same(*models)


class Order(keras.callbacks.Callback):
    """Writes down which methods are called, and which batches are fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(f"begin {batch}")
        np.random.normal()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(f"end {batch}")

    def on_test_begin(self, logs: Any = None) -> None:
        self.seen.append("evaluate")

    def batches(self, name: str) -> Iterator[Any]:
        for i, size in enumerate([8, 8, 6, 6, 8]):
            self.seen.append(f"fetch {name} {i}")
            # The batch depends on what callbacks have drawn.
            yield X[:size] * np.random.normal(), Y[:size]


@pytest.mark.parametrize("more", [{}, {"steps_per_epoch": 2, "epochs": 2}, {"epochs": 2}], ids=str)
@pytest.mark.parametrize("execution", [1, 2])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_batches_are_fetched_after_they_begin_as_in_keras(more: Any, execution: int) -> None:
    runs = []
    for way, exact in ((bridge.fit, {"rewrites": "exact"}), (keras.Model.fit, {})):
        order, model = Order(), fresh(steps_per_execution=execution)
        evaluated = {"validation_data": order.batches("validation"), "validation_steps": 2}
        options = {"verbose": 0, "shuffle": False, "callbacks": [order], **evaluated, **more}
        np.random.seed(0)
        way(model, order.batches("x"), **options, **exact)
        runs.append((order.seen, model))
    (ours, model), (theirs, keras_model) = runs
    assert ours == theirs
    assert_same(model, keras_model)


@EACH_USE
def test_a_model_whose_predict_was_interrupted_is_used_as_if_it_had_not_been(use: Any) -> None:
    results = []
    for interrupted in (True, False):
        model = fresh()
        model.train_on_batch(X[:10], Y[:10])
        if interrupted:
            with pytest.raises(BrokenError):
                breaks_a_predict(model, 0)
        data = Looking(model, lambda model, calls: None)
        results.append((use(bridge, model, data), values(model)))
    np.testing.assert_equal(*results)


def test_two_variables_may_share_an_array() -> None:
    models = []
    for way in (bridge.fit, keras.Model.fit):
        model = fresh(optimizer=keras.optimizers.SGD(0.001, momentum=0.9))
        model.build((None, 8))
        model.optimizer.build(model.trainable_variables)
        first, second = model.layers[0].kernel, model.optimizer.variables[2]
        shared = jax.numpy.asarray(np.asarray(first.value))
        first.assign(shared)
        second.assign(shared if way is bridge.fit else shared.copy())
        fit(model, way)
        models.append(model)
    assert_same(*models)
