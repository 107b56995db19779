"""Adapters of `functrain.lora`, for PEFT."""

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from functrain.checkpoint._layout import parse_layout
from functrain.checkpoint._rename import Rename, Target, find_targets, require_rules
from functrain.common import _tree
from functrain.common._checks import require, require_no_problems
from functrain.common._types import PyTree
from functrain.export._atomic import require_free, write_together
from functrain.export._params import numbers_by_path, targets_of, write
from functrain.model._freeze import FrozenState
from functrain.step._state import TrainState

_PREFIX = "base_model.model."
_ADAPTER_A = re.compile(r"\.lora_(embedding_)?A\b")


def peft(
    directory: str | os.PathLike[str],
    state: TrainState,
    *,
    rename: Sequence[Rename],
    base_model: str = "",
    task_type: str | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the trained params of a model of `functrain.lora` as an adapter of PEFT.

    ``peft.PeftModel.from_pretrained(model, directory)`` adds it to the model whose names the rules
    have. Adapters become `lora_A` and `lora_B`, those of leaves that are called `embedding` or
    `embeddings` `lora_embedding_A` and `lora_embedding_B`, and params that are trained whole those
    of `modules_to_save`, beside the frozen ones of these modules. PEFT adapts the lookups in a
    table, but not the products with it, which a tied head has.

    Args:
      directory: Gets `adapter_model.safetensors` and `adapter_config.json`.
      state: The state of a training. The rank and alpha are those of its adapters.
      rename: The rules by which `functrain.warm_start` reads the weights of the base, with the
        names of the modules in memory: transformers stores some models under other names. Adapted
        matrices are `weight`s of two axes in the file, each of which is some axes of the leaf: its
        inputs or its outputs, as `functrain.lora` divides them.
      base_model: Where the base is, such as ``openai-community/gpt2``; PEFT's tools load it from
        there.
      task_type: Such as ``CAUSAL_LM``, which PEFT's tools ask for.
      overwrite: True replaces the two files.

    Raises:
      FileExistsError: One of the files exists, and `overwrite` is False.
      TypeError: `state` is not a TrainState of a model of `functrain.lora`.
      ValueError: A param has no rule, adapters have several ranks, an adapter does not divide its
        matrix as the file does, or a module has an adapter and a param that is trained whole.

    References:
      https://huggingface.co/docs/peft/developer_guides/checkpoint

    Examples:
      >>> import functrain as ft, jax, jax.numpy as jnp, optax, os, tempfile
      >>> rules = [ft.Rename("head.weight", "params/kernel", "o i -> i o")]
      >>> base = ft.Model(lambda key, x: ({"kernel": jnp.ones((3, 2))}, {}), apply=None)
      >>> params, model_state = ft.lora(base, "kernel", rank=1).init(jax.random.key(0), None)
      >>> state = ft.TrainState.create(params=params, model_state=model_state, tx=optax.sgd(0.1))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     ft.export.peft(folder, state, rename=rules)
      ...     print(sorted(os.listdir(folder)))
      ['adapter_config.json', 'adapter_model.safetensors']
    """
    model_state: Any = getattr(state, "model_state", None)
    is_lora = isinstance(model_state, FrozenState) and model_state.lora_scale is not None
    require(is_lora, "state", "a TrainState of a model of ft.lora", state, error=TypeError)
    paths = [os.path.join(directory, f"adapter_{x}") for x in ("model.safetensors", "config.json")]
    weights, config = (require_free(path, overwrite=overwrite) for path in paths)
    rules = peft_rules(rename)
    trained = numbers_by_path({"params": state.params})
    leaves = _complete_modules(trained, model_state.frozen, rules)
    targets = targets_of(leaves, rules)
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model or None,
        "task_type": task_type,
        **_adapter_settings(targets, leaves, float(model_state.lora_scale), rename),
    }
    with write_together(config) as create:
        with create(weights) as file:
            write(file, targets, leaves)
        with create(config) as file:
            file.write(json.dumps(settings, indent=2).encode())


def _adapter_settings(
    targets: Sequence[Target], leaves: Mapping[str, Any], scale: float, rename: Sequence[Rename]
) -> dict[str, Any]:
    """Returns what PEFT must know of the adapters; raises ValueError for what it does not have."""
    adapted = [target for target in targets if _ADAPTER_A.search(target.names[0])]
    adapted_modules, whole_modules = _modules(adapted), _modules(_trained_whole(targets))
    both = sorted({*adapted_modules} & {*whole_modules})
    advice = "Train only one of the two."
    require_no_problems("state", both, "modules with adapters, or trained whole", advice)
    ranks = {leaves[target.paths[0]].shape[-1] for target in adapted}
    require(len(ranks) == 1, "state", "adapters of one rank", sorted(ranks))
    (rank,) = ranks
    matrices = [target.paths[0].removesuffix("/a") for target in adapted]
    return {
        "r": rank,
        "lora_alpha": float(f"{scale * rank:.6g}"),  # the scale is a float32
        "target_modules": adapted_modules,
        "modules_to_save": whole_modules or None,
        "fan_in_fan_out": any(map(_keeps_order, find_targets(matrices, rename))),
        "bias": "none",
        "inference_mode": True,
    }


def _trained_whole(targets: Iterable[Target]) -> list[Target]:
    """Returns the targets that are params, not adapters."""
    return [target for target in targets if ".lora_" not in target.names[0]]


def _modules(targets: Iterable[Target]) -> list[str]:
    """Returns the names of the modules that arrays of adapters or params belong to."""
    names = (name.removeprefix(_PREFIX) for target in targets for name in target.names)
    return sorted({re.sub(r"(\.lora_[AB])?\.\w+$", "", name) for name in names})


def _complete_modules(
    leaves: Mapping[str, Any], frozen: PyTree, rules: Sequence[Rename]
) -> dict[str, Any]:
    """Adds the frozen params of modules with params that are trained whole: PEFT wants them all."""
    whole = _trained_whole(find_targets(leaves, rules))
    layers = {os.path.dirname(path) for target in whole for path in target.paths}
    frozen_leaves = _tree.leaves_with_path({"params": frozen})
    # Only those of the same layers need a rule.
    siblings = {path: leaf for path, leaf in frozen_leaves if os.path.dirname(path) in layers}
    modules = set(_modules(whole))
    targets = [x for x in find_targets(siblings, rules) if modules.issuperset(_modules([x]))]
    return {**leaves, **{path: siblings[path] for target in targets for path in target.paths}}


def _is_table(path: str) -> bool:
    """Returns True for an embedding, as flax and Keras call it."""
    return path.rpartition("/")[2] in ("embedding", "embeddings")


def peft_rules(rename: Sequence[Rename]) -> list[Rename]:
    """Returns the rules of PEFT's names for the adapters of a model, and for its params.

    Args:
      rename: The rules of the model.

    Examples:
      >>> import functrain as ft
      >>> rules = [ft.Rename("head.weight", "params/kernel", "(h d) i -> i h d")]
      >>> for rule in ft.export.peft_rules(rules):
      ...     print(rule.file, rule.state, rule.layout, sep=", ")
      base_model.model.head.lora_A.weight, params/kernel/a, r (i) -> i r
      base_model.model.head.lora_B.weight, params/kernel/b, (h d) r -> r h d
      base_model.model.head.weight, params/kernel, (h d) i -> i h d
    """
    rules_for_peft = []
    for rule in require_rules(rename):
        axes = _inputs_and_outputs(rule)
        file, path = rule.files[0], rule.states[0]
        if axes is not None:
            module = _PREFIX + file.removesuffix(".weight")
            inputs, outputs = map(" ".join, axes)
            name = "lora_embedding_{}" if _is_table(path) else "lora_{}.weight"
            a, b = (f"{module}.{name.format(x)}" for x in "AB")
            rules_for_peft.append(Rename(a, f"{path}/a", f"r ({inputs}) -> {inputs} r"))
            rules_for_peft.append(Rename(b, f"{path}/b", f"({outputs}) r -> r {outputs}"))
        names = [_PREFIX + name for name in rule.files]
        rules_for_peft.append(dataclasses.replace(rule, file=names if len(names) > 1 else names[0]))
    return rules_for_peft


def _inputs_and_outputs(rule: Rename) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Returns the axes of a matrix that are inputs and outputs; None if it is no such matrix."""
    if len(rule.files) + len(rule.states) > 2 or not rule.files[0].endswith(".weight"):
        return None
    layout = parse_layout(rule.layout)
    if layout is None:
        return ("i",), ("o",)
    if len(layout.groups) != 2:
        return None
    first, second = layout.groups
    if layout.axes == first + second:
        return first, second
    return (second, first) if layout.axes == second + first else None


def _keeps_order(matrix: Target) -> bool:
    """Returns True if a matrix has its inputs first in the file, as in a Conv1D of GPT-2."""
    layout, axes = parse_layout(matrix.rule.layout), _inputs_and_outputs(matrix.rule)
    if axes is None or _is_table(matrix.paths[0]):
        return False
    return layout is None or layout.groups[0] == axes[0]
