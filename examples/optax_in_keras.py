"""Optax optimizers in `model.compile`: schedules, rates by layer, clipping and accumulation.

Every cell compiles the same Keras model with a different optimizer and trains it with `bridge.fit`,
which takes the same arguments as `model.fit`. These optimizers also work with `model.fit`.

    python examples/optax_in_keras.py            # about two minutes on two CPU cores
    python examples/optax_in_keras.py --quick    # a few seconds, to try it out
"""

# %% Options. `arguments` also selects the JAX backend, so it runs before Keras is imported
from _example import arguments

args = arguments(__doc__, quick="one epoch over 6 400 images", epochs=3)

import bridge
import functrain as ft
import jax
import keras
import matplotlib.figure
import numpy as np
import optax
import optax.contrib

# %% Data. MNIST has 60 000 images for training and 10 000 for testing
with np.load(args.data / "mnist.npz") as file:
    x, y = file["x_train"].reshape(-1, 784).astype(np.float32) / 255, file["y_train"].astype(int)
    test = file["x_test"].reshape(-1, 784).astype(np.float32) / 255, file["y_test"].astype(int)
epochs = args.epochs
if args.quick:
    x, y, epochs = x[:6_400], y[:6_400], 1
STEPS = epochs * len(x) // 64


# %% The model. A new one is built for each optimizer. Its layers have names, because the optimizer
# with rates by layer selects them by name
def make_model() -> keras.Model:
    keras.utils.set_random_seed(args.seed)
    layers = [
        keras.Input((784,)),
        keras.layers.Dense(64, "relu", name="body"),
        keras.layers.Dense(10, name="head"),
    ]
    return keras.Sequential(layers)


loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

accuracies = {}


def train(title: str, optimizer: keras.optimizers.Optimizer, **arguments) -> keras.Model:
    model = make_model()
    model.compile(optimizer, loss, metrics=["accuracy"])
    bridge.fit(model, x, y, batch_size=64, epochs=epochs, verbose=0, **arguments)
    found = bridge.evaluate(model, *test, batch_size=1_000, verbose=0, return_dict=True)
    print(f"{title:<36} test accuracy {found['accuracy']:.4f}")
    accuracies[title] = found["accuracy"]
    return model


# %% Any optax optimizer. `bridge.OptaxOptimizer` takes the optax function and its arguments. Keras
# callbacks can set the learning rate
halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else rate)
adan = bridge.OptaxOptimizer(optax.adan, learning_rate=2e-3)
model = train("adan, halved each epoch", adan, callbacks=[halve])

# %% Saving and loading. The file includes the optimizer and its state, because it can refer to the
# function `optax.adan` by name
model.save(args.output / "adan.keras")
again = keras.models.load_model(args.output / "adan.keras")
print(f"loaded after {int(again.optimizer.iterations)} iterations")

# %% Schedules. `bridge.schedule` takes an optax schedule and its arguments, and returns a Keras
# schedule, which works with optax and with Keras optimizers
cosine = bridge.schedule(
    optax.warmup_cosine_decay_schedule,
    init_value=0.0,
    peak_value=4e-3,
    warmup_steps=STEPS // 10,
    decay_steps=STEPS,
)
train("adamw, warm-up and cosine", bridge.OptaxOptimizer(optax.adamw, learning_rate=cosine))
train("Keras's Adam, the same schedule", keras.optimizers.Adam(cosine))


# %% Learning rates by layer. The paths of the params are Keras's, such as `sequential/body/kernel`
rates = ft.tx.param_groups({"**/head/**": optax.sgd(0.1), "**": optax.adam(1e-3)})
train("adam in the body, sgd in the head", bridge.OptaxOptimizer(rates))


# %% Clipping and weight decay. Only matrices decay. The function is registered with Keras, so that
# a model with this optimizer can be saved
@keras.saving.register_keras_serializable("examples")
def clipped(learning_rate, norm, decay):
    return optax.chain(
        optax.clip_by_global_norm(norm),
        optax.adamw(
            learning_rate,
            weight_decay=decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        ),
    )


optimizer = bridge.OptaxOptimizer(clipped, learning_rate=2e-3, norm=1.0, decay=1e-2)
train("clipped, decay for matrices", optimizer).save(args.output / "clipped.keras")

# %% Gradient accumulation. One update uses the mean gradient of four batches
steps = optax.MultiSteps(optax.adam(4e-3), every_k_schedule=4)
train("adam, four batches an update", bridge.OptaxOptimizer(steps))

# %% Prodigy from optax.contrib. It estimates its learning rate during training
train("prodigy", bridge.OptaxOptimizer(optax.contrib.prodigy()))

# %% A Keras optimizer in functrain. Muon trains in `ft.fit`, and then continues in `model.fit` with
# the optimizer's state
model = make_model()
model.compile(keras.optimizers.Muon(1e-2), loss, metrics=["accuracy"])
tx = optax.chain(optax.zero_nans(), bridge.optimizer(model.optimizer))
state = bridge.create_state(model, tx)
loss_fn = ft.supervised(bridge.from_keras(model), bridge.loss(loss))
loader = ft.ArrayLoader((x, y), 64, shuffle=True, seed=args.seed)
state, _ = ft.fit(state, ft.train_step(loss_fn, tx), loader, epochs=epochs, verbose=False)
bridge.to_keras(state, model, optimizer="require")
model.fit(x[:640], y[:640], batch_size=64, verbose=0)
accuracy = model.evaluate(*test, batch_size=1_000, verbose=0, return_dict=True)["accuracy"]
print(f"{'Muon, in functrain, then in Keras':<36} test accuracy {accuracy:.4f}")
accuracies["Muon, in functrain, then in Keras"] = accuracy

# %% Plot. The test accuracy with each optimizer
figure = matplotlib.figure.Figure(figsize=(8, 3.5), layout="constrained")
panel = figure.subplots()
bars = panel.barh(list(accuracies), list(accuracies.values()))
panel.bar_label(bars, fmt="%.4f", padding=3)
panel.set(xlabel="test accuracy", xlim=(min(accuracies.values()) - 0.02, 1.0))
panel.invert_yaxis()
figure.savefig(args.output / "optax_in_keras.png", dpi=120)
print(f"wrote {args.output / 'optax_in_keras.png'}")
