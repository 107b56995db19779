"""A training loop from scratch: every part a pure function, every part yours to change.

MNIST digits, a Keras model of three dense layers, Adam. You write the loss and the loop; functrain
writes neither for you here, and still puts a hundred steps into one program.

    python examples/from_scratch.py            # two epochs, some ten seconds on two CPU cores
    python examples/from_scratch.py --quick    # a few seconds, for a look
"""

# %% Keras runs on JAX from here on
from _example import arguments

args = arguments(__doc__, quick="epochs of 6 400 digits", epochs=2, batch_size=32)

import bridge
import functrain as ft
import jax
import keras
import matplotlib.figure
import numpy as np
import optax

# %% The data: 50 000 digits to learn from, 10 000 to watch, 10 000 to test. Labels are one-hot
with np.load(args.data / "mnist.npz") as file:
    x, y = file["x_train"].reshape(-1, 784), np.eye(10, dtype=np.float32)[file["y_train"]]
    x_test, y_test = file["x_test"].reshape(-1, 784), np.eye(10, dtype=np.float32)[file["y_test"]]

size = 6_400 if args.quick else 50_000
train = ft.ArrayLoader((x[:size], y[:size]), args.batch_size, shuffle=True, seed=args.seed)
validation = ft.ArrayLoader((x[-10_000:], y[-10_000:]), 1_000)
test = ft.ArrayLoader((x_test, y_test), 1_000)

# %% The model: Keras. Its variables leave it here, as two pytrees of arrays. So does the optimizer,
# one of Keras's; optax.adam(1e-3) would do as well
keras.utils.set_random_seed(args.seed)


def mlp(*between):
    return keras.Sequential(
        [
            keras.Input((784,), dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Dense(64, activation="relu"),
            *between,
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


keras_model = mlp()
model = bridge.from_keras(keras_model)
tx = bridge.optimizer(keras.optimizers.Adam(1e-3))
state = bridge.create_state(keras_model, tx)
print(ft.inspect.summary(state))


# %% The loss: a pure function. What the model changes on its way (batch statistics, seed counters)
# comes back in Aux, and so do the outputs, for the metrics. `losses` are those that layers add
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


# %% The step: (state, batch) -> (state, logs). ft.update takes the gradient and applies it; that is
# all there is to training, and where a step of another kind begins
def bare_step(state, batch):
    state, loss, _ = ft.update(state, loss_fn, tx, batch)
    return state, {"loss": loss}


# As it is a pure function of arrays, jax.jit takes it as it stands
jitted = jax.jit(bare_step)
after, logs = jitted(state, train.batch(0, 0))
print(f"one step: loss {logs['loss']:.4f}, then {jitted(after, train.batch(0, 0))[1]['loss']:.4f}")

# %% The same step with a metric, one of Keras's here; ft.metrics.accuracy() is one of functrain's.
# It runs beside the state, as a list of arrays: nothing has to be reset by hand
metrics = {"accuracy": bridge.metric(keras.metrics.CategoricalAccuracy())}
step = ft.train_step(loss_fn, tx, metrics=metrics)
eval_step = ft.eval_step(loss_fn, metrics=metrics)


# %% The evaluation, as a loop of one's own; ft.evaluate(state, eval_step, data) is the same
def evaluate(state, data):
    take = jax.jit(eval_step)
    metered = eval_step.start(state)
    for batch in data.epoch(0):
        metered, _ = take(metered, batch)
    return eval_step.metrics.compute(metered.metrics)


# %% The loop. ft.run steps, as many steps to a program as fit until something is due; what happens
# in between is up to you: here, every hundred steps, the loss and the accuracy of the epoch so far
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
            found = evaluate(event.state, validation)
            validated.append((n, float(found["accuracy"])))
            print(
                f"epoch {epoch + 1}: accuracy {event.metrics()['accuracy']:.4f}, "
                f"validation {found['accuracy']:.4f}"
            )
        case ft.events.RunEnd(state=trained):
            pass

# %% Home again: the model takes the values, and is a Keras model like any other
bridge.to_keras(trained, keras_model)
keras_model.save(args.output / "digits.keras")
found = ft.evaluate(trained, eval_step, test)
print(f"test: loss {found['loss']:.4f}, accuracy {found['accuracy']:.4f}")


# %% Losses that layers add: here, 1e-2 times the sum of what a layer puts out. The loss above has
# them in its sum already, so nothing but the model is new. So heavy a one silences the layer: a
# loss of 2.30 = log 10 is guessing
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

# %% A picture: how the accuracy rose, and what the model still gets wrong
logits = ft.predict(trained, ft.predict_step(model), ft.ArrayLoader(x_test, 1_000))
wrong = np.flatnonzero(logits.argmax(-1) != y_test.argmax(-1))[:24]
figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
left, right = figure.subfigures(1, 2)
panel = left.subplots()
panel.plot(*zip(*running, strict=True), ".-", label="training, the epoch so far")
panel.plot(*zip(*validated, strict=True), "s", label="validation")
panel.set(xlabel="step", ylabel="accuracy")
panel.legend()
right.suptitle("wrong: what it said, not what it is")
for i, cell in zip(wrong, right.subplots(4, 6).flat, strict=False):
    cell.imshow(x_test[i].reshape(28, 28), cmap="gray_r")
    cell.set_title(f"{logits[i].argmax()}, not {y_test[i].argmax()}", fontsize=7)
    cell.axis("off")
figure.savefig(args.output / "from_scratch.png", dpi=120)
print(f"wrote {args.output / 'digits.keras'} and {args.output / 'from_scratch.png'}")
