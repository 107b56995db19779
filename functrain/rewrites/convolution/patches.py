"""Convolutions as matrix products of patches (im2col)."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from functrain.rewrites._windows import call_unfused, pad_spatial, strided_window, zeros_for_sum
from functrain.rewrites.convolution._description import Convolution, padded_to_lanes
from functrain.rewrites.convolution._method import Convolve, Method

# Each tap, or each position, is a slice in the program.
MAX_SLICES = 64
MAX_BYTES = 2**26
# Bytes that stay in the cache between being written and being read.
CACHE_BYTES = 5 * 2**19


def _num_slices(conv: Convolution) -> int:
    return min(math.prod(conv.window), math.prod(conv.positions))


def _patch_bytes(conv: Convolution) -> int:
    elements = conv.batch * math.prod(conv.positions) * math.prod(conv.window) * conv.channels
    return elements * conv.dtype.itemsize


def _is_product(conv: Convolution) -> bool:
    """Returns True if there is one tap or one position: the operands are matrices already."""
    # An image with holes would be multiplied with the holes; `phases` multiplies none.
    return not conv.is_grouped and not conv.has_holes and _num_slices(conv) == 1


def _applies(conv: Convolution) -> bool:
    return (
        not conv.is_grouped
        and 1 < _num_slices(conv) <= MAX_SLICES
        and _patch_bytes(conv) <= MAX_BYTES
    )


def _applies_in_blocks(conv: Convolution) -> bool:
    return (
        not conv.is_grouped
        and 1 < _num_slices(conv) <= MAX_SLICES
        and _patch_bytes(conv) > CACHE_BYTES
        and _patch_bytes(conv) <= CACHE_BYTES * _blocked_size(conv)
    )


def _blocked_size(conv: Convolution) -> int:
    """Returns the size of the axis that is divided into blocks: images of the layer."""
    return conv.channels if conv.is_batch_last else conv.batch


def _features(conv: Convolution) -> Mapping[str, float]:
    taps, positions = math.prod(conv.window), conv.batch * math.prod(conv.positions)
    terms = taps * conv.channels
    run = conv.batch if conv.is_batch_last else conv.channels
    return {
        "calls": 1,
        "slices": _num_slices(conv),
        "products": positions * terms * conv.features,
        "lanes": positions * terms * padded_to_lanes(conv.features),
        "serial": positions * terms * conv.features * (positions * conv.features < 2**15),
        "patches": positions * terms,
        "segments": positions * terms / run,
        "large": positions * terms * (_patch_bytes(conv) > CACHE_BYTES),
        "kernel": terms * conv.features,
        "results": positions * conv.features,
    }


def _blocks(conv: Convolution) -> int:
    """Returns the number of blocks, all of the same size, whose patches stay in the cache."""
    size = _blocked_size(conv)
    fits = lambda count: size % count == 0 and _patch_bytes(conv) <= CACHE_BYTES * count  # noqa: E731
    return next(filter(fits, range(1, size + 1)), size)


def _block_features(conv: Convolution) -> Mapping[str, float]:
    features = dict(_features(conv))
    del features["large"]
    if conv.is_batch_last:
        features["sums"] = _blocks(conv) * conv.batch * math.prod(conv.positions) * conv.features
    else:
        features["kernel"] *= _blocks(conv)
    return features | {"blocks": _blocks(conv)}


def _lower(conv: Convolution, lhs: jax.Array, rhs: jax.Array, convolve: Convolve) -> jax.Array:
    if conv.is_batch_last:
        x, w = _by_channel(conv, lhs, rhs)
        multiply = functools.partial(_multiply_by_channel, conv)
        # Otherwise XLA fuses the product with what computes the patches, and computes those again
        # for each tap that reads them.
        out = multiply(x, w) if _is_product(conv) else call_unfused(multiply, x, w)
        return _from_sums(conv, out)
    out = _multiply(conv, pad_spatial(lhs, conv.padding, conv.image_dilation), rhs)
    return lax.convert_element_type(out, conv.out_dtype)


def _lower_in_blocks(
    conv: Convolution, lhs: jax.Array, rhs: jax.Array, convolve: Convolve
) -> jax.Array:
    count = _blocks(conv)
    if not conv.is_batch_last:
        x = pad_spatial(lhs, conv.padding, conv.image_dilation)
        x = x.reshape(count, -1, *x.shape[1:])
        part = conv._replace(batch=conv.batch // count)
        out = lax.map(lambda block: _multiply(part, block, rhs), x)
        return lax.convert_element_type(lax.collapse(out, 0, 2), conv.out_dtype)
    x, w = (a.reshape(count, -1, *a.shape[1:]) for a in _by_channel(conv, lhs, rhs))
    part = conv._replace(channels=conv.channels // count)
    product = functools.partial(_multiply_by_channel, part)
    start = zeros_for_sum(jax.eval_shape(product, x[0], w[0]), x, w)
    out, _ = lax.scan(lambda total, block: (total + product(*block), None), start, (x, w))
    return _from_sums(conv, out)


def _by_channel(conv: Convolution, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the operands with the channels in front: `[I, *S, N]`, padded, and `[I, *W, O]`."""
    last = lhs.ndim - 1
    x = lax.transpose(lhs, (last, *range(1, last), 0))
    w = lax.transpose(rhs, (last - 1, *range(last - 1), last))
    return pad_spatial(x, conv.padding, conv.image_dilation), w


def _multiply(conv: Convolution, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies patches `[N, *P, W I]` of a padded image by the kernel `[W I, O]`."""
    if math.prod(conv.positions) < math.prod(conv.window):
        views = _views(x, conv.positions, conv.strides, conv.window, conv.window_dilation)
        patches = jnp.stack(views, 1)  # [N, P, *W, I]
    else:
        views = _views(x, conv.window, conv.window_dilation, conv.positions, conv.strides)
        patches = lax.concatenate(views, x.ndim - 1)
    rows = patches.reshape(conv.batch * math.prod(conv.positions), -1)
    out = _dot(rows, lax.collapse(w, 0, w.ndim - 1), 1, conv)
    return out.reshape(conv.batch, *conv.positions, conv.features)


def _multiply_by_channel(conv: Convolution, x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies patches `[I W, P N]` of a padded image by the kernel `[I W, O]`.

    Returns `[P N, O]`, or `[O, P N]` if O is the smaller: fewer rows than columns are faster.
    """
    if math.prod(conv.positions) <= math.prod(conv.window):
        views = _views(x, conv.positions, conv.strides, conv.window, conv.window_dilation)
        patches = lax.concatenate(views, x.ndim - 1)  # [I, *W, P N]
    else:
        views = _views(x, conv.window, conv.window_dilation, conv.positions, conv.strides)
        patches = jnp.stack(views, 1)  # [I, W, *P, N]
    terms = conv.channels * math.prod(conv.window)
    a, b = patches.reshape(terms, -1), w.reshape(terms, -1)
    return _dot(a, b, 0, conv) if _is_wide(conv) else _dot(b, a, 0, conv, swapped=True)


def _is_wide(conv: Convolution) -> bool:
    return math.prod(conv.positions) * conv.batch <= conv.features


def _from_sums(conv: Convolution, out: jax.Array) -> jax.Array:
    if not _is_wide(conv):
        out = lax.transpose(out, (1, 0))
    out = out.reshape(*conv.positions, conv.batch, conv.features)
    out = jnp.moveaxis(out, -2, 0)
    return lax.convert_element_type(out, conv.out_dtype)


def _views(
    x: jax.Array,
    counts: Sequence[int],
    distances: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
) -> list[jax.Array]:
    """Returns a strided window of the spatial axes for each of `counts` places, in order."""
    places = itertools.product(*map(range, counts))
    return [strided_window(x, place, distances, sizes, strides) for place in places]


def _dot(
    a: jax.Array, b: jax.Array, axis: int, conv: Convolution, swapped: bool = False
) -> jax.Array:
    precision = conv.precision and conv.precision[::-1] if swapped else conv.precision
    return lax.dot_general(
        *(a, b),
        (((axis,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=conv.sum_dtype,
    )


product = Method("product", _is_product, _features, _lower)
patches = Method("patches", _applies, _features, _lower)
blocked_patches = Method("blocked_patches", _applies_in_blocks, _block_features, _lower_in_blocks)
