"""`jax.jit` for every program of functrain: it avoids what XLA is known to compile wrongly."""

import functools
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.version import __version__ as jaxlib_version

from functrain.common import _tree

# jaxlib 0.10.0 to 0.11.0 compile parts of CPU programs with YNNPACK ("ynn fusions"). Two kinds of
# those are wrong:
# - a product that is reduced in the same fusion. Rows beyond 128 KiB are wrong (jax#39103), and
#   0.10.0 and 0.10.1 crash in sums of a product over more than 32,768 rows. Right from 0.11.0.
# - arrays of rank 7 or more. The process crashes (jax#40412, jax#39257). Right from 0.11.1.
# Delete this when jax 0.11.1 is the oldest that is supported.
_VERSION = tuple(map(int, re.findall(r"\d+", jaxlib_version)[:3]))
IS_AFFECTED = _VERSION < (0, 11, 1)
# Compiles without ynn fusions. It slows down ordinary networks by up to 45 %, since XLA's own sums
# are slower; so it is given to those programs alone that have a wrong fusion.
REMEDY = {"xla_cpu_experimental_ynn_fusion_type": ""}

_COMPUTATION = re.compile(r"^(%[\w.-]+) ([^\n]*\{\n.*?)^\}", re.MULTILINE | re.DOTALL)
_YNN_FUSION = re.compile(r'calls=(%[\w.-]+)[^\n]*"__ynn_fusion"')
_PRODUCT = re.compile(r" (?:dot|convolution)\(")
_REDUCTION = re.compile(r" reduce(?:-window)?\(")
_RANK_7 = re.compile(r"\w\[\d+(?:,\d+){6,}\]")


class MiscompilationWarning(UserWarning):
    """This version of jaxlib computes a program of yours wrongly outside of functrain.

    Examples:
      >>> import functrain as ft, warnings
      >>> warnings.simplefilter("ignore", ft.inspect.MiscompilationWarning)
    """


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """Returns ``jax.jit(function, **options)`` without the fusions that XLA compiles wrongly.

    Where jaxlib has no such fusions this is `jax.jit` itself. Otherwise every program is looked at
    after its compilation and before its first run, and compiled again if it has one. Within a
    transformation (an outer `jax.jit`, `jax.vmap`, `jax.grad`) the program becomes a part of what
    is transformed, and is compiled with that.
    """
    return CheckedJit(function, options) if IS_AFFECTED else jax.jit(function, **options)


def jit_without_arithmetic(function: Callable[..., Any]) -> Any:
    """Returns ``jax.jit(function)`` of a function that only copies, which is compiled rightly.

    Its calls cost less: those of a checked program are dispatched in Python for every signature
    but the first, some 0.2 ms each.
    """
    return jax.jit(function)


def is_miscompiled(hlo: str) -> bool:
    """Returns True if the text of a compiled program has a fusion that is known to be wrong."""
    called = set(_YNN_FUSION.findall(hlo))
    if not called:
        return False
    bodies = (body for name, body in _COMPUTATION.findall(hlo) if name in called)
    return any(map(_is_wrong, bodies))


def _is_wrong(body: str) -> bool:
    is_reduced_product = _PRODUCT.search(body) and _REDUCTION.search(body)
    return bool(is_reduced_product or _RANK_7.search(body))


class _UncheckedError(Exception):
    """A program is traced that has not been checked yet."""


_tracing = threading.local()  # .is_checked: whether this thread traces for a check


class CheckedJit:
    """What `jit` returns on an affected jaxlib.

    A program that has run once costs nothing more on one device: `jax.jit` finds it in its cache.
    It traces the function only for new shapes, and that is refused until the program has been
    checked. With several devices jax compiles for another sharding without tracing again, so each
    call looks up whether its signature was checked.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        @functools.wraps(function)
        def checked(*args: Any) -> Any:
            if not getattr(_tracing, "is_checked", False):
                raise _UncheckedError
            return function(*args)

        # Apart from the others: what it has traced counts as checked for nobody.
        self._transformed: Any = jax.jit(function, **options)
        self._plain: Any = jax.jit(checked, **options)
        self._remedied: Any = jax.jit(checked, compiler_options=REMEDY, **options)
        self._chosen: dict[Any, Any] = {}  # one of the two for each signature
        self._has_wrong = False
        # Signatures that were traced and whose check has not come to its end: another thread is at
        # it, or Ctrl-C or an error interrupted it. `jax.jit` would run those without tracing.
        self._unchecked: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        """Runs the program, which is checked before its first run."""
        is_new = False
        # Not for the first signature: after an exception from its trace, jax dispatches a signature
        # in Python for ever (0.2 ms more a call of a small MLP's program).
        is_known = self._chosen and not (self._has_wrong or self._unchecked)
        if is_known and jax.device_count() == 1:
            try:
                return self._plain(*args)
            except _UncheckedError:
                is_new = True
        return self._traced(self._right_one(args, is_new=is_new), *args)

    def lower(self, *args: Any) -> Any:
        """Lowers the program that a call would run, which is compiled to be checked."""
        return self._traced(self._right_one(args).lower, *args)

    def trace(self, *args: Any) -> Any:
        """Traces the program that a call would run, which is compiled to be checked."""
        return self._traced(self._right_one(args).trace, *args)

    def eval_shape(self, *args: Any) -> Any:
        """Returns the shapes of the results; nothing is compiled."""
        return self._transformed.eval_shape(*args)

    def _right_one(self, args: tuple[Any, ...], *, is_new: bool = False) -> Any:
        """Returns the `jax.jit` object that computes the right numbers for these arguments.

        Args:
          args: Arrays, or their shapes.
          is_new: Whether jax was seen to trace these arguments, so that an earlier check of the
            same signature does not count: it was made in another context, such as other matmul
            precision.
        """
        is_disabled = jax.config.jax_disable_jit  # type: ignore[attr-defined] # made at run time
        leaves, structure = jax.tree.flatten(args)
        if is_disabled or _is_transformed(leaves):
            return self._transformed
        signature = structure, tuple(map(_kind, leaves))
        if is_new or signature not in self._chosen:
            self._chosen[signature] = self._checked(signature, args)
        return self._chosen[signature]

    def _checked(self, signature: Any, args: tuple[Any, ...]) -> Any:
        """Compiles the program, looks at it, and returns the `jax.jit` object to run it with."""
        self._unchecked.add(signature)
        try:
            lowered = self._traced(self._plain.lower, *args)
        except Exception:  # the function raised, and jax keeps no trace of it
            self._unchecked.discard(signature)
            raise
        # jax keeps the executable: the call that follows neither traces nor compiles again.
        is_wrong = is_miscompiled(lowered.compile().as_text() or "")
        self._has_wrong |= is_wrong
        self._unchecked.discard(signature)
        if is_wrong:
            _warn_once()
        return self._remedied if is_wrong else self._plain

    def _traced(self, function: Callable[..., Any], *args: Any) -> Any:
        before = getattr(_tracing, "is_checked", False)
        _tracing.is_checked = True
        try:
            return function(*args)
        finally:
            _tracing.is_checked = before


def _is_transformed(leaves: list[Any]) -> bool:
    """Returns True within a transformation; an outer jit makes tracers of new arrays, too."""
    return any(isinstance(x, jax.core.Tracer) for x in [*leaves, jnp.asarray(0)])


def _kind(leaf: Any) -> Any:
    """Returns what jax compiles a program for: shape, dtype, weak type, and where an array lies."""
    if isinstance(leaf, jax.Array):
        return leaf.aval, leaf.sharding, leaf.committed
    return _tree.spec(leaf), getattr(leaf, "sharding", None)


_has_warned = False


def _warn_once() -> None:
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    warnings.warn(
        f"jaxlib {jaxlib_version} compiles a part of this program wrongly on CPU "
        "(https://github.com/jax-ml/jax/issues/39103). functrain has compiled it without that "
        "part, and its results are right. The same computation outside of functrain, by jax.jit "
        "or Keras's fit, is wrong: use jax 0.11.1 or newer (from Python 3.12 on), or set "
        "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= before jax starts. "
        "functrain.inspect.doctor() shows what is affected; to silence this, "
        'warnings.simplefilter("ignore", functrain.inspect.MiscompilationWarning).',
        MiscompilationWarning,
        stacklevel=2,
    )
