"""Training loops in plain PyTorch, without Keras."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.keras_ways import Run
from benchmarks.torch_nets import LATENT, discriminator, generator, network
from benchmarks.workloads import Workload

# Compiles a function of tensors, or returns it as it is.
Compiler = Callable[[Any], Any]


def torch_compile(workload: Workload) -> Run:
    """Returns a training loop whose model and loss are compiled by `torch.compile`.

    Compiling the whole step gains nothing: 0.49 ms in place of 0.40 for the digits MLP, 1.76 in
    place of 1.81 for the LSTM. The backward pass and the optimizer remain calls of their own.
    """
    return torch_eager(workload, lambda function: torch.compile(function, dynamic=False))


def torch_eager(workload: Workload, compiler: Compiler = lambda function: function) -> Run:
    """Returns the usual training loop over slices of an array, with a fused Adam."""
    step = gan(compiler) if workload.own_step else classification(workload, compiler)
    x, y = (torch.from_numpy(array) for array in workload.data())
    y = y.long()

    def run() -> float:
        # Sums of the loss and of the accuracy. They are read after the last step only.
        totals = torch.zeros(2)
        for i in range(0, len(x), workload.batch):
            totals += step(x[i : i + workload.batch], y[i : i + workload.batch])
        return float(totals[0]) / workload.steps

    return run


def adam(parameters: Any, learning_rate: float = 1e-3) -> torch.optim.Adam:
    """Returns the optimizer of every way, Adam with the epsilon of Keras."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.Adam(trainable, learning_rate, eps=1e-7, fused=True)


def classification(workload: Workload, compiler: Compiler) -> Any:
    """Returns ``step(x, y) -> f32[2]``, the loss and the accuracy of the batch."""
    net = network(workload)
    optimizer = adam(net.parameters())

    @compiler
    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, y = net(x).flatten(0, -2), y.flatten()
        return F.cross_entropy(logits, y), (logits.argmax(-1) == y).float().mean()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss, hits = loss_fn(x, y)
        loss.backward()
        optimizer.step()
        return torch.stack([loss.detach(), hits])

    return step


def gan(compiler: Compiler) -> Any:
    """Returns the step of `examples/dcgan.py`, whose first result is the discriminator's loss."""
    d, g = discriminator(), generator()
    d_optimizer, g_optimizer = adam(d.parameters(), 3e-4), adam(g.parameters(), 4e-4)

    @compiler
    def judge(latents: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            generated = g(latents)
        return F.binary_cross_entropy_with_logits(d(torch.cat([generated, images])), labels)

    @compiler
    def deceive(latents: torch.Tensor) -> torch.Tensor:
        logits = d(g(latents))
        return F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))

    def update(optimizer: torch.optim.Adam, loss: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step(images: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        batch = len(images)
        labels = torch.cat([torch.ones(batch, 1), torch.zeros(batch, 1)])
        labels += 0.05 * torch.rand_like(labels)
        loss = judge(torch.randn(batch, LATENT), images.permute(0, 3, 1, 2), labels)
        d_loss = update(d_optimizer, loss)
        # The generator's loss needs no gradients of the discriminator's weights.
        d.requires_grad_(False)
        g_loss = update(g_optimizer, deceive(torch.randn(batch, LATENT)))
        d.requires_grad_(True)
        return torch.stack([d_loss, g_loss])

    return step
