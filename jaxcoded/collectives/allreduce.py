"""The coded collectives, for use inside and outside ``jit``."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded import _require
from jaxcoded._jax_compat import ShapedArray
from jaxcoded._warn import warn
from jaxcoded.codes._redraw import MAX_ROUNDING
from jaxcoded.collectives import floats
from jaxcoded.collectives.arguments import (
    checked_operands,
    divided_by,
)
from jaxcoded.collectives.counting import NOT_COUNTED, Count, counted
from jaxcoded.group.group import CodedGroup, check_open
from jaxcoded.plan import Plan, atoms
from jaxcoded.transport.kernels import Encoded, accumulator, divided
from jaxcoded.transport.packing import (
    Apart,
    Kind,
    Packing,
    checked_wire_dtype,
    pack,
    unpack,
)
from jaxcoded.transport.primitive import read, run
from jaxcoded.transport.registry import find
from jaxcoded.transport.result import Result
from jaxcoded.transport.round import Operands, Round

# float16 and bfloat16 round every message. If the error may exceed this fraction of the
# sum, a warning appears.
MAX_NARROW_ROUNDING = 0.125

_NAME = "coded_allreduce"
_ORDERED = ", with a token"


def coded_allreduce(
    x: Any,
    group: CodedGroup,
    weights: Any = None,
    *,
    divisor: float | jax.Array | None = None,
    erasures: jax.Array | np.ndarray | Sequence[bool] | None = None,
    skip: bool | jax.Array | None = None,
    residual: bool = False,
    wire_dtype: Any = None,
    token: jax.Array | None = None,
) -> Any:
    """Return the exact sum over the global batch, on every rank, from the ranks' coded contributions.

    Every rank passes a sum over its examples, weighted by a batch's ``weights``: the
    gradient of the weighted loss, the weighted loss itself, or both in one pytree. Each
    rank sends one message per dtype up the tree, and every parent decodes. The root
    sends the bytes of its sum down the tree, so all ranks get the same bits.
    This is CodedReduce (Reisizadeh et al. 2021, arXiv 1902.01981).

    Usable inside ``jit``, ``scan``, ``while_loop``, ``cond`` (with a predicate that is
    equal on all ranks) and ``vmap`` (one round with the stacked payload). A jvp takes one
    more round. For reverse mode, apply `spread` to the parameters. `coded_sum` supports
    both modes without `spread`.

    Args:
        x: pytree of arrays or numbers, of the same shapes and dtypes on all ranks. Complex numbers are sent as pairs.
            Integers and bools need a strategy whose coefficients are all 0 or 1. The sum of integers is exact and
            wraps around like NumPy's. The sum of bools is the number of true values. In a group with slices, ``x`` is
            the `Encoded` made by `jaxcoded.kernels.encode`.
        group: an open group. All its ranks call its collectives in the same order.
        weights: ``batch.weights`` of the `Batch` from which ``x`` was computed, or a list of the weights of several
            batches. The sum then counts the examples, too. If a rank sums another batch, all ranks get an error, as
            in `coded_value_and_grad`. ``weights`` are required, except in an uncoded group, and after a loop over
            ``group.blocks``. After such a loop, leave ``weights`` out.
        divisor: a number by which the sum is divided, such as the global batch size. All ranks pass the same number.
            Outside ``jit`` the ranks compare this number, so each new number compiles a new program. If it changes
            from call to call, divide the sum yourself. Default: no division.
        erasures: bool ``(size,)``: which ranks' messages to leave out. May be traced; equal on all ranks. Erased
            ranks must still make the call. A parent's code computes the coefficients of the remaining messages in
            float64. Do not erase late ranks: the engine does not wait for late ranks anyway.
        skip: whether this rank contributes nothing, as when it is late (`CodedGroup.lag`) and leaves out its work;
            may be traced. ``skip`` must not be true at the root, which is never late. If it is true, only the
            shapes of ``x`` are used, and this rank counts as a straggler: its numbers never enter a sum. If more
            ranks skip than a parent tolerates, the call raises `TooManyErasures` on all ranks. ``skip`` needs the
            engine.
        residual: whether to return also how far the sum is from the exact sum: ``√Σ_k
            p_k (c_k − 1)²``. Here atom ``k`` (`jaxcoded.plan.atoms`) is the part
            ``p_k`` of the batch, and ``c_k`` is its coefficient in the sum, which the
            same round measures. The residual of an exact code is 0 up to rounding. The
            plan cuts the batch into atoms as if it could be cut anywhere. If a real
            batch cannot be cut exactly so, its coefficients differ a little
            (``docs/theory.md``). With shared work the atoms are the blocks, and the
            call must follow a loop over ``group.blocks``.
        wire_dtype: ``"bfloat16"`` or ``"float16"``: float32 arrays are rounded to this
            dtype once for each message, which halves the traffic (``docs/theory.md``
            bounds the error). All other leaves are sent unchanged, including leaves
            without axes, such as a loss. For an `Encoded`, pass the ``wire_dtype`` that
            was given to `encode`.
        token: an int32 or float32 number such as ``jnp.int32(0)`` that orders this call instead of JAX's ordered
            effects. A token is faster to dispatch, see ``docs/engine.md``. Pass each call's token to the next call;
            its value is never read. In one compiled function, pass a token to all calls of a group or to none.

    Returns:
        A pytree like ``x``, or, for an `Encoded`, like the gradient that was encoded. With a ``divisor``, integers
        become floating point. With a ``residual`` or a ``token``, a `Result` with this pytree, the residual and the
        token for the next call. The residual is a float32 number, or float64 if ``x`` has float64. It is the same on
        all ranks up to its last digits.

    Raises:
        TypeError: a leaf does not consist of numbers, or has integers that the code would round; the group has
            slices and ``x`` is not `Encoded`; ``group`` is not a group; or ``weights`` are missing or not
            `Weights`.
        ValueError: ``erasures`` has a wrong shape; ``divisor`` is not positive; ``residual`` is requested for shared
            work whose sums are always exact; ``wire_dtype`` is not one of the two
            dtypes, or differs from the ``wire_dtype`` of the `Encoded`; the plan's
            amplification leaves too few digits in a dtype of ``x``; or ``skip`` is
            given without the engine.
        NotImplementedError: reverse mode is used without `spread`, with a ``token``, or
            with slices or parts.
        GroupClosed: the group was closed.
        jax.errors.JaxRuntimeError: errors during the round, on every rank, see `jaxcoded.errors.translated`. The
            text contains the name and message of the error. ``GroupMismatch``: ranks
            made different calls in this round or, with the engine, in the previous
            round. ``TooManyErasures``: the plan does not tolerate the erased ranks.
            ``GroupClosed``: the call was compiled before the group was closed.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcoded
        >>> from mpi4py import MPI
        >>> group = jaxcoded.CodedGroup(MPI.COMM_SELF)
        >>> batch = group.batch(jnp.arange(3.0))
        >>> @jax.jit
        ... def mean(batch):
        ...     total = {"x": batch.weights @ batch.data}  # over this rank's examples
        ...     return jaxcoded.coded_allreduce(total, group, batch.weights, divisor=3)
        >>> mean(batch)
        {'x': Array(1., dtype=float32)}
        >>> group.close()
    """
    check_open(group)
    return summed(
        x,
        group,
        counted(weights, group, _NAME),
        divisor=divisor,
        erasures=erasures,
        skip=skip,
        residual=residual,
        wire_dtype=wire_dtype,
        token=token,
        transposes=group._session.spreads,
    ).plain()


def coded_reduce(
    x: Any,
    group: CodedGroup,
    weights: Any = None,
    *,
    divisor: float | jax.Array | None = None,
    erasures: jax.Array | np.ndarray | Sequence[bool] | None = None,
    wire_dtype: Any = None,
    token: jax.Array | None = None,
) -> Any:
    """Return the sum of `coded_allreduce` on the root, and zeros elsewhere.

    Arguments, results and errors are those of `coded_allreduce`, but `coded_reduce`
    cannot be differentiated in reverse mode.
    """
    check_open(group)
    return summed(
        x,
        group,
        counted(weights, group, "coded_reduce"),
        name="coded_reduce",
        divisor=divisor,
        erasures=erasures,
        wire_dtype=wire_dtype,
        token=token,
        down=False,
    ).plain()


def tree_bcast(x: Any, group: CodedGroup, *, token: jax.Array | None = None) -> Any:
    """Return the root's values on every rank, sent down the tree.

    Args:
        x: pytree of arrays, numbers and random keys, of the same shapes and dtypes on
            all ranks. Only the root's values are sent. As everywhere in JAX, float64 becomes float32
            without ``jax_enable_x64``.
        group: an open group.
        token: the token that orders this call; see `coded_allreduce`.

    Returns:
        A pytree like ``x``, of JAX arrays. With a ``token``, a `Result` with this
        pytree and the token for the next call. Outside ``jit`` integers keep 64 bits
        even without ``jax_enable_x64``: integers that JAX cannot hold are returned as
        NumPy arrays. `tree_bcast` cannot be differentiated in reverse mode.

    Raises:
        TypeError: a leaf's elements are not numbers of whole bytes, such as text and
            int4.
        ValueError: an integer does not fit into 64 bits, or inside ``jit`` into JAX's
            integer dtype.
        GroupClosed, jax.errors.JaxRuntimeError: as `coded_allreduce`.

    Example:
        >>> import jaxcoded
        >>> from mpi4py import MPI
        >>> with jaxcoded.CodedGroup(MPI.COMM_SELF) as group:
        ...     jaxcoded.tree_bcast({"step": 3, "tokens": 5_000_000_000}, group)
        {'step': Array(3, dtype=int32), 'tokens': np.int64(5000000000)}
    """
    check_open(group)
    with group._session.failing("tree_bcast"):
        vectors, packing = pack(x, floats_only=False)
        operands, fields = checked_operands(group, token=token)
    round = Round(
        group._session.index,
        f"tree_bcast of {packing}{_ORDERED * (token is not None)}",
        vectors=tuple(packing.vectors),
        up=False,
        **fields,
    )
    out, token = run(round, operands._replace(vectors=vectors))
    group._session.hands_on = True
    return Result(unpack(out, packing), token=token).plain()


def summed(
    x: Any,
    group: CodedGroup,
    count: Count = NOT_COUNTED,
    *,
    divisor: Any = None,
    name: str = _NAME,
    **asked: Any,
) -> Result:
    """Return the coded sum that these arguments request; see `prepared`."""
    check_open(group)
    group._session.check_alike()
    with group._session.failing(name):
        if not isinstance(x, Encoded):
            x = floats.of(
                *(x, group, "leaf", asked.get("wire_dtype")),
                counted=count.examples is not None,
            )
        round, operands, packing = prepared(
            x, group, count, name=name, divisor=divisor, **asked
        )
    out, token = run(round, operands)
    total, residual = results(out, round, packing)
    total = floats.restored(total)
    return Result(
        total if divisor is None else divided(total, divisor), residual, token
    )


def prepared(
    x: Any,
    group: CodedGroup,
    count: Count,
    *,
    name: str = _NAME,
    divisor: Any = None,
    erasures: Any = None,
    skip: Any = None,
    residual: bool = False,
    wire_dtype: Any = None,
    token: Any = None,
    apart: Sequence[str] = (),
    words: str = "",
    **does: Any,
) -> tuple[Round, Operands, Packing]:
    """Return the round of a coded sum before it is called, its operands, and the
    packing of its result.

    Args:
        x, group, divisor, erasures, skip, residual, wire_dtype, token: as for `coded_allreduce`.
        apart: the keys of leaves that checks compare separately; see `Packing.apart`.
        words: a further text that must be equal on all ranks.
        does: other fields of the `Round`.
    """
    words = divided_by(divisor, group) + words
    operands, fields = checked_operands(
        group, divisor=divisor, erasures=erasures, skip=skip, token=token
    )
    if residual and not group.approximate:
        group.plan.strategy.refuse("residual")
    ahead, last = does.get("kind") == "part", does.get("last_part", False)
    part = does["number"] if ahead else -1 if last else None
    vectors, packing = _message(x, group, name, wire_dtype, part is not None)
    probes: tuple[jax.Array, ...] = ()
    if residual and group.plan.strategy.by_blocks:
        # 1 for each block that this rank has computed in a loop over `group.blocks`
        blocks = ShapedArray((len(group.plan.placement.holders),), np.float32)
        probe, token = read(
            "computed", group._session.transport, operands.token, blocks
        )
        operands, probes = operands._replace(token=token), (probe,)
    elif residual:
        probes = (_probe(group, vectors, part),)
    if count.vector is not None:
        counted = count.vector
        if part is not None:
            counted = counted.reshape(group.plan.parts_above[group.rank], -1)[part]
        vectors = (counted, *vectors)
    round = sum_round(
        packing,
        group,
        count,
        name=name,
        words=words,
        tokened=token is not None,
        probes=[probe.dtype for probe in probes],
        residual=residual,
        apart=apart,
        **fields,
        **does,
    )
    return round, operands._replace(vectors=(*vectors, *probes)), packing


def sum_round(
    packing: Packing,
    group: CodedGroup,
    count: Count,
    *,
    name: str = _NAME,
    words: str = "",
    tokened: bool = False,
    probes: Sequence[np.dtype] = (),
    residual: bool = False,
    apart: Sequence[str] = (),
    **fields: Any,
) -> Round:
    """Return the round that sums a pytree with this packing, followed by vectors with
    the dtypes of ``probes``.

    Raises:
        ValueError: rounding would leave too few digits.
    """
    for dtype in dict.fromkeys(packing.wires):
        _check_amplification(dtype, group.plan.amplification)
    call = f"{name} of {packing}{count.words}{words}{group._session.words}"
    call += ", with its residual" * residual + _ORDERED * tokened
    counts = [] if count.vector is None else [count.vector.dtype]
    runs: list[Apart] = []
    if group._session.transport.compares:
        runs = [Apart(0, 0, count.numbers, 1 + len(apart)) for _ in counts]
        for run_ in packing.apart(apart):
            runs.append(run_._replace(vector=run_.vector + len(counts)))
    return Round(
        group._session.index,
        call,
        vectors=(
            *(Kind(dtype, dtype) for dtype in counts),
            *packing.vectors,
            *(Kind(dtype, dtype) for dtype in probes),
        ),
        counts=bool(counts),
        residual=residual,
        apart=tuple(runs),
        examples=count.examples,
        **fields,
    )


def results(
    out: Sequence[jax.Array], round: Round, packing: Packing
) -> tuple[Any, jax.Array | None]:
    """Return the sum as a pytree, without the count of examples, which the transport
    has checked; and its residual if requested."""
    plan = find(round.group).plan
    residual = residual_of(plan, out[-1]) if round.residual else None
    total = unpack(out[round.counts : len(out) - round.residual], packing)
    return total, residual


def _probe(
    group: CodedGroup, vectors: Sequence[jax.Array], number: int | None
) -> jax.Array:
    """Return `atoms.probe` of this rank, or the part ``number`` of this vector."""
    probe = atoms.probe(group.plan, group.rank)
    if number is not None:
        probe = probe.reshape(group.plan.parts_above[group.rank], -1)[number]
    dtype = np.result_type(np.float32, *(accumulator(v.dtype) for v in vectors))
    return jnp.asarray(probe, dtype)


def residual_of(plan: Plan, measured: jax.Array) -> jax.Array:
    """Return the residual of a sum from its measured coefficients."""
    exact, weights = atoms.deviation(plan)
    wrong = measured - exact.astype(measured.dtype)
    square = jnp.sum(weights.astype(measured.dtype) * wrong**2, axis=-1)
    # The square root has no derivative at 0. Define the derivative as 0 there, since
    # NaN would spread.
    exactly = square == 0
    return jnp.where(exactly, 0, jnp.sqrt(jnp.where(exactly, 1, square)))


def _message(
    x: Any, group: CodedGroup, name: str, wire_dtype: Any, one_part: bool
) -> tuple[tuple[jax.Array, ...], Packing]:
    """Return this rank's message, or one part of it, and the gradient's packing."""
    plan = group.plan
    if isinstance(x, Encoded):
        parts = 1 if one_part else plan.parts_above[group.rank]
        expected = parts, plan.slices_above[group.rank]
        multiple = plan.padding_multiple
        if (x.parts, x.slices, x.multiple) != (*expected, multiple):
            raise ValueError(
                f"rank {group.rank} of this group sends parts={expected[0]}, "
                f"slices={expected[1]}, multiple={multiple}, but this message was encoded "
                f"with parts={x.parts}, slices={x.slices}, "
                f"multiple={x.multiple}: use this group's batches and "
                "encode(..., multiple=group.plan.padding_multiple)"
            )
        wanted = checked_wire_dtype(wire_dtype)
        if wanted not in (None, x.packing.wire_dtype):
            raise ValueError(
                f"this message was encoded with wire_dtype={x.packing.wire_dtype}, "
                f"not {wanted}: encode chooses the leaves to which it applies, use "
                f"encode(..., wire_dtype={wanted.name!r})"
            )
        return x.vectors, x.packing
    if plan.encoded:
        raise TypeError(
            f"this group has slices or parts ({plan.strategy!r}): its "
            f"messages are not one weighted gradient, so {name} takes the result of "
            f"jaxcoded.kernels.encode, not {_require.kind(x)}; "
            "coded_value_and_grad encodes and sums"
        )
    return pack(x, wire_dtype=wire_dtype)


def _check_amplification(dtype: np.dtype, amplification: float) -> None:
    """Raise an error if rounding makes sums useless; warn if it leaves few digits."""
    rounding = amplification * float(jnp.finfo(accumulator(dtype)).eps)
    remedy = "use fractional repetition, fewer stragglers, a smaller fan-out or a wider dtype"
    if rounding > MAX_ROUNDING:
        raise ValueError(
            f"the plan's amplification kappa = {amplification:.1e} lets rounding in "
            f"{accumulator(dtype)} grow to {rounding:.1e} of the sum, more than "
            f"{MAX_ROUNDING:.0e}: {remedy}"
        )
    narrow = amplification * float(jnp.finfo(dtype).eps)
    if dtype != accumulator(dtype) and narrow > MAX_NARROW_ROUNDING:
        warn(
            f"messages in {dtype} with the plan's amplification "
            f"kappa = {amplification:.1e} may be off by {narrow:.0%} of the sum: {remedy}"
        )
