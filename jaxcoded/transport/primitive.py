"""The JAX primitive for a communication round: how it is differentiated, batched and
ordered.

One `Round` is one call of a group's transport. This module defines the transformations
that JAX may apply. They are the same for all transports; each transport defines the
lowering.
"""

import atexit
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jaxcoded import _jax_compat
from jaxcoded._jax_compat import ShapedArray, ad, batching, mlir
from jaxcoded.transport import ending
from jaxcoded.transport.base import Carrier, Transport
from jaxcoded.transport.order import ORDER
from jaxcoded.transport.registry import find
from jaxcoded.transport.round import Operands, Round


def effects_barrier() -> None:
    """Wait for the rounds in flight that JAX's effect orders, and forget the rounds
    that have failed.

    JAX runs a compiled step while Python continues. If a round of the step fails, JAX
    does not run later calls with rounds of any group or with mpi4jax. Instead, it passes
    the error to each of these calls. After such an error, call `effects_barrier` on all
    ranks, and continue. It logs the failures as a warning (logger ``jaxcoded``), and
    does not raise them.

    Example:
        >>> import jaxcoded
        >>> jaxcoded.effects_barrier()
    """
    _jax_compat.effects_barrier()


# At exit JAX and mpi4jax wait for rounds, and each would print failures with a
# traceback. This function runs earlier, and logs the failures.
@atexit.register
def _say_what_has_failed() -> None:
    _jax_compat.effects_barrier(ending.error_texts())


class Rules(NamedTuple):
    """The transformations that JAX may apply to a call of one kind."""

    # whether the call only concerns this rank, and is not part of a round
    alone: bool = False
    # why the call cannot be differentiated or batched; empty if it can be
    not_differentiated: str = ""
    not_batched: str = ""


_STARTED = (
    "coded_allreduce_start cannot be {}: use coded_allreduce, or start the "
    "sum of the finished gradient"
)
_AHEAD = "coded_allreduce_start cannot be differentiated: use coded_allreduce"
RULES = {
    # a whole round, or its end
    "round": Rules(),
    # the beginning of a round, or the whole round if the transport makes no progress
    # between calls
    "start": Rules(
        not_differentiated=_STARTED.format("differentiated"),
        not_batched=_STARTED.format("batched by vmap"),
    ),
    # the end of a round that was started
    "done": Rules(
        not_differentiated=_AHEAD,
        not_batched="coded_allreduce_done cannot be batched by vmap: a handle belongs to one round",
    ),
    # a part of a round's vectors, sent ahead of the round
    "part": Rules(not_differentiated=_AHEAD),
    # the next block of shared work
    "take": Rules(
        not_differentiated="shared work cannot be differentiated: coded_value_and_grad gives the "
        "gradient, without jax.grad around it",
        not_batched="shared work cannot be batched by vmap: a round has one batch",
    ),
    # the blocks that this rank has computed
    "computed": Rules(alone=True, not_differentiated=_AHEAD),
    "lag": Rules(alone=True, not_differentiated=_AHEAD),
}
_NO_TRANSPOSE = (
    "{} has no transpose, so it cannot be differentiated in reverse mode; "
    "coded_allreduce without slices can (its transpose is the identity)"
)
_NO_GRADIENT = (
    "{}: reverse mode through a coded sum needs parameters that came through jaxcoded.spread(params, group); "
    "otherwise gradients would differ between ranks. jaxcoded.coded_sum(per_example, group)(params, batch) is a sum "
    "that has a gradient; for the gradient of a mean loss take jaxcoded.coded_value_and_grad(losses, group)(params, batch)"
)


def run(round: Round, operands: Operands) -> tuple[list[jax.Array], jax.Array | None]:
    """Call the transport. Return the results, and the next token. If the round takes no
    token, return the given token. Without vectors the round still takes place, since
    other ranks may have vectors.
    """
    given = (getattr(operands, name) for name in round.leading)
    out = round_p.bind(*given, *operands.vectors, round=round)
    if "token" in round.leading:
        return out[1:], out[0]
    return out, operands.token


def placed(
    transport: Carrier, token: jax.Array | None, **given: Any
) -> tuple[Operands, dict[str, Any]]:
    """Return the operands in front of the vectors, and the fields of the `Round` that
    describe them: their names and devices.
    """
    devices = transport.devices(token)
    place = None if devices is None else devices.place()
    operands = Operands(place=place, token=token, **given)
    leading = operands.leading(takes_tokens=transport.takes_tokens)
    return operands, {"devices": devices, "leading": leading}


def lag(
    transport: Transport, token: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Trace a read of the lag, int32. Return the lag and the next token."""
    if not transport.can_lag:
        return jnp.int32(0), token
    return read("lag", transport, token, ShapedArray((), np.int32))


def read(
    kind: str, transport: Transport, token: jax.Array | None, what: ShapedArray
) -> tuple[jax.Array, jax.Array | None]:
    """Trace a read of local data (`Rules.alone`). Return the data and the next token."""
    operands, fields = placed(transport, token)
    round = Round(transport.index, kind=kind, results=(what,), **fields)
    (out,), token = run(round, operands)
    return out, token


def results(round: Round, vectors: Sequence[Any]) -> list[ShapedArray]:
    """Return the types of the results of a round with these vectors."""
    if round.transposed:
        return [_jax_compat.like(vector, vector.shape) for vector in vectors]
    if round.results is not None:
        return list(round.results)
    carrier = find(round.group)

    def length(length: int) -> int:
        if round.last_part:
            return length * carrier.plan.slices_above[carrier.rank]
        return carrier.plan.result_length(carrier.rank, length) if round.up else length

    return [
        _jax_compat.like(vector, (*vector.shape[:-1], length(vector.shape[-1])))
        for vector in vectors
    ]


round_p = Primitive("coded_round")
round_p.multiple_results = True
_jax_compat.never_drop(round_p)
_jax_compat.keep_results(round_p)


def _with_others(round: Round) -> str | None:
    """Return the description of the round if other ranks take part in it."""
    if RULES[round.kind].alone:
        return None
    return "coded_allreduce_done" if round.kind == "done" else str(round)


_jax_compat.compile_alone(round_p, _with_others)


@round_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, round: Round) -> Any:
    out = results(round, avals[len(round.leading) :])
    if round.transposed:
        return out, set()
    if "token" in round.leading:
        token = avals[round.leading.index("token")]
        return [_jax_compat.like(token, ()), *out], set()
    return out, {ORDER}


def _lowering(ctx: Any, *operands: Any, round: Round, platform: str | None) -> Any:
    if round.transposed:
        return operands[len(round.leading) :]
    if not RULES[round.kind].alone:
        _check_order(ctx, round)
    if "token" in round.leading:
        at = round.leading.index("token")
        if ctx.avals_in[at].dtype == np.float32:
            rule = mlir.lower_fun(_with_integer(at, round), multiple_results=True)
            return rule(ctx, *operands)
    _jax_compat.check_not_again(_with_others(round))
    return find(round.group).lower(ctx, operands, round, platform)


_last = threading.local()  # the program that JAX lowers on this thread, and its groups


def _check_order(ctx: Any, round: Round) -> None:
    """Raise an error unless all of a group's rounds in the program are ordered in the
    same way."""
    program = _jax_compat.program_of(ctx)
    if getattr(_last, "program", None) is not program:
        _last.program, _last.tokened = program, {}
    tokened = "token" in round.leading
    if _last.tokened.setdefault(round.group, tokened) != tokened:
        raise ValueError(
            f"{round}: in one compiled function either all calls of a group have a token, or none. Otherwise ranks "
            "could make the calls in different orders, and wait for each other: pass the token of each call to the next"
        )


def _with_integer(at: int, round: Round) -> Callable[..., list[jax.Array]]:
    """Return a function that binds the round for a float32 token. It passes the token's
    bits as int32, since transports need an integer token."""

    def bound(*operands: jax.Array) -> list[jax.Array]:
        given = list(operands)
        given[at] = jax.lax.bitcast_convert_type(given[at], np.int32)
        token, *out = round_p.bind(*given, round=round)
        return [jax.lax.bitcast_convert_type(token, np.float32), *out]

    return bound


for _platform in ("cpu", "cuda", None):
    with contextlib.suppress(NotImplementedError):  # this JAX has no CUDA
        mlir.register_lowering(
            round_p,
            functools.partial(_lowering, platform=_platform),
            platform=_platform,
        )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, round: Round) -> Any:
    """Return the jvp. Rounds are linear, so one more round sums the tangents, unless
    only the token has a tangent.
    """
    leading = len(round.leading)
    if all(isinstance(t, ad.Zero) for t in tangents[leading:]):
        out = round_p.bind(*primals, round=round)
        still = [ad.Zero(_jax_compat.like(x, x.shape).to_tangent_aval()) for x in out]
        return out, [tangents[round.leading.index("token")], *still[1:]]
    _check(round, "differentiated")
    out = round_p.bind(*primals, round=round)
    tangents = tangents[leading:]
    # integers have no tangents, so none are sent
    moves = [jnp.issubdtype(value.dtype, jnp.inexact) for value in out]
    full = [ad.instantiate_zeros(t) for t, move in zip(tangents, moves) if move]
    of_tangents = dataclasses.replace(
        round,
        vectors=tuple(kind for kind, move in zip(round.vectors, moves) if move),
        examples=None,  # tangents have no count
    )
    moved = iter(
        round_p.bind(*primals[:leading], *full, round=of_tangents) if full else ()
    )
    return out, [next(moved) if move else t for t, move in zip(tangents, moves)]


ad.primitive_jvps[round_p] = _jvp


def _transpose(cotangents: Sequence[Any], *operands: Any, round: Round) -> Any:
    """Transpose an all-reduce to the identity, as mpi4jax does. The result is this
    rank's part of the gradient, and the transpose of `jaxcoded.spread` sums the parts
    in one more round. The transpose of this identity is the all-reduce.
    """
    leading = len(round.leading)
    if all(isinstance(ct, ad.Zero) for ct in cotangents) and not round.transposed:
        # the result does not affect the loss: it may be a metric that is only printed
        return [None for _ in operands]
    _check(round, "differentiated")
    if not (round.up and round.down) or find(round.group).plan.encoded:
        raise NotImplementedError(_NO_TRANSPOSE.format(round))
    if not round.transposes:
        raise NotImplementedError(_NO_GRADIENT.format(round))
    out = round_p.bind(
        *operands[:leading],
        *map(ad.instantiate_zeros, cotangents),
        round=dataclasses.replace(round, transposed=not round.transposed),
    )
    return [None] * leading + [
        ct if ad.is_undefined_primal(v) else None
        for ct, v in zip(out, operands[leading:])
    ]


ad.primitive_transposes[round_p] = _transpose


def _batch(
    operands: Sequence[Any], axes: Sequence[Any], *, round: Round
) -> tuple[Any, Any]:
    """Replace the calls of a batch by one round with the stacked payload."""
    _check(round, "batched by vmap")
    leading = len(round.leading)
    for name, axis in zip(round.leading, axes):
        if axis is not None:
            raise NotImplementedError(
                f"{round}: {name} cannot be batched by vmap: a round has only one {name}"
            )
    vectors = list(zip(operands[leading:], axes[leading:]))
    size = next(v.shape[axis] for v, axis in vectors if axis is not None)
    out = round_p.bind(
        *operands[:leading],
        *(batching.bdim_at_front(v, axis, size) for v, axis in vectors),
        round=dataclasses.replace(round, batch=(size, *round.batch)),
    )
    return out, [0] * len(out)


batching.primitive_batchers[round_p] = _batch


def _check(round: Round, what: str) -> None:
    rules = RULES[round.kind]
    differentiated = what == "differentiated"
    if words := rules.not_differentiated if differentiated else rules.not_batched:
        raise NotImplementedError(words)
    if "token" in round.leading:
        raise NotImplementedError(
            f"{round}: a call with a token cannot be {what}; leave the token out"
        )


# A call of a Python function on the host, in the order of the rounds.

host_p = Primitive("coded_round_host_call")
host_p.multiple_results = True


def on_host(
    function: Callable[..., tuple[np.ndarray, ...]],
    results: Sequence[Any],
    *operands: jax.Array,
) -> list[Any]:
    """Call a Python function from a traced transport, in the order of the rounds.

    ``function`` takes numpy arrays. It returns a tuple of arrays with the shapes and
    dtypes of ``results``, which are ``jax.ShapeDtypeStruct``. It must not call JAX. If it
    raises an error, the call raises a ``JaxRuntimeError`` that ends with the same text,
    and the rest of the round is not carried out.
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
