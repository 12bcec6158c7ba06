from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jaxcoded import _jax_compat
from jaxcoded._jax_compat import ad, batching, mlir
from jaxcoded.collectives.allreduce import summed
from jaxcoded.group.group import CodedGroup, check_open
from jaxcoded.transport.leaves import converted

_NAME = "spread"


def spread(params: Any, group: CodedGroup) -> Any:
    """Return the parameters unchanged, but let reverse mode sum their gradients over
    the ranks.

    With `coded_sum` you do not need ``spread``. With `coded_allreduce`, ``spread``
    makes a function of a sum differentiable: apply ``spread`` to values that are equal
    on all ranks, compute this rank's contribution from the result, and sum the
    contributions.

    The transpose of the sum gives each rank the same cotangent. The gradient through a
    rank's contribution is only one part of the whole gradient. The transpose of
    ``spread`` sums the parts of all ranks in one more round. So the sum and ``spread``
    are each other's transposes, like ``psum`` and ``jax.lax.pvary`` in ``shard_map``.

    Apply ``spread`` to all differentiated inputs of the contribution: gradients of
    inputs without ``spread`` differ between ranks.

    Args:
        params: pytree of arrays that are equal on all ranks.
        group: an open group without slices or parts.

    Returns:
        A pytree of JAX arrays with the values of ``params``.

    Raises:
        TypeError, ValueError, GroupClosed: as `coded_allreduce`.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcoded
        >>> from mpi4py import MPI
        >>> group = jaxcoded.CodedGroup(MPI.COMM_SELF)
        >>> batch = group.batch(jnp.arange(4.0))
        >>> def square_of_sum(w):
        ...     mine = batch.weights @ (jaxcoded.spread(w, group) * batch.data)
        ...     return jaxcoded.coded_allreduce(mine, group, batch.weights) ** 2
        >>> value, slope = jax.value_and_grad(square_of_sum)(1.0)
        >>> float(value), float(slope)
        (36.0, 72.0)
        >>> group.close()
    """
    check_open(group)
    with group._session.failing(_NAME):
        arrays, structure = jax.tree.flatten(converted(params, "params"))
    group._session.spreads = True
    moves = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if moves:
        out = spread_p.bind(*(arrays[i] for i in moves), group=group)
        for i, x in zip(moves, out):
            arrays[i] = x
    return jax.tree.unflatten(structure, arrays)


spread_p = Primitive("coded_spread")
spread_p.multiple_results = True
spread_p.def_impl(lambda *leaves, group: leaves)
spread_p.def_abstract_eval(
    lambda *leaves, group: [_jax_compat.like(leaf, leaf.shape) for leaf in leaves]
)
mlir.register_lowering(spread_p, lambda ctx, *leaves, group: leaves)
batching.primitive_batchers[spread_p] = lambda leaves, axes, *, group: (
    spread_p.bind(*leaves, group=group),
    axes,
)


def _transpose(cotangents: Sequence[Any], *leaves: Any, group: CodedGroup) -> Any:
    """Return the sum of the ranks' cotangents, formed in one round."""
    nonzero = [i for i, ct in enumerate(cotangents) if not isinstance(ct, ad.Zero)]
    back: list[Any] = [None] * len(cotangents)
    if nonzero:
        out = summed(
            [cotangents[i] for i in nonzero], group, name=f"transpose of {_NAME}"
        )
        for i, total in zip(nonzero, out.value):
            back[i] = total
    return back


ad.deflinear2(spread_p, _transpose)
