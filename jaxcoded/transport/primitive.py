"""The JAX primitive of a communication round: differentiation, batching, order.

One round is one call of a collective. What it does is its `Specification`; what JAX may do
with it is the same for all of them and stands here once.
"""

import abc
import atexit
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jaxcoded import _jax_compat
from jaxcoded._jax_compat import ShapedArray, ad, batching, mlir
from jaxcoded.transport import ending
from jaxcoded.transport.order import ORDER


def effects_barrier() -> None:
    """Wait for the rounds in flight that are ordered by the effect, and forget those that
    have failed.

    JAX runs a compiled step while Python goes on. If a round of it fails then, JAX hands
    the error to every later call that has rounds, without running it, on groups of all
    kinds and in mpi4jax: after such an error call this on all ranks, and go on. What
    had failed is logged as a warning (logger ``jaxcoded``), not raised.

    Example:
        >>> import jaxcoded
        >>> jaxcoded.effects_barrier()
    """
    _jax_compat.effects_barrier()


# At exit JAX and mpi4jax wait for rounds, and each would print what has failed, with a traceback.
# This comes before them.
@atexit.register
def _say_what_has_failed() -> None:
    _jax_compat.effects_barrier(ending.told())


def checked_token(token: Any) -> jax.Array:
    """A number that can order calls.

    Raises:
        TypeError: it is not int32.
    """
    token = jnp.asarray(token)
    if token.shape or token.dtype != np.int32:
        raise TypeError(
            "token must be an int32 number such as jnp.int32(0), or what the last call "
            f"returned, got {token.dtype}{list(token.shape)}"
        )
    return token


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["skip", "erasures", "place"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Extras:
    """What a round takes besides its vectors, neither batched nor differentiated.

    Attributes:
        skip: int32, not 0 where this rank has nothing to contribute.
        erasures: bool ``(size,)``, ranks to leave out.
        place: int32, which of the devices this is, where several call together.
    """

    skip: Any = None
    erasures: Any = None
    place: Any = None


NO_EXTRAS = Extras()


class Specification(abc.ABC):
    """What a collective does. Subclasses are frozen dataclasses: static, hashable and
    small under ``jit``."""

    @abc.abstractmethod
    def carry(
        self,
        vectors: Sequence[jax.Array],
        extras: Extras,
        token: jax.Array | None,
    ) -> tuple[Sequence[jax.Array], jax.Array | None]:
        """Trace the communication of one round.

        Args:
            vectors: arrays ``(..., length)``; leading axes are batch axes, made by
                ``vmap``.
            extras: what goes with them.
            token: int32 that orders the round; otherwise the effect does.

        Returns:
            One array for each vector, ``(..., self.result_length(length))`` of the same
            dtype; and the next token.
        """

    def of_tangents(self) -> "Specification":
        """The same for tangents, which are not what they are tangents of."""
        return self

    def result_length(self, length: int) -> int:
        """The length of the result's last axis."""
        return length

    def results(self, vectors: Sequence[Any]) -> list[ShapedArray]:
        """What comes of vectors like these: of `carry`."""
        return [
            _jax_compat.like(v, (*v.shape[:-1], self.result_length(v.shape[-1])))
            for v in vectors
        ]

    def why_not(self, what: str) -> str:
        """Why a round cannot be ``differentiated`` or ``batched by vmap``, whatever the
        operands; empty if it can."""
        return ""

    def no_transpose(self) -> str:
        """Why a round has no transpose; empty if that is the identity.

        It is for an all-reduce, as in mpi4jax: the cotangent of the sum is again one
        rank's contribution, which one more round makes exact. And that round's
        transpose is the all-reduce again.
        """
        return (
            f"{self} has no transpose, so it cannot be differentiated in reverse mode; "
            "coded_allreduce without slices can (its transpose is the identity)"
        )


def run(
    spec: Specification,
    vectors: Sequence[jax.Array],
    extras: Extras = NO_EXTRAS,
    token: jax.Array | None = None,
) -> tuple[list[jax.Array], jax.Array | None]:
    """One round.

    Args:
        spec: what happens in it.
        vectors: arrays of any number of axes ≥ 1. There may be none: the round takes
            place all the same, since other ranks may have some.
        extras: what goes with them.
        token: what orders the round in place of the effect, if that can be.

    Returns:
        One array for each vector, and the next token.
    """
    tokens = () if token is None else (token,)
    flat, structure = jax.tree.flatten(extras)
    out = round_p.bind(
        *vectors,
        *flat,
        *tokens,
        spec=spec,
        extras=structure,
        tokened=bool(tokens),
        transposed=False,
    )
    return (out, None) if token is None else (out[:-1], out[-1])


round_p = Primitive("coded_round")
round_p.multiple_results = True
_jax_compat.compile_alone(round_p, lambda spec, **_: spec)


def _split(operands: Sequence[Any], extras: int) -> tuple[list[Any], list[Any]]:
    vectors = len(operands) - extras
    return list(operands[:vectors]), list(operands[vectors:])


@round_p.def_effectful_abstract_eval
def _abstract_eval(
    *avals: Any, spec: Specification, extras: Any, tokened: bool, transposed: bool
) -> Any:
    vectors, rest = _split(avals, extras.num_leaves + tokened)
    if transposed:
        return [_jax_compat.like(aval, aval.shape) for aval in vectors], set()
    out = spec.results(vectors)
    if tokened:
        return [*out, rest[-1]], set()
    return out, {ORDER}


def _carry(
    *operands: jax.Array,
    spec: Specification,
    extras: Any,
    tokened: bool,
    transposed: bool,
) -> Sequence[jax.Array]:
    vectors, rest = _split(operands, extras.num_leaves + tokened)
    if transposed:
        return vectors
    _jax_compat.check_not_again(spec)
    its = jax.tree.unflatten(extras, rest[: extras.num_leaves])
    out, token = spec.carry(vectors, its, rest[-1] if tokened else None)
    return out if token is None else [*out, token]


mlir.register_lowering(round_p, mlir.lower_fun(_carry, multiple_results=True))


_jax_compat.never_drop(round_p)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Linear: the tangents take one more round of their own."""
    _check(params, "differentiated")
    out = round_p.bind(*primals, **params)
    number = params["extras"].num_leaves
    _, extras = _split(primals, number)
    tangents, _ = _split(tangents, number)
    # integers have no tangent, and none is sent
    moves = [jnp.issubdtype(value.dtype, jnp.inexact) for value in out]
    full = [ad.instantiate_zeros(t) for t, move in zip(tangents, moves) if move]
    params["spec"] = params["spec"].of_tangents()
    moved = iter(round_p.bind(*full, *extras, **params) if full else ())
    return out, [next(moved) if move else t for t, move in zip(tangents, moves)]


ad.primitive_jvps[round_p] = _jvp


def _transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    spec: Specification,
    extras: Any,
    tokened: bool,
    transposed: bool,
) -> Any:
    vectors, rest = _split(operands, extras.num_leaves)
    if all(isinstance(ct, ad.Zero) for ct in cotangents) and not transposed:
        # the result was for looking at, such as a metric beside the loss
        return [None for _ in operands]
    _check({"spec": spec, "tokened": tokened}, "differentiated")
    if words := spec.no_transpose():
        raise NotImplementedError(words)
    full = [ad.instantiate_zeros(ct) for ct in cotangents]
    out = round_p.bind(
        *full,
        *rest,
        spec=spec,
        extras=extras,
        tokened=tokened,
        transposed=not transposed,
    )
    return [
        ct if ad.is_undefined_primal(v) else None for ct, v in zip(out, vectors)
    ] + [None for _ in rest]


ad.primitive_transposes[round_p] = _transpose


def _batch(
    operands: Sequence[Any], axes: Sequence[Any], **params: Any
) -> tuple[Any, Any]:
    """One round with the stacked payload."""
    _check(params, "batched by vmap")
    number = params["extras"].num_leaves
    vectors, extras = _split(operands, number)
    vector_axes, extra_axes = _split(axes, number)
    named = jax.tree.unflatten(params["extras"], extra_axes)
    for field in dataclasses.fields(named):
        if getattr(named, field.name) is not None:
            raise NotImplementedError(
                f"{params['spec']}: {field.name} cannot be batched by vmap: there is one "
                "for the round"
            )
    size = next(
        v.shape[axis] for v, axis in zip(vectors, vector_axes) if axis is not None
    )
    stacked = [
        batching.bdim_at_front(vector, axis, size)
        for vector, axis in zip(vectors, vector_axes)
    ]
    out = round_p.bind(*stacked, *extras, **params)
    return out, [0] * len(out)


batching.primitive_batchers[round_p] = _batch


def _check(params: Any, what: str) -> None:
    if words := params["spec"].why_not(what):
        raise NotImplementedError(words)
    if params["tokened"]:
        raise NotImplementedError(
            f"{params['spec']}: a call with a token cannot be {what}; leave the "
            "token out"
        )


# A call of the host in the order of the round.

host_p = Primitive("coded_round_host_call")
host_p.multiple_results = True


def on_host(
    function: Callable[..., tuple[np.ndarray, ...]],
    results: Sequence[Any],
    *operands: jax.Array,
) -> list[Any]:
    """Call Python in the order of the communication around it. To be used in
    `Specification.carry`.

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
    return avals, {ORDER}


def _host_lowering(
    ctx: Any, *operands: Any, function: Callable[..., Any], avals: Any
) -> Any:
    return _jax_compat.lower_python_in_order(ctx, ORDER, function, operands)


mlir.register_lowering(host_p, _host_lowering)
