"""The plan of a group that plans itself."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from jaxcoded import _format, _require
from jaxcoded.plan import Plan, Uncoded, make_plan
from jaxcoded.tools.planner import Ranking, best_plans
from jaxcoded.tools.planner.candidates import checked_replicas
from jaxcoded.tools.planner.crossover import sections_pay_from
from jaxcoded.tools.planner.measurement import Measurement
from jaxcoded.tools.planner.measuring import measured
from jaxcoded.tools.simulator import Layout
from jaxcoded.tools.simulator.sections import IN_SECTIONS
from jaxcoded.tools.terminal.progress import progress
from jaxcoded.transport.agreement import told
from jaxcoded.transport.options import PIECE

logger = logging.getLogger("jaxcoded")


class Choice(NamedTuple):
    """What all ranks have agreed on.

    Attributes:
        plan: of the group.
        piece: bytes in which its messages move; ``None``: the usual ones.
        sections_from: bytes from which it is to form sums in sections; ``None``: as it would
            without being told.
        words: why.
    """

    plan: Plan
    piece: int | None
    sections_from: int | None
    words: str


def check(payload: Any, work: Any, piece_bytes: Any, replicas: Any, size: int) -> None:
    """Raise unless these are arguments of a group that plans itself.

    Args:
        payload: bytes.
        work: a function of the part of the batch, or seconds for the whole batch.
        piece_bytes: must be ``None``.
        replicas: fewer than ranks, or ``None``; one rank has no use for it.
        size: number of ranks.

    Raises:
        ValueError: the message names the value and the remedy.
    """
    if piece_bytes is not None:
        raise ValueError(
            "CodedGroup.auto chooses the pieces: leave out the option "
            f"piece_bytes={piece_bytes!r}"
        )
    if not _require.is_positive(payload):
        raise ValueError(
            "CodedGroup.auto needs payload, the bytes that a step sums, > 0: got "
            f"payload={payload!r}"
        )
    if not (callable(work) or _require.is_positive(work)):
        raise ValueError(
            "CodedGroup.auto needs work, a function work(part) that computes the gradient of "
            "such a part of the batch, or the seconds that one rank would take for the "
            f"whole batch: got work={work!r}"
        )
    if replicas is not None:
        _require.integer("replicas", replicas, 0)
        if size > 1:
            checked_replicas(replicas, size)


def choose(
    comm: MPI.Intracomm,
    payload: float,
    work: Callable[[float], Any] | float,
    seed: int,
    replicas: int | None = None,
    reading: float = 0.0,
    not_shared: str = "",
    sections_from: int | None = None,
) -> Choice:
    """Measure, and plan. Collective; rank 0 decides.

    Args:
        comm: of the ranks.
        payload: bytes that a step sums.
        work: computes the gradient of a part of the batch; or the seconds that a usual
            rank would take for the whole batch.
        seed: of random codes.
        replicas, reading: as in `best_plans`.
        not_shared: why this group cannot share work, in words that follow "shared work".
        sections_from: bytes from which this group forms sums in sections; 0: none. Default:
            as is expected to pay between its hosts.

    Raises:
        RuntimeError: ``work`` failed on a rank. Raised on every rank.
        ValueError: rank 0 could not plan. Raised on every rank.
    """
    size = comm.size
    if size == 1:
        alone = make_plan(1, Uncoded())
        return Choice(alone, None, None, "one rank: nothing to plan")
    with progress("measuring and planning", quiet=comm.rank > 0) as tell:
        part = 1 / (size - 1)
        mine = functools.partial(work, part) if callable(work) else float(work) * part
        seen = measured(comm, mine, lambda done: tell(0.4 * done))
        seconds = seen.work / part
        network = seen.network
        if sections_from is not None:
            network = dataclasses.replace(network, sections_from=sections_from)
        answer: dict[str, Any] = {}
        if comm.rank == 0:
            try:
                ranking = best_plans(
                    size,
                    float(payload),
                    seconds,
                    network,
                    seen.stragglers,
                    seed=seed,
                    replicas=0 if not_shared else replicas,
                    reading=reading,
                    progress=lambda done: tell(0.4 + 0.6 * done),
                )
                if not_shared:
                    ranking = dataclasses.replace(ranking, not_shared=not_shared)
                best = ranking.best_tree.candidate
                plan = best.plan(size)
                pays_from = None
                if sections_from is None and network.sections_from:
                    pays_from = sections_pay_from(Layout.of(plan), network)
                answer = {
                    "plan": plan.to_json(),
                    "piece": None if best.piece == PIECE else best.piece,
                    "sections_from": pays_from,
                    "words": _words(seen, seconds, ranking),
                }
            except Exception as error:  # noqa: BLE001  # the others wait for an answer
                answer = {"error": f"{type(error).__name__}: {error}"}
    answer = told(comm, answer)
    if "error" in answer:
        raise ValueError(f"CodedGroup.auto failed on rank 0: {answer['error']}")
    if comm.rank == 0:
        logger.info("%s", answer["words"])
    return Choice(
        Plan.from_json(answer["plan"]),
        answer["piece"],
        answer["sections_from"],
        answer["words"],
    )


def _words(seen: Measurement, seconds: float, ranking: Ranking) -> str:
    best, network = ranking.best_tree, seen.network
    trees = (e for e in ranking.estimates if e.candidate.tree)  # a ring is no group
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
            "for all ranks (give replicas=0 where a program has only these)"
        )
    if best.in_sections:
        words += f". Its {IN_SECTIONS}"
    if not ranking.best.candidate.tree:
        words += ". A ring would be faster than any group: jaxcoded.baselines"
    return words
