"""A simulated world of nodes in one process: links with queues, a clock, and a
scheduler.

Every rank's `LoneNode` is the engine's code. This module simulates MPI, the clock and
the processes, in an order that a random generator chooses.
"""

import collections
import ctypes
import dataclasses
import functools
import itertools
import random
import struct
import weakref

import _nodes
import jax.numpy as jnp
import numpy as np

from jaxcoded import Check, Coded, make_plan
from jaxcoded.transport import _engine, engine, pieces

MESSAGE, RESULT, STATE, SECTION, OWN = range(5)
PENDING, DONE, FAILED, DESYNCHRONIZED = range(4)
# as `Kind` in message.h
OFFER, WANT, WANT_STATE, ALERT, BYE, RESULTS, NOTE, GONE, STATES, SIGNATURE = range(10)
ASK, DELEGATE, FORMED = 12, 16, 17
INLINED, FAILURE = 1, 2
NEWS = 2  # see `World.sweep`
HEADER = struct.Struct("<BBxxIIxxxxQQQQQ")
DTYPES = {"uint8": 0, "float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}
SIZES = [1, 2, 2, 4, 8]
RESTS = 20  # times `orphan_seconds`: a second of an idle group
MOST_WOKEN = 128  # most wake-ups by timers in this time
POLICIES = ["warn", "drop", "raise"]
EXAMPLES = 9  # in the batch from which the ranks' contributions are made


@functools.lru_cache(maxsize=4096)
def held(plan, rank):
    """Return a rank's examples of this module's batch, and their coefficients."""
    return plan.strategy.shares(plan, rank, EXAMPLES)


@functools.lru_cache(maxsize=64)
def extent(plan):
    """Return the depth of the tree, and the most children of a parent."""
    return plan.tree.depth, max(map(len, plan.tree.children))


def rounding(plan, dtype):
    """Return a bound on the error of a sum, as a fraction of the sum of absolute values.

    Every rounding, half an eps, is amplified by κ at most. A message in a narrow type is rounded once when it is made
    and once in every layer. In wider types every addition counts, in float64 also the additions of `Call.own` and
    `Call.sums`.
    """
    depth, fanout = extent(plan)
    bits = jnp.finfo(dtype).bits
    roundings = 1 + depth * (1 if bits < 32 else fanout + 3)
    if bits == 64:
        roundings += 2 * EXAMPLES
    return (
        roundings * float(jnp.finfo(dtype).eps) / 2 * plan.amplification * 1.01 + 1e-15
    )


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one round.

    Attributes:
        segments: dtype and length of each vector of the result.
        seed: the seed of the gradients.
        kind: ``"allreduce"``, ``"reduce"`` or ``"broadcast"``.
        why_not: why the call must fail.
        erased: ranks that the sum leaves out.
        apart: vector, first element, length and kind of numbers that are compared
            separately.
        examples: the expected first number of the sum, and its relative tolerance.
    """

    segments: tuple[tuple[str, int], ...]
    seed: int
    kind: str = "allreduce"
    why_not: str = ""
    erased: frozenset[int] = frozenset()
    apart: tuple[tuple[int, int, int, int], ...] = ()
    examples: tuple[float, float] = (0.0, 0.0)

    @property
    def signature(self):
        return f"{self.kind} {self.seed} of {list(self.segments)}"

    @property
    def fingerprint(self):
        return hash(self) & (2**64 - 1)

    @functools.cached_property
    def gradients(self):
        """Return a gradient for each example: arrays ``(EXAMPLES, count)``."""
        rng = np.random.default_rng(self.seed)
        return [
            rng.integers(0, 256, (EXAMPLES, count), np.uint8)
            if dtype == "uint8"
            else rng.standard_normal((EXAMPLES, count)).astype(jnp.dtype(dtype))
            for dtype, count in self.segments
        ]

    @functools.cached_property
    def sums(self):
        """Return the exact sum, and the sum of absolute values, of every segment."""
        wide = [g.astype(np.float64) for g in self.gradients]
        return [(g.sum(0), np.abs(g).sum(0)) for g in wide]

    def own(self, plan, rank):
        """Return a rank's vectors in the result's dtypes, one part after the other."""
        if self.kind == "broadcast":
            return [g[rank % EXAMPLES].copy() for g in self.gradients]
        indices, coefficients = held(plan, rank)
        slices = plan.slices_above[rank]
        out = []
        for part in range(plan.parts_above[rank]):
            for g in self.gradients:
                shape = (len(indices), slices, g.shape[1] // slices)
                pieces = g[indices].astype(np.float64).reshape(shape)
                vector = np.einsum("eu,euq->q", coefficients[:, part], pieces)
                out.append(vector.astype(g.dtype))
        return out

    def check(self, plan, rank, vectors):
        """Return whether these vectors are this call's result at a rank."""
        if self.kind == "reduce" and rank != plan.root:
            assert not any(v.view(np.uint8).any() for v in vectors)
            return
        if self.kind == "broadcast":
            expected = self.own(plan, plan.root)
            assert [v.tobytes() for v in vectors] == [v.tobytes() for v in expected]
            return
        for vector, (exact, size) in zip(vectors, self.sums, strict=True):
            error = np.abs(vector.astype(np.float64) - exact)
            # unlike `error > bound`, this fails for NaN
            right = error <= rounding(plan, vector.dtype) * size
            assert right.all(), (str(vector.dtype), error.max())

    def check_message(self, plan, rank, segment, first, actual):
        """Return whether this is a part of a rank's message to its parent."""
        exact, scale = self.messages(plan)
        expected = exact[rank][segment][first : first + len(actual)]
        size = scale[segment % len(self.segments)]
        bound = rounding(plan, actual.dtype) * size * EXAMPLES
        error = np.abs(actual.astype(np.float64) - expected)
        return error.max(initial=0) <= bound

    @functools.lru_cache(maxsize=4)  # noqa: B019  # few calls live at a time
    def messages(self, plan):
        """Return every rank's message to its parent in float64, and the scale of its
        errors.
        """
        own = [
            [v.astype(np.float64) for v in self.own(plan, r)] for r in range(plan.size)
        ]
        scale = np.ones(len(self.segments))
        for rank in reversed(plan.tree.order):
            children, count = plan.coded_children(rank), len(self.segments)
            for s, vector in enumerate(own[rank]):
                if children:
                    theirs = plan.codings[rank].code.parts
                    rows = [
                        own[child][(s // count * theirs + part) * count + s % count]
                        for child in children
                        for part in range(theirs)
                    ]
                    vector += (plan.coefficients(rank) @ np.array(rows)).reshape(-1)
                kind = s % count
                scale[kind] = max(scale[kind], np.abs(vector).max(initial=0))
        return own, scale


class Zeros(Call):
    """A call that costs nothing to check."""

    def own(self, plan, rank):
        return [np.zeros(count, dtype) for dtype, count in self.segments]

    def check(self, plan, rank, vectors):
        pass

    def check_message(self, *_):
        return True


@dataclasses.dataclass
class Running:
    """A call in progress."""

    round: int
    call: Call
    own: list[np.ndarray]
    out: list[np.ndarray]
    known: int  # number of its vectors that the node has
    scale: float = 1.0  # see `World.steps`
    left: bool = False  # the program passes no more parts, and reads no result


@dataclasses.dataclass(frozen=True)
class End:
    """How a call ended."""

    outcome: int
    error: str


class Header:
    def __init__(self, data):
        (
            self.kind,
            self.flags,
            self.segments,
            self.ready,
            self.round,
            self.last,
            self.done,
            self.fingerprint,
            _,
        ) = HEADER.unpack_from(data)
        self.body = data[HEADER.size :]


def layout(segments, piece_bytes, slices=1):
    """Return the pieces ``(segment, offset, bytes)`` of vectors ``(dtype code,
    count)``, as `Layout` does.
    """
    out = []
    for s, (dtype, count) in enumerate(segments):
        size = SIZES[dtype]
        step = max(piece_bytes // size, 1)
        turns = 1 if count % slices else slices
        part = count // turns
        for first in range(0, part, step):
            bytes_ = min(step, part - first) * size
            out += [(s, (u * part + first) * size, bytes_) for u in range(turns)]
    return out or [(0, 0, 0)]


class Wire:
    """The wire of one node."""

    def __init__(self, world, rank):
        self.world = weakref.proxy(world)  # garbage collection does not traverse nodes
        self.rank = rank
        self.valid = [0] * 5

    def send(self, to, message):
        self.world.sent(self.rank, to, message)

    def fetch(self, source, what, round, piece, version, address, size):
        request = self.rank, source, what, round, piece, version
        return self.world.fetch(request, address, size)

    def withdraw(self, what, first_valid):
        self.valid[what] = first_valid

    def inline_bytes(self, to):
        return self.world.inline[self.rank, to]

    def direct(self, source):
        return self.world.hosts[source] == self.world.hosts[self.rank]

    def now(self):
        return self.world.clock

    def has_memory(self, _bytes):
        return self.rank not in self.world.short_of_memory


class World:
    """All ranks of a plan.

    Attributes:
        script: the call of each round; the first round is at 0.
        in_place: fraction of results that replace the rank's own vectors.
        twice: fraction of messages that are delivered twice.
        again: fraction of announcements that are delivered again later.
        unreadable: fraction of pieces on the same host that cannot be read and must be
            sent.
        rests: how often time passes without messages and calls.
        staged: fraction of calls with several parts that begin before all parts are ready.
        chained: whether contributions depend on `steps`, as gradients depend on
            parameters: a rank that lacks the sum of a round must not contribute to the
            next one.
        check: a `Check`: whether parents compare their children's messages, which
            messages they wait for, and what they do about a mismatch.
        news: the messages in the nodes' logs, by rank.
        deviations: calls that differ from the script, by ``(rank, round)``.
        skips: each ``(rank, round)`` in which a rank has nothing to contribute.
        begins_with: the number of a rank's vectors that are ready as it calls, by
            ``(rank, round)``.
        open: the last round that ranks may call.
        frozen: stopped processes. Other ranks can still read their memory.
        idle: ranks that do not call, but whose engine runs.
        started: ranks whose calls wait in a queue, so that the next one begins in the turn in which the last one
            ended.
        leaving: ranks that have closed the group. Their processes end once they may.
        snapshots: after how many rounds ranks keep a snapshot; 0: never.
        recovers: whether ranks that are too far behind fetch a snapshot.
        restored: the rounds at which each rank has continued from a snapshot.
        steps: number of sums that each rank has got.
        short_of_memory: ranks that get no memory for vectors.
        most_waiting: longest queue of every link so far.
    """

    def __init__(
        self,
        plan,
        script,
        rng,
        *,
        hosts=None,
        inline=(0,),
        limits=None,
        in_place=0.0,
        twice=0.0,
        again=0.0,
        unreadable=0.0,
        staged=0.0,
        rests=0.0,
        chained=False,
        check=None,
    ):
        self.plan = plan
        self.script = list(script)
        self.open = len(self.script)
        self.rng = rng
        self.hosts = hosts or [0] * plan.size
        self.in_place = in_place
        self.twice = twice
        self.again = again
        self.unreadable = unreadable
        self.staged = staged
        self.rests = rests
        self.compares = check is not None
        self.news = [[] for _ in range(plan.size)]
        self.echoes = []
        self.deviations = {}
        self.skips = set()
        self.begins_with = {}
        self.clock = 0.0
        self.frozen = set()
        self.idle = set()
        self.started = set()
        self.leaving = set()
        self.dead = set()  # processes that have ended
        self.reported = set()  # the ended processes that MPI has reported dead
        self.queues = {}
        self.most_waiting = collections.Counter()
        self.requests = []  # (asker, source, what, round, piece, version)
        self.answers = []  # requests with the data that answers them
        self.running = [None] * plan.size
        self.given_back = [()] * plan.size  # the memory of each rank's latest call
        self.left_behind = [None] * plan.size  # the calls of processes that have died
        self.ends = [{} for _ in range(plan.size)]
        self.results = {}  # the bytes of each round's result
        self.seen = {}  # pieces of results that were fetched, by round and version
        self.snapshots = [0] * plan.size
        self.snapshot_bytes = 100
        self.recovers = True
        self.asking = set()
        self.restored = collections.defaultdict(list)
        # with more steps float16 would overflow
        self.chained = chained and plan.amplification < 1e3
        self.steps = [0] * plan.size
        self.summed = set()  # rounds whose sum some rank has got
        self.short_of_memory = set()
        self.offered = collections.defaultdict(list)  # by (rank, round)
        self.fetched = []  # (asker, source, what, round, piece)
        self.limits = _engine.Limits()
        self.delegating = ()
        for name, value in (limits or {}).items():
            setattr(self.limits, name, value)
        if self.limits.sections_from:
            self.delegating = pieces.delegating(plan, self.hosts)
        engine.compare(self.limits, check)

        self.ancestors = []
        for rank in range(plan.size):
            line = []
            while plan.tree.parents[line[-1] if line else rank] >= 0:
                line.append(plan.tree.parents[line[-1] if line else rank])
            self.ancestors.append(line)
        self.inline = {}
        links = [
            (rank, above) for rank, line in enumerate(self.ancestors) for above in line
        ]
        for family in plan.tree.children:
            links += itertools.combinations(family, 2)
        for one, other in links:
            for link in ((one, other), (other, one)):
                self.inline[link] = rng.choice(inline)
                self.queues[link] = collections.deque()
        self.wires = [Wire(self, rank) for rank in range(plan.size)]
        self.nodes = [self._node(rank) for rank in range(plan.size)]

    def _node(self, rank):
        engine._fit_messages(self.limits, self.plan)
        self.limits.deadline_share = engine._deadline_share(self.plan, rank)
        return _nodes.LoneNode(
            engine._family(self.plan, rank, self.delegating),
            engine._decoder(self.plan, rank, self.compares),
            self.limits,
            self.wires[rank],
        )

    def piece_bytes(self, call):
        """Return the bytes of a piece, for all messages of a call."""
        sizes = [count * jnp.dtype(dtype).itemsize for dtype, count in call.segments]
        return self.limits.piece_for(sum(sizes))

    # The wires.

    def sent(self, source, to, message):
        if to in self.dead:
            return
        queue = self.queues[source, to]
        queue.append(message)
        self.most_waiting[source, to] = max(self.most_waiting[source, to], len(queue))
        head = Header(message)
        if head.kind == OFFER:
            self.offered[source, head.round].append(head.ready)

    def fetch(self, request, address, size):
        asker, source, what, round, piece, version = request
        self.fetched.append((asker, source, what, round, piece))
        direct = self.wires[asker].direct(source)
        if not direct or (self.unreadable and self.rng.random() < self.unreadable):
            self._ask(request)
            return False
        # the memory of a dead process may still be mapped
        gone = source in self.dead and self.rng.random() < 0.5
        if gone or self.wires[source].valid[what] > round:
            return None
        data = self.nodes[source].read(what, round, piece, version)
        if data is None:
            assert self.may_change(source, what, version), (
                f"rank {source} changed {what, round} before withdrawing it"
            )
            return self.rng.randbytes(size)
        assert ctypes.string_at(address, size) == data
        self.check_piece(source, what, round, piece, version, data)
        return data

    def may_change(self, source, what, version):
        """Return whether the memory that other ranks may read may change at any moment."""
        return False

    def _ask(self, request):
        if request[1] in self.reported:
            self.answers.append((*request, b""))
        else:
            self.requests.append(request)

    def answer(self, request):
        _asker, source, what, round, piece, version = request
        data = self.nodes[source].read(what, round, piece, version)
        if data is not None:
            self.check_piece(source, what, round, piece, version, data)
        self.answers.append((*request, data or b""))

    def check_piece(self, source, what, round, piece, version, data):
        """Check that every sent piece is right, even if no rank uses it."""
        if what in (RESULT, SECTION):
            # each parent counts the versions of its own family
            above = self.plan.tree.parents[source] if what == SECTION else None
            known = self.seen.setdefault((round, piece, version, above), data)
            assert known == data, (round, piece, version)
        elif what == OWN:
            self._check_own(source, round, piece, data)
        elif what == MESSAGE:
            self._check_message(source, round, piece, data)

    def _offering(self, rank):
        """Return the call whose vectors other ranks may read, even after its process
        has died.
        """
        return self.running[rank] or self.left_behind[rank]

    def _check_own(self, source, round, piece, data):
        running = self._offering(source)
        segment, offset, size = self._place(running, piece, self.limits.slices)
        own = scaled(running.call.own(self.plan, source)[segment], running.scale)
        own = own.view(np.uint8)
        assert own[offset : offset + size].tobytes() == data, (source, round, piece)

    def _place(self, running, piece, slices=1):
        return layout(running.message, self.piece_bytes(running.call), slices)[piece]

    def _check_message(self, source, round, piece, data):
        if self._may_be_overwritten(source, round, piece):
            return
        running = self._offering(source)
        segment, offset, _size = self._place(running, piece)
        dtype = running.own[segment].dtype
        actual = scaled(np.frombuffer(data, dtype), 1 / running.scale)
        right = running.call.check_message(
            self.plan, source, segment, offset // dtype.itemsize, actual
        )
        assert right, (source, round, piece)

    def _may_be_overwritten(self, source, round, piece):
        """Return whether the result may overwrite a piece of a message. It may once the
        root has that piece of the sum. Then no rank uses the message's piece, and a
        parent with the result forms no sum. If messages are compared, no rank may read
        the piece.
        """
        running, root = self._offering(source), self.nodes[self.plan.root]
        in_place = running.out is running.own or self.plan.coded_children(source)
        if self.compares or not in_place:
            return False
        return root.next_round() > round or (
            self.plan.slices_above[source] == 1
            and root.read(RESULT, round, piece) is not None
        )

    # Actions of ranks.

    def call_of(self, rank, round):
        return self.deviations.get((rank, round)) or self.script[round - 1]

    def may_call(self, rank):
        return (
            self.running[rank] is None
            and rank not in self.frozen
            and rank not in self.idle
            and rank not in self.leaving
            and rank not in self.dead
            and not self.nodes[rank].desynchronized()
            and self.nodes[rank].next_round() <= min(self.open, len(self.script))
        )

    def submit(self, rank):
        plan, node = self.plan, self.nodes[rank]
        round = node.next_round()
        call = self.call_of(rank, round)
        scale = 2.0 ** (self.steps[rank] % 3) if self.chained else 1.0
        own = [scaled(vector, scale) for vector in call.own(plan, rank)]
        out = [
            np.full(count * jnp.dtype(dtype).itemsize, 255, np.uint8).view(
                jnp.dtype(dtype)
            )
            for dtype, count in call.segments
        ]
        alike = list(map(len, own)) == list(map(len, out))
        if alike and self.rng.random() < self.in_place:
            out = own
        known = len(own)
        if len(own) > len(out) and self.rng.random() < self.staged:
            known = len(out) * self.rng.randrange(1, len(own) // len(out))
        known = self.begins_with.get((rank, round), known)
        running = self.running[rank] = Running(round, call, own, out, known, scale)
        running.message = [(DTYPES[str(v.dtype)], len(v)) for v in own]
        erased = []
        if call.erased:
            missing = plan.missing([rank in call.erased for rank in range(plan.size)])
            erased = missing[list(plan.coded_children(rank))].tolist()
        node.submit(
            call.fingerprint,
            call.signature,
            call.why_not,
            call.kind != "broadcast",
            call.kind != "reduce",
            (rank, round) in self.skips,
            erased,
            vectors(own),
            vectors(out),
            known,
            call.apart,
            call.examples,
        )
        self.check_end(rank)

    def may_extend(self, rank):
        running = self.running[rank]
        return (
            running is not None
            and running.known < len(running.own)
            and rank not in self.leaving
            and rank not in self.frozen
            and rank not in self.idle
        )

    def extend(self, rank):
        """Make one more part of a rank's call ready."""
        running, node = self.running[rank], self.nodes[rank]
        first = running.known
        running.known = min(first + len(running.out), len(running.own))
        self._turn(rank, node.extend, vectors(running.own[first : running.known]))
        if running.known == len(running.own):
            self._turn(rank, node.complete, vectors(running.out))
        self.check_end(rank)

    def _turn(self, rank, act, *arguments):
        """Let a node act. As in the engine, its call fails if there is too little
        memory.
        """
        try:
            return act(*arguments)
        except MemoryError:
            self.nodes[rank].lack_memory()
            return None

    def check_end(self, rank):
        """Check whether a rank's call has ended, and with which result."""
        running, node = self.running[rank], self.nodes[rank]
        if running is None or node.outcome() == PENDING:
            for array in self.given_back[rank]:
                assert (array == 255).all(), f"rank {rank} writes after its call"
            return
        self.running[rank] = None
        end = End(node.outcome(), node.error())
        self.ends[rank][running.round] = end
        if end.outcome == DONE:
            assert (end.error, node.next_round()) == ("", running.round + 1)
            self._check_result(rank, running)
            if self.chained:
                before = self.steps_before(running.round)
                assert self.steps[rank] == before, (rank, running.round, before)
                self.steps[rank] += 1
                self.summed.add(running.round)
        if end.outcome == DESYNCHRONIZED and "alone" not in end.error:
            self._check_lost(rank, running.round)
        every = self.snapshots[rank]
        if end.outcome != DESYNCHRONIZED and every and (running.round + 1) % every == 0:
            state = self.state(running.round + 1, self.steps[rank])
            self.nodes[rank].keep_state(running.round + 1, state)
        # No rank uses the caller's memory any more, or writes to it.
        arrays = [array.view(np.uint8) for array in (*running.own, *running.out)]
        for array in arrays:
            array[:] = 255
        self.given_back[rank] = arrays

    def _check_result(self, rank, running):
        if running.left:
            return
        where = rank, running.round
        try:
            out = [scaled(vector, 1 / running.scale) for vector in running.out]
            running.call.check(self.plan, rank, out)
        except AssertionError as error:
            raise AssertionError(where, *error.args) from None
        if running.call.kind == "reduce" and rank != self.plan.root:
            return
        data = b"".join(v.tobytes() for v in running.out)
        assert self.results.setdefault(running.round, data) == data, where

    def _check_lost(self, rank, round):
        """Check why a rank cannot get a result any more: it was far behind, or it had asked a rank that is far behind
        or dead.
        """
        behind = self.nodes[self.plan.root].frontier() - round
        assert behind >= self.limits.history_rounds or any(
            above in self.dead
            or self.nodes[above].desynchronized()
            or self.restored.get(above)
            for above in self.ancestors[rank]
        ), (rank, round, behind)

    def deliver(self, link):
        """Deliver a message. A node that had too little memory for a message gets the
        message a second time. If memory runs out again, the node must drop the message,
        as other messages wait behind it.
        """
        source, to = link
        message = self.queues[link].popleft()
        for _ in range(1 + (self.rng.random() < self.twice)):
            try:
                self.nodes[to].deliver(source, message)
            except MemoryError:
                self.nodes[to].lack_memory()
                self.check_end(to)
                self.nodes[to].deliver(source, message)
            self.check_end(to)
        if self.rng.random() < self.again and message[0] in (
            OFFER,
            RESULTS,
            NOTE,
            SIGNATURE,
        ):
            self.echoes.append((link, message))

    def arrive(self, answer):
        asker, source, what, round, piece, version, data = answer
        node = self.nodes[asker]
        self._turn(asker, node.arrived, source, what, round, piece, data, version)
        self.check_end(asker)

    def advance(self, rank):
        """Give a rank a turn; return whether it asks for another turn at once. Otherwise it sleeps."""
        node = self.nodes[rank]
        more = self._turn(rank, node.advance)
        if more is False and node.wakes_at() <= self.clock:
            # after its last message the rank may have nothing to wait for
            assert node.advance() or node.wakes_at() > self.clock, (
                f"rank {rank} never sleeps"
            )
        self.news[rank] += node.take_news()
        self.check_end(rank)
        if rank in self.started and self.may_call(rank):
            self.submit(rank)
            return True
        return more

    def rest(self, times=RESTS):
        """Let ``times`` · `orphan_seconds` pass without messages and calls. Nodes may
        wake up only when they have asked to, and seldom.
        """
        stopped = self.frozen | self.dead
        awake = [rank for rank in range(self.plan.size) if rank not in stopped]
        woken = collections.Counter()
        until = self.clock + times * self.limits.orphan_seconds
        while awake:
            wakes_at = {rank: self.nodes[rank].wakes_at() for rank in awake}
            rank = min(wakes_at, key=wakes_at.get)
            if wakes_at[rank] > until:
                break
            self.clock = max(self.clock, wakes_at[rank])
            while self.advance(rank):
                pass
            woken[rank] += 1
            assert woken[rank] <= MOST_WOKEN, f"rank {rank} wakes up all the time"
        self.clock = until

    def steps_before(self, round):
        """Return the number of sums that a rank without missed rounds has got."""
        return sum(number < round for number in self.summed)

    def state(self, round, steps=0):
        """Return the state after the earlier rounds, ``steps`` of them with a sum;
        equal on all ranks.
        """
        seed = 1000 * round + (steps if self.chained else 0)
        return random.Random(seed).randbytes(self.snapshot_bytes)

    def check_state(self, rank, round):
        """Check that the snapshot that a rank has fetched is that of a round."""
        expected = self.state(round, self.steps_before(round))
        assert self.nodes[rank].state() == expected, (rank, round)

    def recover(self, rank):
        """Fetch a snapshot if needed, and continue from it; return whether anything was
        done.
        """
        node = self.nodes[rank]
        if not (self.recovers and node.desynchronized()) or node.state_missing():
            return False
        if rank not in self.asking:
            self.asking.add(rank)
            node.ask_state()
            return True
        if not (round := node.state_round()):
            return False
        self.check_state(rank, round)
        node.resume()
        assert (node.next_round(), node.desynchronized()) == (round, False)
        self.steps[rank] = self.steps_before(round)
        self.asking.discard(rank)
        self.restored[rank].append(round)
        return True

    def leave(self, rank, failure=""):
        """Let a rank make no more calls. It may still be in its last call, and passes
        no more parts of this call."""
        self.leaving.add(rank)
        if running := self.running[rank]:
            running.left |= running.known < len(running.own)
        self.nodes[rank].leave(failure)

    def kill(self, rank, *, known):
        """Let a process die.

        Args:
            rank: the rank of the process.
            known: whether MPI reports the death to its peers. Then their requests to it
                fail.
        """
        assert rank not in self.dead
        self.dead.add(rank)
        self.left_behind[rank], self.running[rank] = self.running[rank], None
        for link, queue in self.queues.items():
            if link[1] == rank:
                queue.clear()
            elif link[0] == rank:  # the rank's last messages on their way are lost
                for _ in range(self.rng.randint(0, len(queue))):
                    queue.pop()
        if not known:
            return
        self.reported.add(rank)
        peers = sorted({to for source, to in self.queues if source == rank} - self.dead)
        for peer in self.rng.sample(peers, len(peers)):
            self.nodes[peer].lost(rank)
            self.check_end(peer)
        for request in [r for r in self.requests if r[1] == rank]:
            self.requests.remove(request)
            self._ask(request)

    def lose(self, link, told):
        """Lose the next message of a link. MPI tells one of its two ranks."""
        self.queues[link].popleft()
        self.nodes[told].lost_message(link[link[0] == told])
        self.check_end(told)

    def bury(self):
        """End the processes that may."""
        for rank in self.leaving - self.dead - self.frozen:
            if self.nodes[rank].left() and self.nodes[rank].outcome() != PENDING:
                self.dead.add(rank)
                for link, queue in self.queues.items():
                    if link[1] == rank:
                        queue.clear()

    # The scheduler.

    def step(self, pace=None):
        """Let one random event happen.

        Args:
            pace: how readily each rank calls; default: all equally.
        """
        rng = self.rng
        self.bury()
        stopped = self.frozen | self.dead
        kind = rng.random()
        if self.echoes and rng.random() < 0.1:
            link, message = self.echoes.pop(rng.randrange(len(self.echoes)))
            if link[1] not in stopped:
                self.nodes[link[1]].deliver(link[0], message)
                self.check_end(link[1])
        elif kind < 0.45:
            links = [
                link
                for link, queue in self.queues.items()
                if queue and link[1] not in stopped
            ]
            if links:
                self.deliver(rng.choice(links))
        elif kind < 0.6:
            self._move_a_piece()
        elif kind < 0.85:
            rank = rng.randrange(self.plan.size)
            if rank not in stopped:
                self.advance(rank)
                self.recover(rank)
        elif kind < 0.97:
            rank = rng.randrange(self.plan.size)
            if self.may_call(rank) and (pace is None or rng.random() < pace[rank]):
                self.submit(rank)
            elif self.may_extend(rank):
                self.extend(rank)
        elif self.rests and rng.random() < self.rests:
            self.rest(times=1)
        else:
            self.clock += rng.expovariate(1 / self.limits.orphan_seconds)

    def _move_a_piece(self):
        rng = self.rng
        stopped = self.frozen | self.dead
        asked = [r for r in self.requests if r[1] not in stopped]
        ready = [a for a in self.answers if a[0] not in stopped]
        if asked and (not ready or rng.random() < 0.5):
            request = rng.choice(asked)
            self.requests.remove(request)
            self.answer(request)
        elif ready:
            answer = rng.choice(ready)
            self.answers.remove(answer)
            self.arrive(answer)

    def sweep(self):
        """Let every rank that is not frozen do all it can. Return `NEWS` if anything
        happened besides the keep-alive questions of waiting ranks and their answers.
        """
        moved = 0
        self.bury()
        for rank in self.rng.sample(range(self.plan.size), self.plan.size):
            if rank in self.frozen or rank in self.dead:
                continue
            if self.may_call(rank):
                self.submit(rank)
                moved = NEWS
            if self.may_extend(rank):
                self.extend(rank)
                moved = NEWS
            for link in [link for link in self.queues if link[1] == rank]:
                while queue := self.queues[link]:
                    moved = max(moved, 1 if queue[0][0] in (WANT, NOTE) else NEWS)
                    self.deliver(link)
            for request in [r for r in self.requests if r[1] == rank]:
                self.requests.remove(request)
                self.answer(request)
                moved = NEWS
            for answer in [a for a in self.answers if a[0] == rank]:
                self.answers.remove(answer)
                self.arrive(answer)
                moved = NEWS
            for _ in range(10_000):
                if not self.advance(rank):
                    break
            else:
                raise AssertionError(f"rank {rank} never comes to rest")
            if self.recover(rank):
                moved = NEWS
        return max(moved, self._on_their_way())

    def _on_their_way(self):
        """Return what running ranks have not received yet, as a value with the same
        meaning as that of `sweep`."""
        stopped = self.frozen | self.dead
        pieces = [r[1] for r in self.requests] + [a[0] for a in self.answers]
        if set(pieces) - stopped:
            return NEWS
        kinds = {
            message[0]
            for (_, to), queue in self.queues.items()
            for message in queue
            if to not in stopped
        }
        return NEWS if kinds - {WANT, NOTE} else int(bool(kinds))

    def sweep_all(self):
        """Let nothing happen any more, as `settle` does, but let no time pass."""
        while self.sweep():
            pass

    def parts(self, rank):
        """Return the numbers of pieces in the offers of a rank's current call."""
        running = self.running[rank]
        return self.offered.get((rank, running.round), ()) if running else ()

    def settle(self):
        """Let all ranks that are not frozen run, and time pass, until nothing happens
        any more.
        """
        quiet = 0
        for _ in range(10_000):
            if self.sweep() == NEWS:
                quiet = 0
            else:
                quiet += 1
                self.clock += self.limits.orphan_seconds * 2**quiet
            if quiet == 16:
                self.rest()
                return
        raise AssertionError("the ranks never come to rest")

    def done(self, rank, rounds=None):
        """Return whether all rounds of a rank ended with their sum."""
        rounds = min(self.open, len(self.script)) if rounds is None else rounds
        return all(
            self.ends[rank].get(r, End(PENDING, "")).outcome == DONE
            for r in range(1, rounds + 1)
        )

    def assert_done(self, ranks=None):
        for rank in range(self.plan.size) if ranks is None else ranks:
            assert self.done(rank), self.describe(rank)

    def describe(self, rank):
        node, running = self.nodes[rank], self.running[rank]
        return {
            "rank": rank,
            "parents": self.plan.parents,
            "hosts": self.hosts,
            "frozen": self.frozen,
            "idle": self.idle,
            "next": node.next_round(),
            "frontier": node.frontier(),
            "calling": running and running.round,
            "waits": node.waiting_for(),
            "desynchronized": node.desynchronized(),
            "ends": {r: e for r, e in self.ends[rank].items() if e.outcome != DONE},
            "all next": [n.next_round() for n in self.nodes],
        }


def scaled(vector, factor):
    """Return the vector times a power of two, which is exact."""
    return vector if factor == 1 else vector * vector.dtype.type(factor)


def vectors(arrays):
    return [(DTYPES[str(a.dtype)], len(a), a.ctypes.data) for a in arrays]


class Garbling:
    """A world in which ``garble`` sees every message before its receiver does."""

    def garble(self, link, message):
        return message

    def deliver(self, link):
        queue = self.queues[link]
        queue[0] = self.garble(link, queue[0])
        super().deliver(link)


def random_plan(
    rng, least=1, most=14, slices=(1, 1, 1, 2, 2, 3), stragglers=(0, 1, 1, 2)
):
    """Draw a plan of any shape."""
    size = rng.randint(least, most)
    shape = rng.choice(
        ["star", "chain", "balanced", "balanced", "irregular", "irregular"]
    )
    parents = {
        "star": [-1] + [0] * (size - 1),
        "chain": list(range(-1, size - 1)),
        "balanced": None,
        "irregular": [-1] + [rng.randint(max(0, r - 5), r - 1) for r in range(1, size)],
    }[shape]
    if shape == "irregular":  # so that the root is not always rank 0
        names = rng.sample(range(size), size)
        parents = [
            -1 if parents[names[r]] < 0 else names.index(parents[names[r]])
            for r in range(size)
        ]
    widest = max(map(parents.count, range(size))) if parents else size - 1
    m = max(1, min(rng.choice(slices), widest))
    s = max(0, min(rng.choice(stragglers), widest - m))
    options = {
        "parents": parents,
        "stragglers": s,
        "slices": m,
        "root_computes": rng.random() < 0.5,
    }
    if parents is None and rng.random() < 0.6:
        options["fanout"] = rng.randint(max(s + m, 1), max(s + m, 4))
    kinds = [
        "cyclic_repetition",
        "fractional_repetition",
        "random_generator",
        "uncoded",
    ]
    in_parts = ["progressive", "adaptive", "partial_stragglers(late=1, slowdown=4)"]
    everywhere = rng.choice(["auto", "auto", *kinds, *in_parts])
    mixed = {rank: rng.choice(["auto", *in_parts]) for rank in range(size)}
    for code in (everywhere if rng.random() < 0.7 else mixed, "auto"):
        try:
            plan = make_plan(size, Coded(code=code, **options))
        except ValueError:  # one of its parents has no such code
            continue
        if plan.amplification < 1e4:  # messages in float16 would be infinite
            return plan
    return random_plan(rng, least, most, slices, stragglers)


def tolerated(plan, rng):
    """Draw children of every parent, at most as many as the parent tolerates missing."""
    out = set()
    for rank in range(plan.size):
        children = plan.coded_children(rank)
        out.update(rng.sample(children, rng.randint(0, plan.tolerance(rank))))
    return out


def too_many(plan, rng, *, for_good=False):
    """Draw children of the root without which it waits; with the last of them it would not wait. ``for_good``: they stay
    away for good, so that the root takes any set of messages that suffices, even by luck.
    """
    code = plan.codings[plan.root].code
    children, missing = plan.coded_children(plan.root), []
    enough = min(code.n - code.stragglers, len(set(code.classes)))
    # for codes with parts, test every set
    enough = 1 if code.parts > 1 else enough

    def suffices():
        answered = [child not in missing for child in children]
        heard = {c for c, here in zip(code.classes, answered) if here}
        return (for_good or len(heard) >= enough) and code.sufficient(answered)

    while suffices():
        missing.append(rng.choice([c for c in children if c not in missing]))
    return missing


def erasable(plan, rng):
    """Draw ranks without which the plan can form every sum, maybe more than it
    promises.
    """
    mask = np.zeros(plan.size, bool)
    for rank in rng.sample(range(plan.size), rng.randint(0, plan.size)):
        mask[rank] = True
        mask[rank] = not plan.unrecoverable(mask)
    return set(np.flatnonzero(mask).tolist())


def beside(rng):
    """Return a separate generator for additional draws, so that a seed's other draws do
    not change.
    """
    return random.Random(hash(rng.getstate()[1]))


def comparing(plan, rng):
    """Draw a world's options for the comparison of messages: whether to compare, and what to do about a mismatch."""
    action = beside(rng).choice([None, None, *POLICIES])
    return {"compares": Check(action)} if action and plan.checked else {}


def random_script(plan, rng, rounds, *, most=40, dtypes=None, **more):
    """Draw calls with different gradients of zero to three segments."""
    multiple = plan.padding_multiple
    dtypes = dtypes or ["float16", "bfloat16", "float32", "float64"]
    out = []
    for _ in range(rounds):
        segments = tuple(
            (
                dtype,
                multiple * rng.choice([0, 1, 2, rng.randrange(most // multiple + 1)]),
            )
            for dtype in rng.sample(dtypes, rng.choice([0, 1, 1, 1, 2, 3]))
        )
        out.append(Call(segments, rng.randrange(2**32), **more))
    return out


def comparable(call, plan):
    """Return the call with vectors so long, and numbers so wide, that no comparison of
    honest messages sees only rounding (docs/theory.md, "What rounding explains").
    """
    narrow = plan.amplification > 10
    wide = {"float16": "float32", "bfloat16": "float32"} if narrow else {}
    segments = {}
    for dtype, length in call.segments:
        length = max(length, 8 * plan.padding_multiple) if length else 0
        dtype = wide.get(dtype, dtype)
        segments[dtype] = max(length, segments.get(dtype, 0))
    return dataclasses.replace(call, segments=tuple(segments.items()))


def random_world(plan, rounds, rng, *, script=None, limits=None, compares=None, **more):
    """Draw a world with random links and sizes. ``compares``: the check of its messages, which get so long that honest
    messages pass.
    """
    script = script or random_script(plan, rng, rounds)
    if compares:
        script = [comparable(call, plan) for call in script]
        more["check"] = compares
    hosts = rng.choice(
        [
            [0] * plan.size,
            list(range(plan.size)),
            [rng.randrange(3) for _ in range(plan.size)],
        ]
    )
    drawn = {
        "piece_bytes": rng.choice([8, 8, 16, 24, 64, 1 << 18]),
        "announced_bytes": rng.choice([8, 32, 64, 1 << 20]),
        "sections_from": rng.choice([0, 1, 1, 64]),
        "stuck_seconds": rng.choice([float("inf"), 0.05]),
        "section_pieces": rng.choice([0, 0, 3, 10]),
        "least_piece_bytes": 8,
    }
    return World(
        plan,
        script,
        rng,
        hosts=hosts,
        inline=rng.choice([(0,), (0,), (64,), (1 << 20,), (0, 32, 1 << 20)]),
        limits=drawn | (limits or {}),
        in_place=rng.choice([0, 0, 0.5, 1]),
        unreadable=rng.choice([0, 0, 0.1]),
        staged=rng.choice([0, 0.5, 1]),
        rests=rng.choice([0, 0.2]),
        **more,
    )
