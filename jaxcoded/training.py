"""The gradient of a loss over the global batch, coded and reduced."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded.collectives import summed
from jaxcoded.group import CodedGroup, check_open
from jaxcoded.kernels import Encoded, accumulator, divided, encode_vector
from jaxcoded.packing import Packing, pack


def coded_value_and_grad(
    per_example_loss: Callable[[Any, Any], Any],
    group: CodedGroup,
    *,
    has_aux: bool = False,
    mean: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Like ``jax.value_and_grad`` of the loss summed over the global batch: reduced,
    exact, equal on all ranks.

    Encoding is linear, so without slices the coding coefficients are loss weights and
    there is one backward pass: ``Σ_j b_j ∇ℓ_j = ∇ Σ_j b_j ℓ_j``. With slices the gradient of every chunk is encoded on its own, one
    after the other in a ``scan``. A rank (or chunk) whose weights are all 0 computes no
    gradient, and neither does a rank that is behind (`CodedGroup.lag`): its round is
    decided, and it catches up. The loss must be a sum over examples: batch normalisation is not, and
    random keys must belong to the example, not to the rank.

    Args:
        per_example_loss: ``(params, batch) -> losses`` of shape ``(length,)``, or
            ``(losses, aux)`` with ``has_aux``.
        group: an open group.
        has_aux: whether it returns auxiliary data, a pytree of arrays. They are this
            rank's own, not reduced; zeros where it computed nothing, and, with slices,
            stacked over the chunks.
        mean: divide loss and gradient by the number of examples in the global batch,
            counted by the same code. The weights must be those of ``group.assignment``.

    Returns:
        A function ``(params, batch, weights, *, erasures=None, token=None) -> (loss,
        grads)``, or ``((loss, aux), grads)``; with a ``token``, a pair of that and the
        token for the next call, see `coded_allreduce`. ``batch`` is a pytree of this rank's examples, leading
        axis ``length`` as in ``group.assignment``, and ``weights`` are its weights. The
        loss is a scalar of at least float32; ``grads`` is like ``params``. Do not put
        `jaxcoded.optax.coded_allreduce` behind it.

        It raises ``ValueError`` for shapes that do not fit, and what `coded_allreduce`
        raises.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcoded
        >>> from mpi4py import MPI
        >>> group = jaxcoded.CodedGroup(MPI.COMM_SELF)
        >>> indices, weights = group.assignment(4)
        >>> step = jax.jit(jaxcoded.coded_value_and_grad(lambda w, x: (w - x) ** 2, group, mean=True))
        >>> loss, grad = step(1.0, jnp.arange(4.0)[indices], weights)
        >>> float(loss), float(grad)
        (1.5, -1.0)
        >>> group.close()
    """
    check_open(group)

    def value_and_grad(
        params: Any,
        batch: Any,
        weights: jax.Array | np.ndarray,
        *,
        erasures: jax.Array | None = None,
        token: jax.Array | None = None,
    ) -> tuple[Any, Any]:
        with group.failing("coded_value_and_grad"):
            batch = jax.tree.map(jnp.asarray, batch)
            coding = jnp.asarray(weights)
            _check_shapes(batch, coding, group)
            behind = None
            if group.transport.can_lag:
                lag, token = group.transport.lag(token)
                behind = (lag > 0).astype(jnp.int32)
            partial = functools.partial(
                _weighted, per_example_loss, has_aux, mean, behind, params
            )
            if group.plan.sliced:
                multiple = group.plan.padding_multiple
                local, aux = _encoded(partial, batch, coding, multiple)
            else:
                local, aux = partial(batch, coding)
        # the skipped gradient and its round are one: zeros can never enter a sum
        reduced = summed(
            "coded_value_and_grad",
            local,
            group,
            erasures=erasures,
            skipped=behind,
            token=token,
        )
        if token is not None:
            reduced, token = reduced
        loss, grads = reduced["loss"], reduced["grads"]
        if mean:
            # every example counts once in the exact sum, so that the nearest whole
            # number takes the code's rounding away while κ · eps · count is below ½
            loss, grads = divided((loss, grads), jnp.round(reduced["count"]))
        out = ((loss, aux) if has_aux else loss), grads
        return out if token is None else (out, token)

    return value_and_grad


def _weighted(
    per_example_loss: Callable[[Any, Any], Any],
    has_aux: bool,
    counted: bool,
    behind: jax.Array | None,
    params: Any,
    batch: Any,
    weights: jax.Array,
) -> tuple[Any, Any]:
    """``Σ w ℓ``, ``∇ Σ w ℓ`` and, if ``counted``, ``Σ w``; and the auxiliary data. Zeros, and
    no gradient computed, where all weights are 0 or this rank is ``behind``."""

    def weighted_loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        out = per_example_loss(params, batch)
        if isinstance(out, tuple) != has_aux or (has_aux and len(out) != 2):
            wanted = "the pair (losses, aux)" if has_aux else "the losses alone"
            raise ValueError(
                f"with has_aux={has_aux} per_example_loss must return {wanted}, "
                f"got {jax.tree.structure(out)}"
            )
        losses, aux = out if has_aux else (out, None)
        losses = jnp.asarray(losses)
        if losses.shape != weights.shape:
            raise ValueError(
                "per_example_loss must return one loss for each example, "
                f"shape {weights.shape}, got {losses.shape}"
            )
        w = weights.astype(accumulator(losses.dtype))
        # padding has weight 0 and must not count, whatever its loss is
        loss = jnp.sum(jnp.where(w != 0, w * losses.astype(w.dtype), 0))
        return loss, (jnp.sum(w), aux)

    def compute() -> tuple[Any, Any]:
        value_and_grad = jax.value_and_grad(weighted_loss, has_aux=True)
        (loss, (count, aux)), grads = value_and_grad(params)
        sums = {"loss": loss, "grads": grads}
        return (sums | {"count": count} if counted else sums), aux

    def skip() -> tuple[Any, Any]:
        return jax.tree.map(_zeros, jax.eval_shape(compute))

    needed = jnp.any(weights != 0)
    if behind is not None:
        needed &= behind == 0
    return jax.lax.cond(needed, compute, skip)


def _encoded(
    partial: Callable[[Any, jax.Array], tuple[Any, Any]],
    batch: Any,
    weights: jax.Array,
    multiple: int,
) -> tuple[Encoded, Any]:
    """The coded message of what ``partial`` makes of every chunk, one after the other;
    and the auxiliary data, stacked."""
    chunks, chunk_size, slices = weights.shape
    batches = jax.tree.map(
        lambda leaf: leaf.reshape(chunks, chunk_size, *leaf.shape[1:]), batch
    )
    held = jnp.any(weights != 0, axis=2).astype(weights.dtype)
    local, _ = jax.eval_shape(
        partial, jax.tree.map(lambda leaf: leaf[0], batches), held[0]
    )
    packing = Packing.of(local)
    empty = tuple(
        jnp.zeros(-(-length // multiple) * multiple // slices, accumulator(dtype))
        for dtype, length in packing.vectors.items()
    )

    def step(message: tuple[jax.Array, ...], operands: Any) -> tuple[Any, Any]:
        chunk, mask, coefficients = operands
        local, aux = partial(chunk, mask)
        # padding stands at the end of a chunk: its first example has the coefficients
        # of all
        added = [
            encode_vector(vector[None], coefficients[:1], multiple)
            for vector in pack(local)[0]
        ]
        return tuple(map(jnp.add, message, added)), aux

    message, aux = jax.lax.scan(step, empty, (batches, held, weights))
    vectors = tuple(map(jnp.astype, message, packing.vectors))
    return Encoded(vectors, packing, slices, multiple), aux


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(like.shape, like.dtype)


def _check_shapes(batch: Any, weights: jax.Array, group: CodedGroup) -> None:
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(
            f"weights must be floating point as group.assignment makes them, got "
            f"{weights.dtype}"
        )
    slices, sliced = group.plan.slices_above[group.rank], group.plan.sliced
    if weights.ndim != (3 if sliced else 1) or (sliced and weights.shape[2] != slices):
        wanted = f"(chunks, length // chunks, {slices})" if sliced else "(length,)"
        raise ValueError(
            f"weights must have shape {wanted} as group.assignment makes them, got {weights.shape}"
        )
    length = weights.shape[0] * weights.shape[1] if sliced else weights.shape[0]
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not jnp.ndim(leaf) or jnp.shape(leaf)[0] != length:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}, but the weights are for {length} examples: "
                "index the global batch with group.assignment's indices"
            )
