"""The pages of the API: every public name with its docstring, ordered by use.

A public name that is on no page stops the build. A word in single backticks becomes a link if it
is a public name.
"""

import inspect
import itertools
import re
import types
from typing import Any, NamedTuple

from docutils import nodes
from pages import DOCS, write
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

import bridge
import functrain


class Page(NamedTuple):
    """A page of the API.

    Attributes:
      title: The heading, which the sidebar shows.
      module: The module that the names are in.
      names: The names in the order of use: a function before the type that it returns.
    """

    title: str
    module: str
    names: str


PAGES = {  # by file name, in the order of the sidebar
    "training": Page(
        "Training",
        "functrain",
        "fit FitResult History evaluate predict run Run ArrayLoader NoData Position every at",
    ),
    "steps": Page(
        "States, losses and steps",
        "functrain",
        "TrainState supervised LossFn Aux micro_batches train_step eval_step predict_step update "
        "step_key MeteredStep Step",
    ),
    "models": Page(
        "Models",
        "functrain",
        "Model ModelOutput from_linen from_nnx from_equinox freeze merge_frozen lora cast remat",
    ),
    "fusing": Page("Fusing", "functrain", "fuse Fused enable_compilation_cache"),
    "targets": Page("Targets", "functrain", "target Target"),
    "checkpoints": Page(
        "Checkpoints",
        "functrain",
        "Checkpointer save load warm_start WarmStart Rename watch_checkpoints "
        "CheckpointMismatchError CheckpointCorruptError",
    ),
    "events": Page(
        "Events (ft.events)",
        "functrain.events",
        "Event ChunkEnd EpochEnd RunEnd Trigger",
    ),
    "hooks": Page(
        "Hooks (ft.hooks)",
        "functrain.hooks",
        "Hook Evaluate EarlyStopping ReduceLROnPlateau TerminateOnNaN CSVLogger JSONLines "
        "TensorBoard Tracker WandB MLflow Trackio Comet RayReport Sample Profile Throughput "
        "Goodput Watchdog",
    ),
    "metrics": Page(
        "Metrics (ft.metrics)",
        "functrain.metrics",
        "accuracy binary_accuracy top_k_accuracy mean_squared_error mean_absolute_error mean "
        "mean_loss Metric collection Metered",
    ),
    "tx": Page(
        "Optimizers (ft.tx)",
        "functrain.tx",
        "ema averaged ema_params skip_non_finite skip_spikes loss_scale param_groups log_norm "
        "logged",
    ),
    "inspect": Page(
        "Diagnostics (ft.inspect)",
        "functrain.inspect",
        "summary memory Memory largest_batch cost Cost Layer "
        "explain_nan NotFinite explain_rewrites Explanation placement MiscompilationWarning",
    ),
    "sharding": Page(
        "Sharding (ft.sharding)",
        "functrain.sharding",
        "mesh fsdp replicated rules Rule create put shardings collectives Traffic",
    ),
    "distributed": Page(
        "Several processes (ft.distributed)", "functrain.distributed", "initialize local"
    ),
    "population": Page(
        "Populations (ft.population)",
        "functrain.population",
        "create stack PopulationState step hyperparameters with_hyperparameters Loader "
        "EarlyStopping select resample predict_step",
    ),
    "export": Page(
        "Export (ft.export)", "functrain.export", "predict params orbax peft peft_rules"
    ),
    "rewrites": Page("Rewrites (ft.rewrites)", "functrain.rewrites", "optimize resolve_mode Mode"),
    "bridge": Page(
        "Keras (bridge)",
        "bridge",
        "fit evaluate predict from_keras create_state to_keras warm_start loss metric optimizer "
        "schedule constraints OptaxOptimizer memory largest_batch cost train_step test_step "
        "keras_state KerasState from_flax FlaxLayer to_linen from_distribution Placement "
        "to_distribution",
    ),
}
MODULES = sorted({page.module for page in PAGES.values()})
DOTTED = re.compile(r"(?:\b\w+\.)+(\w+)")
HOOK_METHODS = "begin close end logs restore state write"  # see the docstring of `Hook`
LOADER_METHODS = "chunk dropped fingerprint put_on_device shapes summary"
# Public classes have methods that only functrain calls. They are left out of the pages.
HIDDEN_MEMBERS = {
    **{f"functrain.hooks.{name}": HOOK_METHODS for name in functrain.hooks.__all__},
    "functrain.hooks.Evaluate": "require_new",
    "functrain.hooks.ReduceLROnPlateau": f"{HOOK_METHODS} require_rates",
    "functrain.events.Event": "new_state original_state",
    "functrain.events.ChunkEnd": "scalar_logs",
    "functrain.population.EarlyStopping": HOOK_METHODS,
    "functrain.ArrayLoader": LOADER_METHODS,
    "functrain.NoData": f"{LOADER_METHODS} batch",
    "functrain.population.Loader": LOADER_METHODS,
    "functrain.History": "history",
    "functrain.MeteredStep": "values wrap_state",
    "functrain.Run": "resumed",
    "bridge.FlaxLayer": "build call from_config get_build_config get_config",
    "bridge.OptaxOptimizer": "build follows_schedule from_config get_config mapping opt_state "
    "update_all",
}
# Classes that users receive and do not construct: their pages show no signature.
RECEIVED = {
    *{"Explanation", "FlaxLayer", "Fused", "History", "Memory", "NotFinite", "Placement", "Run"},
    *functrain.events.__all__,
}
REPRS = {"<class 'jax.numpy.bfloat16'>": "jnp.bfloat16"}  # of defaults
OWN_TYPE = re.compile(r"\b(?:functrain|bridge)(?:\.\w+)+")


def _public_functions_and_classes(module: str) -> set[str]:
    """Returns the full names in a module's ``__all__`` that are not modules themselves."""
    names = {f"{module}.{name}" for name in _get(module).__all__ if name != "__version__"}
    return {name for name in names if not isinstance(_get(name), types.ModuleType)}


def _names() -> dict[str, list[str]]:
    """Returns the full names on each page, by the page's file name.

    Raises:
      ExtensionError: A public name is on no page, or a page has a name that is not public.
    """
    names = {
        file: [f"{page.module}.{name}" for name in page.names.split()]
        for file, page in PAGES.items()
    }
    listed = set(itertools.chain(*names.values()))
    public = set(itertools.chain(*map(_public_functions_and_classes, MODULES)))
    if listed != public:
        raise ExtensionError(
            f"{__file__}: expected every public name on one page, got {sorted(public - listed)} on "
            f"none, and {sorted(listed - public)} that are not public"
        )
    return names


def _get(name: str) -> Any:
    value: Any = {"functrain": functrain, "bridge": bridge}[name.partition(".")[0]]
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return value


def _directive(name: str) -> str:
    """Returns the directive of autodoc for a name."""
    value = _get(name)
    options = ""
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        options = "   :members:\n"
        if name in HIDDEN_MEMBERS:
            options += f"   :exclude-members: {', '.join(HIDDEN_MEMBERS[name].split())}\n"
    else:
        kind = "autofunction" if inspect.isroutine(value) else "autodata"
    return f".. {kind}:: {name}\n{options}\n"


def _text(page: Page, names: list[str]) -> str:
    """Returns the text of a page: the first paragraph about its module, and each name."""
    introduction = ""
    if page.module != "functrain":
        introduction = inspect.cleandoc(_get(page.module).__doc__ or "").partition("\n\n")[0]
        introduction += "\n\n"
    directives = "".join(map(_directive, names))
    return f"{page.title}\n{'=' * len(page.title)}\n\n{introduction}{directives}"


def _write() -> None:
    """Writes the pages, and removes those of earlier builds."""
    for path in (DOCS / "api").glob("*.rst"):
        if path.stem not in PAGES:
            path.unlink()
    for file, names in _names().items():
        write(DOCS / "api" / f"{file}.rst", _text(PAGES[file], names))


def _public(names: dict[str, list[str]]) -> dict[str, str]:
    """Returns a public name for each word that docstrings and annotations use for it."""
    public = {}
    for name in itertools.chain(*names.values()):
        value, last = _get(name), name.rpartition(".")[2]
        if inspect.isclass(value):
            public.setdefault(last, name)
        public[name] = name
        if inspect.isclass(value) or inspect.isroutine(value):  # not a Literal, which typing owns
            public[f"{value.__module__}.{value.__qualname__}"] = name
    for key, name in list(public.items()):
        if key.startswith("functrain."):
            public[f"ft{key.removeprefix('functrain')}"] = name
    return public


def _resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.Element | None:
    if node.get("refdomain") != "py":
        return None
    target, names = node["reftarget"], env.functrain_public
    # A bare `step` or `loss` is mostly an argument, so it links only to a name in the same module.
    in_module = f"{node.get('py:module') or ''}.{target}"
    public = names.get(in_module) or names.get(target)
    if public not in (None, target):
        python = env.domains.python_domain
        page = node["refdoc"]
        return python.resolve_xref(env, page, app.builder, "obj", public, node, content)
    # Without a public name the word is an argument, or a name of Python or another library.
    return content if public is None else None


def _write_and_index(app: Sphinx) -> None:
    _write()
    app.env.functrain_public = _public(_names())


def _shorten_types(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Shortens the types of attributes to their last names, and removes private ones."""
    types = [line for line in lines if line.startswith(":vartype")]
    lines[:] = [line for line in lines if line not in types or _is_public(line)]
    for i, line in enumerate(lines):
        if line in types:
            lines[i] = DOTTED.sub(r"\1", line)


def _is_public(annotation: str) -> bool:
    """Returns True if a type names nothing of functrain and bridge that is private."""
    public = _public(_names())
    return all(name in public for name in OWN_TYPE.findall(annotation))


def _clean_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str | None, Any] | None:
    """Removes private types from a signature, and signatures that a user has no use for."""
    annotations = app.env.current_document.autodoc_annotations.get(name, {})
    for argument, annotation in list(annotations.items()):
        if not _is_public(annotation):
            del annotations[argument]
    if name.rpartition(".")[2] in RECEIVED or signature == "(*args, **kwargs)":
        return "", None
    for written, source in REPRS.items():
        signature = signature and signature.replace(written, source)
    return signature, returns


def _skip_fields(
    app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any
) -> bool | None:
    """Skips the fields of named tuples, which the class's docstring describes already."""
    return True if type(value).__name__ == "_tuplegetter" else None


def connect_docstrings(app: Sphinx) -> None:
    """Connects the functions that change docstrings and signatures, after napoleon."""
    app.connect("autodoc-process-docstring", _shorten_types, priority=900)
    app.connect("autodoc-process-signature", _clean_signature, priority=900)
    app.connect("autodoc-skip-member", _skip_fields)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the extension to the build."""
    app.connect("builder-inited", _write_and_index)
    app.connect("missing-reference", _resolve)
    connect_docstrings(app)
    return {"parallel_read_safe": True}
