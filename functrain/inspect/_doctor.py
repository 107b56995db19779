"""Checks this installation for known faults of XLA's CPU compiler."""

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common._compile import jit
from functrain.inspect._sheet import sheet

PACKAGES = ("functrain", "jax", "jaxlib", "keras", "flax", "optax", "orbax-checkpoint", "numpy")
REMEDY = (
    "Remedy: jax 0.11.1 or newer (from Python 3.12 on), or for this jax, at some cost of speed,\n"
    "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= before jax starts."
)


class Fault(NamedTuple):
    """A known fault of XLA's CPU compiler, and a small program that shows it.

    Attributes:
      issue: Its number at github.com/jax-ml/jax/issues; empty where there is none.
      title: What goes wrong.
      program: A function of arrays.
      shapes: The shapes of its arguments, which are normally distributed.
    """

    issue: str
    title: str
    program: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]


FAULTS = (
    Fault(
        "39103",
        "sums of products over few features: wrong rows",
        lambda w, x: jnp.sum(w @ x.T, axis=0),
        ((2, 3), (40_000, 3)),
    ),
    Fault(
        "",
        "sums of products over many rows: a crash",
        lambda x, w: jnp.max(x @ w.T, axis=0),
        ((33_000, 16), (32, 16)),
    ),
    Fault(
        "40412",
        "sums of products of rank 7: a crash",
        lambda a, b: jnp.sum(a * b, axis=3),
        ((3, 1, 2, 2, 8, 8, 8), (3, 1, 2, 2, 8, 8, 8)),
    ),
    Fault(
        "39257",
        "sums of products of rank 8: a crash",
        lambda x, a: jnp.log(jnp.maximum(jnp.sum(jnp.expand_dims(x, (3, 4, 5, 6, 7)) * a, 2), 1.0)),
        ((10, 4, 6), (10, 4, 6, 9, 9, 9, 9, 9)),
    ),
)


class Finding(NamedTuple):
    """The result of a fault's program: "right", "wrong" or "crash".

    Attributes:
      fault: The fault.
      plain: The result by `jax.jit`.
      functrain: The result by a program of functrain.
    """

    fault: Fault
    plain: str
    functrain: str


class Doctor(NamedTuple):
    """The result of `doctor`; prints as two tables.

    Attributes:
      versions: Versions of Python and of the packages that matter.
      findings: One for each known fault.

    Examples:
      >>> Doctor({"jax": "0.12.0"}, ()).is_affected
      False
    """

    versions: dict[str, str]
    findings: tuple[Finding, ...]

    @property
    def is_affected(self) -> bool:
        """True if `jax.jit` by itself, and so Keras's fit, computes something wrongly here."""
        return any(finding.plain != "right" for finding in self.findings)

    def __repr__(self) -> str:
        """Returns the tables, and the remedy if one is needed."""
        versions = sheet(["package", "version"], self.versions.items())
        rows = [
            (f"jax#{f.fault.issue}" if f.fault.issue else "", f.fault.title, f.plain, f.functrain)
            for f in self.findings
        ]
        findings = sheet(["issue", "known fault on CPU", "jax.jit", "functrain"], rows)
        return "\n".join([versions, findings, *[REMEDY] * self.is_affected])


def doctor() -> Doctor:
    """Runs the programs that XLA's CPU compiler is known to get wrong, each in two ways.

    Some versions of jaxlib compile a few programs for CPUs wrongly. functrain's own programs are
    compiled around that; those of others, such as Keras's fit or `jax.jit` by hand, are not. Each
    program runs in a process of its own, since some crash: the whole takes some ten seconds.

    Returns:
      A table of versions, and one of the faults: "right", "wrong" or "crash" for `jax.jit` and for
      functrain. It ends with the remedy, if one is needed.

    Examples:
      >>> import functrain as ft
      >>> found = ft.inspect.doctor()  # doctest: +SKIP
      >>> found.is_affected  # doctest: +SKIP
      False
    """
    return Doctor(_versions(), tuple(map(_finding, range(len(FAULTS)))))


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _finding(number: int) -> Finding:
    """Runs the program of a fault in a process of its own, functrain's way first."""
    code = f"from functrain.inspect._doctor import examine; examine({number})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    ours, plain, *_ = [*done.stdout.split(), "crash", "crash"]
    return Finding(FAULTS[number], plain, ours)


def examine(number: int) -> None:
    """Prints "right" or "wrong" for a fault's program on a CPU, by functrain and by `jax.jit`."""
    fault = FAULTS[number]
    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal(shape, np.float32) for shape in fault.shapes]
    arguments = jax.device_put(arguments, jax.devices("cpu")[0])
    with jax.disable_jit():  # operation by operation, nothing is fused
        expected = fault.program(*arguments)
    for compile_ in (jit, jax.jit):
        got = compile_(fault.program)(*arguments)
        is_right = np.allclose(got, expected, rtol=1e-3, atol=1e-3)
        print("right" if is_right else "wrong", flush=True)
