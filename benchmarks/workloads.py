"""The workloads: Keras models with data and batch sizes, for any Keras backend."""

import dataclasses
import importlib
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

MNIST = pathlib.Path(__file__).parents[1] / "examples" / "data" / "mnist.npz"
Arrays = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model with data and a batch size.

    Attributes:
      name: The name on the command line.
      batch: Examples per step.
      steps: Steps per measurement, which is one epoch: a multiple of 128, or less than 128.
      build: Returns a new Keras model whose outputs are logits.
      make_data: ``make_data(examples) -> (inputs, labels i32)``.
      quick: True if the workload is part of `--quick`.
      big: True if compiling takes long. Big workloads have fewer rounds, and leave out the ways
        with `big=False`.
      sensitive: True if rounding changes the loss within an epoch, for example by BatchNorm over
        few numbers. For MobileNetV2 rounding changes the first loss by 1e-6, the second by 0.8 %,
        and the mean of 8 by up to 5 %. For ResNet50 the mean of 8 was 3.68 in a loop and 4.12 in
        a scan of the same step.
      own_step: "module:function" that returns the state and the step, for models that are not
        classifiers. `build` is None then.
      policy: The name of Keras's dtype policy, such as "mixed_bfloat16". Logits are f32 always.
    """

    name: str
    batch: int
    steps: int
    build: Callable[[], keras.Model] | None
    make_data: Callable[[int], Arrays]
    quick: bool = False
    big: bool = False
    sensitive: bool = False
    own_step: str = ""
    policy: str = "float32"

    def model(self) -> keras.Model:
        """Returns a new model, with the same initial weights on every backend."""
        assert self.build is not None, f"{self.name} is not a Keras model"
        keras.utils.set_random_seed(0)
        default = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self.policy)
        try:
            model = self.build()
        finally:
            keras.config.set_dtype_policy(default)
        draw_kernels(model)
        return model

    def data(self) -> Arrays:
        """Returns the examples of one epoch."""
        return self.make_data(self.steps * self.batch)

    def functrain_step(self) -> tuple[Any, Any]:
        """Returns the state and the step of a workload with `own_step`."""
        module, _, function = self.own_step.partition(":")
        return getattr(importlib.import_module(module), function)()


def draw_kernels(model: keras.Model) -> None:
    """Draws the kernels with NumPy, because the backends have different random generators."""
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        shape = tuple(variable.shape)
        if len(shape) >= 2:
            variable.assign(drawn_kernel(rng, shape))


def drawn_kernel(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a normal kernel of Keras's shape, whose variance is one over its inputs."""
    scale = np.float32(np.prod(shape[:-1]) ** -0.5)
    return scale * rng.standard_normal(shape, dtype=np.float32)


def noise(*shape: int, classes: int = 10, labels: tuple[int, ...] = ()) -> Callable[[int], Arrays]:
    """Returns a function that draws normal inputs `f32[n, *shape]` and labels `i32[n, *labels]`."""

    def make(n: int) -> Arrays:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((n, *shape), dtype=np.float32)
        return x, rng.integers(classes, size=(n, *labels), dtype=np.int32)

    return make


def tokens(length: int = 64, vocabulary: int = 256) -> Callable[[int], Arrays]:
    """Returns a function that draws n sequences of tokens, and the next tokens as labels."""

    def make(n: int) -> Arrays:
        rng = np.random.default_rng(0)
        text = rng.integers(vocabulary, size=(n, length + 1), dtype=np.int32)
        return text[:, :-1], text[:, 1:]

    return make


def words(vocabulary: int, *shape: int, classes: int = 2) -> Callable[[int], Arrays]:
    """Returns a function that draws word indices `i32[n, *shape]` and labels `i32[n]`."""

    def make(n: int) -> Arrays:
        rng = np.random.default_rng(0)
        x = rng.integers(vocabulary, size=(n, *shape), dtype=np.int32)
        return x, rng.integers(classes, size=n, dtype=np.int32)

    return make


def mnist(*shape: int) -> Callable[[int], Arrays]:
    """Returns a function that reads n MNIST digits as `f32[n, *shape]` between 0 and 1."""

    def read(n: int) -> Arrays:
        with np.load(MNIST) as file:
            x, y = file["x_train"][:n], file["y_train"][:n]
        return x.reshape(-1, *shape).astype(np.float32) / 255, y.astype(np.int32)

    return read


def mlp(inputs: int, *widths: int) -> Callable[[], keras.Model]:
    """Returns a function that builds a multi-layer perceptron."""

    def build() -> keras.Model:
        hidden = [layers.Dense(width, "relu") for width in widths[:-1]]
        return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(widths[-1])])

    return build


def convnet() -> keras.Model:
    """Returns two convolutions with pooling, and a dense layer."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def residual() -> keras.Model:
    """Returns a stem and four residual blocks with BatchNorm, for images of 28×28."""
    x = inputs = keras.Input((28, 28, 1))
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
    for width, strides in ((16, 1), (32, 2), (32, 1), (64, 2)):
        skip = x
        for stride in (strides, 1):
            x = layers.Conv2D(width, 3, strides=stride, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        if skip.shape != x.shape:
            skip = layers.Conv2D(width, 1, strides=strides, use_bias=False)(skip)
        x = layers.Add()([x, skip])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def separable() -> keras.Model:
    """Returns separable, depthwise and transposed convolutions, which are slow on CPUs."""
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.SeparableConv2D(64, 3, padding="same", activation="relu"),
            layers.DepthwiseConv2D(3, strides=2, padding="same", activation="relu"),
            layers.Conv2DTranspose(32, 4, strides=2, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def application(name: str) -> Callable[[], keras.Model]:
    """Returns a function that builds one of `keras.applications` for 32×32 images."""
    make = getattr(keras.applications, name)
    shape = (32, 32, 3)
    return lambda: make(weights=None, input_shape=shape, classes=10, classifier_activation=None)


def with_places(x: Any) -> Any:
    """Adds position embeddings to `f32[B, T, C]`."""
    places = keras.ops.cumsum(keras.ops.ones_like(x[..., 0], dtype="int32"), axis=1) - 1
    return x + layers.Embedding(x.shape[1], x.shape[2])(places)


def encoder_block(x: Any, heads: int, causal: bool = False) -> Any:
    """Applies a pre-norm transformer block, whose dense part is four times as wide."""
    width = x.shape[-1]
    h = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(heads, width // heads)(h, h, use_causal_mask=causal)
    h = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
    return x + layers.Dense(width)(h)


def transformer() -> keras.Model:
    """Returns two causal blocks of width 64 that predict the next of 64 tokens."""
    return language_model(64, 64, 2, 4, 256)


def language_model(
    length: int, width: int, blocks: int, heads: int, vocabulary: int, *, bias: bool = True
) -> keras.Model:
    """Returns causal blocks that predict the next token, `bias` being that of the logits."""
    inputs = keras.Input((length,), dtype="int32")
    x = with_places(layers.Embedding(vocabulary, width)(inputs))
    for _ in range(blocks):
        x = encoder_block(x, heads, causal=True)
    x = layers.Dense(vocabulary, use_bias=bias)(layers.LayerNormalization()(x))
    return keras.Model(inputs, in_float32(x))


def in_float32(logits: Any) -> Any:
    """Returns logits in float32, also those of a model that computes in bfloat16."""
    is_single = logits.dtype == "float32"
    return logits if is_single else layers.Activation("linear", dtype="float32")(logits)


def vit() -> keras.Model:
    """Returns four blocks of width 64 over the 49 patches of a digit."""
    inputs = keras.Input((28, 28, 1))
    x = layers.Reshape((49, 64))(layers.Conv2D(64, 4, strides=4)(inputs))
    x = with_places(x)
    for _ in range(4):
        x = encoder_block(x, 4)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(inputs, layers.Dense(10)(x))


def bert_tiny() -> keras.Model:
    """Returns two post-norm BERT layers of width 128 that classify texts of 64 tokens.

    There is no dropout, because its random numbers differ between backends.
    """
    inputs = keras.Input((64,), dtype="int32")
    x = layers.LayerNormalization()(with_places(layers.Embedding(8192, 128)(inputs)))
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 64)(x, x))
        h = layers.Dense(128)(layers.Dense(512, "gelu")(x))
        x = layers.LayerNormalization()(x + h)
    return keras.Model(inputs, layers.Dense(2)(layers.Dense(128, "tanh")(x[:, 0])))


def recurrent(layer: Callable[[], keras.Layer]) -> Callable[[], keras.Model]:
    """Returns a function that builds a recurrent layer over 32 steps of 8 features."""
    return lambda: keras.Sequential([keras.Input((32, 8)), layer(), layers.Dense(10)])


def two_way_lstm() -> keras.Layer:
    """Returns a bidirectional LSTM with 32 units in each direction."""
    return layers.Bidirectional(layers.LSTM(32))


def bag_of_words() -> keras.Model:
    """Returns the mean of 64 word embeddings out of 10,000, and two dense layers."""
    return keras.Sequential(
        [
            keras.Input((64,), dtype="int32"),
            layers.Embedding(10_000, 32),
            layers.GlobalAveragePooling1D(),
            layers.Dense(32, "relu"),
            layers.Dense(2),
        ]
    )


def wide_embeddings() -> keras.Model:
    """Returns embeddings of eight columns with 1000 categories each, and three dense layers."""
    inputs = keras.Input((8,), dtype="int32")
    columns = [layers.Embedding(1000, 32)(inputs[:, i]) for i in range(8)]
    x = layers.Concatenate()(columns)
    for _ in range(2):
        x = layers.Dense(128, "relu")(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def _application(key: str, name: str) -> Workload:
    # The sensitivity to rounding was measured for these two only.
    sensitive = key in ("mobilenet-v2", "resnet50")
    return Workload(key, 16, 8, application(name), noise(32, 32, 3), big=True, sensitive=sensitive)


_ALL = [
    Workload("digits-mlp", 32, 1024, mlp(64, 32, 10), noise(64), quick=True),
    Workload("mnist-mlp", 32, 1024, mlp(784, 64, 64, 10), mnist(784), quick=True),
    Workload("tabular-mlp", 4096, 64, mlp(32, 128, 128, 2), noise(32, classes=2), quick=True),
    Workload("tabular-embeddings", 256, 64, wide_embeddings, words(1000, 8)),
    Workload("bag-of-words", 32, 128, bag_of_words, words(10_000, 64)),
    Workload("lstm", 32, 128, recurrent(lambda: layers.LSTM(32)), noise(32, 8), quick=True),
    Workload("gru", 32, 128, recurrent(lambda: layers.GRU(32)), noise(32, 8)),
    Workload("bidirectional-lstm", 32, 128, recurrent(two_way_lstm), noise(32, 8)),
    Workload("transformer", 16, 32, transformer, tokens()),
    Workload("vit", 32, 16, vit, mnist(28, 28, 1)),
    Workload("bert-tiny", 16, 16, bert_tiny, words(8192, 64)),
    Workload("mnist-convnet", 32, 32, convnet, mnist(28, 28, 1), quick=True),
    Workload("residual", 64, 8, residual, mnist(28, 28, 1)),
    Workload("separable", 16, 8, separable, noise(32, 32, 3)),
    Workload("dcgan", 64, 2, None, mnist(28, 28, 1), big=True, own_step="benchmarks.dcgan:make"),
    _application("mobilenet-v2", "MobileNetV2"),
    _application("efficientnet-b0", "EfficientNetB0"),
    _application("convnext-tiny", "ConvNeXtTiny"),
    _application("resnet50", "ResNet50"),
]
WORKLOADS = {workload.name: workload for workload in _ALL}
