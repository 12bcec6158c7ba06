"""The JAX primitive of a communication round: differentiation, batching, order.

One round is one call of a collective. What it does is a `Carrier`; what JAX may do with
it is the same for all of them and stands here once.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from mpi4py import MPI

# mpi4jax orders its operations by an effect of its own; rounds take part in that order,
# so that rounds and a user's own mpi4jax calls can be neither swapped, merged nor
# dropped.
(_ORDER,) = jax.make_jaxpr(lambda: mpi4jax.barrier(comm=MPI.COMM_SELF))().effects


class Carrier(abc.ABC):
    """How a round is carried out. Subclasses are frozen dataclasses: static, hashable
    and small under ``jit``."""

    @property
    def transposable(self) -> bool:
        """Whether the transpose is the identity.

        It is for an all-reduce, as in mpi4jax: the cotangent of the sum is again one
        rank's contribution, which one more round makes exact. And that round's
        transpose is the all-reduce again.
        """
        return False

    @abc.abstractmethod
    def carry(
        self, vectors: Sequence[jax.Array], extra: jax.Array | None
    ) -> Sequence[jax.Array]:
        """Trace the communication of one round.

        Args:
            vectors: arrays ``(..., length)``; leading axes are batch axes, made by
                ``vmap``.
            extra: an operand that is neither batched nor differentiated, or ``None``.

        Returns:
            One array for each vector, ``(..., self.result_length(length))`` of the same
            dtype.
        """

    def result_length(self, length: int) -> int:
        """The length of the result's last axis."""
        return length


def run(
    carrier: Carrier, vectors: Sequence[jax.Array], extra: jax.Array | None = None
) -> list[jax.Array]:
    """One round.

    Args:
        carrier: what happens in it.
        vectors: arrays of any number of axes ≥ 1. There may be none: the round takes
            place all the same, since other ranks may have some.
        extra: see `Carrier.carry`.

    Returns:
        One array for each vector.
    """
    operands = [*vectors] if extra is None else [*vectors, extra]
    return round_p.bind(
        *operands, carrier=carrier, has_extra=extra is not None, transposed=False
    )


round_p = Primitive("coded_round")
round_p.multiple_results = True
round_p.def_impl(functools.partial(xla.apply_primitive, round_p))


def _split(operands: Sequence[Any], has_extra: bool) -> tuple[Sequence[Any], Any]:
    return (operands[:-1], operands[-1]) if has_extra else (operands, None)


@round_p.def_effectful_abstract_eval
def _abstract_eval(
    *avals: Any, carrier: Carrier, has_extra: bool, transposed: bool
) -> Any:
    vectors, _ = _split(avals, has_extra)
    if transposed:
        return [ShapedArray(aval.shape, aval.dtype) for aval in vectors], set()
    shapes = [
        (*aval.shape[:-1], carrier.result_length(aval.shape[-1])) for aval in vectors
    ]
    return [ShapedArray(shape, aval.dtype) for shape, aval in zip(shapes, vectors)], {
        _ORDER
    }


def _carry(
    *operands: jax.Array, carrier: Carrier, has_extra: bool, transposed: bool
) -> Sequence[jax.Array]:
    vectors, extra = _split(operands, has_extra)
    return list(vectors) if transposed else carrier.carry(vectors, extra)


mlir.register_lowering(round_p, mlir.lower_fun(_carry, multiple_results=True))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Linear: the tangents take one more round of their own."""
    out = round_p.bind(*primals, **params)
    _, extra = _split(primals, params["has_extra"])
    tangents, _ = _split(tangents, params["has_extra"])
    # integers have no tangent, and none is sent
    moves = [jnp.issubdtype(value.dtype, jnp.inexact) for value in out]
    full = [ad.instantiate_zeros(t) for t, move in zip(tangents, moves) if move]
    extras = [] if extra is None else [extra]
    moved = iter(round_p.bind(*full, *extras, **params) if full else ())
    return out, [next(moved) if move else t for t, move in zip(tangents, moves)]


ad.primitive_jvps[round_p] = _jvp


def _transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    carrier: Carrier,
    has_extra: bool,
    transposed: bool,
) -> Any:
    vectors, extra = _split(operands, has_extra)
    if not carrier.transposable:
        raise NotImplementedError(
            f"{carrier} has no transpose, so it cannot be differentiated in reverse "
            "mode; coded_allreduce without slices can (its transpose is the identity)"
        )
    full = [ad.instantiate_zeros(ct) for ct in cotangents]
    extras = [] if extra is None else [extra]
    out = round_p.bind(
        *full, *extras, carrier=carrier, has_extra=has_extra, transposed=not transposed
    )
    return [
        ct if ad.is_undefined_primal(v) else None for ct, v in zip(out, vectors)
    ] + [None for _ in extras]


ad.primitive_transposes[round_p] = _transpose


def _batch(
    operands: Sequence[Any], axes: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    """One round with the stacked payload."""
    vectors, extra = _split(operands, params["has_extra"])
    vector_axes, extra_axis = _split(axes, params["has_extra"])
    if extra_axis is not None:
        raise NotImplementedError(
            f"{params['carrier']}: erasures cannot be batched by vmap, they belong to "
            "the round"
        )
    size = next(
        v.shape[axis] for v, axis in zip(vectors, vector_axes) if axis is not None
    )
    stacked = [
        batching.bdim_at_front(vector, axis, size)
        for vector, axis in zip(vectors, vector_axes)
    ]
    out = round_p.bind(*stacked, *([] if extra is None else [extra]), **params)
    return out, [0] * len(out)


batching.primitive_batchers[round_p] = _batch


# A call of the host in the order of the round.

host_p = Primitive("coded_round_host_call")
host_p.multiple_results = True


def on_host(
    function: Callable[..., tuple[np.ndarray, ...]],
    results: Sequence[Any],
    *operands: jax.Array,
) -> list[Any]:
    """Call Python in the order of the communication around it. To be used in
    `Carrier.carry`.

    Args:
        function: takes numpy arrays and returns a tuple of them. It must not call JAX.
            What it raises becomes a ``JaxRuntimeError`` that ends with the same text,
            and nothing after it in the round is carried out.
        results: ``jax.ShapeDtypeStruct`` of each result.
        operands: its arguments.

    Returns:
        The results.
    """
    avals = tuple(ShapedArray(result.shape, result.dtype) for result in results)
    return host_p.bind(*operands, function=function, avals=avals)


@host_p.def_effectful_abstract_eval
def _host_abstract_eval(*operands: Any, function: Any, avals: Any) -> Any:
    return avals, {_ORDER}


def _host_lowering(
    ctx: Any, *operands: Any, function: Callable[..., Any], avals: Any
) -> Any:
    out, token, _ = mlir.emit_python_callback(
        ctx,
        function,
        ctx.tokens_in.get(_ORDER),
        operands,
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
    )
    ctx.set_tokens_out(mlir.TokenSet({_ORDER: token}))
    return out


mlir.register_lowering(host_p, _host_lowering)
