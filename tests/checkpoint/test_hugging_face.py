"""Weights of transformers in the models of the examples, and back; adapters in PEFT.

`make test-adapters` has the libraries. No weights are downloaded: they are random.
"""

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft
from functrain import export

pytestmark = [
    pytest.mark.adapters,
    # Of transformers 5.24, met when peft loads an adapter.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
spec = importlib.util.spec_from_file_location("_pretrained", EXAMPLES / "_pretrained.py")
pretrained = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pretrained)

TOKENS = np.random.default_rng(0).integers(0, 50, (2, 9))
IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)


def gpt2():
    sizes = {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    return theirs, pretrained.GPT2(50, 32, 16, 2, 2), pretrained.gpt2_rules(), TOKENS


def llama():
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    return theirs, pretrained.Llama(50, 16, 24, 2, 4, 2), pretrained.LLAMA_RULES, TOKENS


def vit():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    sizes |= {"intermediate_size": 24, "image_size": 8, "patch_size": 4}
    theirs = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))
    return theirs, pretrained.ViT(3, 4, 16, 24, 2, 2), pretrained.VIT_RULES, IMAGES


def randomized(theirs):
    """Biases and norms of a new model are constant, which would hide that they were exchanged."""
    torch.manual_seed(0)
    with torch.no_grad():
        for param in theirs.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return theirs.eval()


def logits(theirs, inputs):
    inputs = torch.tensor(inputs)
    with torch.no_grad():
        if inputs.ndim == 4:
            return theirs(inputs.permute(0, 3, 1, 2)).logits.numpy()
        return theirs(inputs).logits.numpy()


def create(module, inputs, model=None):
    model = model or ft.from_linen(module)
    params, model_state = model.init(jax.random.key(0), inputs)
    return ft.TrainState.create(params=params, model_state=model_state, tx=optax.sgd(0.1))


@pytest.mark.parametrize("family", [gpt2, llama, vit])
@pytest.mark.parametrize("shards", ["one", "many"])
def test_logits_are_those_of_transformers_in_and_out(tmp_path, family, shards) -> None:
    theirs, module, rules, inputs = family()
    randomized(theirs).save_pretrained(
        tmp_path / "in", max_shard_size="5GB" if shards == "one" else "4KB"
    )
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > (shards == "many")
    warm = ft.warm_start(create(module, inputs), tmp_path / "in", rename=rules)
    assert warm.missing == warm.unused == ()
    ours = module.apply({"params": warm.state.params}, inputs)
    np.testing.assert_allclose(ours, logits(theirs, inputs), atol=1e-4)

    changed = warm.state.replace(params=jax.tree.map(lambda x: x * 1.5, warm.state.params))
    out = tmp_path / "out" / "model.safetensors"
    ft.export.params(out, changed, rename=rules, shard_bytes=None if shards == "one" else 4096)
    (out.parent / "config.json").write_text((tmp_path / "in" / "config.json").read_text())
    again = type(theirs).from_pretrained(out.parent).eval()
    ours = module.apply({"params": changed.params}, inputs)
    np.testing.assert_allclose(ours, logits(again, inputs), atol=1e-4)


# transformers 5 stores a ViT under the names of its older modules.
MODULES = {
    "encoder.layer": "layers",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "*.output.dense": "*.mlp.fc2",
}


def of_modules(rule):
    file = rule.file
    for stored, module in MODULES.items() if isinstance(file, str) else ():
        file = file.replace(stored, module)
    return dataclasses.replace(rule, file=file)


@pytest.mark.parametrize(
    ("family", "patterns", "train"),
    [
        (gpt2, ["h_*/*/kernel"], ()),
        (gpt2, ["h_*/*/kernel", "wpe/embedding"], "h_*/ln_1/scale"),
        (llama, ["embed_tokens/embedding", "layers_*/q_proj/kernel"], "norm/scale"),
        (llama, ["layers_*/[qvo]_proj/kernel", "layers_*/up_proj/kernel"], ()),
        (vit, ["layer_*/attention/kernel", "layer_*/output/kernel"], "classifier/**"),
    ],
)
def test_adapters_are_those_of_peft_in_and_out(tmp_path, family, patterns, train) -> None:
    theirs, module, rules, inputs = family()
    randomized(theirs).save_pretrained(tmp_path / "base")
    base = ft.warm_start(create(module, inputs), tmp_path / "base", rename=rules).state
    model = ft.Model(lambda key, x: (base.params, base.model_state), ft.from_linen(module).apply)
    model = ft.lora(model, *patterns, rank=3, alpha=5.0, train=train)
    state = create(module, inputs, model)
    noise = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + noise.normal(size=x.shape) * 0.1, state.params)
    state = state.replace(params=jax.tree.map(jnp.float32, params))
    rules = list(map(of_modules, rules))
    ft.export.peft(tmp_path / "adapter", state, rename=rules)
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    ours = model.apply(state.params, state.model_state, inputs).outputs
    np.testing.assert_allclose(ours, logits(adapted, inputs), atol=1e-4)
    assert not np.allclose(ours, module.apply({"params": base.params}, inputs), atol=1e-2)

    adapted.save_pretrained(tmp_path / "again")
    file = tmp_path / "again" / "adapter_model.safetensors"
    warm = ft.warm_start(create(module, inputs, model), file, rename=export.peft_rules(rules))
    assert all(path.startswith("model_state/") for path in warm.missing)
    jax.tree.map(np.testing.assert_array_equal, warm.state.params, state.params)
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 5.0)


def test_the_adapters_of_the_example_are_loaded_by_peft(tmp_path) -> None:
    script = [sys.executable, EXAMPLES / "hugging_face.py", "--quick", "--output", tmp_path]
    subprocess.run(script, check=True, capture_output=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with np.load(tmp_path / "logits.npz") as ours:
        np.testing.assert_allclose(ours["logits"], logits(adapted, ours["tokens"]), atol=1e-4)
