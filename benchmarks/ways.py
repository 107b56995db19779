"""How it is trained: every way by name, and which workloads it can do.

A way is a function ``way(workload) -> run``; ``run()`` takes `workload.steps` steps from where the
last call left off, waits for them, and returns their mean loss, by which the ways are compared.
"""

import dataclasses
import importlib
from typing import Any

HAS_BAR = ("digits-mlp", "mnist-mlp", "mnist-convnet")
HAS_FLAX = ("digits-mlp", "mnist-mlp", "tabular-mlp", "mnist-convnet")


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of training.

    Attributes:
      name: As on the command line. A peer's is ``name@backend``.
      where: "module:function"; imported only in the process that runs it.
      label: One line for `--help`.
      backend: The Keras backend it runs on.
      big: Whether big workloads are worth its compile time.
      bar: Whether it shows a progress bar, which matters where a step is short.
    """

    name: str
    where: str
    label: str
    backend: str = "jax"
    big: bool = True
    bar: bool = False

    def can(self, workload: Any) -> bool:
        """Says whether the way does the workload."""
        if self.where.startswith("benchmarks.flax_ways"):
            return workload.name in HAS_FLAX
        if self.bar and workload.name not in HAS_BAR:
            return False
        if workload.own_step and ("keras" in self.name or self.name.startswith("bridge-fit")):
            return False
        return self.big or not workload.big

    def prepare(self, workload: Any) -> Any:
        """Returns the `run` of a workload."""
        module, _, function = self.where.partition(":")
        return getattr(importlib.import_module(module), function)(workload)


_JAX, _FLAX, _KERAS = "benchmarks.jax_ways", "benchmarks.flax_ways", "benchmarks.keras_ways"
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
]
WAYS = {way.name: way for way in _ALL}
