"""A check of this installation for known faults of XLA's CPU compiler."""

import importlib.metadata
import os
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

PACKAGES = ("functrain", "jax", "jaxlib", "keras", "flax", "optax", "numpy")
# The seconds in which a process must have ended, which takes a few.
TIMEOUT = 300
REMEDY = (
    "Remedy: install jax 0.11.1 or newer, which needs Python 3.12. Or keep this jax\n"
    "and set XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= before jax starts;\n"
    "some programs get slower."
)


class Fault(NamedTuple):
    """A known fault of XLA's CPU compiler, and a small program that shows it.

    Attributes:
      issue: Its number at github.com/jax-ml/jax/issues, or "" if there is no issue.
      title: A short description.
      program: A function of arrays.
      shapes: The shapes of its arguments, which are normally distributed random numbers.
    """

    issue: str
    title: str
    program: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]


FAULTS = (
    Fault(
        "39103",
        "sums of products, few features: wrong rows",
        lambda w, x: jnp.sum(w @ x.T, axis=0),
        ((2, 3), (40_000, 3)),
    ),
    Fault(
        "",
        "sums of products, many rows: a crash",
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
    """The results of a fault's program, each "right", "wrong" or "crash".

    Attributes:
      fault: The fault.
      plain: The result with `jax.jit`.
      functrain: The result with functrain's jit.
    """

    fault: Fault
    plain: str
    functrain: str


class Doctor(NamedTuple):
    """The result of `doctor`; prints as two tables.

    Attributes:
      versions: The versions of Python and of the packages that are involved.
      findings: The results for each known fault.

    Examples:
      >>> Doctor({"jax": "0.12.0"}, ()).is_affected
      False
    """

    versions: dict[str, str]
    findings: tuple[Finding, ...]

    @property
    def is_affected(self) -> bool:
        """True if plain `jax.jit`, and so Keras's fit, miscompiles one of the programs here."""
        return any(finding.plain != "right" for finding in self.findings)

    def __repr__(self) -> str:
        """Returns the tables, and the remedy if one is needed."""
        versions = sheet(["package", "version"], self.versions.items())
        rows = []
        for fault, plain, ours in self.findings:
            rows.append((f"jax#{fault.issue}" * bool(fault.issue), fault.title, plain, ours))
        findings = sheet(["issue", "known fault on CPU", "jax.jit", "functrain"], rows)
        return "\n".join([versions, findings, *[REMEDY] * self.is_affected])


def doctor() -> Doctor:
    """Runs small programs that XLA's CPU compiler is known to miscompile.

    Some versions of jaxlib miscompile a few programs for CPUs. functrain avoids that for its own
    programs, but other programs are affected, such as those of Keras's fit or of your own
    `jax.jit`. Each program runs twice, compiled by `jax.jit` and by functrain, in its own process,
    since some crash. Together they take about ten seconds.

    Returns:
      A `Doctor`, which prints a table of versions and a table of the faults with "right", "wrong"
      or "crash" for `jax.jit` and for functrain, and the remedy if one is needed.

    Raises:
      RuntimeError: A process failed without a crash; the message has the end of its traceback.
      subprocess.TimeoutExpired: A process has not ended after five minutes.

    Examples:
      >>> import functrain as ft
      >>> report = ft.inspect.doctor()  # doctest: +SKIP
      >>> report.is_affected  # doctest: +SKIP
      False
    """
    return Doctor(_versions(), tuple(map(_check_fault, range(len(FAULTS)))))


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _check_fault(index: int) -> Finding:
    """Runs the program of a fault in its own process, with functrain's jit first."""
    code = f"from functrain.inspect._doctor import print_results; print_results({index})"
    command, env = [sys.executable, "-c", code], {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT
    )
    # That of an error in Python; of a crash it is the number of a signal, below zero. XLA's errors
    # are those of Python as well, and one may come after functrain's result.
    if done.returncode == 1 and not done.stdout.split():
        raise RuntimeError(
            f"doctor: expected a process that runs {FAULTS[index].title!r}, got an error of this "
            f"installation:\n{done.stderr[-1000:]}"
        )
    # A process that crashes prints fewer results than two.
    ours, plain, *_ = [*done.stdout.split(), "crash", "crash"]
    return Finding(FAULTS[index], plain, ours)


def print_results(index: int) -> None:
    """Prints "right" or "wrong" for a fault's program on a CPU, by functrain and by `jax.jit`."""
    fault = FAULTS[index]
    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal(shape, np.float32) for shape in fault.shapes]
    arguments = jax.device_put(arguments, jax.devices("cpu")[0])
    # Operation by operation nothing is fused, so none of the faults occurs.
    with jax.disable_jit():
        expected = fault.program(*arguments)
    for compile_ in (jit, jax.jit):
        got = compile_(fault.program)(*arguments)
        is_right = np.allclose(got, expected, rtol=1e-3, atol=1e-3)
        print("right" if is_right else "wrong", flush=True)
