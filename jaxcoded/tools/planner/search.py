"""Find the plan that is expected to be the fastest, with the simulator."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxcoded import _require
from jaxcoded.plan import Plan
from jaxcoded.tools.planner.candidates import (
    MOST_DRAWN,
    RING,
    Candidate,
    candidates,
    checked_replicas,
    may_be_drawn,
    sharing,
    too_many_to_draw,
    why_not_shared,
)
from jaxcoded.tools.simulator import Costs, Layout, Network, simulate
from jaxcoded.tools.simulator.sections import forms_sections
from jaxcoded.tools.simulator.stragglers import Delays, Stragglers, as_model
from jaxcoded.transport.options import PIECE

_GAIN = 0.01  # a smaller gain does not justify a code
_MORE_DATA = 0.05  # the gain that justifies holding data on more ranks
_NEAR = 1.2  # shared work within this factor of the best time may still win
# the number of batches of consecutive rounds; the batches' means are nearly independent
_BATCHES = 16
_KEPT = 8  # the most coded candidates in the last rung
# about how many seconds each rung of the search takes
_SHARES = (0.4, 0.4, 0.4, 1.5, 0.2, 0.3)
# the most ranks for which the search also compares codes with too large a κ
_MOST_LEFT_OUT = 20_000


@dataclasses.dataclass(frozen=True)
class Estimate:
    """How long steps with a candidate would take.

    Attributes:
        candidate: the candidate.
        seconds: float64 ``(rounds,)``, the time of each simulated round, including the time to read data. All
            estimates of a ranking use the same draws.
        load: the part of the batch that the busiest rank computes.
        message: bytes of the message that a child of the root sends; in a ring, bytes
            that a rank sends to its neighbour in each step.
        code: the kinds of codes in the candidate's plan.
        amplification: the plan's κ.
        held: the largest part of the batch whose data a rank holds.
        in_sections: whether the candidate's sums are formed in sections
            (``docs/engine.md``).
    """

    candidate: Candidate
    seconds: np.ndarray = dataclasses.field(repr=False, compare=False)
    load: float
    message: float
    code: str
    amplification: float
    held: float = 0.0
    in_sections: bool = False

    @property
    def step(self) -> float:
        """Return the mean seconds of the simulated rounds."""
        return float(self.seconds.mean())

    @property
    def error(self) -> float:
        """Return the standard error of `step`, estimated from batches of rounds."""
        return _standard_error(_batches(self.seconds))

    @property
    def usual(self) -> tuple[float, float]:
        """Return the 5 % and 95 % quantiles of the rounds, in seconds."""
        low, high = np.percentile(self.seconds, [5, 95], method="nearest")
        return float(low), float(high)

    @property
    def name(self) -> str:
        """Return a text that names the candidate."""
        return self.candidate.name

    def faster_than(self, other: "Estimate") -> bool:
        """Return whether this candidate is faster by more than 1 %, and not only by chance. The gain must exceed
        twice its standard error, or be positive in 3 of 4 batches of rounds. The second condition is for
        distributions with tails too heavy for a standard error."""
        if not math.isfinite(other.step):
            return math.isfinite(self.step)
        if self.step >= (1 - _GAIN) * other.step:
            return False
        rounds = min(len(self.seconds), len(other.seconds))
        gains = _batches(other.seconds[:rounds] - self.seconds[:rounds])
        sure = gains.mean() > 2 * _standard_error(gains)
        return bool(sure or (gains > 0).mean() >= 0.75)


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A code that is left out although it would be faster: its rounding errors are too large, or it takes
    too long to find.

    Attributes:
        candidate: the candidate with this code. Its κ is above the bound, or unknown.
        gain: the step time of the best candidate divided by this candidate's step time; infinite if the best
            candidate's steps never end.
        ranks: the smallest number of ranks, above the job's number, with which the candidate would not be left out.
            It is at most ``2 fanout`` above the job's number; 0 if there is no such number.
        drawn: True if κ is known to be above the bound. False if κ is unknown because a parent has too many
            children for a random code.
    """

    candidate: Candidate
    gain: float
    ranks: int
    drawn: bool


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Candidates in order, the fastest first.

    Attributes:
        ranks: the number of ranks of the job.
        payload: bytes that are summed.
        work: seconds that one usual rank would take for the whole batch.
        estimates: estimates of the best coded and uncoded candidates, the fastest first.
        amplification: the largest κ that a plan may have.
        left_out: the fastest code that was left out, if it is faster than `best`.
        not_shared: why no candidate shares the work, as words that continue a sentence
            after "shared work".
    """

    ranks: int
    payload: float
    work: float
    estimates: tuple[Estimate, ...]
    amplification: float = 1000.0
    left_out: LeftOut | None = None
    not_shared: str = ""

    @property
    def uncoded(self) -> Estimate:
        """Return the fastest candidate that waits for all ranks, a tree or a ring."""
        return next(e for e in self.estimates if e.candidate.plain)

    @property
    def best(self) -> Estimate:
        """Return the candidate to use. It is the fastest uncoded candidate, unless a code or shared work is certain
        to be faster. Shared work has the fewest replicas with which a step takes at most 5 % longer than with the
        best number of replicas."""
        return self._better_than(self.uncoded)

    @property
    def best_tree(self) -> Estimate:
        """Return the best candidate that a `CodedGroup` can use."""
        trees = (e for e in self.estimates if e.candidate.tree)
        return self._better_than(next(e for e in trees if e.candidate.plain))

    def _better_than(self, uncoded: Estimate) -> Estimate:
        others = (e for e in self.estimates if e.candidate.coded or e.candidate.shared)
        best = next((e for e in others if e.faster_than(uncoded)), uncoded)
        if not best.candidate.shared:
            return best
        shared = [e for e in self.estimates if e.candidate.shared]
        codes = (e.step for e in self.estimates if e.candidate.coded)
        most = min((1 + _MORE_DATA) * best.step, next(codes, math.inf))
        most = max(most, best.step)  # a code may seem faster by chance
        return min(
            (e for e in shared if e.step <= most and e.faster_than(uncoded)),
            key=lambda e: e.candidate.replicas,
        )

    @property
    def verdict(self) -> str:
        """Return a text that says what to do and why, and why faster candidates are
        left out."""
        best = self.best.candidate
        words = (
            self._sentence + self._too_rough + ("" if best.shared else self._why_not)
        )
        words += self._balanced + self._by_cost
        if not (best.shared or best.stragglers) and math.isfinite(self.best.step):
            words += ". So every step waits for all ranks: a stuck or dead rank stops the job"
        return words

    @property
    def _too_rough(self) -> str:
        left_out = self.left_out
        if left_out is None:
            return ""
        gain = (
            f"{left_out.gain:.3g} times as fast"
            if math.isfinite(left_out.gain)
            else "with which steps would end"
        )
        usable = f"; {left_out.ranks} ranks could use it" if left_out.ranks else ""
        why = (
            f"kappa is above {self.amplification:g}"
            if left_out.drawn
            else f"random codes are not drawn for a parent with more than {MOST_DRAWN} children"
        )
        return f". Left out, as {why}: {left_out.candidate.name}, {gain}{usable}"

    @property
    def _sentence(self) -> str:
        best, uncoded = self.best, self.uncoded
        if best.candidate.shared:
            return self._why_shared(best)
        if math.isinf(best.step):
            any_code = "a code" if self.left_out is None else "any other code"
            return f"do not code: a step would never end, with {any_code} or without"
        if best.candidate.coded:
            times = uncoded.step / best.step
            if math.isinf(times):
                return f"code: without a code ({uncoded.name}) a step would never end"
            return f"code: {times:.3g} times as fast as the best uncoded strategy, {uncoded.name}"
        coded = next((e for e in self.estimates if e.candidate.coded), None)
        if coded is None:
            return "do not code: no code fits"
        return f"do not code: the best code, {coded.name}, {_behind(coded, uncoded)}"

    @property
    def _why_not(self) -> str:
        if self.not_shared:
            return f". Not shared: shared work {self.not_shared}"
        shared = next((e for e in self.estimates if e.candidate.shared), None)
        if shared is None or math.isinf(self.best.step):
            return ""
        return f". Not shared: {shared.name} {_behind(shared, self.best)}"

    @property
    def _balanced(self) -> str:
        balanced = next((e for e in self.estimates if e.candidate.balanced), None)
        if balanced is None or not balanced.faster_than(self.uncoded):
            return ""
        # A factor below 1 is not due to chance, but static balancing needs other calls in
        # the program.
        times = balanced.step / self.best.step
        return f". Static balancing, {balanced.name}, takes {times:.3g} times as long"

    @property
    def _by_cost(self) -> str:
        blind = next((e for e in self.estimates if e.candidate.blind), None)
        if blind is None or math.isinf(blind.step):
            return ""
        by_cost = dataclasses.replace(blind.candidate, blind=False)
        same = next(e for e in self.estimates if e.candidate == by_cost)
        return f". Division by cost makes {same.name} {blind.step / same.step:.3g} times as fast"

    def _why_shared(self, best: Estimate) -> str:
        gains = [
            f"{other.step / best.step:.3g} times as fast as the best {what}, {other.name}"
            if math.isfinite(other.step)
            else f"with the best {what}, {other.name}, a step would never end"
            for what, other in (
                ("uncoded strategy", self.uncoded),
                ("code", next((e for e in self.estimates if e.candidate.coded), None)),
            )
            if other is not None
        ]
        words = f"A rank holds {best.held:.3g} of the batch"
        replicas = best.candidate.replicas
        more = [e.step for e in self.estimates if e.candidate.replicas > replicas]
        if more:
            gain = max(0.0, 1 - min(more) / best.step)
            words += f"; more replicas would gain {gain:.1%}"
        return f"share the work: {'; '.join(gains)}. {words}"


def _behind(other: Estimate, best: Estimate) -> str:
    if math.isinf(other.step):
        return "would never end a step"
    if best.step <= other.step < (1 + _GAIN / 2) * best.step:
        return "takes as long"
    if other.step >= best.step:
        return f"takes {other.step / best.step:.3g} times as long"
    gain = 1 - other.step / best.step
    doubt = "is not worth it" if gain <= _GAIN else "may be chance"
    return f"is {gain:.1%} faster, which {doubt}"


def best_plans(
    ranks: int,
    payload: float,
    work: float,
    network: Network | None = None,
    stragglers: Stragglers | str | None = None,
    *,
    seed: int = 0,
    amplification: float = 1000.0,
    replicas: int | None = None,
    reading: float = 0.0,
    costs: Costs | None = None,
    progress: Callable[[float], None] = lambda part: None,
) -> Ranking:
    """Find the fastest tree, code and pieces, or the fastest way to share the work.

    The simulator runs all candidates on the same draws of the stragglers, with few rounds at first and more rounds
    for the best candidates. ``docs/planning.md`` describes the search and its limits.

    Args:
        ranks: the number of ranks in the job, at least 2.
        payload: bytes that are summed in every step.
        work: seconds that one usual rank would take for the whole batch on its own.
        network: the network of the job; `Network.piece` is chosen. Default: usual hosts
            with 10 Gb/s.
        stragglers: a model, or the text that names a model. Default: no stragglers.
        seed: the seed of the draws and of random codes; at least 0.
        amplification: the largest κ that a plan may have; 1,000 leaves four digits in float32.
        replicas: how many other ranks may hold each rank's part of the batch; 0: no shared work (``docs/sharing.md``).
            Default: all other ranks.
        reading: seconds that a rank would take to read the whole batch. In every step each rank reads all data that it
            holds.
        costs: the costs of examples, by which each batch is divided. Default: all examples cost the same.
        progress: a function that is called with the finished part of the search, from 0
            to 1.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> from jaxcoded.tools.planner import search
        >>> from jaxcoded.tools.simulator import stragglers
        >>> model = stragglers.named("fixed(factor=10)")
        >>> ranking = search.best_plans(13, 4e6, 1.0, stragglers=model, replicas=0)
        >>> ranking.best.candidate.stragglers
        1
        >>> search.best_plans(13, 4e6, 1.0, stragglers=model).best.candidate.shared
        True
        >>> search.best_plans(13, 4e6, 1.0).best.candidate.stragglers  # no stragglers
        0
    """
    ranks = _require.integer("ranks", ranks, 2)
    payload = _require.positive("payload", payload)
    work = _require.positive("work", work)
    seed = _require.integer("seed", seed, 0)
    if not amplification >= 1:
        raise ValueError(f"amplification must be at least 1, got {amplification!r}")
    if replicas is not None:
        replicas = checked_replicas(replicas, ranks)
    if not 0 <= reading < math.inf:
        raise ValueError(f"reading must be seconds >= 0, got {reading!r}")
    search = _Search(
        ranks,
        payload,
        work,
        Network() if network is None else network,
        _Drawn(as_model(stragglers), ranks, seed),
        seed,
        amplification,
        sharing(ranks, work, replicas),
        float(reading),
        costs,
        progress,
    )
    ranking = Ranking(ranks, payload, work, tuple(search.run()), amplification)
    not_shared = why_not_shared(ranks, work, replicas)
    left_out = search.left_out(ranking.best)
    progress(1.0)
    return dataclasses.replace(ranking, left_out=left_out, not_shared=not_shared)


class _Drawn(Stragglers):
    """The rounds of a model, drawn once for all candidates."""

    def __init__(self, model: Stragglers, size: int, seed: int) -> None:
        self._rounds = model.rounds(size, seed)

    def rounds(self, size: int, seed: int = 0) -> Iterator[Delays]:
        self._rounds, again = itertools.tee(self._rounds)
        return again


@dataclasses.dataclass
class _Search:
    """The search, by successive halving: each rung simulates fewer candidates than the
    previous rung, with more rounds of each candidate."""

    ranks: int
    payload: float
    work: float
    network: Network
    stragglers: _Drawn
    seed: int
    amplification: float
    sharing: list[Candidate]
    reading: float
    costs: Costs | None
    progress: Callable[[float], None]
    done: float = 0.0
    amplified: list[Candidate] = dataclasses.field(default_factory=list)

    def run(self) -> list[Estimate]:
        entering: list[Candidate] = []
        for candidate in candidates(self.ranks, self.seed):
            fits = may_be_drawn(self.ranks, candidate, self.amplification)
            (entering if fits else self.amplified).append(candidate)
        first = self._rung(entering, _SHARES[0], least=4, most=64)
        # Rare or rising delays may not show yet, so keep a candidate for each s.
        entering = _each(first, lambda c: (c.stragglers, c.slices))
        entering += [c for c in first if c.coded][:24]
        entering += [c for c in first if not c.coded][:4]
        second = self._rung(entering, _SHARES[1], least=24, most=256)
        plans = self._accepted(second)
        trees = [c for c in second if not c.coded and c.tree][:2]
        entering = [c for base in [*plans, *trees] for c in base.variants(self.payload)]
        third = self._rung(entering, _SHARES[2], least=6, most=64)
        # A code cannot make up for a root that straggles, so compare roots with and
        # without data.
        final = _each(third, lambda c: c.strategy)
        trees = [c for c in final if c.plain]
        final += [dataclasses.replace(c, balanced=True) for c in trees[:1]]
        if self.costs:
            final += [dataclasses.replace(c, blind=True) for c in trees[:1]]
        final.append(RING)
        shared = [v for base in self.sharing for v in base.variants(self.payload)]
        fourth = self._rung(shared, _SHARES[5], least=6, most=64)
        shared = _each(fourth, lambda c: c.replicas)
        near = _NEAR * min([*second.values(), *third.values()])
        final += [c for c in shared if c is shared[0] or fourth[c] < near]
        fewest = 128 if shared else 48
        out = self._estimates(final, plans, least=fewest, most=1024)
        # Simulate four times as many rounds of candidates that may still turn out to be
        # the fastest.
        least = (1 - _GAIN) * out[0].step
        doubt = [e for e in out[1:] if e.step - 2 * e.error < least][:6]
        if doubt and self.ranks <= 20_000:
            again = [e for e in out if e in doubt or e is out[0] or e.candidate.plain]
            rounds = 4 * len(out[0].seconds)
            longer = self._estimates(
                [e.candidate for e in again], plans, least=rounds, most=rounds
            )
            rest = [e for e in out if e not in again]
            out = sorted([*longer, *rest], key=lambda estimate: estimate.step)
        return out

    def left_out(self, best: Estimate) -> LeftOut | None:
        """Return the fastest code whose κ is above the bound or unknown, if it is faster
        than the candidate ``best``."""
        if not self.amplified or self.ranks > _MOST_LEFT_OUT:
            return None
        times = self._rung(self.amplified, _SHARES[4], least=16, most=64)
        fastest = next(iter(times))
        again = dict(self._simulated([fastest], 0.0, 256, 256))[fastest]
        gain = best.seconds[:256].mean() / again[: len(best.seconds)].mean()
        if not gain > 1 / (1 - _GAIN):
            return None
        drawn = not too_many_to_draw(self.ranks, fastest)
        return LeftOut(fastest, float(gain), self._ranks_for(fastest), drawn)

    def _ranks_for(self, candidate: Candidate) -> int:
        star = candidate.fanout >= self.ranks - 1
        for more in range(1, 2 * candidate.fanout + 1):
            ranks = self.ranks + more
            larger = candidate
            if star:
                strategy: Any = larger.strategy
                larger = Candidate(dataclasses.replace(strategy, fanout=ranks - 1))
            if not may_be_drawn(ranks, larger, self.amplification):
                continue
            try:
                if larger.plan(ranks).amplification <= self.amplification:
                    return ranks
            except ValueError:
                continue
        return 0

    def _estimates(
        self,
        final: list[Candidate],
        plans: dict[Candidate, Plan],
        *,
        least: int,
        most: int,
    ) -> list[Estimate]:
        out = []
        times = self._simulated(final, _SHARES[3], least, most, self.costs)
        for candidate, seconds in times:
            layout, plan = candidate.layout(self.ranks), plans.get(candidate.base)
            length = (
                layout.messages[1] if isinstance(layout, Layout) else 1 / self.ranks
            )
            kinds = (
                dict.fromkeys(coding.code.name for _, coding in plan.coded_parents)
                if plan
                else ["shared" if candidate.shared else "uncoded"]
            )
            out.append(
                Estimate(
                    candidate,
                    seconds,
                    float(layout.loads.max()),
                    self.payload * float(length),
                    ", ".join(kinds),
                    plan.amplification if plan else 1.0,
                    candidate.held(layout),
                    isinstance(layout, Layout)
                    and forms_sections(layout, self._network(candidate), self.payload),
                )
            )
        return sorted(out, key=lambda estimate: estimate.step)

    def _network(self, candidate: Candidate) -> Network:
        return dataclasses.replace(self.network, piece=candidate.piece)

    def _accepted(self, times: dict[Candidate, float]) -> dict[Candidate, Plan]:
        """Return coded candidates whose plans have a κ within the bound: the best candidates for some numbers of
        stragglers, and further candidates that may still win."""
        coded = [candidate for candidate in times if candidate.coded]
        of_each = _each(coded, lambda c: c.stragglers)[:3]
        plans: dict[Candidate, Plan] = {}
        for candidate in dict.fromkeys([*of_each, *coded]):
            slow = times[candidate] > 2 * min(times.values())
            if len(plans) == _KEPT or (slow and plans and candidate not in of_each):
                continue
            try:
                plan = candidate.plan(self.ranks)
            except ValueError:
                continue
            if plan.amplification <= self.amplification:
                plans[candidate] = plan
            else:
                self.amplified.append(candidate)
        return plans

    def _rung(
        self, entering: Iterable[Candidate], share: float, *, least: int, most: int
    ) -> dict[Candidate, float]:
        """Return the mean seconds of candidates, the fastest first."""
        entering = list(dict.fromkeys(entering))
        times = {
            candidate: float(seconds.mean())
            for candidate, seconds in self._simulated(entering, share, least, most)
        }
        # An unusual size of pieces must make a step faster by some margin.
        return dict(
            sorted(
                times.items(),
                key=lambda item: item[1] * (1 + _GAIN * (item[0].piece != PIECE)),
            )
        )

    def _simulated(
        self,
        entering: list[Candidate],
        share: float,
        least: int,
        most: int,
        costs: Costs | None = None,
    ) -> Iterator[tuple[Candidate, np.ndarray]]:
        """Yield each candidate with the seconds of its rounds. The number of rounds is such that the simulation of
        all candidates takes about ``share`` seconds."""
        cost = max(len(entering), 1) * (1.5e-4 + 1e-7 * self.ranks)
        # shared work is simulated message by message
        events = sum(candidate.shared for candidate in entering) * self.ranks
        cost += events * (5e-5 + 2e-6 * self.ranks)
        if self.ranks > 2000 and least < most:  # with many ranks, rounds differ less
            least = max(least * 2000 // self.ranks, least // 3)
        rounds = min(max(int(share / cost), least), most)
        start, self.done = self.done, self.done + share / sum(_SHARES)
        for number, candidate in enumerate(entering):
            layout = candidate.layout(self.ranks)
            part = number / len(entering)
            self.progress(min(1.0, start + (self.done - start) * part))
            # the costs need to know which examples each rank has
            if costs and candidate.coded:
                layout = Layout.of(candidate.plan(self.ranks))
            outcome = simulate(
                layout,
                self._network(candidate),
                payload=self.payload,
                work=self.work,
                stragglers=self.stragglers,
                rounds=rounds,
                balanced=candidate.balanced,
                costs=costs.unknown if costs and candidate.blind else costs,
            )
            yield candidate, outcome.seconds + self.reading * candidate.held(layout)


def _each(
    ordered: Iterable[Candidate], key: Callable[[Candidate], Any]
) -> list[Candidate]:
    """Return the first candidate with each key."""
    best: dict[Any, Candidate] = {}
    for candidate in ordered:
        best.setdefault(key(candidate), candidate)
    return list(best.values())


def _batches(seconds: np.ndarray) -> np.ndarray:
    return np.array([part.mean() for part in np.array_split(seconds, _BATCHES)])


def _standard_error(means: np.ndarray) -> float:
    if not np.isfinite(means).all():
        return math.inf
    return float(means.std(ddof=1) / math.sqrt(len(means)))
