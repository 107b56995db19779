"""The ways of training and predicting, by name.

A way is a function ``way(workload) -> run``. Each call of ``run()`` continues for `workload.steps`
steps, waits for the result, and returns the mean loss, by which the ways are compared. A way that
predicts returns a number computed from the outputs instead.
"""

import dataclasses
import importlib
from typing import Any

HAS_BAR = ("digits-mlp", "mnist-mlp", "mnist-convnet")
HAS_FLAX = ("digits-mlp", "mnist-mlp", "tabular-mlp", "mnist-convnet")
HAS_TORCH = (
    *("digits-mlp", "mnist-mlp", "tabular-mlp", "lstm", "transformer", "mnist-convnet"),
    *("residual", "separable", "dcgan", "mobilenet-v2", "resnet50"),
)
# The environments whose name is not the Keras backend that they use.
KERAS_BACKENDS = {"keras-head": "jax"}


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of training or predicting.

    Attributes:
      name: The name on the command line, ``name@environment`` for ways of Keras in other
        environments.
      where: "module:function", imported only in the process that runs the way.
      label: One line for `--help`.
      environment: The environment that the way runs in. Its name is that of the Keras backend, or
        one of `KERAS_BACKENDS`.
      big: True if the way is also measured with big workloads, despite their compile time.
      bar: True if the way shows a progress bar, whose cost matters if steps are short.
    """

    name: str
    where: str
    label: str
    environment: str = "jax"
    big: bool = True
    bar: bool = False

    @property
    def predicts(self) -> bool:
        """True if the way predicts instead of training."""
        return "predict" in self.name

    def can(self, workload: Any) -> bool:
        """Returns True if the way can run the workload."""
        if self.where.startswith("benchmarks.flax_ways"):
            return workload.name in HAS_FLAX
        if self.where.startswith("benchmarks.torch_ways"):
            return workload.name in HAS_TORCH
        if self.bar and workload.name not in HAS_BAR:
            return False
        needs_keras = "keras" in self.name or self.name.startswith("bridge-fit") or self.predicts
        if workload.own_step and needs_keras:
            return False
        return self.big or not workload.big

    def prepare(self, workload: Any) -> Any:
        """Returns the function `run` for a workload."""
        module, _, function = self.where.partition(":")
        return getattr(importlib.import_module(module), function)(workload)


_JAX, _FLAX, _KERAS = "benchmarks.jax_ways", "benchmarks.flax_ways", "benchmarks.keras_ways"
_TORCH = "benchmarks.torch_ways"
_ALL = [
    Way("functrain-fit", f"{_JAX}:functrain_fit", "functrain.fit, end to end"),
    Way("functrain-fused", f"{_JAX}:functrain_fused", "functrain.fuse, chunks on the device"),
    Way("functrain-off", f"{_JAX}:functrain_off", 'functrain.fit(rewrites="off")'),
    Way("bridge-fit", f"{_JAX}:bridge_fit", "bridge.fit of the compiled Keras model"),
    Way("bridge-fit-bar", f"{_JAX}:bridge_fit_bar", "bridge.fit(verbose=1)", bar=True),
    Way("keras-fit", f"{_KERAS}:keras_fit", "Keras fit on JAX"),
    Way("keras-fit-bar", f"{_KERAS}:keras_fit_bar", "Keras fit on JAX, verbose=1", bar=True),
    Way(
        "keras-fit-32",
        f"{_KERAS}:keras_fit_32",
        "Keras fit on JAX, steps_per_execution=32",
        big=False,
    ),
    Way("keras-scan-32", f"{_JAX}:keras_scan_32", "lax.scan over Keras's train_step"),
    Way("jit-loop", f"{_JAX}:jit_loop", "jitted optax step in a loop"),
    Way("scan", f"{_JAX}:scan", "lax.scan of that step, data on the device"),
    Way("linen", f"{_FLAX}:linen", "flax linen and its TrainState"),
    Way("nnx", f"{_FLAX}:nnx_loop", "flax nnx and nnx.jit"),
    Way("keras-fit@tensorflow", f"{_KERAS}:keras_fit", "Keras fit on TensorFlow", "tensorflow"),
    Way(
        "keras-fit-32@tensorflow",
        f"{_KERAS}:keras_fit_32",
        "Keras fit on TensorFlow, steps_per_execution=32",
        "tensorflow",
        big=False,
    ),
    Way("keras-fit@torch", f"{_KERAS}:keras_fit", "Keras fit on torch", "torch"),
    Way("torch-eager", f"{_TORCH}:torch_eager", "plain PyTorch, fused Adam", "torch"),
    Way("torch-compile", f"{_TORCH}:torch_compile", "the same, torch.compile", "torch"),
    Way(
        "keras-fit-32@keras-head",
        f"{_KERAS}:keras_fit_32",
        "Keras's next release on JAX, steps_per_execution=32, which it scans",
        "keras-head",
        big=False,
    ),
]
WAYS = {way.name: way for way in _ALL}

_PREDICTING = [
    Way("functrain-predict", f"{_JAX}:functrain_predict", "functrain.predict, end to end"),
    Way("bridge-predict", f"{_JAX}:bridge_predict", "bridge.predict of the Keras model"),
    Way("keras-predict", f"{_KERAS}:keras_predict", "Keras predict on JAX"),
    Way(
        "keras-predict-32",
        f"{_KERAS}:keras_predict_32",
        "Keras predict on JAX, steps_per_execution=32",
        big=False,
    ),
    Way("jit-predict", f"{_JAX}:jit_predict", "jitted model in a loop, outputs fetched at the end"),
    Way(
        "keras-predict@tensorflow",
        f"{_KERAS}:keras_predict",
        "Keras predict on TensorFlow",
        "tensorflow",
    ),
    Way(
        "keras-predict-32@tensorflow",
        f"{_KERAS}:keras_predict_32",
        "Keras predict on TensorFlow, steps_per_execution=32",
        "tensorflow",
        big=False,
    ),
    Way("keras-predict@torch", f"{_KERAS}:keras_predict", "Keras predict on torch", "torch"),
]
PREDICTING = {way.name: way for way in _PREDICTING}
