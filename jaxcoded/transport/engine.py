"""The tree on the engine: a parent goes on as soon as its code can decode.

The engine is a C++ extension with a progress thread, see ``docs/engine.md``. Here it is
opened for a group, and its calls become JAX primitives.
"""

import atexit
import contextlib
import copy
import dataclasses
import functools
import hashlib
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.ffi import ffi_lowering, register_ffi_target
from jax.interpreters import ad, batching, mlir, xla
from mpi4py import MPI

from jaxcoded import _jax_compat, errors
from jaxcoded.codes import GradientCode
from jaxcoded.plan import Plan
from jaxcoded.transport import ending, one_device, primitive
from jaxcoded.transport.agreement import on_all
from jaxcoded.transport.base import Collective, Transport
from jaxcoded.transport.following import follow
from jaxcoded.transport.options import Options
from jaxcoded.transport.packing import Apart
from jaxcoded.transport.primitive import NO_EXTRAS, Extras

_why_missing = ""
try:
    from jaxcoded.transport import _engine
except ImportError as error:  # not built, or built for another MPI or Python
    _why_missing = str(error)

logger = logging.getLogger("jaxcoded")

_DONE, _FAILED, _DESYNCHRONIZED = 1, 2, 3
_DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}
_BYTES = 0
# How much longer a rank waits for its children than they do for theirs.
_GIVE_UP_SECONDS = 0.5
# At the end of the process, ranks that still lack results get them for so long.
_EXIT_SECONDS = 5.0


def missing() -> str:
    """Why the engine cannot be used in this process, in words; empty if it can."""
    if _why_missing:
        return f"the engine is not built ({_why_missing})"
    built_for, loaded = _engine.mpi_library(), MPI.Get_library_version()
    if _release(built_for) != _release(loaded):
        return (
            f"the engine was built for {_release(built_for)}, but mpi4py uses "
            f"{_release(loaded)}: build it again with this MPI's mpicc on the PATH"
        )
    if not _engine.thread_multiple():
        return (
            "MPI was initialised without MPI_THREAD_MULTIPLE, which the engine's "
            "progress thread needs (mpi4py.rc.thread_level)"
        )
    try:
        _engine.start()
    except RuntimeError as error:
        return f"the engine cannot start: {error}"
    backend = jax.default_backend()
    if backend == "cpu":
        return ""
    if backend != "gpu":
        return f"the engine runs on CPUs and NVIDIA's GPUs, not on {backend}"
    why = _engine.load_cuda("")
    return f"the engine cannot use the GPU: {why}" if why else ""


def _release(version: str) -> str:
    """Name and number of an MPI, out of what it says about itself."""
    return " ".join(version.partition("\n")[0].partition(",")[0].split())


class Engine(Transport):
    """The transport of one group. Collective.

    Args:
        index: of the group; never used again.
        comm: the group's communicator.
        plan: the group's plan.
        options: how it makes its rounds, complete.
    """

    can_lag = True
    takes_tokens = True
    takes_parts = True

    def __init__(
        self,
        index: int,
        comm: MPI.Intracomm,
        plan: Plan,
        options: Options,
    ) -> None:
        self._index, self._plan, self._rank = index, plan, comm.rank
        self._debug = bool(options.debug)
        # a handler for a GPU holds up the thread that fills the stream, so that there
        # is nothing to gain from a round that goes on by itself
        on_cpu = jax.default_backend() == "cpu"
        self.most_started = _engine.most_started if on_cpu else 0
        self._height = _height(plan, comm.rank)
        limits = _engine.Limits()
        assert options.piece_bytes is not None
        limits.piece_bytes = options.piece_bytes
        limits.history_bytes = options.history_bytes
        limits.history_most = max(limits.history_most, options.history_bytes)
        limits.telemetry_rounds = options.telemetry_rounds
        waits = options.waits
        limits.on_deadline = getattr(_engine.OnDeadline, waits.action)
        limits.deadline_seconds = waits.seconds
        limits.deadline_rounds = waits.rounds
        limits.deadline_share = _deadline_share(plan, comm.rank)
        cards = on_all(comm, _introduce, undo=_engine.forget)
        _engine.let_read(cards)  # on all ranks before any gets any further
        # every rank draws the same session: old messages are told from new ones by it
        session = comm.bcast(_random())
        self._serial, self._own = _communicator(comm)
        try:
            on_all(
                comm,
                lambda: _engine.open(
                    index,
                    self._own.py2f(),
                    session,
                    cards,
                    _family(plan, comm.rank),
                    _decoder(plan, comm.rank, self._debug),
                    limits,
                    _erasures(plan),
                    waits.action == "wait",
                ),
                undo=lambda _: _engine.discard(index),
            )
        except errors.CodedError:
            _engine.forget(cards[comm.rank])
            self._put_back()
            raise
        _engine.enter(self._own.py2f(), plan.root, ending.SILENT_SECONDS)
        _open[index] = self

    def carry(
        self,
        collective: Collective,
        vectors: Sequence[jax.Array],
        extras: Extras = NO_EXTRAS,
        token: jax.Array | None = None,
        *,
        last_part: bool = False,
    ) -> tuple[Sequence[jax.Array], jax.Array | None]:
        plan, rank = self._plan, self._rank
        # a parent joins slices and parts one after the other, whatever the batch: they
        # come first
        moved = [
            jnp.moveaxis(v, -1, 0) if v.ndim > 1 and plan.encoded else v
            for v in vectors
        ]
        shapes = []
        for v, vector in zip(moved, vectors):
            length = vector.shape[-1]
            if last_part:
                length *= plan.slices_above[rank]
            elif collective.up:
                length = plan.result_length(rank, length)
            batch = v.shape[1:] if v is not vector else v.shape[:-1]
            shapes.append((length, *batch) if v is not vector else (*batch, length))
        out, token = _bind(
            "jaxcoded_round",
            [*jax.tree.leaves(extras), *moved],
            [ShapedArray(shape, v.dtype) for shape, v in zip(shapes, moved)],
            token,
            collective,
            group=self._index,
            up=int(collective.up),
            down=int(collective.down),
            parts=1 if last_part or not collective.up else plan.parts_above[rank],
            begun=int(last_part),
            skips=int(extras.skip is not None),
            erases=int(extras.erasures is not None),
            apart=_stacked(collective.apart, vectors, plan.encoded),
            examples=collective.examples or (),
        )
        return [
            jnp.moveaxis(o, 0, -1) if v is not vector else o
            for o, v, vector in zip(out, moved, vectors)
        ], token

    def begin(
        self,
        collective: Collective,
        vectors: Sequence[jax.Array],
        number: int,
        extras: Extras = NO_EXTRAS,
        token: jax.Array | None = None,
    ) -> jax.Array | None:
        skips = [] if extras.skip is None else [extras.skip]
        return _bind(
            "jaxcoded_part",
            [*skips, *vectors],
            [],
            token,
            collective,
            group=self._index,
            parts=self._plan.parts_above[self._rank],
            number=number,
            slices=self._plan.slices_above[self._rank],
            skips=len(skips),
            apart=_flat(collective.apart),
        )[1]

    def start(
        self,
        collective: Collective,
        vectors: Sequence[jax.Array],
        extras: Extras = NO_EXTRAS,
        token: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        plan, rank = self._plan, self._rank
        (number,), token = _bind(
            "jaxcoded_start",
            [*jax.tree.leaves(extras), *vectors],
            [ShapedArray((), np.uint32)],
            token,
            collective,
            group=self._index,
            parts=plan.parts_above[rank],
            slices=plan.slices_above[rank],
            skips=int(extras.skip is not None),
            erases=int(extras.erasures is not None),
            apart=_flat(collective.apart),
        )
        return number, token

    def finish(
        self,
        number: jax.Array,
        results: Sequence[ShapedArray],
        after: Sequence[jax.Array],
        token: jax.Array | None,
    ) -> tuple[Sequence[jax.Array], jax.Array | None]:
        return _bind(
            "jaxcoded_done", [number, *after], results, token, group=self._index
        )

    def check_sum(self, dtype: np.dtype) -> None:
        if dtype.name not in _DTYPES:
            raise TypeError(
                f"the engine sums {', '.join(_DTYPES)}, not {dtype}: cast it"
            )

    def lag(self, token: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        (lag,), token = _bind(
            "jaxcoded_lag", [], [ShapedArray((), np.int32)], token, group=self._index
        )
        return lag, token

    def host_lag(self) -> int:
        return self._ask("lag")

    def rounds(self) -> int:
        return self._ask("next_round") - 1

    def note_failure(self, words: str) -> None:
        self._ask("note_failure", words)

    def close(self, seconds: float) -> list[int]:
        # ranks below give up first, and say whom
        absent = self._ask("close", seconds + self._patience)
        _open.pop(self._index, None)
        if not absent:
            self._put_back()
        return absent

    def _put_back(self) -> None:
        """Nothing is on its way in the communicator: the next group may have it."""
        with _idle_lock:
            _idle[self._serial] = self._own

    @property
    def _patience(self) -> float:
        """Seconds for which a rank waits longer than those below it, who then say
        whom they have given up."""
        return _GIVE_UP_SECONDS * self._height

    def abandon(self, error: BaseException) -> None:
        self._ask("abandon", ending.in_words(error))

    def host_round(
        self,
        collective: Collective,
        vectors: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        extras: Extras = NO_EXTRAS,
    ) -> None:
        signature, erased = collective.signature, extras.erasures
        outcome, text = self._ask(
            "run",
            _fingerprint(signature) % 2**64,
            signature,
            collective.up,
            collective.down,
            bool(extras.skip),
            [] if erased is None else np.asarray(erased, bool).tolist(),
            [_vector(v) for v in vectors],
            [_vector(v) for v in results],
        )
        if outcome != _DONE:
            raise _error(outcome, text)

    def broadcast(self, words: str, array: np.ndarray) -> np.ndarray:
        out = np.empty_like(array)
        self.host_round(Collective(words, up=False), [array], [out])
        return out

    def replanned(self, index: int, plan: Plan) -> "Engine":
        children = list(plan.coded_children(self._rank))
        decoder = _decoder(plan, self._rank, self._debug)
        self._ask("replan", index, children, decoder, _erasures(plan))
        other = _open[index] = copy.copy(_open.pop(self._index))
        other._index, other._plan = index, plan
        return other

    def telemetry(self) -> dict[str, list[Any]]:
        return self._ask("telemetry")

    def reports(self) -> Callable[[], tuple[Any, ...] | None]:
        reports = self._ask("reports")
        return lambda: _engine.next_report(reports)

    def keep_state(self, state: np.ndarray) -> None:
        self._ask("keep_state", state.ctypes.data, state.nbytes)

    def fetch_state(self, seconds: float) -> tuple[int, bytes]:
        round_ = self._ask("fetch_state", seconds)
        return round_, self._ask("state") if round_ else b""

    def resume(self) -> None:
        self._ask("resume")

    def statistics(self) -> dict[str, Any]:
        names = ("history_bytes", "memory_bytes", "fetched_bytes")
        return {name: self._ask(name) for name in names}

    def status(self) -> str:
        """Where this rank stands, for whoever looks for the cause of a hang."""
        return self._ask("status")

    def _ask(self, name: str, *args: Any) -> Any:
        try:
            return getattr(_engine, name)(self._index, *args)
        except _engine.Closed as error:
            raise _error(_FAILED, str(error)) from None


# What the engine is told about a rank.


def _introduce() -> Any:
    _register()
    return _engine.introduce()


# Communicators of groups that were closed, for the next group of the same ranks. They
# are never freed: a message to a rank that has left may still be on its way, and MPI
# would take it for one of the next communicator with that number. In the same
# communicator it is recognised by its session.
_idle: dict[int, MPI.Intracomm] = {}
_idle_lock = threading.Lock()


def _communicator(comm: MPI.Intracomm) -> tuple[int, MPI.Intracomm]:
    """A communicator of the ranks of ``comm`` for the engine alone, and its serial
    number. Collective."""
    # taken out while the ranks agree: another thread's ranks may be looking, too
    with _idle_lock:
        mine = {
            serial: _idle.pop(serial)
            for serial, each in list(_idle.items())
            if MPI.Comm.Compare(each, comm) == MPI.CONGRUENT
        }
    common = set(mine).intersection(*comm.allgather(list(mine)))
    taken = min(common, default=None)
    found = None if taken is None else (taken, mine.pop(taken))
    with _idle_lock:
        _idle.update(mine)
    return found or (comm.bcast(_random()), comm.Dup())


def _random() -> int:
    return int(np.random.default_rng().integers(1, 2**62))


def _height(plan: Plan, rank: int) -> int:
    """Layers below a rank."""
    heights = [0] * plan.size
    for below in reversed(plan.tree.order):
        above = plan.tree.parents[below]
        if above >= 0:
            heights[above] = max(heights[above], heights[below] + 1)
    return heights[rank]


def _deadline_share(plan: Plan, rank: int) -> float:
    """Deadlines of parents further down are earlier, so that they are heard in time."""
    return _height(plan, rank) / max(_height(plan, plan.root), 1)


def _family(plan: Plan, rank: int) -> Any:
    tree = plan.tree
    ancestors = []
    above = tree.parents[rank]
    while above >= 0:
        ancestors.append(above)
        above = tree.parents[above]
    children = list(plan.coded_children(rank))
    descendants = list(children)
    for below in descendants:  # grows while it is walked
        descendants.extend(tree.children[below])
    return _engine.Family(rank, ancestors, children, descendants)


def _decoder(plan: Plan, rank: int, debug: bool = False) -> Any:
    coding = plan.codings[rank]
    if coding is None:
        return _engine.Decoder()
    code = coding.code
    decoder = _decoder_of(code)
    if debug:
        checks = code.parity_checks if rank in plan.checked else code.parity_checks[:0]
        decoder.check(checks.tolist())
    return decoder


def _decoder_of(code: GradientCode) -> Any:
    return _engine.Decoder(code.B, code.parts, code.stragglers, code.decoding)


def _erasures(plan: Plan) -> Any:
    decoders = {it.code: _decoder_of(it.code) for it in plan.codings if it is not None}
    parents = [
        (rank, list(plan.coded_children(rank)), decoders[coding.code])
        for rank in plan.tree.order
        if (coding := plan.codings[rank]) is not None
    ]
    return _engine.Erasures(plan.root, parents)


def _report(overdue: tuple[int, str]) -> None:
    logger.warning("group %d, %s", *overdue)


def _fingerprint(words: str) -> int:
    digest = hashlib.sha256(words.encode()).digest()
    return int.from_bytes(digest[:8], signed=True)


def _flat(apart: Sequence[Apart]) -> tuple[int, ...]:
    return tuple(number for each in apart for number in each)


def _stacked(
    apart: Sequence[Apart], vectors: Sequence[jax.Array], encoded: bool
) -> tuple[int, ...]:
    """The same in vectors that are stacked: one after the other, or, `encoded`, behind
    their own axis."""
    out = []
    for vector, first, count, kind in apart:
        *batch, length = vectors[vector].shape
        number = math.prod(batch)
        if encoded:
            out.append(Apart(vector, first * number, count * number, kind))
        else:
            out += [
                Apart(vector, first + each * length, count, kind)
                for each in range(number)
            ]
    return _flat(out)


def _vector(array: np.ndarray) -> tuple[int, int, int]:
    code = _DTYPES.get(array.dtype.name, _BYTES)
    return code, array.size if code else array.nbytes, array.ctypes.data


def _error(outcome: int, text: str) -> Exception:
    if outcome == _DESYNCHRONIZED:
        return errors.Desynchronized(text)
    kind, _, words = text.partition(": ")
    return getattr(errors, kind, errors.CodedError)(words or text)


# What compiled programs call.


@functools.cache
def _register() -> None:
    for platform, prefix in (("cpu", ""), ("CUDA", "cuda_")):
        for name in ("round", "part", "lag"):
            handler = getattr(_engine, f"{prefix}{name}_handler")
            register_ffi_target(f"jaxcoded_{name}", handler, platform=platform)
    for name in ("start", "done"):
        handler = getattr(_engine, f"{name}_handler")
        register_ffi_target(f"jaxcoded_{name}", handler, platform="cpu")
    follow(_engine.next_overdue, _report, "jaxcoded log")
    # at exit the engine stops first: what is registered later runs earlier
    ending.register()
    atexit.register(_stop)


_process = os.getpid()
# Groups that were not closed, by index.
_open: dict[int, Engine] = {}


def _stop() -> None:
    if os.getpid() != _process:
        return  # a fork, in which nothing of the engine runs
    patience = max((group._patience for group in _open.values()), default=0.0)
    error = ending.uncaught()
    failure = "" if error is None else ending.in_words(error)
    if _engine.stop(_EXIT_SECONDS + patience, failure, ending.status()):
        ending.engine_ends_the_job()


call_p = Primitive("coded_engine_call")
call_p.multiple_results = True
call_p.def_impl(functools.partial(xla.apply_primitive, call_p))


def _bind(
    target: str,
    operands: Sequence[jax.Array],
    results: Sequence[ShapedArray],
    token: jax.Array | None,
    collective: Collective | None = None,
    **attributes: int | tuple[int, ...] | tuple[float, ...],
) -> tuple[list[jax.Array], jax.Array | None]:
    """Call the engine, in the order of the rounds or of the token."""
    tokens = [] if token is None else [token]
    out = call_p.bind(
        *tokens,
        *operands,
        target=target,
        results=tuple(results),
        tokened=bool(tokens),
        collective=collective,
        attributes=tuple(attributes.items()),
    )
    return (out, None) if token is None else (out[1:], out[0])


@call_p.def_effectful_abstract_eval
def _abstract_eval(
    *avals: Any, target: str, results: Any, tokened: bool, **_: Any
) -> Any:
    if tokened:
        return [ShapedArray(avals[0].shape, avals[0].dtype), *results], set()
    return list(results), {primitive.ORDER}


def _attribute(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return np.array(value, np.float64 if name == "examples" else np.int64)
    return np.int64(value)


def _lowering(
    ctx: Any,
    *operands: Any,
    target: str,
    results: Any,
    tokened: bool,
    collective: Collective | None,
    attributes: Any,
) -> Any:
    one_device.check(ctx)
    values = {name: _attribute(name, value) for name, value in attributes}
    if collective is not None:
        values["words"] = collective.signature
        values["fingerprint"] = np.int64(_fingerprint(collective.signature))

    def lower(ctx: Any, *operands: Any) -> Any:
        """With what gives the order in front of the operands and the results."""
        # A result lies where its operand was, where XLA may: the caller donated it, or
        # it is a temporary.
        extras = len(ctx.avals_in) - len(ctx.avals_out)
        aliases = {
            i + extras: i
            for i, out in enumerate(ctx.avals_out[1:], 1)
            if target == "jaxcoded_round"
            and (ctx.avals_in[i + extras].shape, ctx.avals_in[i + extras].dtype)
            == (out.shape, out.dtype)
        }
        if tokened:
            aliases[0] = 0
        rule = ffi_lowering(
            target, has_side_effect=True, operand_output_aliases=aliases
        )
        return rule(ctx, *operands, **values)

    if tokened:
        return lower(ctx, *operands)
    return _jax_compat.lower_in_order(ctx, primitive.ORDER, lower, operands)


mlir.register_lowering(call_p, _lowering, platform="cpu")
with contextlib.suppress(NotImplementedError):  # a JAX that knows of no CUDA
    mlir.register_lowering(call_p, _lowering, platform="cuda")


def _batch(
    operands: Sequence[Any],
    axes: Sequence[Any],
    *,
    target: str,
    results: Any,
    tokened: bool,
    collective: Collective,
    attributes: Any,
) -> tuple[Any, Any]:
    """One part of the stacked payload, as `Engine.carry` stacks it: behind the vector's
    own axis, the outermost batch first."""
    if target == "jaxcoded_done":
        raise NotImplementedError(
            "coded_allreduce_done cannot be batched by vmap: a handle is of one round"
        )
    if tokened:
        raise NotImplementedError("a call with a token cannot be batched by vmap")
    assert target == "jaxcoded_part"
    size = next(
        operand.shape[axis] for operand, axis in zip(operands, axes) if axis is not None
    )
    values = dict(attributes)
    runs = np.reshape(values["apart"], (-1, 4)) * [1, size, size, 1]
    values["apart"] = tuple(runs.astype(int).reshape(-1).tolist())
    skips = values["skips"]
    vectors = [
        jnp.moveaxis(batching.bdim_at_front(vector, axis, size), 0, 1)
        for vector, axis in zip(operands[skips:], axes[skips:])
    ]
    out = call_p.bind(
        *operands[:skips],
        *vectors,
        target=target,
        results=results,
        tokened=tokened,
        collective=dataclasses.replace(collective, batch=(size, *collective.batch)),
        attributes=tuple(values.items()),
    )
    return out, []


batching.primitive_batchers[call_p] = _batch


def _transpose(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "coded_allreduce_start cannot be differentiated: use coded_allreduce"
    )


ad.primitive_transposes[call_p] = _transpose
