"""Analyse a job's telemetry: which ranks straggled, what coding saved, and how long other plans would have taken.

A late rank is served from the history and reports nothing to its parent about the rounds that it missed. So a parent's
record lacks exactly the rounds that matter. This module estimates the late rank's times from its next message, its
reported step time, and files of other ranks, if given.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxcoded.group.telemetry import TOLD, Telemetry
from jaxcoded.plan import Coded, Plan, make_plan
from jaxcoded.plan.code_tree import CodeTree
from jaxcoded.plan.tree import balanced_parents
from jaxcoded.tools.simulator import Layout, Network, Ring, simulate
from jaxcoded.tools.simulator.stragglers import Measured, Stragglers

# A rank that takes this many times as long as a round is late in most of them.
_SLOW = 1.2
# Replays of real jobs took the measured time to within 15 % (benchmarks/README.md); the report
# names larger differences.
UNUSUAL = 1.15
# A code makes rounds faster or slower by a factor of 1.2 to 1.6 (benchmarks/README.md). So a replay can rank plans only
# if it is nearer to the job than that.
WRONG = 1.5
_FANOUTS = 2, 4, 8, 16, 32
# the fraction of the rounds above which a rank counts as late in most rounds
_MOSTLY = 0.5


@dataclasses.dataclass(frozen=True)
class Savings:
    """Times of a parent's rounds: the actual times, and the times that they would have taken if the parent had
    waited for all children. Arrays have shape ``(Q,)``."""

    rounds: np.ndarray  # int64, numbers of the rounds with a sum
    coded: np.ndarray  # seconds from the previous result until the sum was complete
    # seconds until the last child's message would have come; infinite if no further message
    # came
    uncoded: np.ndarray
    inferred: np.ndarray  # whether the last child's time is an estimate: its usual time

    @property
    def avoided(self) -> float:
        """Return how many seconds of waiting were avoided, in rounds that would have
        ended without coding."""
        ended = np.isfinite(self.uncoded)
        return float((self.uncoded - self.coded)[ended].sum())

    @property
    def share(self) -> float:
        """Return the avoided seconds as a fraction of the seconds that waiting for all children would
        have taken."""
        total = self.uncoded[np.isfinite(self.uncoded)].sum()
        return self.avoided / float(total) if total > 0 else 0.0

    @property
    def stuck(self) -> int | None:
        """Return the first round that would not have ended without coding, if any."""
        endless = self.rounds[np.isinf(self.uncoded)]
        return int(endless[0]) if len(endless) else None


@dataclasses.dataclass(frozen=True)
class Work:
    """Seconds of work of every rank in every round, without its waits for other
    ranks."""

    rounds: np.ndarray  # int64 (Q,), the numbers of the rounds
    seconds: np.ndarray  # (Q, N); infinite after a rank's last sign of life
    # The source of each rank's column: its "file", its "messages" to its parent, only its "step time", or the
    # median of the "others".
    source: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A plan, and how long rounds would have taken with it."""

    name: str
    load: float  # the largest part of the batch that a rank computes
    seconds: float  # mean seconds of a round; infinite if some round does not end
    actual: bool  # whether the job had this plan
    ended: int  # how many rounds end before the first round that does not end


def spans(seen: Telemetry) -> np.ndarray:
    """Return the seconds from a round's beginning until each child's message came, float64 ``(R, C)``.

    A round begins when the parent has the previous result. Times are NaN if unknown: in the first round, and in rounds
    that a child began late or skipped. The time of a late child is estimated. The child's work for its next message is
    assumed to take its usual time, and its work for the late round ends before that. The time is infinite from the
    first round in which the child is missing, and probably not only slow."""
    begun, over = _begun(seen), _over(seen)
    arrived = seen.arrived
    out = np.full(arrived.shape, np.nan)
    if not out.size:
        return out
    before = np.vstack([np.full(arrived.shape[1], np.nan), arrived[:-1]])
    on_time = before <= begun[:, None]
    # An arrival that is also recorded for the next round belongs to the next round.
    own = arrived != np.vstack([arrived[1:], np.full(arrived.shape[1], np.nan)])
    known = on_time & ((arrived <= over[:, None]) | (own & ~np.isnan(arrived)))
    known &= ~np.isnan(seen.decided)[:, None]
    out[known] = np.maximum(arrived - begun[:, None], 0.0)[known]
    for column in range(len(seen.children)):
        usual = _usual(seen, column, out[:, column])
        for row in np.flatnonzero(on_time[:, column] & ~known[:, column]).tolist():
            out[row, column] = _missed(seen, row, column, usual)
        out[_silent_from(seen, column, usual) :, column] = np.inf
    return out


def savings(seen: Telemetry, others: Sequence[Telemetry] = ()) -> Savings:
    """Return what a parent saved by not waiting for all of its children.

    If `spans` does not know a child's time for a round, the child's usual time counts. If ``others`` has the telemetry
    of a child that is a leaf, this telemetry gives the child's times that are unknown or infinite. The result does not
    include the cost of the code, which is more work on every rank; `compare` includes it."""
    took = spans(seen)
    by_rank = {other.rank: other for other in others}
    inferred = np.isnan(took)
    for column, child in enumerate(seen.children.tolist()):
        values = took[:, column]
        usual = _usual(seen, column, values)
        other = by_rank.get(child)
        if other is not None and not len(other.children):
            lived = seen.rounds <= other.rounds.max(initial=0)
            wanting = ~np.isfinite(values) & lived
            values[wanting] = _own_work(other, seen.rounds)[wanting]
            inferred[:, column] = np.isnan(values)
        values[np.isnan(values)] = usual
    coded = seen.decided - _begun(seen)
    formed = ~np.isnan(coded)
    took, coded, inferred = took[formed], coded[formed], inferred[formed]
    last = np.fmax(coded, np.fmax.reduce(took, axis=1, initial=np.nan))
    return Savings(
        rounds=seen.rounds[formed],
        coded=coded,
        uncoded=last,
        inferred=(inferred & (took >= last[:, None])).any(axis=1),
    )


def too_late(files: Sequence[Telemetry]) -> np.ndarray:
    """Return the fraction of rounds in which each rank's message missed its parent's sum: float64 ``(N,)``, NaN for
    ranks whose parents have no file."""
    shares = np.full(len(files[0].parents), np.nan)
    for seen in files:
        late = seen.lateness[~np.isnan(seen.decided)] > 0
        if len(late):
            shares[seen.children] = late.mean(axis=0)
    return shares


def unknown(files: Sequence[Telemetry]) -> list[int]:
    """Return the ranks that were too late in most rounds and whose speeds are unknown, since they have neither a file
    nor a step time."""
    late, untold = too_late(files), np.isnan(files[0].step_times)
    with_file = {file.rank for file in files}
    ranks = np.flatnonzero((late > _MOSTLY) & untold).tolist()
    return [rank for rank in ranks if rank not in with_file]


def step_seconds(seen: Telemetry) -> float:
    """Return the mean seconds from one result to the next; NaN with fewer than two rounds."""
    if len(seen.rounds) < 2:
        return float("nan")
    lasted = seen.ended[-1] - seen.ended[0]
    return float(lasted / (seen.rounds[-1] - seen.rounds[0]))


def work(files: Sequence[Telemetry]) -> Work:
    """Return the seconds of each rank in each round of the first file.

    The best source is a rank's own file, and the second best are the arrivals of its messages at its parent. A rank
    with children waits for their messages, so its times are scaled to its reported step time. If only a rank's step
    time is known, the rank takes this time in every round. If nothing is known of a rank, it takes as long for its load
    as the median of the other ranks. A rank's usual time fills gaps.
    """
    seen = files[0]
    rows = ~np.isnan(seen.work)
    rounds = seen.rounds[rows]
    count = len(seen.parents)
    seconds = np.full((len(rounds), count), np.nan)
    source = ["others"] * count
    step_time = np.full(count, np.nan)
    for file in files:
        reported = _reported(file)
        step_time = np.where(np.isnan(step_time), reported, step_time)
        step_time[file.rank] = reported[file.rank]
    inner = np.bincount(seen.parents[seen.parents >= 0], minlength=count) > 0
    for file in files:
        took = _aligned(file.rounds, spans(file), rounds)
        for column, rank in enumerate(file.children.tolist()):
            values = took[:, column]
            median = _median(values)
            if inner[rank] and median > 0 and step_time[rank] >= 0:
                values = values * min(step_time[rank] / median, 1.0)
            if not np.isnan(values).all():
                seconds[:, rank], source[rank] = values, "messages"
    for file in files:
        own = _own_work(file, rounds)
        if not np.isnan(own).all():
            later = rounds > file.rounds.max(initial=0)
            stuck = np.isinf(seconds[:, file.rank]) & later
            seconds[:, file.rank] = np.where(stuck, np.inf, own)
            source[file.rank] = "file"
    for rank in range(count):
        if source[rank] == "others" and step_time[rank] >= 0:
            source[rank] = "step time"
        values = seconds[:, rank]
        values[np.isnan(values)] = (
            step_time[rank] if step_time[rank] >= 0 else _median(values)
        )
    unknown = np.isnan(seconds).any(axis=0)
    loaded = ~unknown & (seen.loads > 0)
    each = _of_others(seconds[:, loaded] / seen.loads[loaded])
    seconds[:, unknown] = each[:, None] * seen.loads[unknown]
    return Work(rounds, seconds, tuple(source))


def network(seen: Telemetry) -> tuple[Network, float]:
    """Return the links and the mean payload in bytes, both as a rank has seen them. The latency is the
    default of `Network`."""
    took = seen.link_seconds > 0
    rates = seen.link_bytes[took] / seen.link_seconds[took]
    links = Network(bandwidth=float(np.median(rates))) if len(rates) else Network()
    return links, float(seen.payload.mean()) if len(seen.payload) else 0.0


def alternatives(
    plan: Plan, speeds: np.ndarray | None = None
) -> list[tuple[str, Plan | Ring]]:
    """Return the job's plan, and then other plans for the same ranks and slices, all with names. The other plans have
    the same tree with a different number of stragglers, or with loads in proportion to ``speeds``, or they have
    different fan-outs. The last of them is the uncoded ring."""
    was = plan.strategy
    out: list[tuple[str, Plan | Ring]] = [(f"as it was: {_named(plan)}", plan)]
    if plan.size < 2:
        return out
    assert isinstance(was, CodeTree)  # plans with blocks are not replayed
    most = max(map(len, plan.tree.children))
    s, star, slices = was.stragglers, plan.size - 1, was.slices
    asked = [(plan.parents, other, plan.speeds) for other in (0, 1, 2, 3) if other != s]
    if speeds is not None:
        asked.append((plan.parents, s, tuple(speeds)))
    asked += [
        (_tree(plan.size, fanout, s + slices, plan.root), s, plan.speeds)
        for fanout in (*_FANOUTS, star)
        if s + slices <= fanout <= star and fanout != most
    ]
    asked.append((_tree(plan.size, star, 1, plan.root), 0, plan.speeds))
    keys = {(plan.parents, s, plan.speeds)}
    for parents, stragglers, fast in asked:
        strategy = Coded(
            parents=parents,
            stragglers=stragglers,
            slices=slices,
            root_computes=was.root_computes,
            seed=was.seed,
            speeds=fast or None,
        )
        try:
            other = make_plan(plan.size, strategy)
        except ValueError:
            continue
        key = parents, stragglers, other.speeds
        if key not in keys:
            keys.add(key)
            out.append((_named(other), other))
    out.append(("ring, uncoded", Ring(plan.size)))
    return out


def compare(files: Sequence[Telemetry]) -> list[Predicted]:
    """Replay the job's work with its plan, which comes first, and with other plans. The result is empty for fewer than
    two rounds.

    Each rank takes as long as in the job (`work`), in proportion to its load; a rank without data takes its time
    between calls. Deadlines are not replayed. If the root's telemetry is given, it must come first. Raise a ValueError
    if the telemetry has an invalid plan."""
    seen = files[0]
    plan = Plan.from_json(seen.plan)
    took = work(files)
    if not len(took.rounds):
        return []
    links, payload = network(seen)
    model = _model(took, seen.loads)
    speeds = seen.speeds if seen.rank == plan.root else None
    out = []
    for name, other in alternatives(plan, speeds):
        layout = other if isinstance(other, Ring) else Layout.of(other)
        outcome = simulate(
            layout,
            links,
            payload=payload,
            work=1.0,
            stragglers=model,
            rounds=len(took.rounds),
        )
        ended = int(np.isfinite(outcome.ends).sum())
        load = float(layout.loads.max())
        out.append(Predicted(name, load, outcome.mean, other is plan, ended))
    return out


def disagreement(measured: float, replayed: float) -> float:
    """Return the factor, ≥ 1, by which the replayed seconds differ from the measured seconds.
    Return 1 if the measured seconds are NaN."""
    if np.isnan(measured):
        return 1.0
    if not (0 < measured < np.inf and 0 < replayed < np.inf):
        return float("inf")
    return float(max(measured / replayed, replayed / measured))


def _model(took: Work, loads: np.ndarray) -> Stragglers:
    """Return a straggler model that gives each rank its work. A rank with data gets a factor: its
    seconds for the whole batch. A rank without data gets added seconds, and a factor for plans
    that give it data."""
    loaded = loads > 0
    factors = np.zeros(took.seconds.shape)
    factors[:, loaded] = took.seconds[:, loaded] / loads[loaded]
    # factors for plans in which these ranks get data
    factors[:, ~loaded] = _of_others(factors[:, loaded])[:, None]
    fixed = np.where(loaded, 0.0, took.seconds)
    return Measured(factors) + Measured(fixed, seconds=True)


def _of_others(table: np.ndarray) -> np.ndarray:
    """Return the times of a rank of which nothing is known: the median of each
    round."""
    if not table.size:
        return np.zeros(len(table))
    usual = np.median(table, axis=1)
    return np.where(np.isfinite(usual), usual, np.nan_to_num(_median(table)))


def _tree(size: int, fanout: int, needed: int, root: int) -> tuple[int, ...]:
    """Return a balanced tree with the same root."""
    parents = balanced_parents(size, fanout, needed)
    swapped = {0: root, root: 0}
    renamed = [swapped.get(parent, parent) for parent in parents]
    return tuple(renamed[swapped.get(rank, rank)] for rank in range(size))


def _named(plan: Plan) -> str:
    """Return a text that names the plan's strategy, with its tree and its speeds in
    short form."""
    strategy = plan.strategy
    if isinstance(strategy, CodeTree) and plan.size > 1:
        fanout = max(map(len, plan.tree.children))
        strategy = Coded(
            stragglers=strategy.stragglers,
            fanout=fanout,
            slices=strategy.slices,
            root_computes=strategy.root_computes,
        )
    return repr(strategy) + ", loads by speed" * bool(plan.speeds)


def _begun(seen: Telemetry) -> np.ndarray:
    """Return when each round could begin: when the previous result was there."""
    return seen.started - np.maximum(seen.work, 0.0)


def _over(seen: Telemetry) -> np.ndarray:
    """Return when each round was decided, or ended without a sum."""
    return np.where(np.isnan(seen.decided), seen.ended, seen.decided)


def _own_work(seen: Telemetry, rounds: np.ndarray) -> np.ndarray:
    """Return a rank's own seconds of work in these rounds, float64 ``(Q,)``; NaN in rounds that it skipped. If it
    skipped all rounds, return the time that it still took, which is a lower bound of its work."""
    own = np.maximum(seen.work, 0.0)
    if not seen.skipped.all():
        own = np.where(seen.skipped, np.nan, own)
    return _aligned(seen.rounds, own, rounds)


def _aligned(have: np.ndarray, values: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return a value for each of the rounds ``want``, given the values of the rounds ``have``; NaN for
    rounds without values."""
    out = np.full((len(want), *values.shape[1:]), np.nan)
    _, known, wanted = np.intersect1d(have, want, return_indices=True)
    out[wanted] = values[known]
    return out


def _median(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else float("nan")


def _reported(seen: Telemetry) -> np.ndarray:
    """Return each rank's reported seconds of work, float64 ``(N,)``. For a rank that has finished no work since its
    first round, this is how long it has been silent. It is NaN for a rank that has reported nothing."""
    silent = np.where(seen.silent > 0, seen.silent, np.nan)
    return np.where(np.isnan(seen.step_times), silent, seen.step_times)


def _usual(seen: Telemetry, column: int, took: np.ndarray) -> float:
    """Return a child's usual time: its reported step time or, for a child with children, the median of the times of
    its messages, which is a better estimate then."""
    child, median = seen.children[column], _median(took)
    step_time = float(_reported(seen)[child])
    inner = (seen.parents == child).any()
    if np.isnan(median):
        return step_time
    return median if np.isnan(step_time) or inner else step_time


def _missed(seen: Telemetry, row: int, column: int, usual: float) -> float:
    """Return a child's time for a round that it began on time and missed; NaN if unknown."""
    begun, over = _begun(seen)[row], _over(seen)
    came = seen.arrived[:, column]
    again = np.flatnonzero(came == came[row])  # empty if no message has come
    if len(again):
        # Once the child had caught up with the round of its next message, it worked for this
        # round.
        done = came[row] - (usual if usual >= 0 else 0.0)
        done = np.clip(done, over[max(again[-1] - 1, row)], came[row])
        return max(float(done - begun), 0.0)
    heard = _heard(seen, column)
    if not (heard > over[row] and usual >= 0):
        return float("nan")
    return float(np.clip(usual, over[row] - begun, heard - begun))


def _heard(seen: Telemetry, column: int) -> float:
    """Return when a child last sent anything, or NaN if it never did."""
    child = seen.children[column]
    if np.isnan(_reported(seen)[child]):
        return float(np.fmax.reduce(seen.arrived[:, column], initial=np.nan))
    return float(seen.ended[-1] - seen.silent[child])


def _silent_from(seen: Telemetry, column: int, usual: float) -> int:
    """Return the first row of the rounds in which a child is missing, and probably not only slow. If it is not
    missing, return the number of rows. The process of a missing child may be alive, although its work does not
    end."""
    missing = np.isnan(seen.arrived[:, column])
    rows = len(missing)
    first = 0 if missing.all() else rows - int(np.argmin(missing[::-1]))
    if first == rows:
        return rows
    begun, end = _begun(seen), float(seen.ended[-1])
    a_round = _median(_over(seen) - begun)
    # A usual time that was derived from the silence must not be used to judge the
    # silence.
    usual = float("nan") if np.isnan(seen.step_times[seen.children[column]]) else usual
    patience = TOLD + 2 * np.fmax.reduce([usual, a_round, 0.0])
    alive = end - _heard(seen, column) <= patience
    if alive and (missing.all() or usual > _SLOW * a_round):
        return rows  # the child was always late
    # how long the child was absent before it came again
    absent = np.fmax.reduce(
        seen.arrived[:first, column] - begun[:first], initial=np.nan
    )
    since = seen.started[first] if np.isnan(begun[first]) else begun[first]
    return first if end - since > np.fmax(patience, 2 * absent) else rows
