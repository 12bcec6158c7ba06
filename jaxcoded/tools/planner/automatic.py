"""Plan a group from measurements of its ranks."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from jaxcoded import _format, _require
from jaxcoded.group.opening import why_not_shared
from jaxcoded.group.session import Choice
from jaxcoded.plan import Plan, Uncoded, make_plan
from jaxcoded.tools.planner import Ranking, best_plans
from jaxcoded.tools.planner.candidates import checked_replicas
from jaxcoded.tools.planner.crossover import sections_pay_from
from jaxcoded.tools.planner.measurement import Measurement
from jaxcoded.tools.planner.measuring import measured
from jaxcoded.tools.simulator import Layout
from jaxcoded.tools.simulator.sections import IN_SECTIONS
from jaxcoded.tools.terminal.progress import progress
from jaxcoded.transport import engine
from jaxcoded.transport.agreement import broadcast, gathered
from jaxcoded.transport.options import PIECE, Options

logger = logging.getLogger("jaxcoded")


@dataclasses.dataclass(frozen=True)
class Automatic:
    """The arguments of `CodedGroup.auto`."""

    payload: float
    work: Callable[[float], Any] | float
    seed: int
    replicas: int | None
    reading: float

    @property
    def request(self) -> dict[str, Any]:
        """Return the arguments that must be equal on all ranks."""
        how = "a function" if callable(self.work) else self.work
        return {"plan": "auto", **vars(self), "work": how}

    def first(self, options: Options | None, hosts: Sequence[str]) -> Plan:
        """Return the plan of the group before the measurement; ``hosts`` has the host of each rank. Raise a
        ValueError if an argument is invalid."""
        size, work = len(hosts), self.work
        if options is not None and options.piece_bytes is not None:
            raise ValueError(
                "CodedGroup.auto chooses the pieces: leave out the option "
                f"piece_bytes={options.piece_bytes!r}"
            )
        if not _require.is_positive(self.payload):
            raise ValueError(
                "CodedGroup.auto needs payload, the bytes that a step sums, > 0: got "
                f"payload={self.payload!r}"
            )
        if not (callable(work) or _require.is_positive(work)):
            raise ValueError(
                "CodedGroup.auto needs work: a function work(part) that computes the gradient of "
                "a part of the batch, or one rank's seconds for the whole batch. Got "
                f"work={work!r}"
            )
        if self.replicas is not None:
            _require.integer("replicas", self.replicas, 0)
            if size > 1:
                checked_replicas(self.replicas, size)
        return make_plan(size, Uncoded())

    def choose(self, comm: MPI.Intracomm, transport: str, options: Options) -> Choice:
        """Measure, and return the choice of rank 0. Collective. Raise a RuntimeError on every rank if ``work`` failed
        on some rank, and a ValueError if rank 0 could not plan."""
        reasons = gathered(comm, "" if transport == "mpi4jax" else engine.missing())
        # if a check compares messages, the root forms the whole sum, not in sections
        whole = transport == "mpi4jax" or any(reasons) or bool(options.check)
        not_shared = why_not_shared(transport, reasons)
        return self.measured(comm, not_shared, 0 if whole else options.sections_from)

    def measured(
        self, comm: MPI.Intracomm, not_shared: str, sections_from: int | None
    ) -> Choice:
        """Measure and choose as `choose` does. With ``sections_from=None``, also choose the size above which
        sections make sums faster."""
        size = comm.size
        if size == 1:
            alone = make_plan(1, Uncoded())
            return Choice(alone, None, None, "one rank: nothing to plan")
        with progress("measuring and planning", quiet=comm.rank > 0) as tell:
            part = 1 / (size - 1)
            work = self.work
            own_work = (
                functools.partial(work, part) if callable(work) else float(work) * part
            )
            seen = measured(comm, own_work, lambda done: tell(0.4 * done))
            seconds = seen.work / part
            network = seen.network
            if sections_from is not None:
                network = dataclasses.replace(network, sections_from=sections_from)
            answer: list[Any] | str = ""
            if comm.rank == 0:
                try:
                    ranking = best_plans(
                        size,
                        float(self.payload),
                        seconds,
                        network,
                        seen.stragglers,
                        seed=self.seed,
                        replicas=0 if not_shared else self.replicas,
                        reading=self.reading,
                        progress=lambda done: tell(0.4 + 0.6 * done),
                    )
                    if not_shared:
                        ranking = dataclasses.replace(ranking, not_shared=not_shared)
                    best = ranking.best_tree.candidate
                    plan = best.plan(size)
                    pays_from = None
                    if sections_from is None and network.sections_from:
                        pays_from = sections_pay_from(Layout.of(plan), network)
                    piece = None if best.piece == PIECE else best.piece
                    words = _words(seen, seconds, ranking)
                    answer = [plan.to_json(), piece, pays_from, words]
                except Exception as error:  # noqa: BLE001  # the other ranks wait for an answer
                    answer = f"{type(error).__name__}: {error}"
        answer = broadcast(comm, answer)
        if isinstance(answer, str):
            raise ValueError(f"CodedGroup.auto failed on rank 0: {answer}")  # noqa: TRY004
        text, *others = answer
        choice = Choice(Plan.from_json(text), *others)
        if comm.rank == 0:
            logger.info("%s", choice.words)
        return choice


def _words(seen: Measurement, seconds: float, ranking: Ranking) -> str:
    best, network = ranking.best_tree, seen.network
    trees = (e for e in ranking.estimates if e.candidate.tree)  # no group is a ring
    of_groups = dataclasses.replace(ranking, estimates=tuple(trees))
    spread = np.percentile(seen.stragglers.factors, [5, 50, 95, 100])
    words = (
        f"{best.name}, pieces of {best.candidate.piece >> 10} KiB, expected step "
        f"{_format.seconds(best.step, 'never')}. {of_groups.verdict}. Measured: latency "
        f"{_format.seconds(network.latency)}, {network.bandwidth * 8e-9:.3g} Gb/s, work "
        f"{_format.seconds(seconds)} for the whole batch; ranks took "
        f"{spread[0]:.2f} to {spread[2]:.2f} times as much (5 to 95 %; at most "
        f"{spread[3]:.3g}) in {seen.rounds} turns"
    )
    if best.candidate.shared:
        words += (
            ". Work is shared by coded_value_and_grad and by group.blocks; other sums wait "
            "for all ranks (give replicas=0 if a program has only these)"
        )
    if best.in_sections:
        words += f". Its {IN_SECTIONS}"
    if not ranking.best.candidate.tree:
        words += ". A ring would be faster than any group: jaxcoded.baselines"
    return words
