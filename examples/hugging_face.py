"""GPT-2 from a directory of Hugging Face is fine-tuned with LoRA, and PEFT loads the adapters.

The weights are in safetensors files with the names of transformers. Rules (`ft.Rename`) say which
leaf of a flax model each array is. The adapters are written in the layout of PEFT, under the same
names, so that transformers and PEFT can serve what was trained here.

By default the base is a small GPT-2, which the script trains on three tragedies of Shakespeare and
stores as transformers would. The adapters learn the fourth. With `--weights` the base is any GPT-2
of Hugging Face: a directory, or `hf://openai-community/gpt2` with `--prefix ""`, because the names
there have no prefix. Every byte of the text is a token: the first 256 of GPT-2 are the bytes.

    python examples/hugging_face.py            # some minutes on two CPU cores
    python examples/hugging_face.py --quick    # some seconds
"""

# %% Options
from _example import arguments

args = arguments(
    __doc__,
    quick="few steps",
    weights=("", "a directory or URL with config.json and safetensors; trained here by default"),
    prefix=("transformer.", "what the names in the files begin with"),
    rank=8,
    epochs=(4, "epochs of the adapters"),
)

import gzip
import json

import functrain as ft
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from _pretrained import GPT2, gpt2_rules
from functrain import export

CONTEXT = 64

# %% Data. The bytes of a text as tokens of GPT-2, which numbers the printable bytes first. The last
# quarter is Othello, whose end is held out
with gzip.open(args.data / "tragedies.txt.gz", "rb") as file:
    text = np.frombuffer(file.read(), np.uint8)
printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
token = np.argsort([*printable, *(byte for byte in range(256) if byte not in printable)])
tokens = token[text].astype(np.int32)
tragedies, othello, held_out = np.split(tokens, [len(tokens) * 3 // 4, len(tokens) * 19 // 20])


def windows(tokens, every):
    """Returns inputs and the next tokens `i32[N, T]`."""
    view = np.lib.stride_tricks.sliding_window_view(tokens, CONTEXT + 1)[::every]
    return view[:, :-1], view[:, 1:]


quick = 20 if args.quick else 1
validation = ft.ArrayLoader(windows(held_out, CONTEXT * min(quick, 8)), 32)
loss = optax.softmax_cross_entropy_with_integer_labels


def train(state, model, tokens, tx, epochs):
    """Trains, and returns the state and its perplexity on the validation text in each epoch."""
    loss_fn = ft.supervised(model, loss)
    data = ft.ArrayLoader(windows(tokens, 24 * quick), 32, shuffle=True, seed=args.seed)
    how = {"eval_data": validation, "eval_step": ft.eval_step(loss_fn)}
    state, history = ft.fit(state, ft.train_step(loss_fn, tx), data, epochs=epochs, **how)
    return state, np.exp(history.epochs["val_loss"])


def create(model, tx):
    params, model_state = model.init(jax.random.key(args.seed), tokens[None, :CONTEXT])
    return ft.TrainState.create(params=params, model_state=model_state, tx=tx)


# %% The base, if none is given. A small GPT-2, in two files with an index, and the configuration
# that transformers reads
rules, weights = gpt2_rules(args.prefix), args.weights
if not weights:
    config = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 128, "n_layer": 2, "n_head": 4}
    small = ft.from_linen(GPT2(256, CONTEXT, 128, 2, 4))
    tx = optax.adamw(2e-3)
    state, _ = train(create(small, tx), small, tragedies, tx, 1 if args.quick else 3)
    weights = args.output / "base"
    file = weights / "model.safetensors"
    export.params(file, {"params": state.params}, rename=rules, shard_bytes=10**6, overwrite=True)
    names = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (weights / "config.json").write_text(json.dumps(config | names))

# %% The base from its files. The report says what was taken, and what was left
if "://" in str(weights):
    import fsspec

    with fsspec.open(f"{weights}/config.json") as file:
        config = json.load(file)
else:
    with open(f"{weights}/config.json") as file:
        config = json.load(file)
sizes = [config[name] for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")]
module = ft.from_linen(GPT2(*sizes))
warm = ft.warm_start(create(module, optax.sgd(0.0)), weights, rename=rules)
print(warm)

# %% The adapters, on every matrix of every block
base = ft.Model(lambda key, x: (warm.state.params, warm.state.model_state), module.apply)
model = ft.lora(base, "h_*/*/kernel", rank=args.rank, factored=True)
tx = optax.adamw(2e-3, weight_decay=0.0)
state = create(model, tx)
before = np.exp(ft.evaluate(state, ft.eval_step(ft.supervised(model, loss)), validation)["loss"])
state, perplexities = train(state, model, othello, tx, 2 if args.quick else args.epochs)
print(f"perplexity on Othello: base {before:.3f}, with adapters {perplexities[-1]:.3f}")

# %% The adapters in PEFT's layout. In Python with transformers and peft:
#
#     base = transformers.AutoModelForCausalLM.from_pretrained("base")
#     model = peft.PeftModel.from_pretrained(base, "adapter")
#
# `ft.warm_start` reads them back
adapter = args.output / "adapter"
how = {"base_model": str(weights), "task_type": "CAUSAL_LM", "overwrite": True}
export.peft(adapter, state, rename=rules, **how)
file = adapter / "adapter_model.safetensors"
print(f"adapters: {file.stat().st_size / 1e6:.2f} MB in {file.name}")
again = ft.warm_start(create(model, tx), file, rename=export.peft_rules(rules)).state
batch = windows(held_out, 1)[0][:1]
logits = [model.apply(s.params, s.model_state, batch).outputs for s in (state, again)]
assert jnp.array_equal(*logits)
np.savez(args.output / "logits.npz", tokens=batch, logits=logits[0])

# %% Plot
figure = matplotlib.figure.Figure(figsize=(6, 3.4), layout="constrained")
axes = figure.subplots()
axes.plot(range(len(perplexities) + 1), [before, *perplexities], "o-", color="#1f5fa8")
axes.set(xlabel="epoch of the adapters", ylabel="perplexity of a letter, Othello")
axes.grid(alpha=0.25)
figure.savefig(args.output / "hugging_face.png", dpi=120)
print(f"wrote {args.output / 'hugging_face.png'}")
