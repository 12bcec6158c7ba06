"""The sum of what blocks of the batch give, each computed by whoever has time for it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded._jax_compat import ShapedArray
from jaxcoded.collectives import audit, marks
from jaxcoded.collectives.allreduce import coded_sum, residual_of
from jaxcoded.collectives.request import Request
from jaxcoded.group.group import CodedGroup
from jaxcoded.group.weights import Weights
from jaxcoded.transport.kernels import accumulator
from jaxcoded.transport.packing import Packing
from jaxcoded.transport.result import Result


def like(
    batch: Any, weights: Weights, group: CodedGroup, compute: Callable[..., Any]
) -> Any:
    """What ``compute(block, weights)`` gives for a block: ``jax.ShapeDtypeStruct``s.

    Args:
        batch: pytree of this rank's examples, as `coded_value_and_grad` takes it.
        weights: those of these examples.
        group: whose work is shared.
        compute: a function of the examples of a block, ``(size, …)``, and their weights,
            float32 ``(size,)``.
    """
    _, size = _shape(weights, group)
    block = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (size, *leaf.shape[1:]), jnp.result_type(leaf)
        ),
        batch,
    )
    return jax.eval_shape(compute, block, jax.ShapeDtypeStruct((size,), jnp.float32))


def summed(
    compute: Callable[[Any, jax.Array], tuple[Any, Any]],
    batch: Any,
    weights: Weights,
    group: CodedGroup,
    request: Request,
    key: jax.Array | None = None,
) -> tuple[Result, Any]:
    """The sum of ``compute`` over all blocks of the batch, in one round.

    The engine says which blocks this rank computes. They are added to vectors that others
    fetch while this rank waits for its next block; so the vectors are the leaves
    themselves, and nothing is copied.

    Args:
        compute: a function of a block's examples and their weights, 0 for padding. Its
            sum, and auxiliary data.
        batch: pytree of the examples that this rank holds, block by block.
        weights: those of these examples.
        group: whose work is shared.
        request: what is asked for, checked.
        key: what ranks must have in common, see `jaxcoded.collectives.marks`; it is compared
            by the ``"count"`` in what ``compute`` gives.

    Returns:
        The sum, on every rank the same; and the auxiliary data, stacked over the blocks
        that this rank holds, zeros for those that it has not computed.
    """
    placement, transport = group.plan.placement, group._session.transport
    blocks, size = _shape(weights, group)
    batches = jax.tree.map(
        lambda leaf: leaf.reshape(blocks, size, *leaf.shape[1:]), batch
    )
    bounds = placement.examples(weights.batch_size).astype(np.int32)
    starts, sizes = bounds[:-1], np.diff(bounds)
    where = np.zeros(len(sizes), np.int32)
    held = list(placement.held(group.rank))
    where[held] = np.arange(len(held))
    marked = marks.of_blocks(placement, weights.batch_size)
    with group._session.failing(request.name):
        local, aux = like(batch, weights, group, compute)
        packing = Packing.of(local, request.wire_dtype)
        collective = coded_sum(packing, group, request)
    kinds = [kind for kind, n in zip(packing.kinds, packing.counts) if n]
    # one more vector: in a sum that may be of a part of the batch, which blocks are in it;
    # in a group that looks for mistakes, whose sums are whole, what is told of audits
    probes, audited = [], None
    if request.residual and group.approximate:
        probes = [jnp.zeros(len(sizes), jnp.float32)]
    if group.options.compares and placement.replicas:
        told_of = tuple(leaf for leaf in jax.tree.leaves(local) if leaf.size)
        audited = audit.Audit(group.size, told_of)
        probes.append(audited.zeros())
        collective = dataclasses.replace(collective, audits=audited.eps)

    def flat(pytree: Any) -> list[jax.Array]:
        """The leaves that have elements, in the dtypes in which they are summed."""
        leaves = [leaf for leaf in jax.tree.leaves(pytree) if leaf.size]
        return [leaf.reshape(-1).astype(accumulator(leaf.dtype)) for leaf in leaves]

    def take(
        sums: Sequence[jax.Array], token: jax.Array | None, first: bool = False
    ) -> tuple[jax.Array, jax.Array | None]:
        vectors = [s.astype(kind.wire) for s, kind in zip(sums, kinds)]
        vectors += sums[len(kinds) :]
        return transport.take(collective, vectors, token, first=first)

    def there_are_more(state: Any) -> jax.Array:
        return state[0][0] >= 0

    def one_more(state: Any) -> Any:
        (block, fresh, kind), sums, auxes, token = state
        at = jnp.asarray(where)[block]
        examples = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False), batches
        )
        # in a smaller last batch of an epoch those at the end of the batch are not there
        here = jnp.minimum(
            jnp.asarray(sizes)[block], weights.examples - jnp.asarray(starts)[block]
        )
        ones = (jnp.arange(size, dtype=jnp.int32) < here).astype(jnp.float32)
        sums = jax.lax.cond(
            fresh != 0, lambda: jax.tree.map(jnp.zeros_like, sums), lambda: sums
        )
        local, aux = compute(examples, ones)
        if key is not None:
            mark = (key * jnp.asarray(marked)[block]).astype(local["count"].dtype)
            local = {**local, "count": local["count"] + mark}
        added = flat(local)
        if audited is not None:
            # what it gives only to compare is not added
            added = [jnp.where(audit.added(kind), x, 0) for x in added]
            aux = jax.tree.map(
                lambda all, one: jnp.where(audit.added(kind), one, all[at]), auxes, aux
            )
            leaves = [leaf for leaf in jax.tree.leaves(local) if leaf.size]
            added.append(audited.told(kind, group.rank, leaves))
        elif probes:
            added.append(probes[0].at[block].set(1.0))
        sums = [s + x for s, x in zip(sums, added)]
        auxes = jax.tree.map(lambda all, one: all.at[at].set(one), auxes, aux)
        work, token = take(sums, token)
        return work, sums, auxes, token

    sums = [
        jnp.zeros(n, accumulator(dtype))
        for dtype, n in zip(packing.dtypes, packing.counts)
        if n
    ] + probes
    auxes = jax.tree.map(lambda leaf: jnp.zeros((blocks, *leaf.shape), leaf.dtype), aux)
    token = request.token
    work, token = take(sums, token, first=True)
    _, _, auxes, token = jax.lax.while_loop(
        there_are_more, one_more, (work, sums, auxes, token)
    )
    wires = [*(kind.wire for kind in kinds), *(probe.dtype for probe in probes)]
    results = [ShapedArray(s.shape, wire) for s, wire in zip(sums, wires)]
    out, token = transport.collect(collective, results, token)
    whole = iter(out)
    leaves = [
        next(whole).astype(dtype).reshape(shape) if n else jnp.zeros(shape, dtype)
        for n, dtype, shape in zip(packing.counts, packing.dtypes, packing.shapes)
    ]
    residual = None
    if request.residual:
        residual = jnp.zeros((), jnp.float32)
        if group.approximate:
            residual = residual_of(group.plan, out[-1])
    total = jax.tree.unflatten(packing.structure, leaves)
    return Result(total, residual, token), auxes


def _shape(weights: Weights, group: CodedGroup) -> tuple[int, int]:
    """How many blocks a rank holds, and their examples with padding."""
    blocks = max(len(group.plan.placement.held(group.rank)), 1)
    assert len(weights) % blocks == 0, (len(weights), blocks)
    return blocks, len(weights) // blocks
