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
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# As JAX does on a GPU.
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
torch.backends.cudnn.benchmark = True


def torch_graph(workload: Workload) -> Run:
    """Returns a loop over one CUDA graph of the whole step, whose loss is compiled.

    The graph reads a batch from where it was recorded with one, so each batch is copied there.
    """
    step = classification(workload, lambda f: torch.compile(f, dynamic=False), in_graph=True)
    x, y = tensors(workload)
    batch_x, batch_y = x[: workload.batch].clone(), y[: workload.batch].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(batch_x, batch_y)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step(batch_x, batch_y)

    def replay(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        batch_x.copy_(x)
        batch_y.copy_(y)
        graph.replay()
        return recorded

    return looping(workload, replay, x, y)


def torch_compile(workload: Workload) -> Run:
    """Returns a training loop whose model and loss are compiled by `torch.compile`.

    Compiling the whole step gains nothing: 0.49 ms in place of 0.40 for the digits MLP, 1.76 in
    place of 1.81 for the LSTM. The backward pass and the optimizer remain calls of their own.
    """
    return torch_eager(workload, lambda function: torch.compile(function, dynamic=False))


def torch_eager(workload: Workload, compiler: Compiler = lambda function: function) -> Run:
    """Returns the usual training loop over slices of an array, with a fused Adam."""
    step = gan(compiler) if workload.own_step else classification(workload, compiler)
    return looping(workload, step, *tensors(workload))


def tensors(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the inputs and labels of an epoch, on the device."""
    x, y = (torch.from_numpy(array).to(DEVICE) for array in workload.data())
    return x, y.long()


def looping(workload: Workload, step: Any, x: torch.Tensor, y: torch.Tensor) -> Run:
    """Returns a loop of ``step(x, y) -> f32[2]`` over slices of the tensors."""

    def run() -> float:
        # Sums of the loss and of the accuracy. They are read after the last step only.
        totals = torch.zeros(2, device=DEVICE)
        for i in range(0, len(x), workload.batch):
            totals += step(x[i : i + workload.batch], y[i : i + workload.batch])
        return float(totals[0]) / workload.steps

    return run


def adam(
    parameters: Any, learning_rate: float = 1e-3, *, capturable: bool = False
) -> torch.optim.Adam:
    """Returns the optimizer of every way, Adam with the epsilon of Keras."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    options: Any = {"eps": 1e-7, "fused": True, "capturable": capturable}
    return torch.optim.Adam(trainable, learning_rate, **options)


def classification(workload: Workload, compiler: Compiler, *, in_graph: bool = False) -> Any:
    """Returns ``step(x, y) -> f32[2]``, the loss and the accuracy of the batch."""
    net = network(workload).to(DEVICE)
    optimizer = adam(net.parameters(), capturable=in_graph)
    is_mixed = workload.policy == "mixed_bfloat16"

    @compiler
    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=is_mixed):
            logits = net(x)
        logits, y = logits.flatten(0, -2).float(), y.flatten()
        return F.cross_entropy(logits, y), (logits.argmax(-1) == y).float().mean()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # A graph writes the gradients where it was recorded.
        optimizer.zero_grad(set_to_none=not in_graph)
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
