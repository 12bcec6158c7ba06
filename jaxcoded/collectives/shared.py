import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded._jax_compat import ShapedArray
from jaxcoded.collectives import audit, marks
from jaxcoded.collectives.allreduce import residual_of, sum_round
from jaxcoded.collectives.arguments import checked_operands
from jaxcoded.collectives.counting import Count, count_of_blocks
from jaxcoded.group.group import CodedGroup
from jaxcoded.group.weights import Weights
from jaxcoded.transport.kernels import accumulator
from jaxcoded.transport.packing import Kind, Packing
from jaxcoded.transport.primitive import run
from jaxcoded.transport.result import Result


def summed(
    compute: Callable[..., tuple[Any, Any]],
    batch: Any,
    weights: Weights,
    group: CodedGroup,
    key: jax.Array | None,
    *,
    name: str,
    erasures: None,
    token: jax.Array | None,
    residual: bool,
    wire_dtype: Any,
    words: str = "",
) -> tuple[Result, Any, jax.Array, Count]:
    """Return the sum of ``compute`` over the blocks of the batch; see
    `over_batch.summed`. The auxiliary data are stacked over the blocks that this rank
    holds, with zeros for blocks that it has not computed.

    The engine decides which blocks this rank computes. The rank adds the results to
    vectors that other ranks fetch while this rank waits for its next block. Each leaf is
    a vector of its own, so no leaf is copied. ``compute`` is a function of a block's
    examples, ``(size, …)``, and their weights, float32 ``(size,)``. The weights are 0
    for padding. ``erasures`` is always ``None``, since the strategy does not support
    erasures.
    """
    del erasures
    placement = group.plan.placement
    blocks, size = shape(weights, group)
    batches = jax.tree.map(
        lambda leaf: leaf.reshape(blocks, size, *leaf.shape[1:]), batch
    )
    bounds = placement.examples(weights.batch_size).astype(np.int32)
    starts, sizes = bounds[:-1], np.diff(bounds)
    where = np.zeros(len(sizes), np.int32)
    held = list(placement.held(group.rank))
    where[held] = np.arange(len(held))
    marked = marks.of_blocks(placement, weights.batch_size)
    with group._session.failing(name):
        operands, fields = checked_operands(group, token=token)
        block = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (size, *leaf.shape[1:]), jnp.result_type(leaf)
            ),
            batch,
        )
        local, aux = jax.eval_shape(
            compute, block, jax.ShapeDtypeStruct((size,), jnp.float32)
        )
        packing = Packing.of(local, wire_dtype)
        count = count_of_blocks(weights, group)
        round = sum_round(
            *(packing, group, count),
            name=name,
            words=words,
            tokened=token is not None,
            residual=residual,
            **fields,
        )

    def not_empty(pytree: Any) -> list[Any]:
        """Return the leaves that are not empty."""
        return [leaf for leaf in jax.tree.leaves(pytree) if leaf.size]

    # An additional vector. If the sum may lack a part of the batch, it shows which
    # blocks are in the sum. In a group with a check, it has the reports that `audit`
    # compares.
    probes, audited = [], None
    if residual and group.approximate:
        probes = [jnp.zeros(len(sizes), jnp.float32)]
    if group.options.check and placement.replicas:
        audited = audit.Audit(group.size, tuple(not_empty(local)))
        probes.append(audited.zeros())

    counted, *_ = round.vectors
    nonempty = [(kind, n) for kind, n in zip(packing.kinds, packing.counts) if n]
    kinds = [
        *(counted, *(kind for kind, _ in nonempty)),
        *(Kind(probe.dtype, probe.dtype) for probe in probes),
    ]
    round = dataclasses.replace(
        round,
        vectors=tuple(kinds),
        audits=() if audited is None else audited.precision,
        number=1,
        results=(ShapedArray((3,), np.int32),),
    )

    def take(
        sums: Sequence[jax.Array], token: jax.Array | None, number: int = 1
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return an array of three numbers, and the next token. The first number is the next block, or -1 at
        the end. The second is not 0 if the sums must be zeroed before the block is added. The third tells
        whether the block is added, reported for comparison, or both."""
        asked = round.step("take", number=number)
        (work,), token = run(asked, operands._replace(vectors=sums, token=token))
        return work, token

    def one_more(state: Any) -> Any:
        (block, fresh, kind), sums, auxes, token = state
        at = jnp.asarray(where)[block]
        examples = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False), batches
        )
        # A smaller last batch of an epoch lacks examples at its end.
        filled = jnp.minimum(
            jnp.asarray(sizes)[block], weights.examples - jnp.asarray(starts)[block]
        )
        ones = (jnp.arange(size, dtype=jnp.int32) < filled).astype(jnp.float32)
        sums = jax.lax.cond(
            fresh != 0, lambda: jax.tree.map(jnp.zeros_like, sums), lambda: sums
        )
        local, aux = compute(examples, ones)
        present_examples = jnp.maximum(filled, 0).astype(jnp.float32)
        # see `counting.present`
        total = present_examples * (
            weights.batch_size / jnp.asarray(weights.examples, jnp.float32)
        )
        if key is not None:
            total += key * jnp.asarray(marked)[block]
        leaves = not_empty(local)
        added = [jnp.stack([total, present_examples])]
        added += [x.reshape(-1).astype(accumulator(x.dtype)) for x in leaves]
        if audited is not None:
            # Results that are computed only for comparison are not added.
            added = [jnp.where(audit.added(kind), x, 0) for x in added]
            aux = jax.tree.map(
                lambda all, x: jnp.where(audit.added(kind), x, all[at]), auxes, aux
            )
            added.append(audited.report(kind, group.rank, leaves))
        elif probes:
            added.append(probes[0].at[block].set(1.0))
        sums = [s + x for s, x in zip(sums, added)]
        auxes = jax.tree.map(lambda all, x: all.at[at].set(x), auxes, aux)
        work, token = take(sums, token)
        return work, sums, auxes, token

    sums = [jnp.zeros(n, accumulator(kind.dtype)) for kind, n in nonempty]
    sums = [count.vector, *sums, *probes]
    auxes = jax.tree.map(lambda leaf: jnp.zeros((blocks, *leaf.shape), leaf.dtype), aux)
    work, token = take(sums, operands.token, 0)
    _, _, auxes, token = jax.lax.while_loop(
        lambda state: state[0][0] >= 0, one_more, (work, sums, auxes, token)
    )
    types = [ShapedArray(s.shape, kind.dtype) for s, kind in zip(sums, kinds)]
    end = round.step("round", last_part=True, results=tuple(types))
    out, token = run(end, operands._replace(token=token))
    summed = iter(out[1:])
    leaves = [
        next(summed).reshape(shape) if n else jnp.zeros(shape, dtype)
        for n, dtype, shape in zip(packing.counts, packing.dtypes, packing.shapes)
    ]
    deviation = None
    if residual:
        deviation = jnp.zeros((), jnp.float32)
        if group.approximate:
            deviation = residual_of(group.plan, out[-1])
    total = jax.tree.unflatten(packing.structure, leaves)
    return Result(total, deviation, token), auxes, out[0], count


def shape(weights: Weights, group: CodedGroup) -> tuple[int, int]:
    """Return a rank's number of blocks, and of examples of a block, with padding."""
    blocks = max(len(group.plan.placement.held(group.rank)), 1)
    assert len(weights) % blocks == 0, (len(weights), blocks)
    return blocks, len(weights) // blocks
