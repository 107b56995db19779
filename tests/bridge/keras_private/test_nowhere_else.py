"""No other file of the bridge touches a private name of Keras."""

import bridge  # isort: skip  # before keras: it chooses the backend

import ast
import importlib
import inspect
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import keras
import pytest

ROOT = pathlib.Path(bridge.__file__).parent
FILES = [p for p in sorted(ROOT.rglob("*.py")) if "keras_private" not in p.parts]
OF_NAMED_TUPLES = {"_replace", "_fields", "_asdict"}
IMPORT = re.compile(r"keras\.(src|_)")


def names_in(source: str) -> set[str]:
    """Returns the private names that a source defines, reads or sets."""
    return set(re.findall(r"(?:\.|def )(_[a-z]\w*)", source))


def names_of_keras() -> set[str]:
    sources = (pathlib.Path(keras.__file__).parent / "src").rglob("*.py")
    return set().union(*(names_in(p.read_text()) for p in sources if "_test" not in p.name))


def inherited(cls: type) -> set[str]:
    """Returns the private names that a class has from Keras."""
    modules = {c.__module__ for c in cls.__mro__ if c.__module__.split(".")[0] == "keras"}
    return set().union(*(names_in(inspect.getsource(sys.modules[name])) for name in modules))


def touched(tree: ast.AST, keras_names: set[str], classes: dict[str, Any]) -> Iterator[str]:
    """Yields what a file says of Keras that is not public."""
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr))
    pieces = {piece for string in strings for piece in string.values}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names if IMPORT.match(alias.name))
            case ast.ImportFrom(module, names):
                found = (f"{module}.{alias.name}" for alias in names)
                yield from (name for name in found if IMPORT.match(name))
            case ast.Constant(str(text)) if node not in pieces:
                if text in keras_names or IMPORT.match(text):
                    yield repr(text)
            case ast.keyword(str(name)) if name in keras_names:
                yield f"{name}="
            case ast.Attribute(owner, name) if ast.unparse(owner) not in ("self", "cls"):
                named = IMPORT.match(ast.unparse(node))
                if named or (name in keras_names and name not in OF_NAMED_TUPLES):
                    yield ast.unparse(node)
            case ast.ClassDef(name):
                cls = classes.get(name)  # one inside a function is not looked up
                yield from touched_inside(node, inherited(cls) if cls else keras_names)


def touched_inside(body: ast.ClassDef, from_keras: set[str]) -> Iterator[str]:
    """Yields what a class reads, sets or overrides of the private names it has from Keras."""
    for node in ast.walk(body):
        match node:
            case ast.Attribute(_, name) if name in from_keras:
                yield f"{body.name}: {ast.unparse(node)}"
            case ast.FunctionDef(name) if name in from_keras:
                yield f"{body.name}: def {name}"


@pytest.fixture(scope="module")
def keras_names() -> set[str]:
    return names_of_keras()


def test_no_other_file_touches_a_private_name_of_keras(keras_names: set[str]) -> None:
    private = {}
    for path in FILES:
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        tree = ast.parse(path.read_text())
        private[str(path.relative_to(ROOT))] = list(touched(tree, keras_names, vars(module)))
    assert {name: names for name, names in private.items() if names} == {}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import keras.src.backend", "keras.src.backend"),
        ("from keras.src.losses import loss", "keras.src.losses.loss"),
        ("keras.src.backend.get_keras_mask(x)", "keras.src"),
        ("outputs._keras_mask", "outputs._keras_mask"),
        ("getattr(variable, '_value', None)", "'_value'"),
        ("vars(model).update(_jax_state=None)", "_jax_state="),
        ("class Mine(keras.Layer):\n  def f(self): return self._layers", "Mine: self._layers"),
        ("class Mine(keras.Optimizer):\n  def _backend_update_step(self): pass", "Mine: def _back"),
    ],
)
def test_what_touches_one_is_found(code: str, found: str, keras_names: set[str]) -> None:
    base = re.search(r"\(keras\.(\w+)\)", code)
    classes = {"Optimizer": keras.optimizers.Optimizer, "Layer": keras.Layer, "Model": keras.Model}
    mine = {"Mine": type("Mine", (classes[base[1]],), {})} if "class Mine(keras" in code else {}
    assert any(x.startswith(found) for x in touched(ast.parse(code), keras_names, mine))
