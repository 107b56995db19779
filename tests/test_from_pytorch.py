"""What the page "From PyTorch" says agrees. `make test-adapters` has torch; elsewhere: skipped."""

import pathlib
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import functrain as ft

from .test_docs import DOCS, folder, run

pytestmark = pytest.mark.adapters
torch = pytest.importorskip("torch")

__all__ = ["folder"]  # a fixture
PAGE = DOCS / "from-pytorch.md"
OPTIM, SCHEDULERS = torch.optim, torch.optim.lr_scheduler
LR, STEPS = 0.01, 40


def indented(start: str) -> str:
    """Returns the indented block of the page that starts with a text."""
    text = PAGE.read_text()
    begin = text.index(f"    {start}")
    lines = text[begin:].split("\n")
    end = next(i for i, line in enumerate(lines) if line and not line.startswith(" "))
    return textwrap.dedent("\n".join(lines[:end]))


class Epochs:
    """The batches of a loader of functrain for PyTorch, an epoch at each iteration."""

    def __init__(self, loader: ft.ArrayLoader) -> None:
        self.loader, self.epoch = loader, 0

    def __iter__(self) -> Any:
        for images, labels in self.loader.epoch(self.epoch):
            yield torch.tensor(np.asarray(images)), torch.tensor(np.asarray(labels)).long()
        self.epoch += 1


def test_the_two_programs_of_the_page_have_the_same_losses(folder: pathlib.Path) -> None:
    ours = run(PAGE)
    setup, loop = indented("import torch").split("losses = []")
    data = ("x", "y", "x_test", "y_test")
    theirs = {name: torch.tensor(ours[name]) for name in data}
    torch.manual_seed(0)
    exec(setup, theirs)
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(theirs["net"].state_dict(), "net.safetensors")
    loaded = {**ours}
    exec(indented("rules = ["), loaded)
    trained, history = ft.fit(loaded["state"], ours["step"], ours["train"], epochs=3, verbose=0)
    theirs["train"] = Epochs(ours["train"])
    exec("losses = []" + loop, theirs)
    np.testing.assert_allclose(history.steps["loss"], theirs["losses"], rtol=1e-4, atol=1e-5)
    ft.export.params("back.safetensors", trained, rename=loaded["rules"])
    back = pytest.importorskip("safetensors.torch").load_file("back.safetensors")
    for name, weight in theirs["net"].state_dict().items():
        np.testing.assert_allclose(back[name], weight, rtol=1e-4, atol=1e-4)


OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], optax.GradientTransformation]] = {
    "SGD": (
        lambda p: OPTIM.SGD(p, LR, momentum=0.9, nesterov=True),
        optax.sgd(LR, 0.9, nesterov=True),
    ),
    "SGD with decay": (
        lambda p: OPTIM.SGD(p, LR, momentum=0.9, weight_decay=1e-2),
        optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(LR, 0.9)),
    ),
    "Adam": (lambda p: OPTIM.Adam(p, LR), optax.adam(LR)),
    "Adam with decay": (
        lambda p: OPTIM.Adam(p, LR, weight_decay=1e-2),
        optax.chain(optax.add_decayed_weights(1e-2), optax.adam(LR)),
    ),
    "AdamW": (lambda p: OPTIM.AdamW(p, LR), optax.adamw(LR, weight_decay=1e-2)),
    "RMSprop": (
        lambda p: OPTIM.RMSprop(p, LR),
        optax.rmsprop(LR, decay=0.99, eps_in_sqrt=False),
    ),
    "Adagrad": (
        lambda p: OPTIM.Adagrad(p, LR),
        optax.adagrad(LR, initial_accumulator_value=0, eps=1e-10),
    ),
    "Adadelta": (lambda p: OPTIM.Adadelta(p, LR), optax.adadelta(LR)),
    "Adamax": (lambda p: OPTIM.Adamax(p, LR), optax.adamax(LR)),
    "RAdam": (lambda p: OPTIM.RAdam(p, LR), optax.radam(LR)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_the_page_updates_as_that_of_optax(name: str) -> None:
    make, tx = OPTIMIZERS[name]
    rng = np.random.default_rng(0)
    start = rng.normal(size=(6, 4)).astype("float32")
    gradients = 3 * rng.normal(size=(STEPS, 6, 4)).astype("float32")
    weight = torch.nn.Parameter(torch.tensor(start))
    optimizer, params = make([weight]), jax.numpy.asarray(start)
    opt_state, update = tx.init(params), jax.jit(tx.update)
    for gradient in gradients:
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        updates, opt_state = update(jax.numpy.asarray(gradient), opt_state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, weight.detach().numpy(), atol=2e-5)


SCHEDULES: dict[str, tuple[Callable[[Any], Any], Callable[[int], Any]]] = {
    "StepLR": (
        lambda o: SCHEDULERS.StepLR(o, 10, 0.5),
        optax.exponential_decay(LR, 10, 0.5, staircase=True),
    ),
    "ExponentialLR": (
        lambda o: SCHEDULERS.ExponentialLR(o, 0.95),
        optax.exponential_decay(LR, 1, 0.95),
    ),
    "MultiStepLR": (
        lambda o: SCHEDULERS.MultiStepLR(o, [10, 25], 0.1),
        optax.piecewise_constant_schedule(LR, {10: 0.1, 25: 0.1}),
    ),
    "CosineAnnealingLR": (
        lambda o: SCHEDULERS.CosineAnnealingLR(o, STEPS, 1e-3),
        optax.cosine_decay_schedule(LR, STEPS, alpha=1e-3 / LR),
    ),
    "LinearLR": (
        lambda o: SCHEDULERS.LinearLR(o, 0.25, total_iters=10),
        optax.linear_schedule(0.25 * LR, LR, 10),
    ),
    "PolynomialLR": (
        lambda o: SCHEDULERS.PolynomialLR(o, STEPS, 2.0),
        optax.polynomial_schedule(LR, 0, 2.0, STEPS),
    ),
    "SequentialLR": (
        lambda o: SCHEDULERS.SequentialLR(
            o,
            [
                SCHEDULERS.LinearLR(o, 0.1, total_iters=10),
                SCHEDULERS.CosineAnnealingLR(o, STEPS - 10),
            ],
            [10],
        ),
        optax.warmup_cosine_decay_schedule(0.1 * LR, LR, 10, STEPS),
    ),
    "LambdaLR": (
        lambda o: SCHEDULERS.LambdaLR(o, lambda i: 1 / (1 + i)),
        lambda i: LR / (1 + i),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # of SequentialLR about itself
def test_a_schedule_of_the_page_is_that_of_optax(name: str) -> None:
    make, schedule = SCHEDULES[name]
    optimizer = OPTIM.SGD([torch.nn.Parameter(torch.zeros(1))], LR)
    scheduler, rates = make(optimizer), []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    np.testing.assert_allclose([schedule(i) for i in range(STEPS)], rates, rtol=1e-5, atol=1e-8)
