"""Memory, cost and largest batch of two Keras models, before a device is rented.

The script compiles the training of a ResNet50 and of a transformer of the size of BERT base, and
prints whether it fits into the memory of a device, what a step costs, and the largest batch that
fits. Nothing is trained, and the device need not be there.

    python examples/will_it_fit.py                        # for this machine
    python examples/will_it_fit.py --target tpu:v5e       # needs pip install 'functrain[tpu]'
    python examples/will_it_fit.py --target cuda:h100     # needs pip install 'functrain[cuda]'
    python examples/will_it_fit.py --quick                # a small transformer, less than a minute

Compiling a ResNet50 takes minutes on two CPU cores, and it is compiled several times.
"""

# %% Options
from _example import arguments

args = arguments(
    __doc__,
    quick="a transformer of two layers, no ResNet50",
    batch_size=64,
    target=("", "the device, such as tpu:v5e or cuda:h100; by default this machine"),
)

import bridge  # before keras: it makes Keras use JAX
import functrain as ft
import jax
import keras
import matplotlib.figure

# %% The device. A target has a name and the figures of its chip
target = ft.target(args.target or None)
print(target)


# %% The models. A ResNet50 for images, and an encoder for text with two classes. Both have random
# weights
class AddPositions(keras.layers.Layer):
    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], name="table")

    def call(self, x):
        return x + self.table


def transformer(layers, width, heads, tokens=128, words=30_522):
    inputs = keras.Input((tokens,), dtype="int32")
    x = AddPositions()(keras.layers.Embedding(words, width)(inputs))
    for _ in range(layers):
        attended = keras.layers.MultiHeadAttention(heads, width // heads)(x, x)
        x = keras.layers.LayerNormalization()(x + attended)
        hidden = keras.layers.Dense(4 * width, "gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(width)(hidden))
    outputs = keras.layers.Dense(2, "softmax")(keras.layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs)


if args.quick:
    models = {"small transformer": transformer(2, 64, 2, words=1_000)}
else:
    models = {
        "ResNet50": keras.applications.ResNet50(weights=None),
        "BERT base": transformer(12, 768, 12),
    }

# %% The reports. A batch may be given by its shapes alone
reports = {}
for name, model in models.items():
    model.compile("adam", "sparse_categorical_crossentropy")
    x = jax.ShapeDtypeStruct((args.batch_size, *model.input.shape[1:]), model.input.dtype)
    batch = x, jax.ShapeDtypeStruct((args.batch_size,), "int32")
    print(f"\n{name}, batch {args.batch_size}")
    reports[name] = bridge.memory(model, batch, target=target)
    print(reports[name])
    if reports[name].fits:
        print(bridge.cost(model, batch, target=target))
    print("largest batch that fits:", bridge.largest_batch(model, batch, target=target))

# %% Plot. What the memory of each model consists of
figure = matplotlib.figure.Figure(figsize=(7, 3), layout="constrained")
panel = figure.subplots()
start = [0.0] * len(reports)
for label, attribute in {
    "state": "state",
    "original state": "original_state",
    "chunks": "chunks",
    "temporaries": "temporaries",
}.items():
    sizes = [getattr(report, attribute) / 2**30 for report in reports.values()]
    panel.barh(list(reports), sizes, left=start, label=label)
    start = [a + b for a, b in zip(start, sizes, strict=True)]
panel.set(xlabel=f"GiB of {target.chip.memory_bytes / 2**30:.1f}", title=target.chip.name)
panel.legend()
figure.savefig(args.output / "will_it_fit.png", dpi=120)
print(f"wrote {args.output / 'will_it_fit.png'}")
