"""Copy all slices of a vector at once.

XLA makes a kernel for every slice. For thousands of small leaves, compiling these
kernels takes too long. On the CPU one call of the engine copies all slices.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.ffi import ffi_lowering, register_ffi_target

from jaxcoded import _jax_compat
from jaxcoded._jax_compat import ShapedArray, ad, apply_primitive, batching, mlir
from jaxcoded.transport import extension

try:
    extension.load()
    from jaxcoded.transport import _engine
except ImportError:  # without the engine, XLA makes a kernel for every slice
    _engine = None  # type: ignore[assignment]


def slices(
    vector: jax.Array, starts: Sequence[int], sizes: Sequence[int]
) -> list[jax.Array]:
    """Return ``[vector[start : start + size], …]``, with sizes ≥ 1."""
    return slices_p.bind(vector, starts=tuple(starts), sizes=tuple(sizes))


slices_p = Primitive("coded_slices")
slices_p.multiple_results = True
slices_p.def_impl(functools.partial(apply_primitive, slices_p))


@slices_p.def_abstract_eval
def _abstract_eval(vector: Any, *, starts: Any, sizes: Any) -> list[ShapedArray]:
    return [_jax_compat.like(vector, (size,)) for size in sizes]


def _by_xla(vector: jax.Array, *, starts: Any, sizes: Any) -> list[jax.Array]:
    """Slice along the last axis."""
    return [
        jax.lax.slice_in_dim(vector, start, start + size, axis=-1)
        for start, size in zip(starts, sizes)
    ]


mlir.register_lowering(slices_p, mlir.lower_fun(_by_xla, multiple_results=True))


def _lowering(ctx: Any, vector: Any, *, starts: Any, sizes: Any) -> Any:
    del sizes  # the results have these sizes
    lower = ffi_lowering("jaxcoded_slices")
    return lower(ctx, vector, starts=np.array(starts, np.int64))


if _engine is not None:
    register_ffi_target("jaxcoded_slices", _engine.slices_handler, platform="cpu")
    mlir.register_lowering(slices_p, _lowering, platform="cpu")


def _transpose(cotangents: Any, vector: Any, *, starts: Any, sizes: Any) -> Any:
    total = jnp.zeros(vector.aval.shape, vector.aval.dtype)
    for start, size, cotangent in zip(starts, sizes, cotangents):
        if not isinstance(cotangent, ad.Zero):
            total = total.at[start : start + size].add(cotangent)
    return [total]


ad.deflinear2(slices_p, _transpose)


def _batch(operands: Any, axes: Any, *, starts: Any, sizes: Any) -> Any:
    (vector,), (axis,) = operands, axes
    vector = jnp.moveaxis(vector, axis, 0)
    return _by_xla(vector, starts=starts, sizes=sizes), [0] * len(sizes)


batching.primitive_batchers[slices_p] = _batch
