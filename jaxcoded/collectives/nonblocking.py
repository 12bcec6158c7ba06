"""`coded_allreduce` in two calls, so that computation can hide the communication."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded import _jax_compat, _require
from jaxcoded._jax_compat import ShapedArray
from jaxcoded.collectives import floats
from jaxcoded.collectives.allreduce import prepared, results
from jaxcoded.collectives.counting import NOT_COUNTED, Count, counted
from jaxcoded.group.group import CodedGroup, check_open
from jaxcoded.transport import tokens
from jaxcoded.transport.kernels import Encoded, divided
from jaxcoded.transport.leaves import converted, summand
from jaxcoded.transport.packing import Packing
from jaxcoded.transport.primitive import placed, run
from jaxcoded.transport.primitive import results as results_of
from jaxcoded.transport.registry import find
from jaxcoded.transport.result import Result
from jaxcoded.transport.round import Round


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["rounds", "divisor"],
    meta_fields=["ends", "packings", "structure", "tokened"],
)
@dataclasses.dataclass(frozen=True)
class Handle:
    """Rounds that `coded_allreduce_start` has started, for `coded_allreduce_done`.

    A handle is a pytree, which can be returned from ``jit``, passed to ``jit``, and carried through a ``scan``. It
    is valid only until this process ends, so do not save it in a checkpoint.

    Attributes:
        rounds: for each round, its uint32 number in the engine. With the mpi4jax transport, the complete
            vectors of each round's result.
        divisor: the divisor of the sum.
        ends: for each round, the operation that completes it.
        packings: for each round, the pytree that it sums.
        structure: the structure of the pytree with the leaves of all rounds, if there
            are several rounds.
        tokened: whether a token orders the calls.
    """

    rounds: tuple[tuple[jax.Array, ...], ...]
    divisor: jax.Array | None
    ends: tuple[Round, ...]
    packings: tuple[Packing, ...]
    structure: Any  # jax.tree_util.PyTreeDef
    tokened: bool


def coded_allreduce_start(
    x: Any,
    group: CodedGroup | Sequence[CodedGroup],
    weights: Any = None,
    *,
    divisor: float | jax.Array | None = None,
    erasures: jax.Array | np.ndarray | Sequence[bool] | None = None,
    skip: bool | jax.Array | None = None,
    residual: bool = False,
    wire_dtype: Any = None,
    bucket_bytes: int | None = None,
    token: jax.Array | None = None,
) -> Any:
    """Begin a `coded_allreduce`, so that the program can compute during the
    communication.

    A round takes its place in the order of the group's rounds when it starts. So all
    ranks must start rounds, and call the group's other collectives, in the same order.
    They may call `coded_allreduce_done` in any order. One rank may start a round for
    which another rank calls `coded_allreduce`.

    The engine copies the vectors and carries out the rounds while the rank computes. The
    messages of the mpi4jax transport block. So with this transport the whole round
    takes place in this call, which then hides no communication, and raises the errors
    of the round.

    Usable inside ``jit``, ``scan``, ``while_loop`` and ``cond``. It can be neither
    differentiated nor batched by ``vmap``.

    Args:
        x, weights, divisor, erasures, skip, residual, wire_dtype: as for `coded_allreduce`.
        group: as for `coded_allreduce`; or several groups with the same plan. The
            rounds made by ``bucket_bytes`` then alternate between the groups. Rounds of
            one group run one after the other, but rounds of different groups overlap.
            So on a slow network the end of one round does not delay the next round.
        bucket_bytes: start several rounds (at most 64), each with leaves of about this
            many bytes (≥ 1), a bucket. A bucket is sent as soon as its leaves are
            computed. The bucket with the last leaves comes first, as in a backward pass.
            Default: one round.
        token: the token that orders the calls instead of JAX's effects; see
            `coded_allreduce`. Pass the returned token to the next call, even if this is
            `coded_allreduce_done`.

    Returns:
        A `Handle`. With a ``token``, a `Result` with the handle and the token for the
        next call.

        The engine keeps rounds for which `coded_allreduce_done` was not called: up to
        64 rounds of a group, each with a copy of its vectors. Before it starts one more
        round, it waits for the end of the oldest round, and drops the oldest round's
        result.

    Raises:
        TypeError, ValueError, GroupClosed: as `coded_allreduce`.
        TypeError: ``bucket_bytes`` is given with an `Encoded`, which is one message.
        ValueError: ``bucket_bytes`` is not an integer ≥ 1, or makes more than 64 rounds
            of a group; ``group`` is an empty sequence; or the groups have different
            plans.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcoded
        >>> from mpi4py import MPI
        >>> group = jaxcoded.CodedGroup(MPI.COMM_SELF)
        >>> @jax.jit
        ... def step(grads, batch):
        ...     handle = jaxcoded.coded_allreduce_start(grads, group)
        ...     work = batch @ batch
        ...     return jaxcoded.coded_allreduce_done(handle, after=work), work
        >>> step(jnp.arange(3.0), jnp.eye(2))[0]
        Array([0., 1., 2.], dtype=float32)
        >>> group.close()
    """
    groups = _taking_turns(group)
    return started(
        x,
        groups,
        counted(weights, groups[0], "coded_allreduce"),
        bucket_bytes,
        divisor=divisor,
        erasures=erasures,
        skip=skip,
        residual=residual,
        wire_dtype=wire_dtype,
        token=token,
    )


def started(
    x: Any,
    groups: tuple[CodedGroup, ...],
    count: Count = NOT_COUNTED,
    bucket_bytes: int | None = None,
    *,
    divisor: Any = None,
    **asked: Any,
) -> Any:
    """Start the rounds of a sum; `prepared` explains the options."""
    with groups[0]._session.failing("coded_allreduce"):
        if not isinstance(x, Encoded):
            counts = count.examples is not None
            x = floats.of(x, groups[0], "leaf", asked.get("wire_dtype"), counts)
        buckets, structure = _buckets(x, bucket_bytes, groups)
    # all errors are detected before the first round starts
    ready = []
    for number, bucket in enumerate(buckets):
        bucket_group = groups[number % len(groups)]
        bucket_group._session.check_alike()
        with bucket_group._session.failing("coded_allreduce"):
            ready.append(
                prepared(bucket, bucket_group, count, divisor=divisor, **asked)
            )
    if divisor is not None and not isinstance(divisor, _jax_compat.Tracer):
        divisor = jnp.asarray(divisor, float)  # this accepts integers beyond int32, too
    flights, ends = [], []
    first = token = ready[0][1].token
    number_alone = (ShapedArray((), np.uint32),) if _go_on(groups) else None
    for round, operands, _ in ready:
        ends.append(
            round.step("done", results=tuple(results_of(round, operands.vectors)))
        )
        start = round.step("start", results=number_alone)
        out, token = run(start, operands._replace(token=token))
        flights.append(tuple(out))
    packings = tuple(packing for _, _, packing in ready)
    handle = Handle(
        *(tuple(flights), divisor, tuple(ends), packings, structure),
        tokened=first is not None,
    )
    return Result(handle, token=token).plain()


def coded_allreduce_done(
    handle: Handle, *, after: Any = None, token: jax.Array | None = None
) -> Any:
    """Return the result of a started `coded_allreduce`.

    Args:
        handle: the handle of `coded_allreduce_start`, which can be used once.
        after: pytree of arrays that are computed before this call waits. Pass the
            results of the computation that should hide the communication. Otherwise XLA
            may start this call before the computation, and the waiting call occupies
            one of XLA's threads.
        token: the token of the last call, if a token orders the calls.

    Returns:
        The result of `coded_allreduce`. For several rounds, the ``residual`` is the
        largest of their residuals.

    Raises:
        TypeError: ``handle`` is not a `Handle`.
        ValueError: a ``token`` is missing, or is given although the round was started
            without a token.
        GroupClosed: the group was closed before this call.
        jax.errors.JaxRuntimeError: an error during the round, as in `coded_allreduce`;
        the handle was used before; or more than 64 rounds were started after the
        handle's round.
    """
    if not isinstance(handle, Handle):
        raise TypeError(
            "handle must be the result of coded_allreduce_start (with a token, the value of that "
            f"result), got {_require.kind(handle)}"
        )
    if handle.tokened != (token is not None):
        raise ValueError(
            "calls are ordered by tokens or by effects: the round was started "
            + (
                "with a token, so pass the latest token to coded_allreduce_done, too"
                if handle.tokened
                else "without a token, so call coded_allreduce_done without a token"
            )
        )
    transports = [find(end.group) for end in handle.ends]
    token = tokens.checked(token)
    before = [jax.lax.stop_gradient(jnp.asarray(x)) for x in jax.tree.leaves(after)]
    sums: list[Any] = []
    residuals: list[jax.Array] = []
    for transport, flight, end, packing in zip(
        transports, handle.rounds, handle.ends, handle.packings
    ):
        out: Sequence[jax.Array] = flight
        if transport.most_started:
            operands, fields = placed(transport, token)
            operands = operands._replace(vectors=(flight[0], *before))
            out, token = run(dataclasses.replace(end, **fields), operands)
        total, residual = results(out, end, packing)
        sums.append(total)
        residuals += [] if residual is None else [residual]
    total = sums[0]
    if handle.structure is not None:
        leaves = [leaf for bucket in reversed(sums) for leaf in bucket]
        total = jax.tree.unflatten(handle.structure, leaves)
    total = floats.restored(total)
    if handle.divisor is not None:
        total = divided(total, handle.divisor)
    residual = jnp.stack(residuals).max(axis=0) if residuals else None
    return Result(total, residual, token).plain()


def _taking_turns(group: CodedGroup | Sequence[CodedGroup]) -> tuple[CodedGroup, ...]:
    """Check and return the groups whose rounds alternate."""
    groups = tuple(group) if isinstance(group, list | tuple) else (group,)
    if not groups:
        raise ValueError("group is an empty sequence: pass one or several groups")
    for each in groups:
        check_open(each)
    if any(each.plan != groups[0].plan for each in groups):
        raise ValueError(
            "groups whose rounds alternate must have the same plan, or parts of the gradient "
            "would be sums of different assignments: open the other groups with "
            "CodedGroup(comm, group.plan)"
        )
    # With the mpi4jax transport a round ends within the call that starts it. Then
    # several groups would gain nothing, and nothing would order the rounds of two
    # groups. So use one group.
    return groups if _go_on(groups) else groups[:1]


def _go_on(groups: Sequence[CodedGroup]) -> bool:
    """Return whether a started round progresses while its rank computes."""
    return groups[0]._session.transport.most_started > 0


def _buckets(
    x: Any, bucket_bytes: int | None, groups: tuple[CodedGroup, ...]
) -> tuple[list[Any], Any]:
    """Return the buckets in the order in which they start, with the last leaves first,
    and the pytree's structure, or ``None`` if the whole pytree is the only bucket."""
    if bucket_bytes is None:
        return [x], None
    bucket_bytes = _require.integer("bucket_bytes", bucket_bytes, 1)
    if isinstance(x, Encoded):
        raise TypeError(
            "bucket_bytes splits a pytree of arrays, but an Encoded is one message: "
            "encode parts of the gradient and start each of them"
        )
    x = converted(x, "leaf", summand)
    leaves, structure = jax.tree.flatten(x, is_leaf=floats.is_summands)
    buckets: list[list[Any]] = [[]]
    held = 0
    for leaf in reversed(leaves):
        size = sum(array.nbytes for array in jax.tree.leaves(leaf))
        if size and buckets[-1] and held + size > bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].insert(0, leaf)
        held += size
    most = len(groups) * groups[0]._session.transport.most_started
    if most and len(buckets) > most:
        raise ValueError(
            f"bucket_bytes={bucket_bytes} makes {len(buckets)} rounds, but at most {most} "
            "can be started before the first round is done: use larger buckets"
        )
    return buckets, structure
