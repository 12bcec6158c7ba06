"""The plan of a group, and of one that takes its place with other ranks."""

from collections.abc import Callable, Sequence

from mpi4py import MPI

from jaxcoded.plan import Plan, Shared, Strategy, make_plan
from jaxcoded.plan.strategy import check_strategy
from jaxcoded.transport.agreement import told


def planned(strategy: Strategy | Plan | None, hosts: Sequence[str]) -> Plan:
    """The plan for a rank on each of these hosts.

    Args:
        strategy: of it, or a plan; None: the strategy that works on any number of ranks.
        hosts: of each rank.

    Raises:
        TypeError, ValueError: it is neither, or does not fit so many ranks.
    """
    if not isinstance(strategy, Plan):
        return make_plan(len(hosts), strategy or Shared(), hosts=hosts)
    if strategy.size != len(hosts):
        raise ValueError(
            f"the plan is for {strategy.size} ranks, but the communicator has {len(hosts)}: "
            f"make_plan({len(hosts)}, {strategy.strategy!r}) makes one for these"
        )
    return strategy


def check_other(strategy: object) -> None:
    """Raise unless it is a strategy, or none is given."""
    if strategy is not None:
        check_strategy(strategy)


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
