"""A small causal transformer learns to write like Shakespeare, letter by letter.

The script uses three techniques that large models need, and each is one function call: it computes
in bfloat16, divides every batch into micro-batches and accumulates their gradients, and keeps an
exponential moving average (EMA) of the weights. The averaged weights are used for the validation
perplexity and for the text that is generated at the end.

The data set is four tragedies with 580 000 letters. The baseline is a bigram model, which counts
how often each letter follows another. The transformer should reach a lower perplexity on held-out
text.

    python examples/text.py            # a few minutes on two CPU cores
    python examples/text.py --quick    # a few seconds, to try it out
"""

# %% Options
from _example import arguments

args = arguments(
    __doc__,
    quick="40 steps of 16 examples",
    steps=(1_600, "a multiple of 200: perplexity is measured every 200"),
    batch_size=32,
    micro_batch=(8, "examples whose gradient is computed at once"),
    letters=(300, "letters in a sample"),
    temperature=(0.8, "sampling temperature; lower values give more likely text"),
)

import gzip

import flax.linen as nn
import functrain as ft
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax

CONTEXT, WIDTH, BLOCKS, HEADS = 64, 128, 2, 4

# %% Data. Letters are encoded as integers. The last tenth, the end of Othello, is for validation
with gzip.open(args.data / "tragedies.txt.gz", "rt", encoding="ascii") as file:
    text = file.read()
alphabet = sorted(set(text))
codes = np.array([alphabet.index(letter) for letter in text], np.uint8)
train_codes, held_out = np.split(codes, [len(codes) * 9 // 10])


def windows(codes, every):
    """Returns inputs `u8[N, T]` and the next letters `u8[N, T]`, both views of `codes`."""
    view = np.lib.stride_tricks.sliding_window_view(codes, CONTEXT + 1)[::every]
    return view[:, :-1], view[:, 1:]


steps, every, batch_size = (40, 20, 16) if args.quick else (args.steps, 200, args.batch_size)
train = ft.ArrayLoader(windows(train_codes, 5), batch_size, shuffle=True, seed=args.seed)
validation = windows(held_out, CONTEXT * (10 if args.quick else 1))
validation = ft.ArrayLoader(validation, 45)
print(f"{len(codes):,} letters of {len(alphabet)} kinds, {len(train):,} batches in an epoch")

# %% The baselines. A unigram model predicts each letter by its frequency, and a bigram model also
# uses the letter before it. Pairs that do not occur get a small count, so that no probability is
# zero
counts = np.zeros((len(alphabet), len(alphabet)))
np.add.at(counts, (train_codes[:-1], train_codes[1:]), 1)
counts += 0.1
letter_probs = counts.sum(0) / counts.sum()
pair_probs = counts / counts.sum(1, keepdims=True)
unigram = np.exp(-np.log(letter_probs[held_out[1:]]).mean())
bigram = np.exp(-np.log(pair_probs[held_out[:-1], held_out[1:]]).mean())
print(f"validation perplexity of a unigram model {unigram:.3f}, of a bigram model {bigram:.3f}")


# %% The model. Each block has causal self-attention and two dense layers. `ft.cast` makes the model
# compute in bfloat16, and the params stay float32
class Transformer(nn.Module):
    @nn.compact
    def __call__(self, letters):
        positions = self.param("positions", nn.initializers.normal(0.02), (CONTEXT, WIDTH))
        x = nn.Embed(len(alphabet), WIDTH)(letters) + positions
        for _ in range(BLOCKS):
            mask = nn.make_causal_mask(letters)
            x += nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
            x += nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(len(alphabet))(nn.LayerNorm()(x))


model = ft.cast(ft.from_linen(Transformer()), jnp.bfloat16)

# %% The loss and the optimizer. The optimizer clips gradients, follows a schedule, and keeps an
# average of the params
loss_fn = ft.supervised(model, optax.softmax_cross_entropy_with_integer_labels)
schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps, 1e-4)
tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(schedule, weight_decay=0.1),
    ft.tx.ema(0.98, debias=True),
)
params, _ = model.init(jax.random.key(args.seed), train_codes[None, :CONTEXT])
state = ft.TrainState.create(params=params, tx=tx)
print(f"a transformer of {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters")

# %% Training. Perplexity is the exponential of the mean loss, so the metric changes only `compute`.
# `ft.micro_batches` accumulates gradients, and `get_state` selects the averaged params for
# evaluation
mean = ft.metrics.mean_loss()
perplexity = ft.metrics.Metric(mean.init, mean.update, lambda m: jnp.exp(mean.compute(m)))
state, history = ft.fit(
    state,
    ft.train_step(ft.micro_batches(loss_fn, args.micro_batch), tx, learning_rate=schedule),
    train,
    steps=steps,
    steps_per_epoch=every,
    eval_data=validation,
    eval_step=ft.eval_step(
        loss_fn,
        metrics={"perplexity": perplexity},
        get_state=ft.tx.averaged,
    ),
)


# %% Generating text. One program draws all letters, one after another. Each letter is appended to
# the window of letters that the model sees, and the first letter of the window is dropped
@jax.jit
def write(params, window, key):
    def letter(window, key):
        logits = model.apply(params, {}, window[None]).outputs[0, -1]
        drawn = jax.random.categorical(key, logits / args.temperature).astype(window.dtype)
        return jnp.append(window[1:], drawn), drawn

    return jax.lax.scan(letter, window, jax.random.split(key, args.letters))[1]


def decode(codes):
    return "".join(alphabet[code] for code in codes)


for i, start in enumerate((0, len(held_out) // 2)):
    prompt = held_out[start : start + CONTEXT]
    drawn = write(ft.tx.ema_params(state), prompt, jax.random.key(args.seed + i))
    print(f"\n--- prompt\n{decode(prompt)}\n--- generated\n{decode(np.asarray(drawn))}")

# %% Plot. The training and validation perplexity, compared with the baselines
val_perplexity = history.epochs["val_perplexity"]
figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
step_numbers = np.arange(1, steps + 1)
panel.plot(step_numbers, np.exp(history.steps["loss"]), color="#b8c4d6", lw=0.7, label="training")
panel.plot(
    step_numbers[every - 1 :: every],
    val_perplexity,
    "s-",
    color="#d1602a",
    ms=4,
    label="validation",
)
panel.axhline(unigram, color="gray", ls=":", label="unigram model")
panel.axhline(bigram, color="black", ls="--", label="bigram model")
panel.set(xlabel="step", ylabel="perplexity, per letter", yscale="log")
panel.legend()
figure.savefig(args.output / "text.png", dpi=120)
verdict = "below" if val_perplexity[-1] < bigram else "not below"
print(
    f"\nvalidation perplexity {val_perplexity[-1]:.3f}, {verdict} the bigram model's {bigram:.3f}"
)
print(f"wrote {args.output / 'text.png'}")
