"""A training loop from scratch: each part is a pure function that you can change.

A Keras model of three dense layers learns to classify MNIST digits with Adam. You write the loss
and the loop yourself, and functrain still fuses up to a hundred steps into one program.

    python examples/from_scratch.py            # two epochs, about ten seconds on two CPU cores
    python examples/from_scratch.py --quick    # a few seconds, to try it out
"""

# %% Options. `arguments` also selects the JAX backend, so it runs before Keras is imported
from _example import arguments

args = arguments(__doc__, quick="epochs of 6 400 digits", epochs=2, batch_size=32)

import bridge
import functrain as ft
import jax
import keras
import matplotlib.figure
import numpy as np
import optax

# %% Data. 50 000 digits for training, 10 000 for validation and 10 000 for testing, with one-hot
# labels
with np.load(args.data / "mnist.npz") as file:
    x, y = file["x_train"].reshape(-1, 784), np.eye(10, dtype=np.float32)[file["y_train"]]
    x_test, y_test = file["x_test"].reshape(-1, 784), np.eye(10, dtype=np.float32)[file["y_test"]]

size = 6_400 if args.quick else 50_000
train = ft.ArrayLoader((x[:size], y[:size]), args.batch_size, shuffle=True, seed=args.seed)
validation = ft.ArrayLoader((x[-10_000:], y[-10_000:]), 1_000)
test = ft.ArrayLoader((x_test, y_test), 1_000)

# %% The model and the optimizer, from Keras. `bridge.create_state` copies the variables of the
# model into two pytrees of arrays, params and model state. `bridge.optimizer` converts a Keras
# optimizer; `optax.adam(1e-3)` would work as well
keras.utils.set_random_seed(args.seed)


def mlp(*extra_layers):
    return keras.Sequential(
        [
            keras.Input((784,), dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Dense(64, activation="relu"),
            *extra_layers,
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


keras_model = mlp()
model = bridge.from_keras(keras_model)
tx = bridge.optimizer(keras.optimizers.Adam(1e-3))
state = bridge.create_state(keras_model, tx)
print(ft.inspect.summary(state))


# %% The loss. It is a pure function. It returns the loss and an `ft.Aux` with the updated model
# state (batch statistics and seed counters) and the outputs, which the metrics need. `losses` are
# the losses that layers add with `add_loss`
def loss_of(model):
    def loss_fn(params, model_state, batch, *, rng, training):
        x, y = batch
        logits, model_state, losses = model.apply(
            params, model_state, x, rng=rng, training=training
        )
        loss = optax.softmax_cross_entropy(logits, y).mean() + sum(losses)
        return loss, ft.Aux(model_state, logits)

    return loss_fn


loss_fn = loss_of(model)


# %% The step. It is a function `(state, batch) -> (state, logs)`. `ft.update` computes the gradient
# and applies the optimizer. A custom algorithm starts from a function like this one
def bare_step(state, batch):
    state, loss, _ = ft.update(state, loss_fn, tx, batch)
    return state, {"loss": loss}


# The step is a pure function of arrays, so jax.jit can compile it directly.
jitted = jax.jit(bare_step)
after, logs = jitted(state, train.batch(0, 0))
print(f"one step: loss {logs['loss']:.4f}, then {jitted(after, train.batch(0, 0))[1]['loss']:.4f}")

# %% Metrics. `ft.train_step` builds the same step with metrics. This one is a Keras metric;
# `ft.metrics.accuracy()` is functrain's own. The values of a metric are arrays that are passed from
# step to step beside the state, and every epoch starts with new ones
metrics = {"accuracy": bridge.metric(keras.metrics.CategoricalAccuracy())}
step = ft.train_step(loss_fn, tx, metrics=metrics)
eval_step = ft.eval_step(loss_fn, metrics=metrics)


# %% Evaluation. This is a loop of your own. `ft.evaluate(state, eval_step, data)` does the same
def evaluate(state, data):
    jitted_step = jax.jit(eval_step)
    metered = eval_step.start(state)
    for batch in data.epoch(0):
        metered, _ = jitted_step(metered, batch)
    return eval_step.metrics.compute(metered.metrics)


# %% The loop. `ft.run` fuses steps into programs, and stops at every boundary and at the end of
# every epoch. It yields events, and your code decides what to do with them. Here it prints the loss
# and the accuracy of the epoch so far after every hundred steps, and validates after every epoch
running, validated = [], []
for event in ft.run(state, step, train, epochs=args.epochs, boundaries=[ft.every(steps=100)]):
    match event:
        case ft.events.ChunkEnd(step=n) if n % 100 == 0:
            accuracy = float(event.metrics()["accuracy"])
            running.append((n, accuracy))
            print(
                f"step {n}: loss {event.latest()['loss']:.4f}, accuracy {accuracy:.4f}, "
                f"{n * args.batch_size} samples seen"
            )
        case ft.events.EpochEnd(epoch=epoch, step=n):
            val_metrics = evaluate(event.state, validation)
            validated.append((n, float(val_metrics["accuracy"])))
            print(
                f"epoch {epoch + 1}: accuracy {event.metrics()['accuracy']:.4f}, "
                f"validation {val_metrics['accuracy']:.4f}"
            )
        case ft.events.RunEnd(state=trained):
            pass

# %% Back to Keras. The trained values are copied into the model, which is saved as usual
bridge.to_keras(trained, keras_model)
keras_model.save(args.output / "digits.keras")
test_metrics = ft.evaluate(trained, eval_step, test)
print(f"test: loss {test_metrics['loss']:.4f}, accuracy {test_metrics['accuracy']:.4f}")


# %% Losses that layers add. Here a layer adds 1e-2 times the sum of its outputs. The loss function
# above includes such losses already, so only the model is new. This penalty is so large that the
# layer's outputs vanish: the loss ends near log 10 = 2.30, which is the loss of guessing
class Sparse(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(1e-2 * keras.ops.sum(inputs))
        return inputs


sparse_model = mlp(Sparse())
sparse, history = ft.fit(
    bridge.create_state(sparse_model, tx),
    ft.train_step(loss_of(bridge.from_keras(sparse_model)), tx),
    train,
    verbose=0,
)
losses = history.steps["loss"]
print(f"with the layer's loss: {losses[0]:.2f} at first, {losses[-100:].mean():.2f} at the end")

# %% Plot. The accuracy during training, and some digits that the model classifies wrongly
logits = ft.predict(trained, ft.predict_step(model), ft.ArrayLoader(x_test, 1_000))
wrong = np.flatnonzero(logits.argmax(-1) != y_test.argmax(-1))[:24]
figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
left, right = figure.subfigures(1, 2)
panel = left.subplots()
panel.plot(*zip(*running, strict=True), ".-", label="training, the epoch so far")
panel.plot(*zip(*validated, strict=True), "s", label="validation")
panel.set(xlabel="step", ylabel="accuracy")
panel.legend()
right.suptitle("errors: predicted, not true class")
for i, cell in zip(wrong, right.subplots(4, 6).flat, strict=False):
    cell.imshow(x_test[i].reshape(28, 28), cmap="gray_r")
    cell.set_title(f"{logits[i].argmax()}, not {y_test[i].argmax()}", fontsize=7)
    cell.axis("off")
figure.savefig(args.output / "from_scratch.png", dpi=120)
print(f"wrote {args.output / 'digits.keras'} and {args.output / 'from_scratch.png'}")
