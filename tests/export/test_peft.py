"""Adapters for PEFT: which params are written under which names, and what PEFT could not load."""

import json
import os

import jax
import jax.numpy as jnp
import optax
import pytest
import safetensors.numpy

import functrain as ft
from tests.checkpoint.test_disk import no_room

RULES = [
    ft.Rename("emb.weight", "params/emb/embedding"),
    ft.Rename("*.norm.weight", "params/*/norm/scale"),
    ft.Rename("*.norm.bias", "params/*/norm/bias"),
    ft.Rename("*.weight", "params/*/kernel", "o i -> i o"),
    ft.Rename("*.bias", "params/*/bias"),
]
PARAMS = {
    "emb": {"embedding": jnp.ones((5, 4))},
    "block": {"norm": {"scale": jnp.ones(4), "bias": jnp.zeros(4)}},
    "head": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)},
}


def create(*patterns, rank=2, **how):
    model = ft.lora(ft.Model(lambda *_: (PARAMS, {}), apply=None), *patterns, rank=rank, **how)
    params, model_state = model.init(jax.random.key(0), None)
    return ft.TrainState.create(params=params, model_state=model_state, tx=optax.sgd(0.1))


def export(folder, state, **how):
    """Returns the shapes in the file by name, without what all names begin with, and the config."""
    ft.export.peft(folder, state, rename=RULES, **how)
    found = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    shapes = {name.removeprefix("base_model.model."): x.shape for name, x in found.items()}
    return shapes, json.loads((folder / "adapter_config.json").read_text())


def test_adapters_of_embeddings_have_names_of_their_own(tmp_path) -> None:
    shapes, config = export(tmp_path, create("emb/*", "head/*"))
    assert shapes == {
        "emb.lora_embedding_A": (2, 5),
        "emb.lora_embedding_B": (4, 2),
        "head.lora_A.weight": (2, 4),
        "head.lora_B.weight": (3, 2),
    }
    assert config["target_modules"] == ["emb", "head"]
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (2, 2.0, False)


def test_modules_are_written_whole_if_one_of_their_params_is_trained(tmp_path) -> None:
    shapes, config = export(tmp_path, create("head/*", train="block/norm/scale"))
    assert {"block.norm.weight", "block.norm.bias"} < shapes.keys()
    assert "head.bias" not in shapes
    assert config["modules_to_save"] == ["block.norm"]


def test_a_base_in_int8_is_not_written(tmp_path) -> None:
    shapes, _ = export(tmp_path, create("head/*", train="block/norm/*", base_dtype="int8"))
    assert not any(name in shapes for name in ("head.weight", "head.bias"))


def test_a_module_with_an_adapter_and_a_trained_param_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"modules with adapters, or trained whole, got\n  head"):
        export(tmp_path, create("head/*", train="head/bias"))


def test_what_is_not_of_lora_is_refused(tmp_path) -> None:
    model = ft.freeze(ft.Model(lambda *_: (PARAMS, {}), apply=None), "emb/*")
    params, model_state = model.init(jax.random.key(0), None)
    state = ft.TrainState.create(params=params, model_state=model_state, tx=optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"expected a TrainState of a model of ft\.lora"):
        export(tmp_path, state)
    adapters = create("head/*", "emb/*")
    adapters.params["emb"]["embedding"] = {"a": jnp.ones((5, 3)), "b": jnp.ones((3, 4))}
    with pytest.raises(ValueError, match=r"expected adapters of one rank, got \[2, 3\]"):
        export(tmp_path, adapters)
    assert not list(tmp_path.iterdir())


def test_weights_never_have_the_config_of_others(tmp_path, monkeypatch) -> None:
    export(tmp_path, create("head/*"))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    larger = create("head/*", rank=30)
    with no_room(300), pytest.raises(OSError, match="too large"):
        export(tmp_path, larger, overwrite=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    replaced = []
    monkeypatch.setattr(os, "replace", lambda *names: replaced.append(names) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ft.export.peft(tmp_path, create("head/*", rank=3), rename=RULES, overwrite=True)
    assert len(replaced) == 1
    assert not (tmp_path / "adapter_config.json").exists()
