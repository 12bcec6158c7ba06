"""The calls of the engine in compiled programs, in the order of the rounds."""

import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.ffi import ffi_lowering, register_ffi_target

from jaxcoded import _jax_compat
from jaxcoded._jax_compat import ShapedArray, ad, batching, mlir
from jaxcoded.transport.base import Collective
from jaxcoded.transport.devices import PATIENCE, Devices, check
from jaxcoded.transport.order import ORDER
from jaxcoded.transport.packing import Apart


def register(engine: Any) -> None:
    """Tell XLA of the engine's handlers."""
    for platform, prefix in (("cpu", ""), ("CUDA", "cuda_")):
        for name in ("round", "part", "take", "computed", "lag"):
            handler = getattr(engine, f"{prefix}{name}_handler")
            register_ffi_target(f"jaxcoded_{name}", handler, platform=platform)
    together = [f"devices_{name}" for name in ("round", "start", "done", "lag")]
    for name in ("start", "done", *together):
        handler = getattr(engine, f"{name}_handler")
        register_ffi_target(f"jaxcoded_{name}", handler, platform="cpu")


def fingerprint(signature: str) -> int:
    """What ranks compare in place of a signature: a signed number of 64 bits."""
    digest = hashlib.sha256(signature.encode()).digest()
    return int.from_bytes(digest[:8], signed=True)


def stacked(
    collective: Collective, vectors: Sequence[jax.Array], encoded: bool
) -> Collective:
    """The collective on vectors ``(..., length)`` that the engine gets one after the other,
    or, `encoded`, behind their own axis."""
    number = math.prod(collective.batch)
    if encoded:
        return _behind(collective, number)
    apart = tuple(
        Apart(vector, first + each * vectors[vector].shape[-1], count, kind)
        for vector, first, count, kind in collective.apart
        for each in range(number)
    )
    return dataclasses.replace(collective, apart=apart)


def _behind(collective: Collective, number: int) -> Collective:
    """The collective on so many vectors behind their own axis."""
    apart = tuple(
        Apart(vector, first * number, count * number, kind)
        for vector, first, count, kind in collective.apart
    )
    return dataclasses.replace(collective, apart=apart)


class Together(NamedTuple):
    """How the devices of a process call together.

    Attributes:
        devices: they.
        place: int32, which of them this is.
        owners: for each vector and each of them, who has the same and brings it.
    """

    devices: Devices
    place: jax.Array
    owners: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, collective: Collective, place: jax.Array | None
    ) -> tuple[Collective, "Together | None"]:
        """Of a collective, which is of the vectors that all bring then."""
        if collective.devices is None:
            return collective, None
        assert place is not None
        owners = [collective.devices.owners(split) for split in collective.splits]
        numbers = [len(set(each)) for each in owners]
        first = [sum(numbers[:vector]) for vector in range(len(owners))]
        apart = tuple(
            each._replace(vector=first[each.vector] + number)
            for each in collective.apart
            for number in range(numbers[each.vector])
        )
        flat = tuple(owner for each in owners for owner in each)
        return dataclasses.replace(collective, apart=apart), cls(
            collective.devices, place, flat
        )


call_p = Primitive("coded_engine_call")
call_p.multiple_results = True
_jax_compat.never_drop(call_p)


def call(
    target: str,
    operands: Sequence[jax.Array],
    results: Sequence[ShapedArray],
    token: jax.Array | None,
    collective: Collective | None = None,
    together: "Together | None" = None,
    **attributes: int,
) -> tuple[list[jax.Array], jax.Array | None]:
    """Call the engine, in the order of the rounds or of the token. It gets the attributes
    and those of the collective."""
    tokens = [] if token is None else [token]
    places = [] if together is None else [together.place]
    out = call_p.bind(
        *places,
        *tokens,
        *operands,
        target=target,
        results=tuple(results),
        tokened=bool(tokens),
        collective=collective,
        devices=together and together.devices,
        owners=() if together is None else together.owners,
        attributes=tuple(attributes.items()),
    )
    return (out, None) if token is None else (out[1:], out[0])


def _with_others(target: str, collective: Collective | None, **_: Any) -> str | None:
    """What the other ranks take part in, in words, if they do."""
    if target in ("jaxcoded_lag", "jaxcoded_computed"):
        return None
    return "coded_allreduce_done" if collective is None else collective.signature


_jax_compat.compile_alone(call_p, _with_others)


@call_p.def_effectful_abstract_eval
def _abstract_eval(
    *avals: Any, target: str, results: Any, tokened: bool, devices: Any, **_: Any
) -> Any:
    if tokened:
        token = avals[devices is not None]
        return [_jax_compat.like(token, token.shape), *results], set()
    return list(results), {ORDER}


def _attributes(collective: Collective, target: str) -> dict[str, Any]:
    """What the engine is told of a collective."""
    apart = [number for each in collective.apart for number in each]
    attributes = {
        "signature": collective.signature,
        "fingerprint": np.int64(fingerprint(collective.signature)),
        "apart": np.array(apart, np.int64),
    }
    if target in ("jaxcoded_round", "jaxcoded_take", "jaxcoded_start"):
        attributes["examples"] = np.array(collective.examples or (), np.float64)
    if target == "jaxcoded_take":
        attributes["audits"] = np.array(collective.audits, np.float64)
    if target == "jaxcoded_round":  # the others begin a sum for all ranks
        attributes |= {
            "up": np.int64(collective.up),
            "down": np.int64(collective.down),
        }
    return attributes


def _lowering(
    ctx: Any,
    *operands: Any,
    target: str,
    results: Any,
    tokened: bool,
    collective: Collective | None,
    devices: Devices | None,
    owners: Any,
    attributes: Any,
    platform: str,
) -> Any:
    check(ctx, devices, platform)
    _jax_compat.check_not_again(_with_others(target, collective))
    values: dict[str, Any] = {name: np.int64(value) for name, value in attributes}
    if collective is not None:
        values |= _attributes(collective, target)
    name = target
    if devices is not None:
        name = target.replace("jaxcoded_", "jaxcoded_devices_")
        values |= {
            "devices": np.int64(devices.number),
            "patience": np.float64(PATIENCE),
        }
        if target != "jaxcoded_lag":  # which has no vectors
            values["owners"] = np.array(owners, np.int64)

    def lower(ctx: Any, *operands: Any) -> Any:
        """With what gives the order in front of the operands and the results."""
        # A result lies where its operand was, where XLA may: the caller donated it, or
        # it is a temporary.
        extras = len(ctx.avals_in) - len(ctx.avals_out)
        aliases = {
            i + extras: i
            for i, out in enumerate(ctx.avals_out[1:], 1)
            if target == "jaxcoded_round"
            and extras >= 0  # not of a sum whose operands others bring
            and (ctx.avals_in[i + extras].shape, ctx.avals_in[i + extras].dtype)
            == (out.shape, out.dtype)
        }
        if tokened:
            aliases[int(devices is not None)] = 0
        rule = ffi_lowering(name, has_side_effect=True, operand_output_aliases=aliases)
        return rule(ctx, *operands, **values)

    if tokened:
        return lower(ctx, *operands)
    if platform == "cuda":
        operands = _whole(ctx, operands)
    return _jax_compat.lower_in_order(ctx, ORDER, lower, operands)


def _whole(ctx: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """The operands, so that XLA does not see which of them are slices of other arrays: with JAX 0.11 it
    fuses a slice with the call that takes it, on GPUs, and aborts the process where the call has a result
    of XLA's type for an order (docs/engine.md)."""
    if not operands:
        return ()
    barrier = mlir.lower_fun(
        lambda *arrays: jax.lax.optimization_barrier(arrays), multiple_results=True
    )
    return tuple(barrier(ctx.replace(avals_out=ctx.avals_in), *operands))


mlir.register_lowering(
    call_p, functools.partial(_lowering, platform="cpu"), platform="cpu"
)
with contextlib.suppress(NotImplementedError):  # a JAX that knows of no CUDA
    mlir.register_lowering(
        call_p, functools.partial(_lowering, platform="cuda"), platform="cuda"
    )


def _batch(
    operands: Sequence[Any],
    axes: Sequence[Any],
    *,
    target: str,
    results: Any,
    tokened: bool,
    collective: Collective,
    devices: Devices | None,
    owners: Any,
    attributes: Any,
) -> tuple[Any, Any]:
    """One part of the stacked payload, as `Engine.carry` stacks it: behind the vector's
    own axis, the outermost batch first."""
    if target == "jaxcoded_done":
        raise NotImplementedError(
            "coded_allreduce_done cannot be batched by vmap: a handle is of one round"
        )
    if target == "jaxcoded_take":
        raise NotImplementedError(
            "shared work cannot be batched by vmap: there is one of it in a round"
        )
    if tokened:
        raise NotImplementedError("a call with a token cannot be batched by vmap")
    assert target == "jaxcoded_part"
    size = next(
        operand.shape[axis] for operand, axis in zip(operands, axes) if axis is not None
    )
    skips = dict(attributes)["skips"]
    vectors = [
        jnp.moveaxis(batching.bdim_at_front(vector, axis, size), 0, 1)
        for vector, axis in zip(operands[skips:], axes[skips:])
    ]
    out = call_p.bind(
        *operands[:skips],
        *vectors,
        target=target,
        results=results,
        tokened=tokened,
        collective=dataclasses.replace(
            _behind(collective, size), batch=(size, *collective.batch)
        ),
        devices=devices,
        owners=owners,
        attributes=attributes,
    )
    return out, []


batching.primitive_batchers[call_p] = _batch


def _not_differentiated(*_: Any, target: str, **__: Any) -> Any:
    if target == "jaxcoded_take":
        raise NotImplementedError(
            "shared work cannot be differentiated: coded_value_and_grad gives the gradient, "
            "without jax.grad around it"
        )
    raise NotImplementedError(
        "coded_allreduce_start cannot be differentiated: use coded_allreduce"
    )


ad.primitive_jvps[call_p] = ad.primitive_transposes[call_p] = _not_differentiated
