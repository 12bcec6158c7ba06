"""Whether a group looks for mistakes, and what it can see."""

import os
from typing import Any

from jaxcoded import _require
from jaxcoded.plan import Plan
from jaxcoded.transport.deadline import Deadline

VARIABLE = "JAXCODED_DEBUG"


def asked(debug: Any) -> Any:
    """``debug``, or what the environment says where it is ``None``: a bool if it is
    sound, see `check`."""
    if debug is not None:
        return debug
    value = os.environ.get(VARIABLE, "")
    return {"": False, "0": False, "1": True}.get(value, f"{VARIABLE}={value}")


def check(debug: Any) -> None:
    """Raise unless ``debug`` is a bool, as `asked` found it.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(debug, bool):
        raise ValueError(  # noqa: TRY004  # it may be a text of the environment
            f"debug must be True, False or None ({VARIABLE} 1 or 0), got "
            f"{_require.shown(debug)}"
        )


def why_not(plan: Plan, deadline: Deadline, transport: str) -> str:
    """Why a group cannot look for mistakes, in words; empty if it can."""
    if transport != "engine":
        return "needs the engine"
    if deadline.action == "approximate":
        return 'waits for all ranks, so that on_deadline="approximate" means nothing'
    if plan.placement is not None:
        return ""  # examples are counted
    if plan.size > 1 and not plan.checked:
        return (
            f"has nothing to compare: {_unseen(plan)}; take more stragglers or another "
            "code"
        )
    return ""


def gaps(plan: Plan) -> str:
    """The mistakes that a group cannot see, in words; empty if there are none."""
    if plan.placement is not None:
        return ""
    unseen = _unseen(plan)
    return unseen and f"debug does not see all mistakes: {unseen}"


def _unseen(plan: Plan) -> str:
    parents = {rank for rank, coding in enumerate(plan.codings) if coding is not None}
    ranks = sorted(parents - set(plan.checked))
    if not ranks:
        return ""
    return (
        f"what the children of rank{'s' * (len(ranks) > 1)} "
        f"{', '.join(map(str, ranks))} send cannot be checked, as there is no "
        "redundancy in it or a code below is approximate"
    )
