from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded.collectives.allreduce import prepared, results
from jaxcoded.collectives.counting import Count, count
from jaxcoded.group.group import CodedGroup
from jaxcoded.group.weights import Weights
from jaxcoded.plan import Plan
from jaxcoded.transport.kernels import Encoded, accumulator, encode_vector
from jaxcoded.transport.packing import Packing, pack
from jaxcoded.transport.primitive import lag, run
from jaxcoded.transport.result import Result

# Keys that checks compare separately from the gradient.
APART = ("loss",)


def summed(
    compute: Callable[..., tuple[Any, Any]],
    batch: Any,
    weights: Weights,
    group: CodedGroup,
    key: jax.Array | None,
    *,
    name: str,
    erasures: Any,
    token: jax.Array | None,
    **asked: Any,
) -> tuple[Result, Any, jax.Array, Count]:
    """Return the coded sum of ``compute`` over the batch; see `over_batch.summed`.

    ``compute`` is a function of examples, their weights, and whether this rank is
    behind. It returns a sum and auxiliary data.
    """
    plan, transport = group.plan, group._session.transport
    with group._session.failing(name):
        coding = jnp.asarray(weights)
        behind = None
        if transport.can_lag:
            rounds, token = lag(transport, token)
            behind = (rounds > 0).astype(jnp.int32)
        counts = count(weights, group, name, key, present=True)
        parts = plan.parts_above[group.rank]
        sends = transport.takes_parts and erasures is None and parts > 1
        asked |= {"name": name, "apart": APART}
        if plan.encoded:

            def send(part: Encoded, number: int) -> jax.Array:
                """Send a finished part before the other parts. Return whether this rank
                is now behind."""
                nonlocal token
                round, operands, _ = prepared(
                    *(part, group, counts),
                    kind="part",
                    results=(),
                    number=number,
                    skip=behind,
                    token=token,
                    **asked,
                )
                _, token = run(round, operands)
                rounds, token = lag(transport, token)
                return (rounds > 0).astype(jnp.int32)

            local, aux, behind = _encoded(
                *(compute, batch, coding, behind, plan, parts),
                send if sends else None,
                asked["wire_dtype"],
            )
        else:
            local, aux = compute(batch, coding, behind)
        # One operation both decides whether to skip and calls the round, so zeros never
        # enter a sum.
        round, operands, packing = prepared(
            *(local, group, counts),
            skip=behind,
            token=token,
            erasures=erasures,
            last_part=sends,
            **asked,
        )
    out, token = run(round, operands)
    return Result(*results(out, round, packing), token), aux, out[0], counts


def _encoded(
    compute: Callable[..., tuple[Any, Any]],
    batch: Any,
    weights: jax.Array,
    behind: jax.Array | None,
    plan: Plan,
    parts: int,
    send: Callable[[Encoded, int], jax.Array] | None,
    wire_dtype: np.dtype | None,
) -> tuple[Encoded, Any, jax.Array | None]:
    """Compute every chunk in turn. Return the coded message of the results of
    ``compute``, the stacked auxiliary data, and whether this rank is behind at the end.

    With ``send``, every part except the last is sent as soon as its chunks are
    computed, and the returned message is the last part.
    """
    chunks, chunk_size, _ = weights.shape
    multiple = plan.padding_multiple
    weights = weights.reshape(chunks, chunk_size, parts, -1)
    slices = weights.shape[-1]
    batches = jax.tree.map(
        lambda leaf: leaf.reshape(chunks, chunk_size, *leaf.shape[1:]), batch
    )
    held = jnp.any(weights != 0, axis=(2, 3)).astype(weights.dtype)
    local, _ = jax.eval_shape(
        compute, jax.tree.map(lambda leaf: leaf[0], batches), held[0], behind
    )
    packing = Packing.of(local, wire_dtype, multiple)
    message = tuple(
        jnp.zeros(
            (parts, -(-length // multiple) * multiple // slices),
            accumulator(kind.dtype),
        )
        for kind, length in packing.vectors.items()
    )

    def steps(behind: jax.Array | None) -> Callable[..., tuple[Any, Any]]:
        # Make a new function for each stage: `scan` traces a function only once, and
        # would keep the first stage's `behind`.
        def step(message: tuple[jax.Array, ...], operands: Any) -> tuple[Any, Any]:
            chunk, mask, coefficients = operands
            local, aux = compute(chunk, mask, behind)
            # Padding is at the end of a chunk, so the chunk's first example is real if
            # the chunk has real examples. All real examples of a chunk have the same coefficients.
            added = [
                jax.vmap(
                    lambda row, v=vector: encode_vector(v[None], row[None], multiple)
                )(coefficients[0])
                for vector in pack(local, wire_dtype=wire_dtype, multiple=multiple)[0]
            ]
            return tuple(map(jnp.add, message, added)), aux

        return step

    def encoded(vectors: Iterable[jax.Array], parts: int) -> Encoded:
        flat = (
            v.reshape(-1).astype(kind.dtype)
            for v, kind in zip(vectors, packing.vectors)
        )
        return Encoded(tuple(flat), packing, slices, multiple, parts)

    operands = batches, held, weights
    if send is None:
        message, aux = jax.lax.scan(steps(behind), message, operands)
        return encoded(message, parts), aux, behind
    # The stages follow the order of `assignment`: after each stage, one more part is
    # complete.
    stages = []
    for part in range(parts):
        stage = jax.tree.map(
            lambda leaf, part=part: jnp.split(leaf, parts)[part], operands
        )
        message, aux = jax.lax.scan(steps(behind), message, stage)
        stages.append(aux)
        if part < parts - 1:
            behind = send(encoded([vector[part] for vector in message], 1), part)
    aux = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *stages)
    return encoded([vector[-1] for vector in message], 1), aux, behind
