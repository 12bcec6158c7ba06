"""Lower rounds to calls of the engine in compiled programs, through XLA's FFI."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ffi import ffi_lowering, register_ffi_target

from jaxcoded import _jax_compat
from jaxcoded._jax_compat import ShapedArray, mlir
from jaxcoded.plan import Plan
from jaxcoded.transport.devices import PATIENCE, check
from jaxcoded.transport.order import ORDER
from jaxcoded.transport.packing import Apart, Kind
from jaxcoded.transport.round import Round


class Call(NamedTuple):
    """The engine's description of a round of one kind."""

    # names in `_attributes`, without ``group``, which every call has
    attributes: tuple[str, ...] = ()
    # whether the round's vectors are operands, and whether they are results
    sends: bool = False
    receives: bool = False


_AGREED = ("signature", "fingerprint", "apart")
_SUM = (*_AGREED, "examples", "skips", "erases")
CALLS = {
    "round": Call(
        (*_SUM, "up", "down", "parts", "last_part"), sends=True, receives=True
    ),
    "start": Call((*_SUM, "parts", "slices"), sends=True),
    "part": Call((*_AGREED, "parts", "slices", "number", "skips"), sends=True),
    "take": Call((*_AGREED, "examples", "audits", "first"), sends=True),
    "done": Call(receives=True),
    "computed": Call(),
    "lag": Call(),
}
_BY_DEVICES = ("round", "start", "done", "lag")
_ON_GPUS = ("round", "part", "take", "computed", "lag")


def register(engine: Any) -> None:
    """Register the engine's handlers with XLA."""
    names = [*CALLS, *(f"devices_{name}" for name in _BY_DEVICES)]
    handlers = [(name, f"{name}_handler", "cpu") for name in names]
    handlers += [(name, f"cuda_{name}_handler", "CUDA") for name in _ON_GPUS]
    for name, handler, platform in handlers:
        target = getattr(engine, handler)
        register_ffi_target(f"jaxcoded_{name}", target, platform=platform)


def lower(
    ctx: Any,
    operands: Sequence[Any],
    round: Round,
    plan: Plan,
    rank: int,
    platform: str | None,
) -> Any:
    """Lower a round for a platform."""
    check(ctx, round.devices, platform or "")
    does = CALLS[round.kind]
    tokened = "token" in round.leading
    # A parent joins slices and parts one after the other, whatever the batch, so their
    # axis comes first.
    moves = bool(round.batch) and plan.encoded
    vectors = ctx.avals_in[len(round.leading) :]
    sent = _travelling(vectors, round.vectors, moves) if does.sends else vectors
    given = ctx.avals_out[tokened:]
    received = _travelling(given, round.vectors, moves) if does.receives else given
    lengths = [aval.shape[-1] for aval in vectors] if does.sends else []
    attributes = _attributes(round, plan, rank, lengths)
    values = {name: attributes[name] for name in ("group", *does.attributes)}
    target = f"jaxcoded_{round.kind}"
    if round.devices is not None:
        target = f"jaxcoded_devices_{round.kind}"
        values |= {name: attributes[name] for name in ("devices", "patience")}
        if round.kind != "lag":  # a lag call has no vectors
            values["owners"] = attributes["owners"]

    def convert(
        values: Sequence[Any], before: Sequence[Any], after: Sequence[Any], axes: Any
    ) -> Sequence[Any]:
        """Convert values from the types ``before`` to the types ``after``, and move an
        axis if necessary."""
        if not moves and list(map(_kind, before)) == list(map(_kind, after)):
            return values

        def converted(*arrays: jax.Array) -> list[jax.Array]:
            return [
                (jnp.moveaxis(array, *axes) if moves else array).astype(aval.dtype)
                for array, aval in zip(arrays, after)
            ]

        rule = mlir.lower_fun(converted, multiple_results=True)
        rule_ctx = ctx.replace(avals_in=list(before), avals_out=list(after))
        return rule(rule_ctx, *values)

    def call(inner: Any, *operands: Any) -> Any:
        """Call the engine. The value that orders the call comes first, both among the
        operands and among the results."""
        at = len(inner.avals_in) - len(vectors)
        out_at = len(inner.avals_out) - len(given)
        avals_in = [*inner.avals_in[:at], *sent]
        avals_out = [*inner.avals_out[:out_at], *received]
        operands = (*operands[:at], *convert(operands[at:], vectors, sent, (-1, 0)))
        if platform == "cuda" and not tokened:
            operands = (operands[0], *_whole(ctx, avals_in[1:], operands[1:]))
        # A result uses its operand's memory if XLA allows it: if the caller has donated
        # the operand, or if the operand is a temporary array.
        extras = len(avals_in) - len(avals_out)
        aliases = {
            i + extras: i
            for i, out in enumerate(avals_out[1:], 1)
            if round.kind == "round"
            and extras >= 0  # false for a sum whose operands come from other devices
            and _kind(avals_in[i + extras]) == _kind(out)
        }
        if tokened:
            aliases[round.leading.index("token")] = 0
        rule = ffi_lowering(
            target, has_side_effect=True, operand_output_aliases=aliases
        )
        rule_ctx = inner.replace(avals_in=avals_in, avals_out=avals_out)
        out = rule(rule_ctx, *operands, **values)
        return [*out[:out_at], *convert(out[out_at:], received, given, (0, -1))]

    if tokened:
        return call(ctx, *operands)
    return _jax_compat.lower_in_order(ctx, ORDER, call, operands)


def _kind(aval: Any) -> tuple[Any, Any]:
    return aval.shape, aval.dtype


def _travelling(
    avals: Sequence[Any], vectors: Sequence[Kind], moves: bool
) -> list[ShapedArray]:
    """Return the types in which the engine gets vectors of these types."""
    return [
        _jax_compat.like(
            aval, (aval.shape[-1], *aval.shape[:-1]) if moves else aval.shape, kind.wire
        )
        for aval, kind in zip(avals, vectors)
    ]


def _attributes(
    round: Round, plan: Plan, rank: int, lengths: Sequence[int]
) -> dict[str, Any]:
    """Return all attributes that the engine may need for a round with vectors of these
    lengths."""
    parts = plan.parts_above[rank] if round.up and not round.last_part else 1
    owners = [
        [] if round.devices is None else round.devices.owners(kind.split)
        for kind in round.vectors
    ]
    numbers: dict[str, Any] = {
        "group": round.group,
        "fingerprint": round.fingerprint,
        "up": round.up,
        "down": round.down,
        "parts": parts,
        "slices": plan.slices_above[rank],
        "number": round.number,
        "first": round.number == 0,
        "last_part": round.last_part,
        "skips": "skip" in round.leading,
        "erases": "erasures" in round.leading,
        "devices": round.devices and round.devices.number,
    }
    arrays = {
        "apart": np.array(_apart(round, plan.encoded, lengths, owners), np.int64),
        "examples": np.array(round.examples or (), np.float64),
        "audits": np.array(round.audits, np.float64),
        "owners": np.array([owner for each in owners for owner in each], np.int64),
        "signature": round.signature,
        "patience": np.float64(PATIENCE),
    }
    return {name: np.int64(value or 0) for name, value in numbers.items()} | arrays


def _apart(
    round: Round, encoded: bool, lengths: Sequence[int], owners: Sequence[Sequence[int]]
) -> list[int]:
    """Return `Round.apart` for the engine's vectors. The vectors of a batch, or of all
    devices, follow each other. If the vectors are ``encoded``, the batch axis comes
    after the vectors' own axis.
    """
    batch = math.prod(round.batch)
    brought = [max(len(set(each)), 1) for each in owners]
    if not round.batch:
        batched = list(round.apart)
    elif encoded:
        batched = [
            Apart(vector, first * batch, count * batch, kind)
            for vector, first, count, kind in round.apart
        ]
    else:
        batched = [
            Apart(vector, first + each * lengths[vector], count, kind)
            for vector, first, count, kind in round.apart
            for each in range(batch)
        ]
    return [
        number
        for each in batched
        for brings in range(brought[each.vector])
        for number in each._replace(vector=sum(brought[: each.vector]) + brings)
    ]


def _whole(ctx: Any, avals: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
    """Return the operands behind a barrier, so that XLA does not see that they are
    slices of other arrays. Without it, JAX 0.11 on GPUs fuses a slice with the call
    that takes the slice, and aborts the process if the call has a result of XLA's token
    type (docs/engine.md).
    """
    if not operands:
        return ()
    barrier: Callable[..., Any] = mlir.lower_fun(
        lambda *arrays: jax.lax.optimization_barrier(arrays), multiple_results=True
    )
    return barrier(ctx.replace(avals_in=list(avals), avals_out=list(avals)), *operands)
