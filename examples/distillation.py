"""A small flax network learns from few labels and from the predictions of a large Keras network.

The teacher is a convolutional network. `bridge.fit` trains it on all digits, and then it is frozen.
The student has one hidden layer and sees a twentieth of the digits. It learns from the labels and
from the teacher's softened probabilities, which tell it, for example, that a 7 looks a little like
a 1 (Hinton et al., 2015, https://arxiv.org/abs/1503.02531). The same student is also trained
without a teacher. Its test accuracy is about 91 % without the teacher and 93 to 94 % with it; that
of the teacher is 98 %.

    python examples/distillation.py            # a few minutes on two CPU cores
    python examples/distillation.py --quick    # a few seconds
"""

# %% Options. `arguments` also selects the JAX backend, so it runs before Keras is imported
from _example import arguments

args = arguments(
    __doc__,
    quick="a teacher of 6 400 digits, students of 640, in 600 steps",
    epochs=(3, "of the teacher"),
    few=(3_000, "digits that the students see"),
    steps=(3_000, "of the students"),
    temperature=(4.0, "by which the teacher's answers are softened"),
    share=(0.9, "of the teacher's answers in the student's loss"),
)

import bridge
import flax.linen as nn
import functrain as ft
import jax
import jax.numpy as jnp
import keras
import matplotlib.figure
import numpy as np
import optax
from keras import layers

# %% Data. The pixels stay bytes; the models scale them on the device
with np.load(args.data / "mnist.npz") as file:
    x, y = file["x_train"][..., None], file["y_train"].astype(np.int32)
    test = file["x_test"][..., None], file["y_test"].astype(np.int32)
if args.quick:
    x, y, args.epochs, args.few, args.steps = x[:6_400], y[:6_400], 2, 640, 600
few = ft.ArrayLoader((x[: args.few], y[: args.few]), 64, shuffle=True, seed=args.seed)

# %% The teacher. It is a Keras model, compiled as usual and trained with `bridge.fit`. The `init`
# of a converted Keras model ignores its key, and returns the trained params and model state
keras.utils.set_random_seed(args.seed)
convnet = [layers.Conv2D(width, 3, strides=2, activation="relu") for width in (32, 64)]
top = [layers.Flatten(), layers.Dropout(0.3), layers.Dense(10)]
keras_model = keras.Sequential(
    [keras.Input((28, 28, 1)), layers.Rescaling(1 / 255), *convnet, *top]
)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
keras_model.compile("adam", cross_entropy, metrics=["accuracy"])
bridge.fit(keras_model, x, y, batch_size=64, epochs=args.epochs, verbose=2)
teacher = bridge.from_keras(keras_model)
frozen = teacher.init(jax.random.key(0), x[:1])  # its values, as they are now


# %% The student. It is a flax module with one hidden layer
class Student(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1).astype(jnp.float32) / 255
        return nn.Dense(10)(nn.relu(nn.Dense(32)(x)))


student = ft.from_linen(Student())


# %% The loss. It adds a term for the labels and a term for the teacher's softened probabilities.
# The teacher's weights are passed as `model_state`, so the optimizer does not update them
def distillation(share):
    def loss_fn(params, model_state, batch, *, rng, training):
        x, y = batch
        logits = student.apply(params, {}, x).outputs
        said = teacher.apply(*model_state, x).outputs
        soft = jax.nn.softmax(said / args.temperature)
        label = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        taught = optax.softmax_cross_entropy(logits / args.temperature, soft).mean()
        loss = (1 - share) * label + share * args.temperature**2 * taught
        return loss, ft.Aux(model_state, logits, {"label": label, "taught": taught})

    return loss_fn


# %% Training. Both students start from the same params and see the same batches
tx = optax.adam(2e-3)
params, _ = student.init(jax.random.key(args.seed), x[:1])
start = ft.TrainState.create(params=params, model_state=frozen, tx=tx)
reached = {}
for name, share in (("alone", 0.0), ("taught", args.share)):
    loss_fn = distillation(share)
    accuracy = {"accuracy": ft.metrics.accuracy()}
    _, history = ft.fit(
        start,
        ft.train_step(loss_fn, tx),
        few,
        steps=args.steps,
        steps_per_epoch=args.steps // 10,
        eval_data=ft.ArrayLoader(test, 500),
        eval_step=ft.eval_step(loss_fn, metrics=accuracy),
        verbose=0,
    )
    reached[name] = history.epochs["val_accuracy"]
    print(f"the student {name}: test accuracy {reached[name][-1]:.4f}")

# %% Plot. The test accuracy of both students during training, and that of the teacher
figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
for name, values in reached.items():
    panel.plot(np.arange(1, 11) * (args.steps // 10), values, "o-", ms=4, label=f"student, {name}")
of_teacher = bridge.evaluate(keras_model, *test, batch_size=500, verbose=0)[1]
print(f"the teacher: test accuracy {of_teacher:.4f}")
panel.axhline(of_teacher, color="gray", ls=":", label="teacher")
panel.set(xlabel="step", ylabel="test accuracy")
panel.legend()
figure.savefig(args.output / "distillation.png", dpi=120)
print(f"wrote {args.output / 'distillation.png'}")
