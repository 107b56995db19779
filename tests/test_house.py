"""The shape of the house: what imports what, what is public, what is documented."""

import ast
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import bridge
import functrain
from tests.conftest import SLOW

ROOT = pathlib.Path(__file__).parents[1]

# Imports go downwards only: a module may import those above it in this list, and its own floor.
FLOORS = [
    ["functrain.common", "functrain._version"],
    ["functrain.rewrites"],
    ["functrain.data"],
    ["functrain.model"],
    ["functrain.metrics"],
    ["functrain.tx"],
    ["functrain.sharding"],
    ["functrain.distributed"],
    ["functrain.step"],
    ["functrain.engine"],
    ["functrain.checkpoint"],
    ["functrain.export"],
    ["functrain.loop"],
    ["functrain.hooks"],
    ["functrain.population"],
    ["functrain.trainer"],
    ["functrain"],
    ["bridge._backend", "bridge._version", "bridge._randomness"],
    ["bridge.keras_private"],
    ["bridge.model"],
    ["bridge.optim"],
    ["bridge.state"],
    ["bridge.train"],
    ["bridge"],
]


def floor_of(module: str) -> int:
    best = max(
        (name for floor in FLOORS for name in floor if (module + ".").startswith(name + ".")),
        key=len,
    )
    return next(i for i, floor in enumerate(FLOORS) if best in floor)


def modules() -> list[tuple[str, pathlib.Path]]:
    found = []
    for package in ("functrain", "bridge"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts).removesuffix(".__init__"), path))
    return found


def imports(path: pathlib.Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_go_downwards(module: str, path: pathlib.Path) -> None:
    ours = {n for n in imports(path) if n.split(".")[0] in ("functrain", "bridge")}
    for name in ours:
        target = floor_of(name)
        assert target <= floor_of(module), f"{module} imports {name} from a floor above"


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_the_bridge_takes_what_is_not_public_through_one_door(
    module: str, path: pathlib.Path
) -> None:
    if module.startswith("bridge"):
        names = {n for n in imports(path) if n.split(".")[0] == "functrain"}
        public = {f"functrain.{name}" for name in functrain.__all__} | {"functrain"}
        private = {n for n in names if not n.startswith("functrain.internal.")} - public
        assert not private, f"{module} takes {private} by another way than functrain.internal"


ROOMS = [path for path in modules() if path[1].name == "__init__.py" and "." in path[0]]


@pytest.mark.parametrize(("module", "path"), ROOMS, ids=[name for name, _ in ROOMS])
def test_a_folder_says_which_files_are_in_it(module: str, path: pathlib.Path) -> None:
    if module == "functrain.rewrites":  # its rules are listed where they are ordered
        return
    listed = re.findall(r"^  (\w+): \S", ast.get_docstring(ast.parse(path.read_text())) or "", re.M)
    there = {p.stem for p in path.parent.glob("*.py")} - {"__init__", "__main__"}
    assert len(listed) == len(there)
    assert set(listed) == there


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_only_the_bridge_imports_keras(module: str, path: pathlib.Path) -> None:
    if module.startswith("functrain"):
        assert not {n for n in imports(path) if n.split(".")[0] in ("keras", "bridge")}


@pytest.mark.parametrize(
    ("package", "needs"),
    [
        pytest.param("functrain", "flax, jax, optax, rich", marks=pytest.mark.smoke),
        pytest.param("bridge", "functrain, keras", marks=pytest.mark.long),
    ],
)
def test_an_import_brings_nothing_but_what_is_always_needed(package: str, needs: str) -> None:
    code = (
        f"import sys, {needs}; before = set(sys.modules); import {package}; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "known = {name.split('.')[0] for name in before} | sys.stdlib_module_names; "
        "print(sorted(new - known), 'flax.nnx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"['{package}'] False"


def test_what_is_listed_as_slow_is_there() -> None:
    listed = SLOW.read_text().splitlines()
    assert listed == sorted(set(listed))
    for line in listed:
        path, _, test = line.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), line


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert functrain.__version__ == bridge.__version__ == project["version"]


NO_DOCSTRING = ("__version__", "hooks", "metrics", "population", "rewrites", "sharding")
NO_DOCSTRING += ("distributed", "Mode")
NAMESPACES = [functrain, functrain.hooks, functrain.metrics, functrain.population]
NAMESPACES += [functrain.rewrites, functrain.distributed, functrain.sharding, bridge]
PUBLIC = [
    (package.__name__, name)
    for package in NAMESPACES
    for name in package.__all__
    if name not in NO_DOCSTRING
]


@pytest.mark.parametrize("package", NAMESPACES)
def test_all_lists_every_export(package) -> None:
    exported = {
        alias.asname
        for node in ast.parse(pathlib.Path(package.__file__).read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert exported == set(package.__all__)
    assert list(package.__all__) == sorted(package.__all__)


@pytest.mark.parametrize(("package", "name"), PUBLIC)
def test_public_names_are_documented_with_an_example(package: str, name: str) -> None:
    thing = getattr(importlib.import_module(package), name)
    doc = inspect.getdoc(thing) or ""
    assert doc, f"{package}.{name} has no docstring"
    assert ">>> " in doc or name == "Step", f"{package}.{name} has no runnable example"
