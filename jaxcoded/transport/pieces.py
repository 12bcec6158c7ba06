"""In which pieces the vectors of a group move, and from which length on its sums are formed in sections
(``docs/engine.md``)."""

import os
from typing import Any, NamedTuple

from mpi4py import MPI

from jaxcoded.plan import Plan
from jaxcoded.simulator import Layout
from jaxcoded.simulator.network import SECTION_PIECES, SECTIONS_FROM
from jaxcoded.transport.agreement import gathered
from jaxcoded.transport.options import PIECE, Options

# On one host, from what is measured in benchmarks/README.md. Bytes of a piece: those that are added up are
# in a cache together.
_NEAR_PIECE = 128 << 10
# Sections pay from this many bytes, divided by the number of ranks that form them at a time: on 2 cores from 2 MiB
# on; on 16, 13 ranks need a third of the time for 2 MB.
_NEAR_SECTIONS_FROM = 4 << 20
# How many times as long the root takes to fetch and add a message as another rank to copy the result: of 16 MB
# 5 ms of CPU against 2.4.
_ADDING = 2.0
# How much more the root must have to do than the others: sections cost messages, and copies.
_AS_MUCH = 1.5


class Pieces(NamedTuple):
    """How long vectors move.

    Attributes:
        bytes: of a piece.
        sections_from: bytes from which sums are formed in sections; 0: none.
        of_sections: into how many pieces such a sum is cut, if they are not too long or short; 0: into
            those of any other.
    """

    bytes: int
    sections_from: int
    of_sections: int


def pieces(comm: MPI.Intracomm, plan: Plan, options: Options) -> Pieces:
    """Those of a group. Collective."""
    here: Any = MPI.Get_processor_name(), sorted(os.sched_getaffinity(0))
    hosts, cores = zip(*gathered(comm, here))
    near = len(set(hosts)) == 1
    family = _one_family(plan)
    sections_from = 0
    if family and not near:
        sections_from = SECTIONS_FROM
    elif family and pays_on_one_host(plan, number := len(set().union(*cores))):
        pay_from = _NEAR_SECTIONS_FROM // min(number, plan.size)
        sections_from = max(pay_from, 2 * _NEAR_PIECE)
    if family and options.sections_from is not None:
        sections_from = options.sections_from
    return Pieces(
        options.piece_bytes or (_NEAR_PIECE if near else PIECE),
        sections_from,
        # memory has no port that would be idle while long pieces move
        0 if near else SECTION_PIECES * plan.size,
    )


def pays_on_one_host(plan: Plan, cores: int) -> bool:
    """Whether the root of a family on one host, which would add up all messages on its own, would keep
    the other ranks waiting, who only copy the result. Of two ranks one adds while the other copies.

    Example:
        >>> from jaxcoded.plan import make_plan
        >>> coded, uncoded = (make_plan(13, fanout=12, stragglers=s) for s in (1, 0))
        >>> [pays_on_one_host(coded, cores) for cores in (1, 2, 4)]
        [False, False, True]
        >>> pays_on_one_host(uncoded, cores=2)
        True
        >>> pays_on_one_host(make_plan(2, stragglers=0), cores=16)
        False
    """
    if plan.size <= 2:
        return False
    messages = float(Layout.of(plan).needs[0])
    return (cores - 1) * _ADDING * messages >= _AS_MUCH * (plan.size - 1)


def _one_family(plan: Plan) -> bool:
    """Whether all ranks below the root are its children, with messages as long as sums."""
    coding = plan.codings[plan.root]
    if coding is None or len(plan.tree.children[plan.root]) != plan.size - 1:
        return False
    return coding.code.m == coding.code.parts == 1
