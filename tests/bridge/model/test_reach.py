"""Which steps may touch Keras: found in whatever way they hold a model."""

import bridge  # isort: skip  # before keras: it chooses the backend

import functools
import sys
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import optax
import pytest

import functrain as ft
from bridge.model._reach import reaches_keras

del bridge

MODEL = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
MODULE = types.ModuleType("module_of_models")
MODULE.net = MODEL  # type: ignore[attr-defined]


def by_global(state: Any, x: Any) -> Any:
    return state, MODEL(x)


def by_module(state: Any, x: Any) -> Any:
    return state, MODULE.net(x)


def by_import(state: Any, x: Any) -> Any:
    import keras as k

    return state, k.random.normal((2,)) + x


def by_function(state: Any, x: Any) -> Any:
    return by_global(state, x)


def by_default(state: Any, x: Any, model: Any = MODEL) -> Any:
    return state, model(x)


def by_closure(model: Any) -> Any:
    return lambda state, x: (state, model(x))


def within(state: Any, x: Any) -> Any:
    return state, [MODEL(row) for row in x]


class Trainer:
    """Holds a model, and has methods."""

    shared = MODEL

    def __init__(self, model: Any = None) -> None:
        self.model = model

    def step(self, state: Any, x: Any) -> Any:
        return state, self.model(x)

    __call__ = step


class Base:
    """Uses a model in a method and in an attribute of the class."""

    net = MODEL

    def helper(self, x: Any) -> Any:
        return MODEL(x)


class Child(Base):
    """Inherits both."""

    def step(self, state: Any, x: Any) -> Any:
        return state, self.helper(x)

    __call__ = step


def by_class(state: Any, x: Any) -> Any:
    return state, Trainer.shared(x)


def loss_by_closure(params: Any, model_state: Any, x: Any, *, rng: Any, training: bool) -> Any:
    return jnp.mean(MODEL(x)), ft.Aux(model_state)


@pytest.mark.parametrize(
    "step",
    [
        *(by_global, by_module, by_import, by_function, by_default, within, by_class),
        by_closure(MODEL),
        by_closure({"models": [MODEL]}),
        by_closure(keras.metrics.Mean()),
        by_closure(keras.Variable(1.0)),
        functools.partial(by_default, model=MODEL),
        jax.jit(by_global),
        jax.vmap(by_closure(MODEL)),
        Trainer(MODEL),
        Trainer(MODEL).step,
        Child(),
        Child().step,
        ft.train_step(loss_by_closure, optax.sgd(0.1)),
        ft.eval_step(loss_by_closure),
    ],
    ids=lambda step: getattr(step, "__name__", type(step).__name__),
)
def test_a_step_that_holds_something_of_keras_in_any_way(step) -> None:
    assert reaches_keras(step)


IMPORTING = {
    "a dotted name": "import reach_package.deep\ndef step(x): return reach_package.deep.model(x)",
    "a dotted name within": "def step(x):\n import reach_package.deep\n"
    " return reach_package.deep.model(x)",
    "another name": "import reach_package.deep as d\ndef step(x): return d.model(x)",
    "from a module": "def step(x):\n from .deep import model\n return model(x)",
    "from a package": "def step(x):\n from . import deep\n return deep.model(x)",
    "from the package above": "def step(x):\n from ..deep import model\n return model(x)",
    "a name of the package": "def step(x):\n from .. import net\n return net(x)",
}


@pytest.mark.parametrize("calls_keras", [True, False])
@pytest.mark.parametrize("source", IMPORTING.values(), ids=IMPORTING)
def test_a_step_that_imports_a_module_of_the_users(
    source: str, calls_keras: bool, monkeypatch
) -> None:
    package, inner, deep = (
        types.ModuleType(f"reach_package{name}") for name in ("", ".inner", ".deep")
    )
    model = by_closure(MODEL) if calls_keras else jnp.sin
    deep.model = package.net = model  # type: ignore[attr-defined]
    deep.unused = MODEL  # type: ignore[attr-defined]
    package.deep = deep  # type: ignore[attr-defined]
    for module in (package, inner, deep):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    where = inner if ".." in source else package
    scope: dict[str, Any] = {"__package__": where.__name__, "__name__": "reach_package.steps"}
    exec(source, scope)
    assert reaches_keras(scope["step"]) == calls_keras


class Plain:
    """Holds params."""

    def __init__(self) -> None:
        self.params = {"w": jnp.ones(3)}

    def step(self, state: Any, x: Any) -> Any:
        return state, x @ self.params["w"]


class PlainChild(Plain):
    """Inherits its step."""

    __call__ = Plain.step


def by_name_only(state: Any, x: Any) -> Any:
    return state, {"MODEL": jnp.sum(x)}


LINEN = ft.from_linen(nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(2)]))
LOSS = ft.supervised(LINEN, optax.softmax_cross_entropy_with_integer_labels)
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


@pytest.mark.parametrize(
    "step",
    [
        by_name_only,
        Plain().step,
        PlainChild(),
        jax.jit(by_name_only),
        ft.train_step(LOSS, TX, metrics={"accuracy": ft.metrics.accuracy()}),
        ft.train_step(ft.micro_batches(LOSS, 2), TX),
        ft.eval_step(LOSS),
        ft.predict_step(LINEN),
        ft.population.step(ft.train_step(LOSS, TX)),
    ],
    ids=lambda step: getattr(step, "__name__", type(step).__name__),
)
def test_a_step_of_pure_jax_reaches_nothing_of_keras(step) -> None:
    assert not reaches_keras(step)
