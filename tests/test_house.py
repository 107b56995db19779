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
    ["functrain.targets"],
    ["functrain.distributed"],
    ["functrain.step"],
    ["functrain.engine"],
    ["functrain.inspect"],
    ["functrain.checkpoint"],
    ["functrain.export"],
    ["functrain.loop"],
    ["functrain.hooks"],
    ["functrain.population"],
    ["functrain.trainer"],
    ["functrain"],
    ["bridge._backend"],
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


IMPORTS = {module: imports(path) for module, path in modules()}


def test_imports_go_downwards() -> None:
    upwards = [
        f"{module} imports {name} from a floor above"
        for module, names in IMPORTS.items()
        for name in sorted(names)
        if name.split(".")[0] in ("functrain", "bridge") and floor_of(name) > floor_of(module)
    ]
    assert upwards == []


def test_the_bridge_takes_what_is_not_public_through_one_door() -> None:
    public = {f"functrain.{name}" for name in functrain.__all__} | {"functrain"}
    for room in inspect.getmembers(functrain, inspect.ismodule):
        public |= {f"functrain.{room[0]}.{name}" for name in getattr(room[1], "__all__", ())}
    private = [
        f"{module} takes {name} by another way than functrain.internal"
        for module, names in IMPORTS.items()
        for name in sorted(names - public)
        if module.startswith("bridge") and name.startswith("functrain.")
        if not name.startswith("functrain.internal.")
    ]
    assert private == []


def test_a_folder_says_which_files_are_in_it() -> None:
    for module, path in modules():
        is_room = path.name == "__init__.py" and "." in module
        if not is_room or module == "functrain.rewrites":  # which lists its rules in their order
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        listed = re.findall(r"^  (\w+): \S", docstring, re.M)
        present = {p.stem for p in path.parent.glob("*.py")} - {"__init__", "__main__"}
        assert sorted(listed) == sorted(present), module


def test_only_the_bridge_imports_keras() -> None:
    importing = [
        f"{module} imports {name}"
        for module, names in IMPORTS.items()
        for name in sorted(names)
        if module.startswith("functrain") and name.split(".")[0] in ("keras", "bridge")
    ]
    assert importing == []


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


def test_every_program_is_compiled_where_it_is_checked() -> None:
    allowed = {"functrain.rewrites._compile": 6}
    allowed["functrain.export._predict"] = 1  # what is exported is compiled elsewhere
    allowed["functrain.engine._loop"] = 1  # what is traced there is a part of a program
    compiling = {"jit", "pjit", "pmap"}
    for module, path in modules():
        nodes = list(ast.walk(ast.parse(path.read_text())))
        attributes = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr in compiling]
        of_jax = [n for n in attributes if ast.unparse(n.value) in ("jax", "nnx", "nn")]
        assert len(of_jax) == allowed.get(module, 0), f"{module}: use rewrites._compile.jit"
        names = {n for n in imports(path) if n.split(".")[0] in ("jax", "flax", "keras")}
        assert not {n for n in names if n.split(".")[-1] in compiling}, module


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert functrain.__version__ == bridge.__version__ == project["version"]


NO_DOCSTRING = ("__version__", "hooks", "inspect", "metrics", "population", "rewrites", "sharding")
NO_DOCSTRING += ("distributed", "events", "export", "tx", "Mode")
NAMESPACES = [
    functrain,
    functrain.hooks,
    functrain.inspect,
    functrain.metrics,
    functrain.population,
]
NAMESPACES += [functrain.rewrites, functrain.distributed, functrain.sharding, bridge]
PUBLIC = [
    (package.__name__, name)
    for package in NAMESPACES
    for name in package.__all__
    if name not in NO_DOCSTRING
]


def test_all_lists_every_export() -> None:
    for package in NAMESPACES:
        exported = {
            alias.asname
            for node in ast.parse(pathlib.Path(package.__file__).read_text()).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.asname
        }
        assert exported == set(package.__all__), package.__name__
        assert list(package.__all__) == sorted(package.__all__), package.__name__


def test_public_names_are_documented_with_an_example() -> None:
    for package, name in PUBLIC:
        docstring = inspect.getdoc(getattr(importlib.import_module(package), name)) or ""
        assert docstring, f"{package}.{name} has no docstring"
        assert ">>> " in docstring or name == "Step", f"{package}.{name} has no runnable example"
