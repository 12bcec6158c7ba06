"""From which length on the sums of a group are formed in sections (``docs/engine.md``)."""

import os
from typing import Any, NamedTuple

from mpi4py import MPI

from jaxcoded.plan import Plan
from jaxcoded.simulator import Layout
from jaxcoded.simulator.network import SECTION_PIECES, SECTIONS_FROM
from jaxcoded.transport.agreement import gathered
from jaxcoded.transport.options import Options

# On one host, measured in benchmarks/README.md: bytes of a sum, how many times as long a rank takes to
# fetch and add a message as another one to copy the result, and how much more others may have to do.
_ON_ONE_HOST = 2 << 20
_ADDING = 2.0
_AS_MUCH = 1.5


class Sections(NamedTuple):
    """How a group forms long sums.

    Attributes:
        least: bytes from which they are formed in sections; 0: none.
        pieces: into how many pieces one is cut at least; 0: of the usual length.
    """

    least: int
    pieces: int


def sections(comm: MPI.Intracomm, plan: Plan, options: Options) -> Sections:
    """What a group does. Collective."""
    if not _one_family(plan):
        return Sections(0, 0)
    here: Any = MPI.Get_processor_name(), sorted(os.sched_getaffinity(0))
    hosts, cores = zip(*gathered(comm, here))
    if len(set(hosts)) > 1:
        least, pieces = SECTIONS_FROM, SECTION_PIECES * plan.size
    else:  # memory has no port that would be idle while long pieces move
        least = _ON_ONE_HOST if pays_on_one_host(plan, len(set().union(*cores))) else 0
        pieces = 0
    return Sections(
        least if options.sections_from is None else options.sections_from, pieces
    )


def pays_on_one_host(plan: Plan, cores: int) -> bool:
    """Whether the root of a family on one host, which would add up all messages on its own, would keep
    the other ranks waiting, who only copy the result.

    Example:
        >>> from jaxcoded.plan import make_plan
        >>> coded, uncoded = (make_plan(13, fanout=12, stragglers=s) for s in (1, 0))
        >>> [pays_on_one_host(coded, cores) for cores in (1, 2, 4)]
        [False, False, True]
        >>> pays_on_one_host(uncoded, cores=2)
        True
    """
    messages = float(Layout.of(plan).needs[0])
    return (cores - 1) * _ADDING * messages >= _AS_MUCH * (plan.size - 1)


def _one_family(plan: Plan) -> bool:
    """Whether all ranks below the root are its children, with messages as long as sums."""
    coding = plan.codings[plan.root]
    if coding is None or len(plan.tree.children[plan.root]) != plan.size - 1:
        return False
    return coding.code.m == coding.code.parts == 1
