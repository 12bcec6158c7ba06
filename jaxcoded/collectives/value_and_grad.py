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
    """Return a function like ``jax.value_and_grad`` of the mean loss of the global batch. Its results are exact and
    equal on all ranks.

    Encoding is linear: ``Σ_j b_j ∇ℓ_j = ∇ Σ_j b_j ℓ_j``. So without slices the coding coefficients are loss weights,
    and one backward pass suffices. With slices or parts the gradient of every chunk is encoded separately, one after
    the other in a ``scan``. A code with several parts sends each part as soon as it is ready (with the engine,
    without ``erasures``). So the finished parts of a slow rank count.

    A rank (or chunk) whose weights are all 0 computes no gradient. A rank that is
    behind (`CodedGroup.lag`) computes none either, as its round is already decided. The
    loss must be a sum over examples, so it must not use batch normalisation. Random
    keys must belong to the example, not to the rank.

    The code also counts the examples. The count shows if ranks have different parameters, are at different batches
    of ``group.epoch``, or have changed the values of weights. Then the round fails with ``InconsistentMessages`` on
    all ranks (limits: ``docs/sharp-bits.md``). With the mpi4jax transport, or under ``vmap`` with ``mean``, loss
    and gradient are NaN instead.

    Args:
        losses: ``(params, data) -> losses`` of shape ``(length,)``, one for each example. Or it returns the mean
            loss as a scalar, like the usual ``loss(params, batch)``. A scalar loss is computed by ``jax.vmap`` over
            batches of one example, see ``docs/training.md``. With ``has_aux``, ``(losses, aux)``.
        group: an open group.
        has_aux: whether ``losses`` returns auxiliary data, a pytree of arrays. The auxiliary data are not reduced:
            each rank gets its own data, or zeros if it computed nothing. With slices
            they are stacked over the chunks, and with a scalar loss over the examples.
        mean: divide loss and gradient by the number of examples in the global batch, without padding; ``False``
            gives the sum. With an approximate code, or ``on_deadline="approximate"``, divide by the weight of the
            examples in the sum.
        residual: also return the residual ``√Σ_k p_k (c_k − 1)²``, where ``c_k`` is the
            coefficient in the sum of atom ``k``, the part ``p_k`` of the batch; see
            `coded_allreduce`.
        wire_dtype: ``"bfloat16"`` or ``"float16"``, the dtype in which float32
            gradients of arrays are sent, see `coded_allreduce`. The option does not
            affect how gradients are computed and encoded. Loss and count keep all
            digits.

    Returns:
        A function ``(params, batch, *, erasures=None, token=None) -> (loss, grads)``, or ``((loss, aux), grads)``.
        With a ``residual`` or a ``token`` it returns a `Result` with this tuple as its ``value``. ``batch`` is a
        `Batch` of ``group.epoch`` or ``group.batch``, the same batch on all ranks. The
        loss is a scalar of at least float32; ``grads`` is like ``params``. Do not pass
        ``grads`` to `jaxcoded.optax.sum_gradients`, which would sum them again. If both
        calls are in the same ``jit`` or both outside, this raises an error. Otherwise
        the result is wrong. Outside ``jax.jit`` the function compiles itself, once for
        equal shapes, ``losses`` and options. A group keeps its last 16 functions, with
        at most 4 programs each.

        It raises the errors of `coded_allreduce`, and ``InconsistentMessages`` as above. It raises ``TypeError`` if
        ``batch`` is not a `Batch`, or losses or leaves of ``params`` are not floating point (partition the model).
        It raises ``ValueError`` for a batch of another plan or rank, and for shapes that do not fit. It raises
        ``GroupMismatch`` also if ranks differ in the batch size.

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
        for name, value in {
            "has_aux": has_aux,
            "mean": mean,
            "residual": residual,
        }.items():
            _require.boolean(name, value)
        wire_dtype = checked_wire_dtype(wire_dtype)
    strategy = group.plan.strategy
    known: set[Any] = set()

    def reduce(
        params: Any, data: Any, weights: Weights, erasures: Any, token: Any
    ) -> Result:
        # every chunk needs the shapes, so trace `losses` once
        of_part = jax.jit(
            functools.partial(gradient.of_part, losses, has_aux, group, known)
        )
        out, aux, counted, count = over_batch.summed(
            functools.partial(gradient.unless_behind, of_part, params),
            *(params, data, weights, group),
            eps=lambda: _jax_compat.coarsest_eps(losses, params, data),
            name=f"{_NAME}({_require.named(losses)})",
            words=", of which the mean" * mean,  # all ranks must agree on it
            erasures=erasures,
            token=token,
            residual=residual,
            wire_dtype=wire_dtype,
        )
        loss, grads = out.value["loss"], floats.restored(out.value["grads"])
        if mean:
            loss, grads = divided((loss, grads), present(counted, weights, count))
        return out._replace(value=(((loss, aux) if has_aux else loss), grads))

    # equal functions may compute different things
    asked = (
        *(_NAME, group._session.index, _require.identity(losses)),
        *(has_aux, mean, residual, wire_dtype),
    )
    outside = group._session.kept(asked, lambda: Eager(reduce))

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
            if token is not None:
                token = tokens.checked(token)
        reducing = reduce if _jax_compat.tracing() else outside
        out = reducing(params, data, batch.weights, erasures, token)
        reduced.note(out.value[1], group._session.index)
        return out.plain()

    return value_and_grad
