import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxcoded import _jax_compat, _require
from jaxcoded.collectives import floats, gradient, over_batch, reduced
from jaxcoded.collectives.arguments import (
    checked_data,
    checked_erasures,
    checked_params,
)
from jaxcoded.collectives.counting import present
from jaxcoded.collectives.eager import Eager
from jaxcoded.group.batch import Batch
from jaxcoded.group.group import CodedGroup, check_open
from jaxcoded.group.weights import Weights
from jaxcoded.transport import tokens
from jaxcoded.transport.kernels import divided
from jaxcoded.transport.packing import checked_wire_dtype
from jaxcoded.transport.result import Result

_NAME = "coded_value_and_grad"


def coded_value_and_grad(
    losses: Callable[[Any, Any], Any],
    group: CodedGroup,
    *,
    has_aux: bool = False,
    mean: bool = True,
    residual: bool = False,
    wire_dtype: Any = None,
) -> Callable[..., tuple[Any, ...]]:
    """Return a function that computes what ``jax.value_and_grad`` computes for the mean loss of the global batch.
    Its results are exact and equal on all ranks.

    Encoding is linear: ``Σ_j b_j ∇ℓ_j = ∇ Σ_j b_j ℓ_j``. So without slices the coding coefficients are loss weights,
    and one backward pass suffices. With slices or parts the gradients of the chunks are computed and encoded one
    after the other in a ``scan``. With the engine and without ``erasures``, a code with several parts sends each
    part as soon as it is ready. So the finished parts of a slow rank are used.

    No gradient is computed for a rank or chunk whose weights are all 0. A rank that is
    behind (`CodedGroup.lag`) does not compute a gradient either, since its round is
    already decided. The loss must be a sum over examples, so it must not use batch
    normalisation. Random keys must belong to the example, not to the rank.

    The code also counts the examples. The count shows if ranks have different parameters, are at different batches
    of ``group.epoch``, or have changed the values of weights. Then the round fails with ``InconsistentMessages`` on
    all ranks; ``docs/sharp-bits.md`` says what the count cannot show. With the mpi4jax transport, or under ``vmap``
    with ``mean``, loss and gradient are NaN instead.

    Args:
        losses: a function ``(params, data) -> losses`` that returns one loss for each example, with shape
            ``(length,)``. Or it returns the mean loss as a scalar, like the usual ``loss(params, batch)``. A scalar
            loss is computed by ``jax.vmap`` over batches of one example; see ``docs/training.md``. With ``has_aux``
            the function returns ``(losses, aux)``.
        group: an open group.
        has_aux: whether ``losses`` returns auxiliary data, a pytree of arrays. The auxiliary data are not reduced:
            each rank gets its own data, or zeros if it computed nothing. With slices
            the data are stacked over the chunks, and with a scalar loss over the
            examples.
        mean: whether to divide loss and gradient by the number of examples in the global batch, not counting
            padding. Otherwise they are sums. With an approximate code, or with ``on_deadline="approximate"``, the
            divisor is the total weight of the examples in the sum.
        residual: whether to return also the residual ``√Σ_k p_k (c_k − 1)²``. Here atom
            ``k`` is the part ``p_k`` of the batch, and enters the sum with the
            coefficient ``c_k``; see `coded_allreduce`.
        wire_dtype: ``"bfloat16"`` or ``"float16"``, the dtype in which float32
            gradients of arrays are sent; see `coded_allreduce`. The option does not
            affect how gradients are computed and encoded. The loss and the
            number of examples keep their dtype.

    Returns:
        A function ``(params, batch, *, erasures=None, token=None) -> (loss, grads)``, or ``((loss, aux), grads)``.
        With a ``residual`` or a ``token`` it returns a `Result` with this tuple as its ``value``. ``batch`` is a
        `Batch` of ``group.epoch`` or ``group.batch``, the same batch on all ranks. The
        loss is a scalar of at least float32; ``grads`` is like ``params``. Do not pass
        ``grads`` to `jaxcoded.optax.sum_gradients`, which would sum them again. A
        second sum raises an error if both calls are in the same ``jit`` or both
        outside; otherwise its result is wrong. Outside ``jax.jit`` the function
        compiles itself once for equal shapes, ``losses`` and options. A group keeps its
        last 16 functions, with at most 4 programs each.

        The function raises the errors of `coded_allreduce`, and ``InconsistentMessages`` as above. It raises
        ``TypeError`` if ``batch`` is not a `Batch`, or if losses or leaves of ``params`` are not floating point
        (then partition the model). It raises ``ValueError`` if the batch belongs to another plan or rank, or if
        shapes do not fit. If ranks differ in the batch size, it raises ``GroupMismatch``.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcoded
        >>> from mpi4py import MPI
        >>> group = jaxcoded.CodedGroup(MPI.COMM_SELF)
        >>> step = jax.jit(jaxcoded.coded_value_and_grad(lambda w, x: (w - x) ** 2, group))
        >>> loss, grad = step(1.0, group.batch(jnp.arange(4.0)))
        >>> float(loss), float(grad)
        (1.5, -1.0)
        >>> group.close()
    """
    check_open(group)
    with group._session.failing(_NAME):
        _require.function("losses", losses)
        _require.boolean("has_aux", has_aux)
        _require.boolean("mean", mean)
        _require.boolean("residual", residual)
        wire_dtype = checked_wire_dtype(wire_dtype)
    strategy = group.plan.strategy
    known: set[Any] = set()

    def reduce(
        params: Any, data: Any, weights: Weights, erasures: Any, token: Any
    ) -> Result:
        # Trace `losses` once, since every chunk needs the shapes of its results.
        of_part = jax.jit(
            functools.partial(gradient.of_part, losses, has_aux, group, known)
        )
        out, aux, counted, count = over_batch.summed(
            functools.partial(gradient.unless_behind, of_part, params),
            *(params, data, weights, group),
            eps=lambda: _jax_compat.coarsest_eps(losses, params, data),
            name=f"{_NAME}({_require.named(losses)})",
            words=", as a mean"
            * mean,  # all ranks must agree whether they take the mean
            erasures=erasures,
            token=token,
            residual=residual,
            wire_dtype=wire_dtype,
        )
        loss, grads = out.value["loss"], floats.restored(out.value["grads"])
        if mean:
            loss, grads = divided((loss, grads), present(counted, weights, count))
        return out._replace(value=(((loss, aux) if has_aux else loss), grads))

    # compare functions by identity: equal functions may compute different things
    asked = (
        *(_NAME, group._session.index, _require.identity(losses)),
        *(has_aux, mean, residual, wire_dtype),
    )
    kept = group._session.kept(asked, lambda: Eager(reduce))

    def value_and_grad(
        params: Any,
        batch: Batch,
        *,
        erasures: jax.Array | None = None,
        token: jax.Array | None = None,
    ) -> Any:
        check_open(group)
        group._session.check_alike()
        with group._session.failing(_NAME):
            params = checked_params(params)
            data = checked_data(batch, group)
            if erasures is not None:
                strategy.refuse("erasures")
                erasures = checked_erasures(erasures, group.size)
            token = tokens.checked(token)
        out = kept(params, data, batch.weights, erasures, token)
        reduced.note(out.value[1], group._session.index)
        return out.plain()

    return value_and_grad
