"""The pages of the API: every public name, grouped by what it is for, with its docstring.

A public name that is in no group stops the build. A word in single backticks becomes a link where
it is a public name.
"""

import inspect
import itertools
import re
import types
from typing import Any

from docutils import nodes
from pages import DOCS, write
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

import bridge
import functrain

GROUPS = {
    "Models": "Model ModelOutput from_linen from_nnx freeze merge_frozen cast remat",
    "States, losses and steps": "TrainState supervised LossFn Aux micro_batches update train_step "
    "eval_step predict_step Step MeteredStep",
    "Training": "fit FitResult History run Run evaluate predict fuse Fused ArrayLoader Steps "
    "Position every at enable_compilation_cache",
    "Checkpoints": "Checkpointer save load warm_start WarmStart CheckpointCorruptError "
    "CheckpointMismatchError",
}
DOTTED = re.compile(r"(?:\b\w+\.)+(\w+)")
MODULES = (
    "events", "hooks", "metrics", "tx", "export", "inspect",
    "sharding", "distributed", "population", "rewrites",
)  # fmt: skip


def _names() -> dict[str, list[str]]:
    """Returns the full names on each page."""
    pages = {
        title: [f"functrain.{name}" for name in names.split() if hasattr(functrain, name)]
        for title, names in GROUPS.items()
    }
    for name in MODULES:
        if module := getattr(functrain, name, None):
            pages[f"functrain.{name}"] = [f"functrain.{name}.{x}" for x in module.__all__]
    pages["bridge"] = [f"bridge.{x}" for x in bridge.__all__ if x != "__version__"]
    listed = {name for names in pages.values() for name in names}
    for name in functrain.__all__:
        if name != "__version__" and f"functrain.{name}" not in listed | pages.keys():
            raise ExtensionError(f"functrain.{name} is in no group of {__file__}")
    return pages


def _get(name: str) -> Any:
    value: Any = {"functrain": functrain, "bridge": bridge}[name.partition(".")[0]]
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def _directive(name: str) -> str:
    value = _get(name)
    if isinstance(value, types.ModuleType):
        kind, options = "automodule", ["members", "imported-members"]
    elif inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        options = ["members"]
    else:
        kind, options = ("autofunction" if callable(value) else "autodata"), []
    return "\n".join([f".. {kind}:: {name}", *(f"   :{option}:" for option in options), "", ""])


def _page(title: str, names: list[str]) -> str:
    """Returns a page: what the module says of itself, and each name."""
    about = ""
    if title.partition(".")[0] in ("functrain", "bridge"):
        about = inspect.cleandoc(_get(title).__doc__ or "").partition("\n\nFiles:")[0] + "\n\n"
    return f"{title}\n{'=' * len(title)}\n\n{about}{''.join(map(_directive, names))}"


def _write() -> None:
    for title, names in _names().items():
        name = title.removeprefix("functrain.").lower().replace(",", "").replace(" ", "-")
        write(DOCS / "api" / f"{name}.rst", _page(title, names))


def _public(names: dict[str, list[str]]) -> dict[str, str]:
    """Returns the public name of each word by which docstrings and annotations call it."""
    found = {}
    for name in itertools.chain(*names.values()):
        value, last = _get(name), name.rpartition(".")[2]
        if inspect.isclass(value):
            found.setdefault(last, name)
        found[name] = name
        if hasattr(value, "__qualname__"):
            found[f"{value.__module__}.{value.__qualname__}"] = name
    found |= {
        f"ft{key.removeprefix('functrain')}": name
        for key, name in found.items()
        if key.startswith("functrain.")
    }
    return found


def _resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    if node.get("refdomain") != "py":
        return None
    target, names = node["reftarget"], env.functrain_public
    module = node.get("py:module") or ""
    beside = (f"{module}.{target}", f"{module.partition('.')[0]}.{target}")
    # A bare `step` or `loss` is mostly an argument: only what is beside it is meant by its name.
    public = next((names[name] for name in (*beside, target) if name in names), None)
    if public not in (None, target):
        python = env.domains.python_domain
        where = node["refdoc"]
        return python.resolve_xref(env, where, app.builder, "obj", public, node, content)
    return content if public is None else None  # a name of Python, of others, of an argument


def _know(app: Sphinx) -> None:
    _write()
    app.env.functrain_public = _public(_names())


def _shorten_types(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Shortens the types of attributes, ``functrain.common._types.StateT``, to their last names."""
    for i, line in enumerate(lines):
        if line.startswith(":vartype"):
            lines[i] = DOTTED.sub(r"\1", line)


def _skip_fields(
    app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any
) -> bool | None:
    """Skips the fields of named tuples, which the class's docstring describes already."""
    return True if type(value).__name__ == "_tuplegetter" else None


def connect_docstrings(app: Sphinx) -> None:
    """Connects what changes docstrings, after napoleon has read them."""
    app.connect("autodoc-process-docstring", _shorten_types, priority=900)
    app.connect("autodoc-skip-member", _skip_fields)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects both to the build."""
    app.connect("builder-inited", _know)
    app.connect("missing-reference", _resolve)
    connect_docstrings(app)
    return {"parallel_read_safe": True}
