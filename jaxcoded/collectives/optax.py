"""The coded all-reduce as an optax gradient transformation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcoded.collectives import allreduce, reduced
from jaxcoded.collectives.counting import check_counted
from jaxcoded.group.group import CodedGroup, check_open


class SumGradientsState(NamedTuple):
    """The state of the transformation between steps.

    Attributes:
        token: the number that orders the calls (see `jaxcoded.coded_allreduce`), or
            ``None`` without ``carry_token``. The token's value has no meaning, so a
            state from a checkpoint works like a new state.
    """

    token: jax.Array | None


def sum_gradients(
    group: CodedGroup,
    *,
    divisor: float | jax.Array | None = None,
    wire_dtype: Any = None,
    carry_token: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Replace local gradients by their exact sum over the global batch.

    Use the transformation in a chain, on the local gradient of the loss weighted by a
    batch's ``weights``. Do not use it on the result of `coded_value_and_grad`, which is
    already reduced. ``init`` never communicates. Pass the batch's weights to
    ``update``, as ``tx.update(grads, state, params, weights=batch.weights)``.
    ``update`` passes its ``weights`` and ``erasures`` to `jaxcoded.coded_allreduce`.

    Args:
        group: an open group.
        divisor: a number by which the sum is divided, such as the global batch size.
            Default: no division.
        wire_dtype: as for `jaxcoded.coded_allreduce`.
        carry_token: whether to order the calls by a token in the state, which is faster
            to dispatch. Then the step must make no other call of this group.

    Returns:
        A ``GradientTransformationExtraArgs``. ``update`` raises the errors of
        `jaxcoded.coded_allreduce`. It also raises ``ValueError`` if
        `coded_value_and_grad`, or another such transformation, has already summed the
        gradient in the same ``jit``, or if both calls are outside ``jit``.

    Example:
        >>> import jax.numpy as jnp, jaxcoded, optax
        >>> from mpi4py import MPI
        >>> with jaxcoded.CodedGroup(MPI.COMM_SELF) as group:
        ...     tx = optax.chain(jaxcoded.optax.sum_gradients(group, divisor=4), optax.sgd(1.0))
        ...     grads, params = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
        ...     weights = group.batch(4).weights
        ...     updates, _ = tx.update(grads, tx.init(params), params, weights=weights)
        >>> updates
        {'w': Array([-0.25, -0.25], dtype=float32)}
    """

    check_open(group)

    def init(params: optax.Params) -> SumGradientsState:
        del params
        return SumGradientsState(jnp.int32(0) if carry_token else None)

    def update(
        updates: optax.Updates,
        state: SumGradientsState,
        params: optax.Params | None = None,
        *,
        weights: Any = None,
        erasures: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SumGradientsState]:
        del params, extra_args
        check_open(group)
        with group._session.failing("optax.sum_gradients"):
            reduced.check(updates, group._session.index)
            check_counted(
                *(weights, group, "sum_gradients"),
                "tx.update(grads, state, params, weights=batch.weights) with the gradients of the weighted loss",
            )
        total = allreduce.coded_allreduce(
            updates,
            group,
            weights,
            divisor=divisor,
            erasures=erasures,
            wire_dtype=wire_dtype,
            token=state.token,
        )
        if state.token is not None:
            total, state = total.value, SumGradientsState(total.token)
        reduced.note(total, group._session.index)
        return total, state

    return optax.GradientTransformationExtraArgs(init, update)
