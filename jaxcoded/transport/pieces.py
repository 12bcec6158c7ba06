"""The size of the pieces in which a group's vectors are sent, and the least length of
sums that are formed in sections (``docs/engine.md``).
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

from jaxcoded.plan import Plan
from jaxcoded.plan.sections import SECTION_PIECES, SECTIONS_FROM, pay_in_layers
from jaxcoded.transport.agreement import gathered
from jaxcoded.transport.options import PIECE, Options

# These values for one host come from measurements in benchmarks/README.md. With this
# many bytes in a piece, all messages' pieces of a sum fit into a cache together.
_NEAR_PIECE = 128 << 10
# Sections make a sum faster if it has at least this many bytes, divided by the number
# of ranks that can form sections at the same time. On 2 cores that is 2 MiB. On 16
# cores, 13 ranks need a third of the time for 2 MB.
_NEAR_SECTIONS_FROM = 4 << 20
# The root's time to fetch and add a message, divided by another rank's time to copy the
# result: 5 ms and 2.4 ms of CPU time for 16 MB.
_ADDING = 2.0
# Sections cost messages and copies. So they are used only if the root, without
# sections, has this many times as much work as other ranks.
_AS_MUCH = 1.5


class Pieces(NamedTuple):
    """The pieces of long vectors."""

    bytes: int  # number of bytes of a piece
    # sums of at least this many bytes are formed in sections; 0: no sums
    sections_from: int
    # number of pieces of a sum in sections, unless pieces become too long or too short; 0:
    # pieces of the usual size
    of_sections: int
    delegating: frozenset[int]  # the parents whose children form sections of sums


def pieces(comm: MPI.Intracomm, plan: Plan, options: Options) -> Pieces:
    """Return the pieces of a group. Collective."""
    place: Any = MPI.Get_processor_name(), sorted(os.sched_getaffinity(0))
    hosts, cores = zip(*gathered(comm, place))
    near = len(set(hosts)) == 1
    sections_from = 0
    if plan.codings[plan.root] is None:
        pass  # a single rank sends no messages
    elif options.sections_from is not None:
        sections_from = options.sections_from
    elif not near and pays_between_hosts(plan, hosts):
        sections_from = SECTIONS_FROM
    elif near and pays_on_one_host(plan, number := len(set().union(*cores))):
        pay_from = _NEAR_SECTIONS_FROM // min(number, plan.size)
        sections_from = max(pay_from, 2 * _NEAR_PIECE)
    family = 1 + len(plan.tree.children[plan.root])
    return Pieces(
        options.piece_bytes or (_NEAR_PIECE if near else PIECE),
        sections_from,
        # On one host there is no network port that long pieces could leave idle.
        0 if near else SECTION_PIECES * family,
        delegating(plan, hosts) if sections_from else frozenset(),
    )


def delegating(plan: Plan, hosts: Sequence[object]) -> frozenset[int]:
    """Return the parents whose children form sections if a sum is formed in sections:
    the root, and every parent of several children of which at least one is on another
    host.
    """
    families = enumerate(plan.tree.children)
    return frozenset({plan.root}).union(
        parent
        for parent, children in families
        if len(children) > 1
        and any(hosts[child] != hosts[parent] for child in children)
    )


def pays_between_hosts(plan: Plan, hosts: Sequence[str]) -> bool:
    """Return whether the network ports of the hosts would be busy for longer without
    sections. Below the root's children, messages that are shorter than the sum, or have
    several parts, are not formed in sections.
    """
    tree = plan.tree
    far = [
        above >= 0 and hosts[rank] != hosts[above]
        for rank, above in enumerate(tree.parents)
    ]
    ports = [sum(far[child] for child in children) for children in tree.children]
    # how many ranks, from each rank up to the root's child, have children on other hosts
    layers = [0] * plan.size
    for rank in tree.order:
        if rank != plan.root:
            layers[rank] = layers[tree.parents[rank]] + (ports[rank] > 0)
    codes = [coding.code for _, coding in plan.coded_parents]
    if max(layers) and any((code.m, code.parts) != (1, 1) for code in codes):
        return False
    needs, children = _needs(plan), len(tree.children[plan.root])
    most = max(below + above for below, above in zip(ports, far))
    return pay_in_layers(needs, children, max(layers), most)


def pays_on_one_host(plan: Plan, cores: int) -> bool:
    """Return whether sections are faster on one host. All other ranks must be the
    root's children. Without sections they wait while the root adds up all messages, and
    then only copy the result. With two ranks, one rank adds while the other copies.
    """
    if plan.size <= 2 or len(plan.tree.children[plan.root]) < plan.size - 1:
        return False
    return (cores - 1) * _ADDING * _needs(plan) >= _AS_MUCH * (plan.size - 1)


def _needs(plan: Plan) -> int:
    """Return the number of messages that the root needs for its sum."""
    coding = plan.codings[plan.root]
    return coding.needs if coding is not None else 0
