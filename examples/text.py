"""A small causal transformer learns to write like Shakespeare, letter by letter.

The text is four tragedies, 580 000 letters. A bigram model, which knows how often a letter follows
another, is counted first: that is what the transformer has to beat, on text that neither has seen.

    python examples/text.py            # some minutes on two CPU cores
    python examples/text.py --quick    # a few seconds, for a look
"""

# %% Keras runs on JAX from here on
from _example import arguments

args = arguments(
    __doc__,
    quick="40 steps of 16 examples",
    steps=1_500,
    batch_size=32,
    letters=(300, "letters in a sample"),
    temperature=(0.8, "of the sampling; lower is safer"),
)

import gzip

import bridge
import functrain as ft
import jax
import jax.numpy as jnp
import keras
import matplotlib.figure
import numpy as np
import optax
from keras import layers

CONTEXT, WIDTH, BLOCKS, HEADS = 64, 128, 2, 4

# %% The data: letters as numbers. The last tenth, the end of Othello, is for validation
with gzip.open(args.data / "tragedies.txt.gz", "rt", encoding="ascii") as file:
    text = file.read()
alphabet = sorted(set(text))
codes = np.array([alphabet.index(letter) for letter in text], np.uint8)
learn, held_out = np.split(codes, [len(codes) * 9 // 10])


def windows(codes, every):
    """Returns inputs `u8[N, T]` and the letters that follow, without copying any."""
    view = np.lib.stride_tricks.sliding_window_view(codes, CONTEXT + 1)[::every]
    return view[:, :-1], view[:, 1:]


steps, batch_size = (40, 16) if args.quick else (args.steps, args.batch_size)
train = ft.ArrayLoader(windows(learn, 5), batch_size, shuffle=True, seed=args.seed)
validation = ft.ArrayLoader(windows(held_out, CONTEXT * (10 if args.quick else 1)), 50)
print(f"{len(codes):,} letters of {len(alphabet)} kinds, {len(train):,} batches in an epoch")

# %% What has to be beaten: how well letters are told from none, and from one before them
counts = np.zeros((len(alphabet), len(alphabet)))
np.add.at(counts, (learn[:-1], learn[1:]), 1)
counts += 0.1  # no pair is impossible
unigram = -np.log(counts.sum(0) / counts.sum())[held_out[1:]].mean()
bigram = -np.log(counts / counts.sum(1, keepdims=True))[held_out[:-1], held_out[1:]].mean()
print(f"validation loss of a unigram model {unigram:.4f}, of a bigram model {bigram:.4f}")


# %% The model: Keras. A block looks back with attention, then thinks with two dense layers
def transformer():
    inputs = keras.Input((CONTEXT,), dtype="uint8")
    places = keras.ops.cumsum(keras.ops.ones_like(inputs, dtype="int32"), axis=1) - 1
    x = layers.Embedding(len(alphabet), WIDTH)(inputs) + layers.Embedding(CONTEXT, WIDTH)(places)
    for _ in range(BLOCKS):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(h, h, use_causal_mask=True)
        h = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(WIDTH)(h)
    return keras.Model(inputs, layers.Dense(len(alphabet))(layers.LayerNormalization()(x)))


keras.utils.set_random_seed(args.seed)
keras_model = transformer()
model = bridge.from_keras(keras_model)

# %% The optimizer: optax, with a schedule and clipping
schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps, 1e-4)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
state = bridge.create_state(keras_model, tx)
size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
print(f"a transformer of {size:,} parameters")

# %% Training: a hook ends the run when enough steps are taken, another looks at held-out text
loss_fn = ft.supervised(model, optax.softmax_cross_entropy_with_integer_labels)


@ft.at(steps)
def enough(event):
    event.stop()


@ft.every(steps=max(10, steps // 15))
def report(event):
    print(f"step {event.step}: loss {event.latest()['loss']:.4f}", end="")
    print(f", validation {event.values['val_loss']:.4f}", flush=True)


look = ft.hooks.Evaluate(ft.eval_step(loss_fn), validation, when=report.when)
state, history = ft.fit(
    state,
    ft.train_step(loss_fn, tx),
    train,
    epochs=1 + steps // len(train),
    hooks=[look, report, enough],
    verbose=0,
)


# %% Writing: a letter at a time, all of it one program. The window moves on with each letter
@jax.jit
def write(params, model_state, window, key):
    def letter(window, key):
        logits = model.apply(params, model_state, window[None]).outputs[0, -1]
        drawn = jax.random.categorical(key, logits / args.temperature).astype(window.dtype)
        return jnp.append(window[1:], drawn), drawn

    return jax.lax.scan(letter, window, jax.random.split(key, args.letters))[1]


def decode(codes):
    return "".join(alphabet[code] for code in codes)


for i, start in enumerate((0, len(held_out) // 2)):
    prompt = held_out[start : start + CONTEXT]
    drawn = write(state.params, state.model_state, prompt, jax.random.key(args.seed + i))
    print(
        f"\n--- what Shakespeare began\n{decode(prompt)}\n--- goes on\n{decode(np.asarray(drawn))}"
    )

# %% A picture, and the verdict
at, losses = history.points["val_loss"]
figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
panel.plot(
    np.arange(1, steps + 1), history.steps["loss"], color="#b8c4d6", lw=0.7, label="training"
)
panel.plot(at, losses, "s-", color="#d1602a", ms=4, label="validation")
panel.axhline(unigram, color="gray", ls=":", label="unigram model")
panel.axhline(bigram, color="black", ls="--", label="bigram model")
panel.set(xlabel="step", ylabel="loss, nats per letter")
panel.legend()
figure.savefig(args.output / "text.png", dpi=120)
verdict = "below" if losses[-1] < bigram else "not below"
print(f"\nvalidation loss {losses[-1]:.4f}, {verdict} the bigram model's {bigram:.4f}")
print(f"wrote {args.output / 'text.png'}")
