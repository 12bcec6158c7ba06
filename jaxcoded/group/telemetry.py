import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Self

import numpy as np

from jaxcoded import _format
from jaxcoded._files import replacing
from jaxcoded.group import telemetry_file
from jaxcoded.plan import Plan
from jaxcoded.transport.following import follow

logger = logging.getLogger("jaxcoded")

# The smallest speed, so that a rank that was almost never active still gets some data.
SLOWEST = 0.05
# A child that is late in more than this fraction of the rounds is called late.
_OFTEN = 0.1
# A rank is called slow if its time is longer than the median rank's time, multiplied by
# this factor and by the variation of the rounds' times.
_SLOW = 2.0
# A live rank reports once a second, and after each of its rounds.
TOLD = 1.0
# If it takes less than this number of seconds to compute a block, granting and reporting
# the block takes about as long.
_SHORT = 1e-3
_DONE = 1  # the outcome of a successful round


class RoundSeen(NamedTuple):
    """One round, as recorded by this rank; see `Telemetry` for the fields."""

    number: int
    work: float
    started: float
    decided: float
    ended: float
    decided_by: int
    failed: bool
    skipped: bool
    approximate: bool


@dataclasses.dataclass(frozen=True)
class Telemetry:
    """The latest rounds of a group, as recorded by one of its ranks.

    `CodedGroup.telemetry` makes it. The lengths of the axes are ``R`` rounds, ``C``
    children of this rank, ``N`` ranks, and ``L`` ranks from which this rank has
    received data. Times are in seconds on this rank's monotonic clock. The time of an
    event that did not happen is NaN.

    Attributes:
        rank: the rank that recorded this telemetry.
        plan: the group's plan as text; see `Plan.from_json`.
        parents: int64 ``(N,)``, the parent of each rank, -1 at the root.
        loads: float64 ``(N,)``, the part of the batch that each rank computes.
        rounds: int64 ``(R,)``, the numbers of the rounds, in order.
        work: float64 ``(R,)``, seconds from the end of the previous call to this call.
        started: float64 ``(R,)``, when this rank made the call.
        decided: float64 ``(R,)``, when this rank's sum was complete; NaN if this rank
            was late or has no children.
        ended: float64 ``(R,)``, when this rank had the result.
        decided_by: int64 ``(R,)``, the rank that completed the sum: a child by its
            message, or this rank by its call; -1 if no rank did.
        failed: bool ``(R,)``, whether the round ended with an error.
        payload: int64 ``(R,)``, the size of the result in bytes.
        skipped: bool ``(R,)``, whether this rank had nothing to contribute.
        approximate: bool ``(R,)``, whether this rank continued after its deadline with
            the messages that had arrived.
        shared: bool ``(R,)``, whether the round had shared work (``docs/sharing.md``).
        loop: bool ``(R,)``, whether the round was a loop over `CodedGroup.blocks`. The
            sum of this loop is the next round.
        busy: float64 ``(R,)``, seconds for which this rank computed blocks of the
            round.
        blocks: int64 ``(R,)``, number of blocks that this rank computed, including
            unused ones.
        computed: int64 ``(R, N, 3)``, on the root: for each rank the numbers of blocks
            that it computed, as far as the root knows. The three numbers count its own
            blocks in the sum, other ranks' blocks in the sum, and unused blocks. Zeros
            on all ranks but the root.
        children: int64 ``(C,)``, this rank's children.
        arrived: float64 ``(R, C)``, when the first message of each child in that round,
            or in a later round, arrived.
        used: bool ``(R, C)``, whether the child's message entered the sum.
        peers: int64 ``(L,)``, the ranks from which this rank has received data.
        link_bytes: int64 ``(L,)``, bytes received from each peer since the group was
            made.
        link_seconds: float64 ``(L,)``, seconds that the transfer of these bytes took.
        step_times: float64 ``(N,)``, median seconds of work in the latest rounds, for
            this rank and the ranks below it. Each layer between the two ranks delays a
            report by up to a second. With shared work, the value is an estimate of the
            time for the rank's own blocks, from the times of the blocks that it
            computed.
        silent: float64 ``(N,)``, at the end of the newest round, the seconds since each
            rank's last sign of life; 0 for ranks in time.

    Example:
        >>> import numpy as np, jaxcoded
        >>> from mpi4py import MPI
        >>> with jaxcoded.CodedGroup(MPI.COMM_SELF, transport="engine") as group:
        ...     _ = jaxcoded.host.allreduce(np.ones(3), group)
        ...     seen = group.telemetry()
        >>> seen.rounds.tolist(), seen.failed.tolist(), seen.speeds.tolist()
        ([1], [False], [1.0])
    """

    # The annotations contain dtypes and axes. K is the axis of the three counts of
    # blocks.
    rank: int
    plan: str
    parents: Annotated[np.ndarray, np.int64, "N"]
    loads: Annotated[np.ndarray, np.float64, "N"]
    rounds: Annotated[np.ndarray, np.int64, "R"]
    work: Annotated[np.ndarray, np.float64, "R"]
    started: Annotated[np.ndarray, np.float64, "R"]
    decided: Annotated[np.ndarray, np.float64, "R"]
    ended: Annotated[np.ndarray, np.float64, "R"]
    decided_by: Annotated[np.ndarray, np.int64, "R"]
    failed: Annotated[np.ndarray, np.bool_, "R"]
    payload: Annotated[np.ndarray, np.int64, "R"]
    skipped: Annotated[np.ndarray, np.bool_, "R"]
    approximate: Annotated[np.ndarray, np.bool_, "R"]
    shared: Annotated[np.ndarray, np.bool_, "R"]
    loop: Annotated[np.ndarray, np.bool_, "R"]
    busy: Annotated[np.ndarray, np.float64, "R"]
    blocks: Annotated[np.ndarray, np.int64, "R"]
    computed: Annotated[np.ndarray, np.int64, "RNK"]
    children: Annotated[np.ndarray, np.int64, "C"]
    arrived: Annotated[np.ndarray, np.float64, "RC"]
    used: Annotated[np.ndarray, np.bool_, "RC"]
    peers: Annotated[np.ndarray, np.int64, "L"]
    link_bytes: Annotated[np.ndarray, np.int64, "L"]
    link_seconds: Annotated[np.ndarray, np.float64, "L"]
    step_times: Annotated[np.ndarray, np.float64, "N"]
    silent: Annotated[np.ndarray, np.float64, "N"]

    @classmethod
    def of(cls, rank: int, plan: Plan, columns: dict[str, list[Any]]) -> Self:
        """Return the telemetry from the engine's records."""
        rounds, ranks = len(columns["outcome"]), plan.size
        lengths = {
            "R": rounds,
            "C": len(columns["children"]),
            "L": len(columns["peers"]),
        }
        members = [rank, *columns["children"]]
        computed = np.zeros((rounds, ranks, 3), np.int64)
        if len(columns["computed"]):
            each = np.array(columns["computed"], np.int64)
            computed[:, members] = each.reshape(rounds, len(members), 3)
        step_times, silent = np.full(ranks, np.nan), np.zeros(ranks)
        step_times[columns["told"]] = columns["step_times"]
        silent[columns["told"]] = columns["silent"]
        seen = columns | {
            "rounds": columns["round"],
            "decided_by": columns["decider"],
            "failed": np.array(columns["outcome"]) != _DONE,
        }
        arrays: dict[str, Any] = {
            name: np.array(seen[name], dtype).reshape([lengths[axis] for axis in axes])
            for name, (dtype, axes) in _ARRAYS.items()
            if lengths.keys() >= set(axes)
        }
        return cls(
            rank=rank,
            plan=plan.to_json(),
            parents=np.array(plan.parents, np.int64),
            loads=np.array([float(plan.load_of(each)) for each in range(ranks)]),
            computed=computed,
            step_times=step_times,
            silent=silent,
            **arrays,
        )

    @property
    def lateness(self) -> np.ndarray:
        """Return how many seconds after this rank's sum each child's message arrived:
        float64 ``(R, C)``. A value is not positive if the message was in time, infinite
        if it never arrived, and NaN in rounds in which this rank formed no sum.
        """
        decided = np.broadcast_to(self.decided[:, None], self.arrived.shape)
        missing = np.isnan(self.arrived) & ~np.isnan(decided)
        return np.where(missing, np.inf, self.arrived - decided)

    @property
    def speeds(self) -> np.ndarray:
        """Return each rank's speed relative to the fastest: float64 ``(N,)`` in
        `SLOWEST` … 1, for `CodedGroup.replan`.

        A speed is the load divided by the time between calls. A live rank gives a sign
        of life every second. If a rank has been silent for longer than a second, and
        longer than its time between calls, the time of its silence counts instead. Only
        the root knows the times of all ranks. A rank without measurements or data gets
        the median speed of the other ranks.
        """
        known = self.measured
        if not known.any():
            return np.ones(len(known))
        speeds = np.full(len(known), np.nan)
        speeds[known] = self.loads[known] / self._seconds[known]
        speeds[~known] = np.median(speeds[known])
        return np.clip(speeds / speeds.max(), SLOWEST, 1.0)

    @property
    def _seconds(self) -> np.ndarray:
        """Return the seconds that each rank works in a round, without its waits for
        other ranks."""
        silence_counts = np.isnan(self.step_times) | (self.silent > TOLD)
        return np.fmax(self.step_times, np.where(silence_counts, self.silent, 0.0))

    @property
    def measured(self) -> np.ndarray:
        """Return whether each rank's speed can be computed: bool ``(N,)``."""
        return (self.loads > 0) & (self._seconds > 0) & np.isfinite(self._seconds)

    def summary(self) -> str:
        """Return the findings as text."""
        if not len(self.rounds):
            return f"rank {self.rank} has not called a round yet"
        begins_step = ~np.concatenate([[False], self.loop[:-1]])
        work = self.work[~np.isnan(self.work) & begins_step]
        took = self.ended - self.started
        medians = [
            (took[~self.loop], "from call to result"),
            (took[self.loop], "for a loop over group.blocks"),
            (work, "of work before the call"),
        ]
        lines = [
            f"rank {self.rank}, rounds {self.rounds[0]} to {self.rounds[-1]}, medians: "
            + ", ".join(
                f"{_format.seconds(np.median(seconds))} {what}"
                for seconds, what in medians
                if len(seconds)
            )
        ]
        if self.loop.any():
            lines.append(
                f"{self.loop.sum()} of {len(self.rounds)} rounds are loops over "
                "group.blocks; the sum of each loop is one more round"
            )
        for what, count in (
            ("failed", self.failed.sum()),
            ("approximate", self.approximate.sum()),
            ("skipped by this rank", self.skipped.sum()),
        ):
            if count:
                lines.append(f"{what}: {count} of {len(self.rounds)} rounds")
        lines += self._divided_work() if self.shared.any() else self._late_children()
        lines += self._slow_ranks()
        for peer, count, seconds in zip(self.peers, self.link_bytes, self.link_seconds):
            rate = f", {_format.size(count / seconds)}/s" if seconds > 0 else ""
            lines.append(f"from rank {peer}: {_format.size(count)}{rate}")
        return "\n".join(lines)

    def _slow_ranks(self) -> list[str]:
        """Return one line for each rank that is much slower than the median rank.
        Processes that share cores take turns, so a process that got few turns is not
        necessarily slow. Therefore a rank is compared with the median rank, not with
        the fastest rank. The more the times of rounds differ, the larger the difference
        must be."""
        known = self.measured
        if not known.any():
            return []
        took = np.full(len(known), np.nan)
        took[known] = self._seconds[known] / self.loads[known]
        took /= np.quantile(took[known], 0.5, method="lower")
        rounds = np.diff(self.ended[~self.loop])
        low, high = np.quantile(rounds, [0.25, 0.75]) if len(rounds) else (1.0, 1.0)
        uneven = high / low if low > 0 else np.inf
        slow = [rank for rank in np.argsort(-took) if took[rank] > _SLOW * uneven]
        return [
            f"rank {rank} was last active {_format.seconds(self.silent[rank])} before the "
            "newest result: it is slow, stopped, dead, or was late only once"
            if self._seconds[rank] == self.silent[rank]
            else f"rank {rank} is slow: it takes {took[rank]:.3g} times as long for its data as "
            f"the median rank, {_format.seconds(self._seconds[rank])} a round"
            for rank in slow
        ]

    @property
    def divided(self) -> np.ndarray:
        """Return the rounds with a known division of work: bool ``(R,)``."""
        return np.asarray(self.computed.any(axis=(1, 2)))

    def _divided_work(self) -> list[str]:
        """Return lines that say how much each rank has computed."""
        lines = []
        placement = Plan.from_json(self.plan).placement
        own = self.shared & (self.blocks > 0)
        if own.any():
            # The median hardly depends on the first rounds, which compile.
            each = np.median(self.busy[own] / self.blocks[own])
            lines.append(
                f"this rank computed {self.blocks[self.shared].mean():.3g} blocks a round, "
                f"{_format.seconds(each)} each"
            )
            if each < _SHORT:
                fewer = f"fewer blocks (now blocks={placement.blocks}), or "
                lines.append(
                    f"these blocks are short: {fewer * (placement.blocks > 1)}a code "
                    "would suit better"
                )
        if not self.divided.any():
            return lines
        mean = self.computed[self.divided].mean(axis=0)
        others = mean[:, 1].sum()
        lines.append(
            f"{others:.3g} of {len(placement.holders)} blocks a round were computed by "
            f"ranks other than their owners, and {mean[:, 2].sum():.3g} more were not used"
        )
        lacks = placement.blocks - mean[list(placement.ranks), 0]
        for column in np.argsort(-lacks, kind="stable"):
            if lacks[column] <= _OFTEN * placement.blocks:
                break
            rank = placement.ranks[column]
            unused = mean[rank, 2]
            lines.append(
                f"rank {rank} computed {mean[rank, 0]:.3g} of its {placement.blocks} blocks, "
                "and other ranks the rest"
                + (f"; {unused:.3g} more were not used" if unused >= 0.05 else "")
            )
        return lines

    def _late_children(self) -> list[str]:
        lateness = self.lateness[~np.isnan(self.decided)]
        lines = []
        if len(lateness) and len(self.children):
            late = (lateness > 0).mean(axis=0)
            for column in np.argsort(-late):
                if late[column] <= _OFTEN:
                    break
                missed = lateness[lateness[:, column] > 0, column]
                known = missed[np.isfinite(missed)]
                # Only a recent sign of life distinguishes a rank that is always late
                # from a dead rank.
                silent = self.silent[self.children[column]]
                signs = f"its last sign of life was {_format.seconds(silent)} old"
                words = f"child {self.children[column]} was too late in {late[column]:.0%} of "
                words += f"{len(lateness)} rounds"
                if len(known):
                    words += f" by {_format.seconds(np.median(known))} (median)"
                if np.isinf(missed[-1]) and silent > TOLD:
                    words += f" and has been missing since; {signs}"
                lines.append(words)
            if not lines:
                lines.append("no child was late in more than 10% of the rounds")
            elif usual := self._usually_late():
                lines[-1] += (
                    f"; if all children were equally fast, each would be late in {usual:.0%}"
                )
        return lines

    def _usually_late(self) -> float:
        """Return the fraction of rounds in which a child is too late although it is as
        fast as the other children."""
        coding = Plan.from_json(self.plan).codings[self.rank]
        return coding.code.stragglers / len(self.children) if coding else 0.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to an ``.npz`` file that needs no pickle; see `load`.

        An existing file is replaced completely, or stays unchanged.

        Raises:
            OSError: the file cannot be written.
        """
        with replacing(path) as file:
            np.savez(file, **dataclasses.asdict(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load telemetry from a file that `save` has written.

        Raises:
            ValueError: the file does not contain telemetry, or is inconsistent.
            OSError: the file cannot be read.
        """
        return cls(**telemetry_file.read(path, _ARRAYS))


_ARRAYS: dict[str, tuple[type, str]] = {
    field.name: field.type.__metadata__
    for field in dataclasses.fields(Telemetry)
    if hasattr(field.type, "__metadata__")
}


def report(
    following: Callable[[], tuple[Any, ...] | None],
    callback: Callable[[RoundSeen], Any],
) -> None:
    """Start a thread that calls ``callback`` with each round, in the order in which
    ``following`` returns the rounds."""

    def seen(values: tuple[Any, ...]) -> None:
        record = RoundSeen(*values)
        try:
            callback(record._replace(failed=record.failed != _DONE))
        # Log every error, since it would end this thread and its reports.
        except BaseException:
            logger.exception("the function given to on_round raised an error")

    follow(following, seen, "jaxcoded rounds")
