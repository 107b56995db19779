"""A Keras model is trained on MNIST with an optax optimizer, and saved as a Keras model.

The model comes from Keras, the optimizer from optax and the loop from functrain, which runs 32
steps in one program. At the end a new process loads the saved file with plain Keras and checks that
the accuracy is the same.

    python examples/mnist.py            # 10 epochs, about ten seconds on two CPU cores
    python examples/mnist.py --quick    # a few seconds, to try it out
"""

# %% Options. `arguments` also selects the JAX backend, so it runs before Keras is imported
from _example import arguments

args = arguments(
    __doc__,
    quick="one epoch over 6 400 images",
    epochs=10,
    batch_size=64,
    fuse=(32, "steps per program"),
)

import subprocess
import sys

import bridge
import functrain as ft
import keras
import numpy as np
import optax

# %% Data. Of the 60 000 training images, the last 10 000 are for validation
with np.load(args.data / "mnist.npz") as file:
    images, labels = file["x_train"].reshape(-1, 784), file["y_train"].astype(np.int32)
    test = file["x_test"].reshape(-1, 784), file["y_test"].astype(np.int32)

train, validation = (images[:-10_000], labels[:-10_000]), (images[-10_000:], labels[-10_000:])
epochs = args.epochs
if args.quick:
    train, epochs = (train[0][:6_400], train[1][:6_400]), 1

loader = ft.ArrayLoader(train, args.batch_size, shuffle=True, seed=args.seed)

# %% The model. Any Keras model works. Pixels are copied to the device as uint8 and are scaled there
keras.utils.set_random_seed(args.seed)
keras_model = keras.Sequential(
    [
        keras.Input((784,), dtype="uint8"),
        keras.layers.Rescaling(1 / 255),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ],
    name="mlp",
)

# %% The optimizer. It is an optax chain with a schedule
schedule = optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=4e-3,
    warmup_steps=len(loader) // 2,
    decay_steps=epochs * len(loader),
)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-1))

# %% The state, the loss and the step. The state is a pytree, and the others are pure functions
state = bridge.create_state(keras_model, tx)
model = bridge.from_keras(keras_model)
loss_fn = ft.supervised(model, optax.softmax_cross_entropy_with_integer_labels)
metrics = {"accuracy": ft.metrics.accuracy()}
step = ft.train_step(loss_fn, tx, metrics=metrics, learning_rate=schedule)
eval_step = ft.eval_step(loss_fn, metrics=metrics)
print(ft.inspect.summary(state))

# %% Training
state, history = ft.fit(
    state,
    step,
    loader,
    epochs=epochs,
    eval_data=ft.ArrayLoader(validation, 1_000),
    eval_step=eval_step,
    fuse=args.fuse,
)

# %% Back to Keras. The trained values are copied into the Keras model, which is saved as usual
bridge.to_keras(state, keras_model)
accuracy = ft.evaluate(state, eval_step, ft.ArrayLoader(test, 1_000))["accuracy"]
keras_model.save(args.output / "mnist.keras")
history.plot(args.output / "curves.png")
print(f"test accuracy {accuracy:.4f} after {int(state.step)} steps")
print(f"wrote {args.output / 'mnist.keras'} and {args.output / 'curves.png'}")

# %% Check with plain Keras. A new process, which does not import functrain, loads the saved model
# and computes the same accuracy
PLAIN_KERAS = """
import sys, keras, numpy as np
model = keras.models.load_model(sys.argv[1])
with np.load(sys.argv[2]) as file:
    x, y = file["x_test"].reshape(-1, 784), file["y_test"].astype(np.int32)
model.compile(metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")])
print(model.evaluate(x, y, batch_size=1_000, verbose=0, return_dict=True)["accuracy"])
"""
command = [sys.executable, "-c", PLAIN_KERAS]
paths = [args.output / "mnist.keras", args.data / "mnist.npz"]
reloaded = float(subprocess.run([*command, *paths], check=True, stdout=subprocess.PIPE).stdout)
print(f"test accuracy {reloaded:.4f} computed by plain Keras in a new process")
if abs(reloaded - accuracy) > 1e-7:
    sys.exit(f"expected the same accuracy, got {accuracy!r} here and {reloaded!r} there")
