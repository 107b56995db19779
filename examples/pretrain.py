"""A GPT is pretrained from scratch, from a text to samples, as language models are today.

The script learns a tokenizer, packs documents into rows, and trains a transformer in bfloat16 with
Muon and AdamW. It evaluates and samples with averaged weights. A run that was ended continues when
the same command is given again, and its result is the same to the bit.

    python examples/pretrain.py            # some minutes on two CPU cores
    python examples/pretrain.py --quick    # less than a minute, to try it out
    python examples/pretrain.py --size gpt2 --text train.bin

`--size` selects the model and its training. The arrays of the state and the rows of a batch are
divided among all devices (FSDP):

| `--size` | parameters | tokens in a step | steps | meant for |
|---|---:|---:|---:|---|
| `laptop` | 0.9 M | 4,096 | 450 | two CPU cores |
| `gpt2` | 124 M | 524,288 | 5,000 | one GPU |
| `gpt2-xl` | 1.6 B | 524,288 | 50,000 | several GPUs |

The text of `laptop` is four tragedies of Shakespeare. Larger models need more of it: `--text` takes
a text file, plain or `.gz`, or a `.bin` file with the tokens of GPT-2 as 16-bit integers, such as
those that nanoGPT's `data/openwebtext/prepare.py` writes. A run of `gpt2` takes 56 GiB of an H100,
as `ft.inspect.memory` estimates with the compiler for it.

`docs/comparison.md` sets this script beside nanoGPT, nanochat, levanter and MaxText.
"""

# %% Options
from _example import arguments

args = arguments(
    __doc__,
    quick="a model of 35 000 parameters, 60 steps",
    packages={"grain": "pip install grain"},
    size=("laptop", "laptop, gpt2 or gpt2-xl"),
    model=("nnx", "nnx or keras: the library of the model"),
    text=("", "a text file or a .bin file of tokens; by default four tragedies"),
    split=(r"\n\n(?=\[)", "regular expression that separates the documents of a text"),
    temperature=(0.8, "sampling temperature; lower values give more likely text"),
)

import functools
import gzip
import math
import pathlib
import re
import sys
from typing import NamedTuple

import functrain as ft
import grain
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


# %% The sizes. A step takes `rows` of `length` tokens each. Gradients are computed for `micro_rows`
# at once, and accumulated: this number decides how much memory the activations take. `steps` is the
# length of the training, which is evaluated ten times
class Size(NamedTuple):
    vocabulary: int
    width: int
    blocks: int
    heads: int
    length: int
    rows: int
    micro_rows: int
    steps: int


SIZES = {
    "quick": Size(320, 32, 2, 2, 64, 8, 4, 60),
    "laptop": Size(1_024, 128, 4, 4, 256, 16, 8, 450),
    "gpt2": Size(50_304, 768, 12, 12, 1_024, 512, 32, 5_000),
    "gpt2-xl": Size(50_304, 1_600, 48, 25, 1_024, 512, 32, 50_000),
}
for option, value, known in (
    ("size", args.size, SIZES),
    ("model", args.model, ("nnx", "keras")),
):
    if value not in known:
        sys.exit(f"--{option}: expected one of {', '.join(known)}, got {value!r}")
size = SIZES["quick" if args.quick else args.size]
every = size.steps // 10
path = pathlib.Path(args.text or args.data / "tragedies.txt.gz")

# %% The tokenizer. Byte-pair encoding begins with the bytes of the text. It makes one new token
# after the other, each of the pair of tokens that is the most frequent one. The text is kept as a
# string with a character for each token, so that `str.replace` does the work. Token 0 begins a
# document, and is in no pair. A document of the tragedies begins with a stage direction
if path.suffix == ".bin":
    import tiktoken  # pip install tiktoken

    tokens, begin, vocabulary_size = np.memmap(path, np.uint16, mode="r"), 50_256, 50_257
    to_bytes = tiktoken.get_encoding("gpt2").decode_bytes
else:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        documents = re.split(args.split, file.read().decode("latin-1"))
    if len(documents) < 10:
        sys.exit(f"--split: expected at least 10 documents in {path}, got {len(documents)}")
    text, begin = "".join(f"\0{document}" for document in documents) + "\0", 0
    vocabulary_size = min(size.vocabulary, 4_096)
    vocabulary = [chr(byte) for byte in range(256)]
    while len(vocabulary) < vocabulary_size:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.int64)
        pairs = codes[:-1] * vocabulary_size + codes[1:]
        counts = np.bincount(pairs[(codes[:-1] != begin) & (codes[1:] != begin)])
        first, second = divmod(int(counts.argmax()), vocabulary_size)
        text = text.replace(chr(first) + chr(second), chr(len(vocabulary)))
        vocabulary.append(vocabulary[first] + vocabulary[second])
    tokens = np.frombuffer(text.encode("utf-32-le"), np.uint32)

    def to_bytes(tokens):
        return "".join(vocabulary[token] for token in tokens).encode("latin-1")


# %% Documents. Each begins with its token, and its last label is the token that begins the next
# one. Every tenth document is held out
bounds = np.flatnonzero(tokens == begin)
spans = np.stack([bounds[:-1], bounds[1:]], axis=1)
held_out = spans[::10][:1_000]
trained = np.delete(spans, np.s_[::10], axis=0)
held_out_tokens = np.concatenate([tokens[start:end] for start, end in held_out]).tolist()
bits_per_nat = len(held_out_tokens) / len(to_bytes(held_out_tokens)) / math.log(2)
print(f"{len(spans):,} documents of {len(tokens):,} tokens, {len(held_out):,} of them held out")


# %% Packed rows. Documents follow one another in rows of `length` tokens, and one that does not fit
# continues in the next row. grain adds to each token the number of its segment, which is the part
# of a document in this row, and its position in the segment. Labels are shifted before packing, so
# that no label is lost, and none belongs to another document. The mask excludes padding, which only
# the last row has
def shifted(span):
    document = np.asarray(tokens[span[0] : span[1] + 1], np.int32)
    return {"tokens": document[:-1], "labels": document[1:]}


def example(row):
    segments = row["tokens_segment_ids"]
    inputs = {"tokens": row["tokens"], "segments": segments, "positions": row["tokens_positions"]}
    return inputs, row["labels"], segments > 0


def batches(documents, rows):
    lengths = {"tokens": size.length, "labels": size.length}
    documents = documents.map(shifted).to_iter_dataset()
    packed = grain.experimental.ConcatThenSplitIterDataset(documents, length_struct=lengths)
    return packed.map(example).batch(rows)


source = grain.MapDataset.source(trained).seed(args.seed).shuffle().repeat()
train = batches(source, size.rows)
validation = batches(grain.MapDataset.source(held_out), size.micro_rows)


# %% The model. It has rotary positions, normalized queries and keys, and no biases, and its
# embedding is its last layer, too. A token attends to itself and to earlier tokens of its segment
def rotated(x, positions):
    """Returns `x` `[B, T, H, D]`, whose pairs of features are turned by angles."""
    frequencies = 10_000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    angles = positions[..., None, None] * frequencies
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Block(nnx.Module):
    def __init__(self, rngs):
        norm = functools.partial(nnx.RMSNorm, rngs=rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        width, zeros = size.width, nnx.initializers.zeros
        self.norm, self.mlp_norm = norm(width), norm(width)
        self.query_norm, self.key_norm = (norm(width // size.heads) for _ in range(2))
        self.query, self.key, self.value = (linear(width, width) for _ in range(3))
        self.out = linear(width, width, kernel_init=zeros)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width, kernel_init=zeros)

    def __call__(self, x, mask, positions):
        y = self.norm(x)
        heads = *x.shape[:2], size.heads, -1
        query, key, value = (f(y).reshape(heads) for f in (self.query, self.key, self.value))
        query = rotated(self.query_norm(query), positions)
        key = rotated(self.key_norm(key), positions)
        y = jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)
        x = x + self.out(y.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class GPT(nnx.Module):
    def __init__(self, rngs):
        table = nnx.initializers.normal(0.02)(rngs.params(), (size.vocabulary, size.width))
        self.embedding = nnx.Param(table)
        self.blocks = nnx.List(Block(rngs) for _ in range(size.blocks))
        self.norm = nnx.RMSNorm(size.width, rngs=rngs)

    def __call__(self, inputs):
        segments = inputs["segments"]
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
        x = self.embedding[...][inputs["tokens"]]
        for block in self.blocks:
            x = block(x, mask, inputs["positions"])
        return self.norm(x) @ self.embedding[...].T


# %% The same training takes a model of Keras: `--model keras`. This one has GPT-2's positions,
# norms and biases. A policy of Keras makes it compute in bfloat16, and `ft.cast` does so for the
# module of nnx
def keras_model():
    import bridge  # before keras: it makes Keras use JAX
    import keras
    from keras import layers

    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.utils.set_random_seed(args.seed)
    names = ("tokens", "segments", "positions")
    inputs = {name: keras.Input((size.length,), dtype="int32", name=name) for name in names}
    tokens, segments, positions = inputs.values()
    mask = keras.ops.equal(segments[:, :, None], segments[:, None, :])
    x = layers.Embedding(size.vocabulary, size.width)(tokens)
    x += layers.Embedding(size.length, size.width)(positions)
    for _ in range(size.blocks):
        y = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(size.heads, size.width // size.heads)
        x += attention(y, y, attention_mask=mask, use_causal_mask=True)
        y = layers.Dense(4 * size.width, activation="gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(size.width)(y)
    x = layers.LayerNormalization()(x)
    return bridge.from_keras(keras.Model(inputs, layers.Dense(size.vocabulary)(x)))


model = keras_model() if args.model == "keras" else ft.cast(ft.from_nnx(GPT), jnp.bfloat16)

# %% The loss and the optimizer. The loss is the mean over all tokens that the mask includes: in
# micro-batches, in batches, and in the evaluation. Muon updates the kernels, and AdamW all other
# params. A step whose loss or gradient jumps is skipped
loss_fn = ft.supervised(
    model, optax.softmax_cross_entropy_with_integer_labels, reduction="weighted_mean"
)
schedule = optax.warmup_cosine_decay_schedule(0.0, 0.02, size.steps // 20, size.steps, 0.001)
muon = optax.contrib.muon(schedule, weight_decay=0.1)
adamw = optax.adamw(lambda count: 0.15 * schedule(count), b2=0.95, weight_decay=0.0)
tx = ft.tx.skip_spikes(
    optax.chain(
        ft.tx.log_norm(),
        optax.clip_by_global_norm(1.0),
        ft.tx.param_groups({"**/kernel": muon, "**": adamw}),
        ft.tx.ema(0.98, debias=True),
    )
)

# %% The state. It is made on the devices that hold it. On a single device, nothing is divided
mesh = ft.sharding.mesh({"data": -1})
first_batch = next(iter(train))


def create():
    params, model_state = model.init(jax.random.key(args.seed), first_batch[0])
    return ft.TrainState.create(params=params, model_state=model_state, tx=tx)


state = ft.sharding.create(create, mesh, ft.sharding.fsdp())
step = ft.train_step(ft.micro_batches(loss_fn, size.micro_rows), tx, learning_rate=schedule)
parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
flops = ft.inspect.cost(state, step, first_batch).flops
print(
    f"{parameters:,} parameters, {flops:.3g} FLOPs in a step of {size.rows * size.length:,} tokens"
)

# %% The evaluation. Bits per byte do not depend on the tokenizer, as the loss per token does
mean = ft.metrics.mean_loss()
bits = ft.metrics.Metric(mean.init, mean.update, lambda m: mean.compute(m) * bits_per_nat)
eval_step = ft.eval_step(
    loss_fn,
    metrics={"bits_per_byte": bits},
    get_state=lambda state: state.replace(params=ft.tx.ema_params(state)),
)


# %% Samples. One program draws a whole row, one token after the other. Later tokens do not matter
# to the one that is drawn, since none attends to them
@jax.jit
def draw(params, model_state, key):
    inputs = {
        "tokens": jnp.full((1, size.length), begin),
        "segments": jnp.ones((1, size.length), jnp.int32),
        "positions": jnp.arange(size.length)[None],
    }

    def draw_token(i, tokens):
        outputs = model.apply(params, model_state, {**inputs, "tokens": tokens}).outputs
        logits = outputs[0, i, :vocabulary_size] / args.temperature
        token = jax.random.categorical(jax.random.fold_in(key, i), logits)
        return tokens.at[0, i + 1].set(token)

    return jax.lax.fori_loop(0, size.length - 1, draw_token, inputs["tokens"])[0, 1:]


def sample(state, number=0):
    key = jax.random.key(args.seed + number)
    drawn = np.asarray(draw(ft.tx.ema_params(state), state.model_state, key))
    drawn = drawn[: np.append(drawn == begin, True).argmax()]
    return to_bytes(drawn.tolist()).decode(errors="replace")


# %% Training. The state, the data, the hooks and the history are saved every `every` steps, and
# restored from `--output` if there are any. The log has the sample and the speed: tokens and FLOPs
# a second, and on a device with a known peak their quotient, the MFU
state, history = ft.fit(
    state,
    step,
    train,
    steps=size.steps,
    steps_per_epoch=every,
    eval_data=validation,
    eval_step=eval_step,
    sharding=NamedSharding(mesh, P("data")),
    hooks=[
        ft.hooks.Throughput(tokens_per_example=size.length, flops_per_step=flops),
        ft.hooks.Sample(sample),
        ft.hooks.JSONLines(args.output / "log.jsonl"),
    ],
    checkpointer=ft.Checkpointer(args.output / "checkpoints", every=ft.every(steps=every)),
)

# %% The texts that the trained model writes
for i in range(3):
    print(f"\n--- sample {i + 1}\n{sample(state, i)}")

# %% Plot. Training and validation in bits per byte, and the segments of a batch
figure = matplotlib.figure.Figure(figsize=(9, 4), layout="constrained")
left, right = figure.subplots(1, 2)
step_numbers = np.arange(1, size.steps + 1)
losses = np.asarray(history.steps["loss"]) * bits_per_nat
left.plot(step_numbers, losses, color="#b8c4d6", lw=0.7, label="training")
left.plot(
    step_numbers[every - 1 :: every],
    history.epochs["val_bits_per_byte"],
    "s-",
    color="#d1602a",
    ms=4,
    label="validation, averaged weights",
)
left.set(xlabel="step", ylabel="bits per byte")
left.legend()
right.imshow(first_batch[0]["segments"], aspect="auto", interpolation="nearest", cmap="tab20")
right.set(xlabel="token", ylabel="row", title="segments of the first batch")
figure.savefig(args.output / "pretrain.png", dpi=120)
print(f"\nvalidation: {history.epochs['val_bits_per_byte'][-1]:.3f} bits per byte")
print(f"wrote {args.output / 'pretrain.png'}")
