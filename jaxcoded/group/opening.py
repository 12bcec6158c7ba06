"""The agreement of all ranks of a new group on its plan, its transport and its options."""

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from jaxcoded.errors import GroupMismatch
from jaxcoded.plan import Plan, Shared, Strategy, make_plan
from jaxcoded.transport import build, cuda_aware, engine
from jaxcoded.transport.agreement import Unreadable, disagreement, gathered, plain
from jaxcoded.transport.base import Transport
from jaxcoded.transport.check import DEBUG, VARIABLE, Check
from jaxcoded.transport.options import Options

TRANSPORTS = ("auto", "engine", "mpi4jax")
LONG = 30.0  # seconds after which a rank logs that it waits for other ranks
logger = logging.getLogger("jaxcoded")


def communicator_of_its_own(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a duplicate for the group's messages only. Collective: MPI waits silently for all ranks."""
    words = "rank %d has waited %g s for other ranks to make a group: ranks without this message have ended, or do not make the group yet"
    waits = threading.Timer(LONG, logger.warning, (words, comm.rank, LONG))
    waits.daemon = True
    waits.start()
    try:
        return comm.Dup()
    finally:
        waits.cancel()


def planned(strategy: Strategy | Plan | None, hosts: Sequence[str]) -> Plan:
    """Return the plan for one rank on each of these hosts, from a strategy or a plan.
    The default strategy works on any number of ranks. Raise a TypeError or ValueError
    if ``strategy`` is neither, or does not fit the number of ranks.
    """
    if not isinstance(strategy, Plan):
        return make_plan(
            len(hosts), Shared() if strategy is None else strategy, hosts=hosts
        )
    if strategy.size != len(hosts):
        raise ValueError(
            f"the plan is for {strategy.size} ranks, but the communicator has {len(hosts)}: "
            f"make_plan({len(hosts)}, {strategy.strategy!r}) makes a plan for these ranks"
        )
    return strategy


def agreed_plan(
    comm: MPI.Intracomm,
    transport: str,
    request: dict[str, Any],
    planner: Callable[[], Plan],
) -> Plan:
    """Return this rank's plan if all ranks have the same plan and gave the same
    ``request``. Otherwise raise the same error on all ranks: the error of ``planner``
    if it is the same on all ranks, or a GroupMismatch. Collective.
    """
    plan: Plan | None = None
    failure: BaseException | None = None
    try:
        if transport not in TRANSPORTS:
            raise ValueError(
                f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}"
            )
        plan = planner()
    except BaseException as error:  # noqa: BLE001  # other ranks wait for an answer
        failure = error
    outcome = f"error: {failure}" if plan is None else f"plan {plan.fingerprint}"
    words = ", ".join(f"{key}={plain(value)}" for key, value in request.items())
    mismatch = disagreement(
        comm,
        f"{words}, transport={transport} ({outcome[:200]})",
        "ranks made a group with different arguments",
    )
    if failure is not None and not isinstance(failure, Exception):
        raise failure  # this process must end
    if mismatch is not None:
        raise GroupMismatch(mismatch) from failure
    if plan is None:
        assert failure is not None
        raise failure
    return plan


def agreed_transport(
    comm: MPI.Intracomm,
    index: int,
    plan: Plan,
    transport: str,
    options: Options,
    explicit: bool,
) -> tuple[Transport, Options, list[str]]:
    """Return three values: the group's transport, which has the same type on all ranks;
    its options; and a list of warnings. Collective. Raise a ValueError on every rank if the transport is not
    available, or does not support the options. ``explicit`` tells whether the caller
    requested a ``check``; otherwise an environment variable requested it.
    """
    try:
        reason = "" if transport == "mpi4jax" else engine.missing()
    except Exception as error:  # noqa: BLE001  # other ranks wait for an answer
        reason = f"{type(error).__name__}: {error}"
    reasons = gathered(comm, reason)
    strategy = plan.strategy
    if strategy.by_blocks and (why := why_not_shared(transport, reasons)):
        raise ValueError(
            f"{strategy!r} {why}; without the engine, use Coded(stragglers=1) or Uncoded()"
        )
    if transport != "mpi4jax" and not any(reasons):
        build.check_engine(comm)
        options, warnings = _checking(plan, "engine", options, explicit)
        return engine.Engine(index, comm, plan, options), options, warnings
    words = "; ".join(
        f"rank {rank}: {reason}"
        for rank, reason in enumerate(reasons)
        if reason and reason not in reasons[:rank]
    )
    if transport == "engine":
        raise ValueError(f'transport="engine" cannot be used: {words}')
    if not options.waits.waits_on:
        raise ValueError(
            f'on_deadline="{options.on_deadline}" needs the engine'
            + (f", which cannot be used: {words}" if words else "")
        )
    try:
        from jaxcoded.transport.mpi4jax import Mpi4jax
    except ImportError as error:
        reason = f'transport="mpi4jax" cannot be used: {error}'
        if words:
            reason += f". The engine cannot be used either: {words}"
    else:
        reason = cuda_aware.why_not()
    if reasons := list(filter(None, gathered(comm, reason))):
        raise ValueError(reasons[0])
    options, warnings = _checking(plan, "mpi4jax", options, explicit)
    if transport == "auto":
        fallback = f"falling back on the mpi4jax transport, in which every rank waits for the slowest rank; {words}"
        warnings = [fallback, *warnings]
    return Mpi4jax(index, comm, plan), options, warnings


def why_not_shared(transport: str, reasons: list[str]) -> str:
    """Return why this group cannot share work, or an empty text if it can."""
    if transport == "mpi4jax" or any(reasons):
        reason = next(filter(None, reasons), 'transport="mpi4jax" was asked for')
        return f"needs the engine: {reason}"
    return ""


def _checking(
    plan: Plan, transport: str, options: Options, explicit: bool
) -> tuple[Options, list[str]]:
    """Return the options and a list of warnings. If a ``check`` was requested that this
    group does not support, raise a ValueError, or, if an environment variable requested
    it, return options without it.
    """
    if not isinstance(check := options.check, Check):
        return options, []
    name = "DEBUG" if check == DEBUG else repr(check)
    if why_not := check.why_not(plan, options.waits, transport):
        if explicit:
            raise ValueError(f"check={name} {why_not}")
        warning = f"{VARIABLE} is ignored: {name} {why_not}"
        return dataclasses.replace(options, check=False), [warning]
    gaps = plan.strategy.gaps(plan)
    return options, [f"check={name} cannot detect every error: {gaps}"] if gaps else []


def has_died(failure: BaseException) -> bool:
    """Return whether a rank's death may be the cause of an error in making a group.
    Errors that a death cannot cause are the same on all ranks.
    """
    return isinstance(failure, MPI.Exception | Unreadable)
