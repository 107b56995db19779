"""The networks of the workloads in plain PyTorch, with the initial weights of the Keras models.

Most are made layer by layer from the Keras model, so that they compute the same. Images have the
shape `[B, C, H, W]` between the modules and the layout "channels last" in memory, in which a batch
of Keras's images is such an array without a copy.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch
from keras import layers
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads import Workload, drawn_kernel


def network(workload: Workload) -> nn.Module:
    """Returns the network of a workload. It takes inputs as Keras does, and returns logits."""
    model = workload.model()
    is_transformer = workload.name in ("transformer", "gpt2")
    net = Transformer(model) if is_transformer else Graph(model)
    return net.to(memory_format=torch.channels_last)


class Graph(nn.Module):
    """The layers of a functional Keras model as modules of PyTorch."""

    def __init__(self, model: keras.Model):
        super().__init__()
        self.nodes = nn.ModuleList()
        # For each node the indices of its inputs; index 0 is the input of the model.
        self.inputs: list[list[int]] = []
        index = {id(model.inputs[0]): 0}
        for layer in model.layers:
            if isinstance(layer, layers.InputLayer):
                continue
            sources = layer.input if isinstance(layer.input, list) else [layer.input]
            self.inputs.append([index[id(source)] for source in sources])
            self.nodes.append(converted(layer))
            index[id(layer.output)] = len(self.nodes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits."""
        values = [x.permute(0, 3, 1, 2) if x.ndim == 4 else x]
        for node, inputs in zip(self.nodes, self.inputs, strict=True):
            values.append(node(*[values[i] for i in inputs]))
        return values[-1]


class Call(nn.Module):
    """A module without weights that calls a function."""

    def __init__(self, function: Callable[..., torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Returns the result of the function."""
        return self.function(*inputs)


def converted(layer: keras.Layer) -> nn.Module:
    """Returns the module for a Keras layer, followed by the layer's activation."""
    modules = [MODULES[type(layer)](layer)]
    activation = getattr(layer, "activation", None)
    # An LSTM computes its activations itself.
    if activation is not None and not isinstance(layer, layers.LSTM):
        modules += ACTIVATIONS[activation.__name__]()
    return modules[0] if len(modules) == 1 else nn.Sequential(*modules)


ACTIVATIONS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": list,
    "relu": lambda: [nn.ReLU()],
    "softmax": lambda: [nn.Softmax(-1)],
}


def filled(module: Any, **values: Any) -> Any:
    """Returns a module whose parameters and buffers have the given values."""
    for name, value in values.items():
        if value is not None:
            value = np.ascontiguousarray(keras.ops.convert_to_numpy(value))
            getattr(module, name).data = torch.from_numpy(value.copy())
    return module


def transposed(kernel: Any, *axes: int) -> np.ndarray:
    """Returns a kernel of Keras with its axes in another order."""
    return keras.ops.convert_to_numpy(kernel).transpose(axes)


def dense(layer: keras.Layer) -> nn.Module:
    linear = nn.Linear(*layer.kernel.shape, bias=layer.use_bias)
    return filled(linear, weight=transposed(layer.kernel, 1, 0), bias=layer.bias)


def conv(layer: keras.Layer) -> nn.Module:
    height, width, inputs, outputs = layer.kernel.shape
    module = nn.Conv2d(inputs, outputs, (height, width), layer.strides, bias=layer.use_bias)
    filled(module, weight=transposed(layer.kernel, 3, 2, 0, 1), bias=layer.bias)
    return padded(layer, module)


def depthwise(layer: keras.Layer) -> nn.Module:
    height, width, features, _ = layer.kernel.shape
    options = {"groups": features, "bias": layer.use_bias}
    module = nn.Conv2d(features, features, (height, width), layer.strides, **options)
    filled(module, weight=transposed(layer.kernel, 2, 3, 0, 1), bias=layer.bias)
    return padded(layer, module)


def separable(layer: keras.Layer) -> nn.Module:
    height, width, features, _ = layer.depthwise_kernel.shape
    options = {"groups": features, "bias": False}
    first = nn.Conv2d(features, features, (height, width), layer.strides, **options)
    filled(first, weight=transposed(layer.depthwise_kernel, 2, 3, 0, 1))
    second = nn.Conv2d(features, layer.filters, 1)
    filled(second, weight=transposed(layer.pointwise_kernel, 3, 2, 0, 1), bias=layer.bias)
    return nn.Sequential(padded(layer, first), second)


def conv_transpose(layer: keras.Layer) -> nn.Module:
    height, width, outputs, inputs = layer.kernel.shape
    # Keras's "same" is this padding where kernel and strides are both even.
    padding = ((height - layer.strides[0]) // 2, (width - layer.strides[1]) // 2)
    module = nn.ConvTranspose2d(inputs, outputs, (height, width), layer.strides, padding)
    return filled(module, weight=transposed(layer.kernel, 3, 2, 0, 1), bias=layer.bias)


def padded(layer: keras.Layer, module: nn.Conv2d) -> nn.Module:
    """Pads a convolution as Keras does, which pads less on the left than on the right."""
    if layer.padding == "valid":
        return module
    sides = []
    for size, kernel, stride in zip(
        layer.input.shape[1:3], module.kernel_size, module.stride, strict=True
    ):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        sides.append((total // 2, total - total // 2))
    if all(left == right for left, right in sides):
        module.padding = tuple(left for left, _ in sides)
        return module
    (top, bottom), (left, right) = sides
    return nn.Sequential(nn.ZeroPad2d((left, right, top, bottom)), module)


def batch_norm(layer: keras.Layer) -> nn.Module:
    module = nn.BatchNorm2d(layer.gamma.shape[0], layer.epsilon, 1 - layer.momentum)
    statistics = {"running_mean": layer.moving_mean, "running_var": layer.moving_variance}
    return filled(module, weight=layer.gamma, bias=layer.beta, **statistics)


def zero_padding(layer: keras.Layer) -> nn.Module:
    (top, bottom), (left, right) = layer.padding
    return nn.ZeroPad2d((left, right, top, bottom))


class Lstm(nn.Module):
    """An LSTM that returns its last output."""

    def __init__(self, layer: keras.Layer):
        super().__init__()
        cell = layer.cell
        self.lstm = nn.LSTM(cell.kernel.shape[0], cell.units, batch_first=True)
        weights = {"weight_ih_l0": cell.kernel, "weight_hh_l0": cell.recurrent_kernel}
        filled(self.lstm, **{name: transposed(w, 1, 0) for name, w in weights.items()})
        filled(self.lstm, bias_ih_l0=cell.bias, bias_hh_l0=np.zeros_like(cell.bias))
        # PyTorch has two biases, whose sum Adam would move twice as far as the one of Keras.
        self.lstm.bias_hh_l0.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `f32[B, units]`."""
        return self.lstm(x)[0][:, -1]


MODULES: dict[type, Callable[[Any], nn.Module]] = {
    layers.Activation: lambda layer: nn.Identity(),
    layers.Add: lambda layer: Call(torch.add),
    layers.BatchNormalization: batch_norm,
    layers.Conv2D: conv,
    layers.Conv2DTranspose: conv_transpose,
    layers.Dense: dense,
    layers.DepthwiseConv2D: depthwise,
    layers.Flatten: lambda layer: Call(lambda x: x.permute(0, 2, 3, 1).flatten(1)),
    layers.GlobalAveragePooling2D: lambda layer: Call(lambda x: x.mean((2, 3))),
    layers.LSTM: Lstm,
    layers.MaxPooling2D: lambda layer: nn.MaxPool2d(layer.pool_size, layer.strides),
    layers.ReLU: lambda layer: nn.ReLU6() if layer.max_value else nn.ReLU(),
    layers.Rescaling: lambda layer: Call(lambda x: x * layer.scale + layer.offset),
    layers.SeparableConv2D: separable,
    layers.ZeroPadding2D: zero_padding,
}


class Attention(nn.Module):
    """Causal self-attention that computes queries, keys and values in one product."""

    def __init__(self, layer: keras.Layer):
        super().__init__()
        self.heads = layer.num_heads
        query, query_bias, key, key_bias, value, value_bias, out, out_bias = layer.get_weights()
        width = len(query)
        kernels = [w.reshape(width, -1).T for w in (query, key, value)]
        biases = [b.reshape(-1) for b in (query_bias, key_bias, value_bias)]
        self.qkv = nn.Linear(width, 3 * width)
        filled(self.qkv, weight=np.concatenate(kernels), bias=np.concatenate(biases))
        self.out = filled(nn.Linear(width, width), weight=out.reshape(-1, width).T, bias=out_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `f32[B, T, C]`."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """`workloads.language_model` in PyTorch."""

    def __init__(self, model: keras.Model):
        super().__init__()

        def of_kind(kind: type) -> Any:
            return (layer for layer in model.layers if isinstance(layer, kind))

        self.tokens, self.places = (embedding(layer) for layer in of_kind(layers.Embedding))
        norms, denses = of_kind(layers.LayerNormalization), of_kind(layers.Dense)
        self.blocks = nn.ModuleList(
            Block(norms, attention, denses) for attention in of_kind(layers.MultiHeadAttention)
        )
        self.norm, self.logits = layer_norm(next(norms)), dense(next(denses))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits `[B, T, V]` for tokens `i32[B, T]`."""
        x = self.tokens(x) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, norms: Any, attention: keras.Layer, denses: Any):
        super().__init__()
        self.norm_1, self.attention = layer_norm(next(norms)), Attention(attention)
        self.norm_2 = layer_norm(next(norms))
        self.mlp = nn.Sequential(dense(next(denses)), nn.GELU(), dense(next(denses)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `f32[B, T, C]`."""
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


def layer_norm(layer: keras.Layer) -> nn.Module:
    module = nn.LayerNorm(layer.gamma.shape[0], layer.epsilon)
    return filled(module, weight=layer.gamma, bias=layer.beta)


def embedding(layer: keras.Layer) -> nn.Module:
    return filled(nn.Embedding(*layer.embeddings.shape), weight=layer.embeddings)


# The networks of the DCGAN. Their Keras models belong to an example that needs JAX, so they are
# written again here.
LATENT = 128


def discriminator() -> nn.Module:
    """Returns the discriminator, which maps images `[B, 1, 28, 28]` to logits `[B, 1]`."""
    half: Any = {"kernel_size": 3, "stride": 2}
    return with_kernels(
        nn.ZeroPad2d((0, 1, 0, 1)),
        nn.Conv2d(1, 64, **half),
        nn.LeakyReLU(0.2),
        nn.ZeroPad2d((0, 1, 0, 1)),
        nn.Conv2d(64, 128, **half),
        nn.LeakyReLU(0.2),
        Call(lambda x: x.amax((2, 3))),
        nn.Linear(128, 1),
    )


def generator() -> nn.Module:
    """Returns the generator, which maps latents `[B, 128]` to images `[B, 1, 28, 28]`."""
    twice: Any = {"kernel_size": 4, "stride": 2, "padding": 1}
    return with_kernels(
        nn.Linear(LATENT, 7 * 7 * 128),
        nn.LeakyReLU(0.2),
        Call(lambda x: x.unflatten(1, (7, 7, -1)).permute(0, 3, 1, 2)),
        nn.ConvTranspose2d(128, 128, **twice),
        nn.LeakyReLU(0.2),
        nn.ConvTranspose2d(128, 128, **twice),
        nn.LeakyReLU(0.2),
        nn.Conv2d(128, 1, 7, padding=3),
        nn.Sigmoid(),
    )


def with_kernels(*modules: nn.Module) -> nn.Module:
    """Returns the modules in sequence, with the kernels that `workloads.draw_kernels` draws."""
    rng = np.random.default_rng(0)
    for module in modules:
        if hasattr(module, "weight"):
            # The axes that Keras's shape of this kernel has in PyTorch, and the way back.
            axes = (2, 3, 1, 0) if module.weight.ndim == 4 else (1, 0)
            shape = tuple(module.weight.shape[axis] for axis in axes)
            kernel = drawn_kernel(rng, shape).transpose(np.argsort(axes))
            filled(module, weight=kernel, bias=np.zeros(module.bias.shape, np.float32))
    return nn.Sequential(*modules).to(memory_format=torch.channels_last)
