"""The plan of a group that takes the place of another one, of other ranks."""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from mpi4py import MPI

from jaxcoded import _require
from jaxcoded.plan import Plan, make_plan
from jaxcoded.transport.agreement import told

Planner = Callable[[int], Plan]  # makes the plan for so many ranks
# What a plan is asked for with, by name, and of which kind where `make_plan` does not say: see `planned`.
ASKED = dict.fromkeys(inspect.signature(make_plan).parameters, object)
for _name in ("size", "hosts", "parents"):
    del ASKED[_name]
ASKED["by_host"] = bool


def check_planner(plan: object) -> None:
    """
    Raises:
        TypeError: it makes no plans.
    """
    if not (plan is None or callable(plan)):
        raise TypeError(
            f"plan must make a plan for a number of ranks, got {_require.shown(plan)}"
        )


def planned(hosts: Sequence[str], *, by_host: bool, **asked: Any) -> Plan:
    """The plan for a rank on each of these hosts, with what it was asked for with."""
    if not isinstance(by_host, bool):
        raise TypeError(f"by_host must be True or False, got {_require.shown(by_host)}")
    if by_host and asked["fanout"] is not None:
        raise ValueError("give fanout or by_host, not both")
    return make_plan(len(hosts), hosts=hosts if by_host else None, **asked)


def planned_anew(
    asked: Mapping[str, Any] | None,
    hosts: Sequence[str],
    speeds: Sequence[Fraction],
    plan: Planner | None,
    call: str,
    whose: str,
) -> Plan:
    """The plan for other ranks than a group's.

    Args:
        asked: what its own was asked for with; None if it was given or chosen.
        hosts: of each rank.
        speeds: of each; none if they count as equal.
        plan: makes it; None: with what was asked for.
        call, whose: what asks for it, and for which ranks, in words.

    Raises:
        ValueError: there is none, or ``plan`` makes something else.
    """
    size = len(hosts)
    if plan is not None:
        made = plan(size)
        if not isinstance(made, Plan) or made.size != size:
            raise ValueError(
                f"plan must return a jaxcoded.Plan for {size} ranks, got {made!r}"
            )
        return made
    if asked is None or isinstance(asked["code"], Mapping):
        raise ValueError(
            f"the group was made with a plan, or a code, for just its ranks: say with {call}("
            f"plan=lambda size: jaxcoded.make_plan(size, ...)) which one the ranks {whose} go on with"
        )
    try:
        return planned(hosts, **{**asked, "speeds": speeds or None})
    except ValueError as error:
        raise ValueError(
            f"no plan for the {size} ranks {whose}: {error}. Or say which one to take: "
            f"{call}(plan=lambda size: jaxcoded.make_plan(size, stragglers=0)) waits for all; "
            "this group goes on as it is"
        ) from None


def root_of(plan: Planner | None, size: int) -> int:
    """Of the plan for so many ranks; what is wrong with it is said elsewhere."""
    try:
        return 0 if plan is None else operator.index(plan(size).root) % size
    except Exception:  # noqa: BLE001
        return 0


def plan_of_root(
    comm: MPI.Intracomm, root: int, make: Callable[[], Plan] | None = None
) -> Plan:
    """The plan of the root, on ranks that cannot make it themselves, too. Collective.

    Args:
        comm: of all.
        root: whose plan counts.
        make: makes this rank's; None on those that cannot.
    """
    plan, failure = None, None
    try:
        plan = make and make()
    except Exception as error:  # noqa: BLE001  # the others wait for an answer
        failure = error
    said = told(comm, [plan and plan.to_json(), failure and str(failure)], root)
    if failure is not None:
        raise failure
    if plan is None:
        if said[0] is None:
            raise ValueError(said[1])
        plan = Plan.from_json(said[0])
    return plan
