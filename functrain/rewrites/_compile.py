"""`jax.jit` for every program of functrain, which avoids known miscompilations of XLA."""

import functools
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import primitives
from jaxlib.version import __version__ as jaxlib_version

from functrain.common import _tree
from functrain.common._checks import require_one_of
from functrain.common._platform import platform_of
from functrain.common._warnings import warn
from functrain.rewrites._conv import crop
from functrain.rewrites._optimize import evaluate
from functrain.rewrites._pass import rewrite_jaxpr
from functrain.rewrites._rewrite import rewrite

# jaxlib before 0.12 miscompiles some programs for CPUs.
# Convolutions with a padding that is negative in front of an axis and positive behind it read
# outside of the image (openxla/xla#48713). Fixed in 0.12.0. XLA also makes such a padding itself:
# it adds a positive padding of the image to a negative one of the convolution. A sliced image with
# no negative padding in front is convolved correctly, and XLA leaves it alone.
# Parts of programs are compiled with YNNPACK ("ynn fusions"). Two kinds of these are wrong:
# - A product that is reduced in the same fusion. Rows beyond 128 KiB are wrong (jax#39103), and
#   0.10.0 and 0.10.1 crash in sums of a product over more than 32,768 rows. Fixed in 0.11.0.
# - Arrays of rank 7 or more. The process crashes (jax#40412, jax#39257). Fixed in 0.11.1.
# Delete CheckedJit when 0.12 is the oldest supported version of jax.
_VERSION = tuple(map(int, re.findall(r"\d+", jaxlib_version)[:3]))
IS_AFFECTED = _VERSION < (0, 12)


# The compiler option that turns ynn fusions off. XLA's own sums are slower, by up to 45 % in
# ordinary networks, so only the programs that have a wrong fusion are compiled with it.
WITHOUT_FUSIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}

# These match the text of optimized HLO. A fusion's body is a computation that the fusion calls.
_COMPUTATION = re.compile(r"^(%[\w.-]+) ([^\n]*\{\n.*?)^\}", re.MULTILINE | re.DOTALL)
_YNN_FUSION = re.compile(r'calls=(%[\w.-]+)[^\n]*"__ynn_fusion"')
_PRODUCT = re.compile(r" (?:dot|convolution)\(")
# Most of those with a window are right, but not those over two or three rows.
_REDUCTION = re.compile(r" reduce(?:-window)?\(")
_RANK_7 = re.compile(r"\w\[\d+(?:,\d+){6,}\]")


class MiscompilationWarning(UserWarning):
    """A warning: outside of functrain, this version of jaxlib computes your program wrongly.

    Examples:
      >>> import functrain as ft, warnings
      >>> warnings.simplefilter("ignore", ft.inspect.MiscompilationWarning)
    """


# XLA moves what is the same in every round of a loop in front of it: the mask of an index that is a
# constant, for example. It then fuses the rest of the body as it would not outside of a loop, and
# orders sums differently.
WITHOUT_MOTION = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


def jit(function: Callable[..., Any], *, compiler_options: Any = None, **options: Any) -> Any:
    """Returns ``jax.jit(function, **options)`` without what XLA compiles wrongly.

    With a jaxlib that compiles all of it correctly this is `jax.jit` itself. Otherwise images are
    cropped before their convolutions, and every program is inspected after its compilation and
    before its first run, and compiled again if it has a wrong fusion.
    FUNCTRAIN_CHECK_PROGRAMS=off in the environment turns this off. Within a transformation (an
    outer `jax.jit`, `jax.vmap`, `jax.grad`) the function is inlined into the outer program, and
    compiled with it, so without the compiler options: jax accepts those of the outer program only.
    """
    setting = os.environ.get("FUNCTRAIN_CHECK_PROGRAMS") or "on"
    require_one_of("FUNCTRAIN_CHECK_PROGRAMS", setting, ("on", "off"))
    if IS_AFFECTED and setting == "on":
        return CheckedJit(function, options, compiler_options or {})
    if compiler_options:
        return _OutermostJit(function, options, compiler_options)
    return jax.jit(function, **options)


class _OutermostJit:
    """A jitted function with compiler options, which it drops within a transformation."""

    def __init__(
        self, function: Callable[..., Any], options: dict[str, Any], compiler_options: Any
    ) -> None:
        self._transformed: Any = jax.jit(function, **options)
        self._jitted: Any = jax.jit(function, **options, compiler_options=compiler_options)

    def __call__(self, *args: Any) -> Any:
        """Runs the program."""
        return self._use("__call__", args)

    def lower(self, *args: Any) -> Any:
        """Lowers the program that a call would run."""
        return self._use("lower", args)

    def trace(self, *args: Any) -> Any:
        """Traces the program that a call would run."""
        return self._use("trace", args)

    def eval_shape(self, *args: Any) -> Any:
        """Returns the shapes of the results without compiling."""
        return self._transformed.eval_shape(*args)

    def _use(self, method: str, args: tuple[Any, ...]) -> Any:
        """Calls a method of the `jax.jit` object for these arguments."""
        is_transformed = _is_transformed(jax.tree.leaves(args))
        return getattr(self._transformed if is_transformed else self._jitted, method)(*args)


def jit_without_arithmetic(function: Callable[..., Any], **options: Any) -> Any:
    """Returns ``jax.jit(function, **options)`` of a function that only copies: it compiles well."""
    return jax.jit(function, **options)


def has_wrong_fusion(hlo: str) -> bool:
    """Returns True if the text of a compiled program has a fusion of one of the wrong kinds."""
    fusions = set(_YNN_FUSION.findall(hlo))
    # Most programs have none: do not search their whole text for computations.
    if not fusions:
        return False
    for name, body in _COMPUTATION.findall(hlo):
        is_reduced_product = _PRODUCT.search(body) and _REDUCTION.search(body)
        if name in fusions and (is_reduced_product or _RANK_7.search(body)):
            return True
    return False


class _UncheckedError(Exception):
    """A program that has not been checked yet is being traced."""


# `is_allowed` is True while this thread traces in order to check. It is per thread, since another
# thread may meet a new program at the same time.
_tracing = threading.local()


class CheckedJit(_OutermostJit):
    """A jitted function whose programs are checked before they run, for affected jaxlibs.

    On one device, a program that has run once costs nothing more: `jax.jit` finds it in its cache.
    `jax.jit` traces the function only for new shapes and contexts, and tracing raises
    `_UncheckedError` until the program has been checked. With several devices, jax compiles for a
    new sharding without tracing again, so each call looks up whether its signature was checked.
    """

    def __init__(
        self, function: Callable[..., Any], options: dict[str, Any], compiler_options: Any
    ) -> None:
        cropped = _crop_first(function)

        @functools.wraps(function)
        def checked(*args: Any) -> Any:
            if not getattr(_tracing, "is_allowed", False):
                raise _UncheckedError
            return cropped(*args)

        super().__init__(checked, options, compiler_options)
        # For calls within transformations. It shares no cache with the others, so a program that it
        # has traced does not count as checked.
        self._transformed = jax.jit(function, **options)
        self._without_fusions: Any = jax.jit(
            checked, **options, compiler_options={**compiler_options, **WITHOUT_FUSIONS}
        )
        self._choices: dict[Any, Any] = {}  # by signature: one of the last two
        self._all_are_right = False
        # Signatures that were traced but whose check has not finished: another thread is checking
        # them, or Ctrl-C or an error interrupted the check. `jax.jit` would run their programs
        # without tracing, that is without raising `_UncheckedError`.
        self._unchecked: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        """Runs the program, after a check before its first run."""
        # The first signature is checked without this attempt.
        if self._all_are_right and not self._unchecked and jax.device_count() == 1:
            try:
                return self._jitted(*args)
            except _UncheckedError:
                # After an exception from its trace, jax dispatches a signature in Python from then
                # on (0.6 ms more per call with 40 arrays), unless it forgets that.
                self._jitted._clear_cache()
        return self._use("__call__", args)

    def _use(self, method: str, args: tuple[Any, ...]) -> Any:
        """Calls a method of the `jax.jit` object that computes the right numbers."""
        try:
            return getattr(self._choose(args), method)(*args)
        except _UncheckedError:
            # The check of this signature was made in another context, such as another matmul
            # precision, for which jax traces again.
            choice = self._choose(args, again=True)
            return _allow_tracing(getattr(choice, method), *args)

    def _choose(self, args: tuple[Any, ...], *, again: bool = False) -> Any:
        """Returns the `jax.jit` object that computes the right numbers for these arguments.

        Args:
          args: Arrays, or their shapes.
          again: True checks a signature that has been checked before.
        """
        # jax defines its flags at run time, so type checkers do not know them.
        is_disabled = jax.config.jax_disable_jit  # type: ignore[attr-defined, unused-ignore]
        leaves, structure = jax.tree.flatten(args)
        # Only programs for CPUs are affected.
        if is_disabled or _is_transformed(leaves) or platform_of(leaves) != "cpu":
            return self._transformed
        signature = structure, tuple(map(_leaf_signature, leaves))
        choice = self._choices.get(signature)
        # A program with a wrong fusion in one context is compiled without fusions in all of them.
        if choice is None or (again and choice is self._jitted):
            # If the check is interrupted, an earlier one in another context must not count.
            self._choices.pop(signature, None)
            choice = self._choices[signature] = self._check(signature, args)
            self._all_are_right = all(x is self._jitted for x in self._choices.values())
        return choice

    def _check(self, signature: Any, args: tuple[Any, ...]) -> Any:
        """Compiles and inspects the program; returns the `jax.jit` object to run it with."""
        self._unchecked.add(signature)
        choice = self._jitted
        try:
            lowered = _allow_tracing(choice.lower, *args)
        except Exception:
            # The function raised, so jax has cached no trace that could run unchecked. Ctrl-C
            # is no Exception: it may come after the trace was cached.
            self._unchecked.discard(signature)
            raise
        # jax caches the executable, so the call that follows neither traces nor compiles again.
        if has_wrong_fusion(lowered.compile().as_text() or ""):
            choice = self._without_fusions
            _allow_tracing(choice.lower, *args)
            _warn_once("a sum of products")
        self._unchecked.discard(signature)
        return choice


def _allow_tracing(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function that may trace a checked program without raising `_UncheckedError`."""
    # Restored instead of reset: a checked program may be traced within another one's trace.
    before = getattr(_tracing, "is_allowed", False)
    _tracing.is_allowed = True
    try:
        return function(*args)
    finally:
        _tracing.is_allowed = before


# Not one of `REWRITES`: it makes nothing faster, and applies whatever `rewrites` is.
@rewrite(
    primitives.conv_general_dilated_p,
    lambda eqn: any(low < 0 for low, _ in eqn.params["padding"]),
    "XLA reads outside of an image that its padding crops",
)
def cropped_conv(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    """Crops the image before the convolution."""
    lhs, params = crop(lhs, params["dimension_numbers"].lhs_spec[2:], params)
    out: jax.Array = primitives.conv_general_dilated_p.bind(lhs, rhs, **params)
    return out


def _crop_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with each image cropped before its convolution, instead of by it."""

    def cropped(*args: Any) -> Any:
        closed, out_shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        rewritten = rewrite_jaxpr(closed, [cropped_conv])
        if rewritten is not closed:
            _warn_once("a convolution with negative padding")
        return evaluate(rewritten, out_shapes, args)

    return cropped


def _is_transformed(leaves: list[Any]) -> bool:
    """Returns True within a transformation."""
    # The arguments may all be concrete within an outer jit, but there even new arrays are tracers.
    return any(isinstance(x, jax.core.Tracer) for x in leaves) or _tree.is_in_jit()


def _leaf_signature(leaf: Any) -> Any:
    """Returns all that a compilation depends on: shape, dtype, weak type, and sharding."""
    if isinstance(leaf, jax.Array):
        return leaf.aval, leaf.sharding, leaf.committed
    return _tree.spec(leaf), getattr(leaf, "sharding", None)


_has_warned = False


def _warn_once(operation: str) -> None:
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    warn(
        f"jaxlib {jaxlib_version} computes {operation} of this program wrongly on CPU. functrain "
        'avoids that; jax.jit and Keras\'s fit do not. See "Known faults of XLA on CPU" on '
        "functrain's page about performance.",
        MiscompilationWarning,
    )
