"""The gradient of a loss over the global batch, coded and reduced."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded import _jax_compat, _require
from jaxcoded.collectives import marks, reduced, shared
from jaxcoded.collectives.allreduce import begin, summed
from jaxcoded.collectives.counting import checked_count, over_devices, rounding
from jaxcoded.collectives.request import Request
from jaxcoded.group.batch import Batch, check_batch, check_length
from jaxcoded.group.group import CodedGroup, check_open
from jaxcoded.group.weights import Weights
from jaxcoded.plan import Plan
from jaxcoded.transport.kernels import Encoded, accumulator, divided, encode_vector
from jaxcoded.transport.leaves import array, named, summand
from jaxcoded.transport.packing import Packing, checked_wire_dtype, pack
from jaxcoded.transport.result import Result

_NAME = "coded_value_and_grad"
# What the gradient is not to hide behind, where ranks look for mistakes.
_APART = ("loss", "count", "examples")


def coded_value_and_grad(
    losses: Callable[[Any, Any], Any],
    group: CodedGroup,
    *,
    has_aux: bool = False,
    mean: bool = True,
    residual: bool = False,
    wire_dtype: Any = None,
) -> Callable[..., tuple[Any, ...]]:
    """Like ``jax.value_and_grad`` of the mean loss of the global batch: reduced,
    exact, equal on all ranks.

    Encoding is linear, so without slices the coding coefficients are loss weights and
    there is one backward pass: ``Σ_j b_j ∇ℓ_j = ∇ Σ_j b_j ℓ_j``. With slices or parts the gradient of every
    chunk is encoded on its own, one after the other in a ``scan``. A code with several
    parts sends each as soon as it is ready (with the engine, without ``erasures``), so
    that what a slow rank has finished counts. A rank (or chunk) whose weights are all 0 computes no
    gradient, and neither does a rank that is behind (`CodedGroup.lag`): its round is
    decided, and it catches up. The loss must be a sum over examples: batch normalisation is not, and
    random keys must belong to the example, not to the rank.

    The examples are counted by the same code, in a way that shows where ranks have other parameters than the
    others, are at other batches of ``group.epoch``, or have weights whose values have changed: the round fails
    with ``InconsistentMessages`` on all ranks (``docs/sharp-bits.md`` says of what it does not); with the
    mpi4jax transport, or under ``vmap``, loss and gradient may be NaN instead, with ``mean``.

    Args:
        losses: ``(params, data) -> losses`` of shape ``(length,)``, one for each example; or a scalar, their mean,
            as a usual ``loss(params, batch)`` returns. A scalar loss is computed by ``jax.vmap`` over batches of one
            example, see ``docs/training.md``. With ``has_aux``, ``(losses, aux)``.
        group: an open group.
        has_aux: whether it returns auxiliary data, a pytree of arrays. They are this
            rank's own, not reduced; zeros where it computed nothing; stacked over the chunks with slices, and
            over the examples with a scalar loss.
        mean: divide loss and gradient by the number of examples in the global batch, of a
            smaller last batch of ``group.epoch`` by the number of those that are there; ``False`` gives the sum. With
            an approximate code, or ``on_deadline="approximate"``, divide by the weight that the examples
            have in the sum.
        residual: return the residual too: ``√Σ_k p_k (c_k − 1)²`` for the coefficients
            ``c_k`` with which the atoms of the batch, its parts ``p_k``, entered; of
            atoms that divide the batch, see `coded_allreduce`.
        wire_dtype: ``"bfloat16"`` or ``"float16"``, in which float32 gradients of
            arrays travel, see `coded_allreduce`. Gradients are computed and encoded as
            without it, and loss and count keep all digits.

    Returns:
        A function ``(params, batch, *, erasures=None, token=None) -> (loss,
        grads)``, or ``((loss, aux), grads)``; with a ``residual`` or a ``token``, a
        `Result` whose ``value`` this is. ``batch`` is a `Batch` of ``group.epoch`` or ``group.batch``,
        the same one on all ranks. The
        loss is a scalar of at least float32; ``grads`` is like ``params``. Do not put
        `jaxcoded.optax.sum_gradients` behind it: where it gets the very ``grads``, in the
        same ``jit``, that is an error; otherwise they are wrong. Call it inside ``jax.jit``:
        outside, each call is compiled anew.

        It raises ``TypeError`` for what is no `Batch`, and for losses or leaves
        of ``params`` that are not floating point (partition the model), ``ValueError``
        for a batch of another plan or rank, and for shapes that do not fit, and what
        `coded_allreduce` raises; ``GroupMismatch`` also where ranks differ in the batch
        size, and ``InconsistentMessages`` as above.

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
        wire_dtype = checked_wire_dtype(wire_dtype)

    def result(
        out: Result, aux: Any, examples: tuple[float, float] | None, weights: Weights
    ) -> Any:
        """What the user gets of the sum."""
        total = out.value
        loss, grads = total["loss"], total["grads"]
        if mean:
            count = total["examples"]
            if (
                examples is None
            ):  # approximate: of nothing that came the mean is 0, as the sum
                count = jnp.where(count == 0, 1, count)
            else:
                checked = checked_count(total["count"], examples)
                present = _present(count, weights, examples)
                count = jnp.where(jnp.isnan(checked), checked, present)
            loss, grads = divided((loss, grads), count)
        reduced.note(grads, group._session.index)
        value = ((loss, aux) if has_aux else loss), grads
        return out._replace(value=value).plain()

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
            params = _differentiable(params)
            check_batch(batch)
            weights = batch.weights
            weights.check(group.plan, group.rank)
            coding = jnp.asarray(weights)
            data = jax.tree_util.tree_map_with_path(
                lambda path, leaf: array(leaf, named("data", path)), batch.data
            )
            _check_shapes(data, coding, group)
            # before anything is said of its batch
            together = group._session.transport.devices(token)
            shares = group.plan.strategy.by_blocks
            if erasures is not None:
                group.plan.strategy.refuse("erasures")
            behind = None
            if group._session.transport.can_lag and not shares:
                lag, token = group._session.transport.lag(token)
                behind = (lag > 0).astype(jnp.int32)
            request = Request(
                _NAME,
                erasures=erasures,
                residual=residual,
                wire_dtype=wire_dtype,
                token=token,
                about=f", for a batch of {weights.batch_size}",
                apart=_APART,
            )
            # what is asked for its shape, chunk after chunk, is traced once
            gradient = jax.jit(functools.partial(_gradient, losses, has_aux, weights))
            partial = functools.partial(_unless_behind, gradient, params)
            if group.options.compares and not (shares or together):
                group._session.transport.computes_with(
                    _jax_compat.coarsest_eps(losses, params, data)
                )
            told = None
            if not group.approximate:
                # of a code the debug mode compares messages, which may differ in rounding
                to_the_bit = shares and bool(group.options.debug)
                key = marks.key(weights.number, params, to_the_bit=to_the_bit)
                # one of all devices that the parameters are split over, as the count is
                told = _Told(weights, over_devices(key, _jax_compat.varying(key)))
        if shares:
            compute = functools.partial(partial, None)
            out = _of_blocks(compute, data, weights, told, group, request)
        else:
            out = _of_code(partial, data, coding, behind, told, group, request)
        return result(*out, weights)

    return value_and_grad


class _Told(NamedTuple):
    """By what an exact sum tells whether ranks compute the same: the weights whose examples are counted, and the key
    of `marks` that goes to the count."""

    weights: Weights
    key: jax.Array


def _of_blocks(
    compute: Callable[..., tuple[Any, Any]],
    batch: Any,
    weights: Weights,
    told: _Told | None,
    group: CodedGroup,
    request: Request,
) -> tuple[Result, Any, tuple[float, float] | None]:
    """The sum of shared work, the auxiliary data, and how many examples it is of."""
    with group._session.failing(_NAME):
        examples = None
        if told is not None:
            local = shared.like(batch, weights, group, compute)[0]
            examples = _examples(local, weights, group.plan)
        request = dataclasses.replace(request, examples=examples).checked(group)
    key = None if told is None else told.key
    # a round that fails is not this rank's mistake
    return *shared.summed(compute, batch, weights, group, request, key), examples


def _of_code(
    partial: Callable[..., tuple[Any, Any]],
    batch: Any,
    weights: jax.Array,
    behind: jax.Array | None,
    told: _Told | None,
    group: CodedGroup,
    request: Request,
) -> tuple[Result, Any, tuple[float, float] | None]:
    """The sum by the group's code, the auxiliary data, and how many examples it is of."""
    plan, token = group.plan, request.token
    with group._session.failing(_NAME):
        parts = plan.parts_above[group.rank]
        ahead = (
            group._session.transport.takes_parts
            and request.erasures is None
            and parts > 1
        )
        mark = examples = None
        if told is not None:
            share = rounding(plan, told.weights.dtype)
            mark = jnp.asarray(
                marks.of_rank(plan, group.rank, told.weights.batch_size, share)
            )
            mark *= told.key.astype(mark.dtype)
        if plan.encoded:

            def send(part: Encoded, number: int) -> jax.Array | None:
                """What is ready goes ahead. Whether this rank is behind by now."""
                nonlocal token
                asked = dataclasses.replace(
                    request, skip=behind, token=token, last_part=True
                )
                token = begin(part, number, group, asked)
                lag, token = group._session.transport.lag(token)
                return (lag > 0).astype(jnp.int32)

            local, aux, behind = _encoded(
                partial,
                batch,
                weights,
                behind,
                plan,
                parts,
                send if ahead else None,
                request.wire_dtype,
                mark,
            )
        else:
            local, aux = partial(behind, batch, weights)
            if mark is not None:
                local["count"] += mark[0].astype(local["count"].dtype)
        if told is not None:
            examples = _examples(local, told.weights, plan)
    # the skipped gradient and its round are one: zeros can never enter a sum
    request = dataclasses.replace(
        request, skip=behind, token=token, last_part=ahead, examples=examples
    )
    return summed(local, group, request), aux, examples


def _gradient(
    losses: Callable[[Any, Any], Any],
    has_aux: bool,
    counted: Weights,
    params: Any,
    batch: Any,
    weights: jax.Array,
) -> tuple[Any, Any]:
    """``Σ w ℓ``, ``∇ Σ w ℓ`` and ``Σ w`` of the examples, which are ``counted``; and the auxiliary data."""
    split = _jax_compat.varying(weights)

    def weighted_loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        each, aux = _losses_of_examples(losses, has_aux, params, batch)
        if each.shape != weights.shape:
            raise ValueError(
                "losses must return one loss for each example, "
                f"shape {weights.shape}, or their mean, shape (), got {each.shape}"
            )
        if not jnp.issubdtype(each.dtype, jnp.floating):
            raise TypeError(
                "losses must be in floating point, got "
                f"{each.dtype}: cast what they are computed from"
            )
        if alone := set(_jax_compat.varying(each)).difference(split):
            raise ValueError(
                f"the losses differ along the axes {sorted(alone)} of the devices, over which the "
                "weights are not split: where devices share an example let its loss be their sum "
                "(jax.lax.psum)"
            )
        w = weights.astype(accumulator(each.dtype))
        # padding has weight 0 and must not count, whatever its loss is; its gradient is
        # finite, as padding repeats an example that is there
        loss = jnp.sum(jnp.where(w != 0, w * each.astype(w.dtype), 0))
        return loss, (jnp.sum(w), aux)

    value_and_grad = jax.value_and_grad(weighted_loss, has_aux=True)
    (loss, (count, aux)), grads = value_and_grad(params)
    sums = {"loss": over_devices(loss, split), "grads": grads}
    return sums | _counts(over_devices(count, split), counted), aux


def _losses_of_examples(
    losses: Callable[[Any, Any], Any], has_aux: bool, params: Any, batch: Any
) -> tuple[jax.Array, Any]:
    """The loss of each example, and the auxiliary data. A scalar is the mean of the losses of the examples that it is
    computed from, so of a batch of one example it is the loss of this example."""

    @functools.partial(jax.jit, inline=True)  # asked for its shape, too: traced once
    def pair(params: Any, batch: Any) -> tuple[Any, Any]:
        out = losses(params, batch)
        if isinstance(out, tuple) != has_aux or (has_aux and len(out) != 2):
            wanted = "the pair (losses, aux)" if has_aux else "the losses alone"
            raise ValueError(
                f"with has_aux={has_aux} losses must return {wanted}, "
                f"got {jax.tree.structure(out)}"
            )
        values, aux = out if has_aux else (out, None)
        return jnp.asarray(values), aux

    def of_one(example: Any) -> tuple[Any, Any]:
        return pair(params, jax.tree.map(lambda leaf: leaf[None], example))

    if jax.eval_shape(pair, params, batch)[0].shape:
        return pair(params, batch)
    return jax.vmap(of_one)(batch)


def _unless_behind(
    gradient: Callable[..., tuple[Any, Any]],
    params: Any,
    behind: jax.Array | None,
    batch: Any,
    weights: jax.Array,
) -> tuple[Any, Any]:
    """The ``gradient`` of a batch. Zeros, and nothing computed, where all weights are 0 or this rank is
    ``behind``. Where the batch is split over devices, of all of them: they decide alike, as they may
    need each other for the gradient."""

    def compute() -> tuple[Any, Any]:
        return gradient(params, batch, weights)

    def skip() -> tuple[Any, Any]:
        return jax.tree.map(_zeros, jax.eval_shape(compute))

    split = _jax_compat.varying(weights)
    some = jnp.any(weights != 0).astype(jnp.int32)
    needed = over_devices(some, split) > 0
    if behind is not None:
        needed &= behind == 0
    return jax.lax.cond(needed, compute, skip)


def _encoded(
    partial: Callable[[jax.Array | None, Any, jax.Array], tuple[Any, Any]],
    batch: Any,
    weights: jax.Array,
    behind: jax.Array | None,
    plan: Plan,
    parts: int,
    send: Callable[[Encoded, int], jax.Array | None] | None,
    wire_dtype: np.dtype | None,
    mark: jax.Array | None,
) -> tuple[Encoded, Any, jax.Array | None]:
    """The coded message of what ``partial`` makes of every chunk, one after the other;
    the auxiliary data, stacked; and whether this rank is behind at the end. The ``mark`` of each
    part goes to the count, which is its first number.

    With ``send`` every part but the last goes there when its chunks are done, and the
    message is the last one.
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
        partial, behind, jax.tree.map(lambda leaf: leaf[0], batches), held[0]
    )
    packing = Packing.of(local, wire_dtype, multiple)
    message = tuple(
        jnp.zeros(
            (parts, -(-length // multiple) * multiple // slices),
            accumulator(kind.dtype),
        )
        for kind, length in packing.vectors.items()
    )
    if mark is not None:
        first, *others = message
        message = (first.at[:, 0].set(mark.astype(first.dtype)), *others)

    def steps(behind: jax.Array | None) -> Callable[..., tuple[Any, Any]]:
        # a new function for each stage: `scan` would trace one only once, with the
        # first stage's `behind`
        def step(message: tuple[jax.Array, ...], operands: Any) -> tuple[Any, Any]:
            chunk, mask, coefficients = operands
            local, aux = partial(behind, chunk, mask)
            # padding stands at the end of a chunk: its first example has the
            # coefficients of all
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
    # as `assignment` has ordered them: after each of these, one more part is complete
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


def _examples(local: Any, weights: Weights, plan: Plan) -> tuple[float, float]:
    """The number of examples that the ranks' counts add up to, and the share of it that
    rounding explains."""
    packing = local.packing if isinstance(local, Encoded) else Packing.of(local)
    count = packing.dtypes[0]  # the first of the keys
    return float(weights.batch_size), rounding(plan, count, weights.dtype)


def _counts(count: jax.Array, weights: Weights) -> dict[str, jax.Array]:
    """What is summed of a ``count`` of examples, in two ways.

    Transports look for a number that they know when they compile. So the examples of a smaller last
    batch count for more: ``batch_size`` together. Ranks at different batches do not add up to
    that. By the other sum the mean is, on all ranks the same, also on one that was done
    without and is at another batch."""
    present = jnp.asarray(weights.examples, count.dtype)
    return {"count": count * (weights.batch_size / present), "examples": count}


def _present(
    counted: jax.Array, weights: Weights, examples: tuple[float, float]
) -> jax.Array:
    """How many examples of a batch there are, where so many were ``counted``."""
    expected = jnp.asarray(weights.examples, counted.dtype)
    near = jnp.abs(counted - expected) <= examples[1] * expected
    return jnp.where(near, expected, jnp.round(counted))


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return _jax_compat.vary(
        jnp.zeros(like.shape, like.dtype), _jax_compat.varying(like)
    )


def _differentiable(params: Any) -> Any:
    """The parameters as arrays, all of which can be differentiated."""

    def taken(path: Any, leaf: Any) -> jax.Array:
        name = named("params", path)
        dtype = getattr(leaf, "dtype", None)
        if dtype is None and isinstance(leaf, bool | int | float | complex):
            dtype = jnp.result_type(leaf)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            kind = _require.kind(leaf) if dtype is None else f"of dtype {dtype}"
            raise TypeError(
                f"{name} is {kind}, which has no gradient: "
                "partition the model, hand over its floating-point leaves as params, and "
                "put the rest back in losses, as equinox.partition(model, "
                "equinox.is_inexact_array) and equinox.combine do"
            )
        return summand(leaf, name)

    return jax.tree_util.tree_map_with_path(taken, params)


def _check_shapes(data: Any, weights: jax.Array, group: CodedGroup) -> None:
    plan, rank = group.plan, group.rank
    numbers, encoded = plan.parts_above[rank] * plan.slices_above[rank], plan.encoded
    if weights.ndim != (3 if encoded else 1) or (
        encoded and weights.shape[2] != numbers
    ):
        wanted = f"(chunks, length // chunks, {numbers})" if encoded else "(length,)"
        raise ValueError(
            f"batch.weights must have shape {wanted}, got {weights.shape}: hand in the batch as the group made it"
        )
    length = weights.shape[0] * weights.shape[1] if encoded else weights.shape[0]
    check_length(data, length)
