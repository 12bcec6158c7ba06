"""The transport with the engine: a parent continues as soon as its code can decode.

The engine is a C++ extension with a progress thread; see ``docs/engine.md``. This
module opens the engine for a group, and calls it.
"""

import atexit
import contextlib
import copy
import functools
import logging
import os
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Self

import numpy as np
from mpi4py import MPI

from jaxcoded import _jax_compat, _own_process, errors
from jaxcoded.codes import GradientCode
from jaxcoded.plan import Plan
from jaxcoded.transport import devices, ending, engine_call, extension, registry
from jaxcoded.transport.agreement import Unreadable, broadcast, gathered, on_all
from jaxcoded.transport.base import Transport
from jaxcoded.transport.check import DEBUG, Check
from jaxcoded.transport.devices import Devices
from jaxcoded.transport.following import follow
from jaxcoded.transport.leaves import SUMMED
from jaxcoded.transport.options import Options
from jaxcoded.transport.pieces import pieces
from jaxcoded.transport.round import Round, fingerprint

_why_missing = ""
try:
    extension.load()
    from jaxcoded.transport import _engine
except ImportError as error:
    _why_missing = str(error)

logger = logging.getLogger("jaxcoded")

# A round with shared work: its number, the call's description, and for each rank the
# blocks that it has computed, in order.
Dealt = tuple[int, str, list[list[int]]]

_DONE, _FAILED, _DESYNCHRONIZED = 1, 2, 3
_DTYPES = {np.dtype(name): 1 + i for i, name in enumerate(SUMMED)}
_BYTES = 0
_STATISTICS = (
    *("history_bytes", "memory_bytes", "fetched_bytes"),
    *("formed_bytes", "compared_rounds"),
)
# How many seconds longer a rank waits for its children than the children wait for their
# own children.
_GIVE_UP_SECONDS = 0.5
# Without a deadline in seconds, the log names a child that makes no call for this many
# seconds.
_STUCK_SECONDS = 10.0
# For how many seconds, at the end of the process, other ranks can still get missing
# results.
_EXIT_SECONDS = 5.0


def missing() -> str:
    """Return why the engine cannot be used in this process, or an empty text."""
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
    try:
        backend = _jax_compat.default_backend()
    except Exception as error:  # noqa: BLE001  # a broken driver may raise any error
        return f"JAX does not start: {type(error).__name__}: {error}"
    if backend == "cpu":
        return ""
    if backend != "gpu":
        return f"the engine runs on CPUs and NVIDIA's GPUs, not on {backend}"
    why = _engine.load_cuda("")
    return f"the engine cannot use the GPU: {why}" if why else ""


def sources() -> str:
    """Return a digest of the engine's C++ sources. Call this only if `missing` returns
    an empty text."""
    return _engine.sources[:12]


def fault_tolerant() -> bool:
    """Return whether the engine is built and MPI survives a rank's death (ULFM)."""
    return not _why_missing and _engine.fault_tolerant()


def join() -> None:
    """Record that this process joins a job, or lets other processes join. Then, at the
    end of this process, MPI does not disconnect the communicators that old and new
    processes share, since it would wait for all ranks of these communicators.
    """
    _engine.join()


def _release(version: str) -> str:
    """Return the name and version number of an MPI, from its version text."""
    return " ".join(version.partition("\n")[0].partition(",")[0].split())


class Engine(Transport):
    """The transport of one group that uses the engine. Collective. ``options`` is a
    result of `Options.complete`."""

    name = "engine"
    can_lag = True
    refuses_miscounts = True
    takes_tokens = True
    takes_parts = True

    def __init__(
        self, index: int, comm: MPI.Intracomm, plan: Plan, options: Options
    ) -> None:
        self.index, self.plan, self.rank = index, plan, comm.rank
        # With shared work, ranks do not send surplus messages that a parent could
        # compare.
        self.compares = bool(options.check) and not plan.strategy.by_blocks
        # On a GPU the handler blocks the thread that fills the stream, so a program
        # would gain nothing by starting rounds early.
        on_cpu = _jax_compat.default_backend() == "cpu"
        self.most_started = _engine.most_started if on_cpu else 0
        self._height = _height(plan, comm.rank)
        limits = _engine.Limits()
        cut = pieces(comm, plan, options)
        limits.piece_bytes = cut.bytes
        limits.sections_from = cut.sections_from
        limits.section_pieces = cut.of_sections
        _fit_messages(limits, plan)
        limits.history_bytes = options.history_bytes
        limits.history_most = max(limits.history_most, options.history_bytes)
        limits.telemetry_rounds = options.telemetry_rounds
        waits = options.waits
        limits.on_deadline = getattr(_engine.OnDeadline, waits.action)
        limits.deadline_seconds = waits.seconds
        limits.deadline_rounds = waits.rounds
        limits.stuck_seconds = (waits.waits_on and waits.seconds) or _STUCK_SECONDS
        limits.deadline_share = _deadline_share(plan, comm.rank)
        compare(limits, options.check)
        cards = on_all(comm, _introduce, undo=_engine.forget)

        def let_read() -> Any:
            _engine.let_read(cards)
            return cards[comm.rank]

        on_all(comm, let_read, undo=_engine.forget)  # no rank continues before this
        # All ranks get the same random session number, which distinguishes the group's
        # messages from messages of earlier groups.
        session = broadcast(comm, _random())
        self._serial, self._own = _communicator(comm)
        try:
            on_all(
                comm,
                lambda: _engine.open(
                    index,
                    self._own.py2f(),
                    session,
                    cards,
                    _family(plan, comm.rank, cut.delegating),
                    _decoder(plan, comm.rank, self.compares),
                    limits,
                    _erasures(plan),
                    waits.waits_on,
                    plan.placement.holders,
                ),
                undo=lambda _: _engine.discard(index),
            )
        except errors.CodedError as error:
            _engine.forget(cards[comm.rank])
            if not isinstance(error, Unreadable):
                # no rank still uses the communicator
                self._put_back()
            raise
        registry.add(self)

    def enter(self) -> None:
        """Begin to work. All ranks must have opened this transport. From now on a rank
        that ends reports its end."""
        root = self.plan.root
        if self._own.size > 1:
            _own_process.in_group = True
        _engine.enter(self._own.py2f(), root, ending.SILENT_SECONDS)

    def devices(self, token: Any) -> Devices | None:
        program_devices = devices.of_program()
        if program_devices is None:
            return None
        if token is None:
            raise ValueError(
                "inside shard_map over several devices JAX keeps no order of effects: order the "
                f"calls by a token, as token=jnp.int32(0); {devices.REMEDY}"
            )
        if why := self.plan.strategy.why_not_split(self.plan):
            raise ValueError(
                f"{why}: on several devices take a code with one part and slices=1, such as "
                "Coded(stragglers=1)"
            )
        return program_devices

    def lower(
        self, ctx: Any, operands: Sequence[Any], round: Round, platform: str | None
    ) -> Any:
        return engine_call.lower(ctx, operands, round, self.plan, self.rank, platform)

    def host_lag(self) -> int:
        return self._ask("lag")

    def rounds(self) -> int:
        return self._ask("next_round") - 1

    def note_failure(self, words: str) -> None:
        self._ask("note_failure", words)

    def close(self, seconds: float) -> list[int]:
        # Ranks further down give up first, and name the absent ranks.
        absent = self._ask("close", seconds + self._patience)
        if not absent:
            self._put_back()
        return absent

    def _put_back(self) -> None:
        """Keep the communicator for the next group, since it has no messages in
        transit."""
        with _idle_lock:
            _idle[self._serial] = self._own

    @property
    def _patience(self) -> float:
        """Return how many seconds longer a rank waits than the ranks below it. In this
        time these ranks can report the ranks for which they no longer wait.
        """
        return _GIVE_UP_SECONDS * self._height

    def abandon(self, error: BaseException) -> None:
        self._ask("abandon", ending.in_words(error))
        _abandoned.append(self)

    def broadcast(self, words: str, array: np.ndarray) -> np.ndarray:
        out = np.empty_like(array)
        self.host_round(Round(self.index, words, up=False), [array], [out])
        return out

    def computes_with(self, eps: Callable[[], float]) -> None:
        if self.compares:
            self._ask("computes_with", eps())

    def replanned(self, index: int, plan: Plan) -> Self:
        children = list(plan.coded_children(self.rank))
        decoder = _decoder(plan, self.rank, self.compares)
        self._ask("replan", index, children, decoder, _erasures(plan))
        registry.remove(self.index)
        other = copy.copy(self)
        other.index, other.plan = index, plan
        registry.add(other)
        return other

    @classmethod
    def of(cls, transport: Transport, needed: str) -> Self:
        """Return the transport if it is an engine; otherwise raise a
        NotImplementedError. ``needed`` is a text that says which calls need an engine.
        """
        if isinstance(transport, cls):
            return transport
        raise NotImplementedError(f'{needed} a group with transport="engine"')

    def host_round(
        self,
        round: Round,
        vectors: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        skip: bool = False,
        erasures: np.ndarray | None = None,
    ) -> None:
        """Carry out a round on NumPy arrays, without XLA, and write the ``results``. Rounds
        that JAX's effects order, and that are still pending, come first.
        """
        _jax_compat.effects_barrier()
        own = [_vector(v) for v in vectors]
        outcome = self._ask(
            "run",
            round.fingerprint % 2**64,
            round.signature,
            round.up,
            round.down,
            bool(skip),
            [] if erasures is None else np.asarray(erasures, bool).tolist(),
            own,
            [a if v is w else _vector(w) for a, v, w in zip(own, vectors, results)],
            round.examples or (0.0, 0.0),
        )
        _check(*outcome)

    # Shared work.

    def take_block(
        self, words: str, *, first: bool, costs: Sequence[float] = ()
    ) -> int | None:
        """Return the number of the next block to compute. The round of this call only
        divides the blocks; the next round sums the ranks' vectors. Return ``None`` once
        all blocks are computed; then call `end_of_blocks`. ``words`` must be equal on all
        ranks. ``costs`` has the cost of each block, > 0 and about 1; without costs, all
        blocks cost the same.
        """
        number = fingerprint(words) % 2**64 if first else 0
        arguments = (words, first, list(costs)) if first else ("", first, [])
        return self._ask("take", number, *arguments)

    def end_of_blocks(self) -> None:
        _check(*self._ask("end_of_blocks"))

    def leave_blocks(self) -> None:
        """Take no more blocks. Other ranks compute the blocks of this rank."""
        self._ask("leave_share")

    def record(self) -> Callable[[], Dealt | None]:
        """Return, on the root, a function that waits for the next round with shared
        work. The function returns which rank computed which blocks. After the last
        round it returns ``None``.
        """
        reports, members = self._ask("record"), self._members

        def following() -> Dealt | None:
            if (dealt := _engine.next_dealt(reports)) is None:
                return None
            number, call, division = dealt
            of = dict(zip(members, division))
            return number, call, [of.get(rank, []) for rank in range(self.plan.size)]

        return following

    def replay(self, rounds: Sequence[Dealt]) -> None:
        """On the root, divide the work of the next rounds as in these rounds. A round
        that differs from these rounds raises an error."""
        members = self._members
        divided = [(n, call, [of[rank] for rank in members]) for n, call, of in rounds]
        self._ask("replay", divided)

    @property
    def _members(self) -> list[int]:
        """Return the ranks of the family that shares its work: this rank, the root, and
        its children, in the ledger's order."""
        return [self.rank, *self.plan.coded_children(self.rank)]

    # Telemetry.

    def telemetry(self) -> dict[str, list[Any]]:
        """Return the records of the latest rounds, by name."""
        return self._ask("telemetry")

    def reports(self) -> Callable[[], tuple[Any, ...] | None]:
        """Return a function that waits for a round and returns its record. It returns
        ``None`` after the last round."""
        reports = self._ask("reports")
        return lambda: _engine.next_report(reports)

    def statistics(self) -> dict[str, Any]:
        return {name: self._ask(name) for name in _STATISTICS}

    def status(self) -> str:
        """Return the state of this rank, to find the cause of a hang."""
        return self._ask("status")

    # Snapshots.

    def keep_state(self, state: np.ndarray) -> None:
        """Keep a copy of these bytes as this rank's snapshot."""
        self._ask("keep_state", state.ctypes.data, state.nbytes)

    def fetch_state(self, seconds: float) -> tuple[int, bytes]:
        """Return the round of the nearest ancestor's snapshot, and the snapshot's bytes.
        The round is 0 if there is no snapshot."""
        round_ = self._ask("fetch_state", seconds)
        return round_, self._ask("state") if round_ else b""

    def undone(self) -> int:
        """Return for how many rounds that this rank has started ``done`` was not called."""
        return self._ask("undone")

    def resume(self) -> bool:
        """Continue at the round of the fetched snapshot. Return whether this is possible:
        this rank has no round in flight."""
        return self._ask("resume")

    # Ranks that die or join.

    def departed(self) -> dict[int, str]:
        """Return the ranks below this rank that make no more calls, each with the error
        that ended its program."""
        return dict(self._ask("departed"))

    def drained(self, seconds: float) -> bool:
        """Wait until all rounds that this rank has called are over, at most
        ``seconds``. Return whether they are over."""
        return self._ask("drained", seconds)

    def rounds_of_all(self) -> int:
        """Return how many of this rank's rounds are over. A round that failed on this
        rank alone, and not on the root, does not count, nor does any later round.
        """
        return self._ask("rounds_of_all")

    def decided(self) -> int:
        """Return the latest round that is over, as far as this rank knows."""
        return self._ask("decided")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In this ``with`` block, let the engine ask the ranks above this rank which
        rounds are decided. The engine asks even if this rank makes no call and its
        parent is silent.
        """
        self._ask("watch", True)
        try:
            yield
        finally:
            # the group may have been closed in the block
            with contextlib.suppress(errors.GroupClosed):
                self._ask("watch", False)

    def agreed(self, flag: bool) -> bool:
        """Return whether ``flag`` is true on all ranks, and all ranks live. Collective."""
        # MPI uses one sequence of numbers for agreements in a communicator and for the
        # communicators made from it. So use the engine's communicator, from which no
        # other communicator is made.
        try:
            return bool(self._own.Agree(int(flag)))
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_PROC_FAILED:
                raise
            return False

    def expect_state(self) -> None:
        """Make sums raise an error on this rank until it has received a broadcast."""
        self._ask("expect_state")

    def alike(self) -> bool:
        """Return whether no state is expected, or the state has arrived."""
        return self._ask("alike")

    def _ask(self, name: str, *args: Any) -> Any:
        try:
            return getattr(_engine, name)(self.index, *args)
        except _engine.Closed as error:
            raise _error(_FAILED, str(error)) from None


# The engine's description of this rank, which other ranks need to reach it.


def _introduce() -> Any:
    _register()
    return _engine.introduce()


# Communicators of closed groups, for the next group of the same ranks. They are never
# freed. A message to a rank that has left may still be in transit. If its communicator
# were freed, MPI would deliver it in the next communicator with the same number. If a
# group uses the same communicator again, the session number shows that the message is
# old.
_idle: dict[int, MPI.Intracomm] = {}
_idle_lock = threading.Lock()


def _communicator(comm: MPI.Intracomm) -> tuple[int, MPI.Intracomm]:
    """Return a communicator that only the engine uses, and its number. Collective."""
    # Remove the candidates while the ranks agree, since another thread may look for a
    # communicator, too.
    with _idle_lock:
        candidates = {
            serial: _idle.pop(serial)
            for serial, each in list(_idle.items())
            if MPI.Comm.Compare(each, comm) == MPI.CONGRUENT
        }
    common = set(candidates).intersection(*gathered(comm, list(candidates)))
    taken = min(common, default=None)
    reused = None if taken is None else (taken, candidates.pop(taken))
    with _idle_lock:
        _idle.update(candidates)
    return reused or (broadcast(comm, _random()), comm.Dup())


def _random() -> int:
    return int(np.random.default_rng().integers(1, 2**62))


def _height(plan: Plan, rank: int) -> int:
    """Return the number of layers below a rank."""
    heights = [0] * plan.size
    for below in reversed(plan.tree.order):
        above = plan.tree.parents[below]
        if above >= 0:
            heights[above] = max(heights[above], heights[below] + 1)
    return heights[rank]


def _deadline_share(plan: Plan, rank: int) -> float:
    """Return the fraction of the deadline that a parent waits. Deeper parents wait
    less, so that their messages reach their own parents in time.
    """
    return _height(plan, rank) / max(_height(plan, plan.root), 1)


def _fit_messages(limits: Any, plan: Plan) -> None:
    """Let the engine cut a sum that is formed in sections into the same pieces as the
    messages of the root's children."""
    coding = plan.codings[plan.root]
    if limits.sections_from and coding is not None:
        limits.slices, limits.parts = coding.code.m, coding.code.parts


def _family(plan: Plan, rank: int, delegating: Container[int]) -> Any:
    """Return a rank's family, for the engine. ``delegating`` contains the parents whose
    sums are formed in sections by their children."""
    tree = plan.tree
    ancestors = []
    above = tree.parents[rank]
    while above >= 0:
        ancestors.append(above)
        above = tree.parents[above]
    children = list(plan.coded_children(rank))
    descendants = list(children)
    for below in descendants:  # the list grows during the loop
        descendants.extend(tree.children[below])
    leaves = [child for child in children if not tree.children[child]]
    siblings = []
    if ancestors and ancestors[0] in delegating:
        siblings = [other for other in tree.children[ancestors[0]] if other != rank]
    return _engine.Family(
        rank, ancestors, children, descendants, leaves, siblings, rank in delegating
    )


def compare(limits: Any, check: Check | bool | None) -> None:
    """Set which messages of its children a parent compares, and what happens if they differ."""
    if isinstance(check, Check):
        limits.waits_for_all = check == DEBUG
        limits.on_contradiction = getattr(_engine.OnContradiction, check.action)
        waits = {False: "what_has_come", True: "until_deadline", "all": "all"}
        limits.compares = getattr(_engine.Compares, waits[check.wait])


def _decoder(plan: Plan, rank: int, compares: bool = False) -> Any:
    """Return a rank's decoder, for the engine. ``compares`` tells whether parents
    compare messages, which leaves must know, too."""
    coding = plan.codings[rank]
    code = None if coding is None else coding.code
    decoder = _engine.Decoder() if code is None else _decoder_of(code)
    if compares and plan.size > 1:
        checks = code.parity_checks.tolist() if code and rank in plan.checked else []
        children = plan.coded_children(rank)
        decoder.check(checks, [_below(plan, child) for child in children])
    return decoder


def _below(plan: Plan, rank: int) -> tuple[float, float, float, float]:
    """Return four numbers that bound the rounding error of a rank's message. They are
    the largest product of the codes' ``κ`` along a path downwards, the number of layers
    below the rank, and the largest number of children of a parent. The last one is how
    far the message is off if each message on the way is rounded by 1.
    """
    coding = plan.codings[rank]
    if coding is None:
        return 1.0, 0.0, 0.0, 1.0
    children = plan.coded_children(rank)
    below = [_below(plan, child) for child in children]
    amplifications, layers, widest, errors = zip(*below)
    return (
        coding.code.amplification * max(amplifications),
        1 + max(layers),
        max(len(children), *widest),
        1 + coding.code.absolute_amplification * max(errors),
    )


def _decoder_of(code: GradientCode) -> Any:
    return _engine.Decoder(
        code.B,
        code.parts,
        code.stragglers,
        code.decoding,
        code.promises,
        code.amplification_limit,
    )


def _erasures(plan: Plan) -> Any:
    codes = {coding.code for _, coding in plan.coded_parents}
    decoders = {code: _decoder_of(code) for code in codes}
    parents = [
        (rank, list(plan.coded_children(rank)), decoders[coding.code])
        for rank, coding in plan.coded_parents
    ]
    return _engine.Erasures(plan.root, parents)


def _vector(array: np.ndarray) -> tuple[int, int, int]:
    code = _DTYPES.get(array.dtype, _BYTES)
    address = array.__array_interface__["data"][0]  # faster than `array.ctypes`
    return code, array.size if code else array.nbytes, address


def _check(outcome: int, text: str) -> None:
    """Raise the error of a round that has failed."""
    if outcome != _DONE:
        raise _error(outcome, text)


def _error(outcome: int, text: str) -> Exception:
    if outcome == _DESYNCHRONIZED:
        return errors.Desynchronized(text)
    name, _, words = text.partition(": ")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.CodedError):
        return kind(words)
    return errors.CodedError(text)


@functools.cache
def _register() -> None:
    engine_call.register(_engine)
    warn = functools.partial(logger.warning, "group %d, %s")
    follow(_engine.next_warning, lambda warning: warn(*warning), "jaxcoded log")
    # At exit the engine stops first, since functions that are registered later run
    # earlier.
    ending.register()
    atexit.register(_stop)


_process = os.getpid()
_abandoned: list[Engine] = []  # groups to leave at the end of the process


def _left() -> list[Engine]:
    """Return the transports of the groups that were not closed."""
    opened = (carrier for carrier in registry.carriers() if isinstance(carrier, Engine))
    return [*opened, *_abandoned]


def leave(seconds: float) -> None:
    """Leave all groups as the process does at its end. No calls may follow. For
    ``seconds``, ranks below this rank can still get missing results.

    A root does not leave in this way: if it did, rounds would fail that another root
    can repeat."""
    groups = _left()
    if groups and all(group.rank != group.plan.root for group in groups):
        _engine.stop(seconds, "", 0)


def _stop() -> None:
    if os.getpid() != _process:
        return  # this process is a fork, in which the engine does not run
    patience = max((group._patience for group in _left()), default=0.0)
    if _engine.stop(_EXIT_SECONDS + patience, ending.failure(), ending.status()):
        ending.engine_ends_the_job()
