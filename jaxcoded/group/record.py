import itertools
import json
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from mpi4py import MPI

from jaxcoded import _parse, _require
from jaxcoded._files import contents
from jaxcoded.plan import Plan
from jaxcoded.transport.agreement import on_all
from jaxcoded.transport.base import Transport
from jaxcoded.transport.deadline import Deadline
from jaxcoded.transport.engine import Dealt, Engine
from jaxcoded.transport.following import follow

logger = logging.getLogger("jaxcoded")

FORMAT = "jaxcoded.record/1"
_NEEDED = "shared work needs"
Path = str | os.PathLike[str]


class Record:
    """Write the group's record to the file ``path``, and follow the record of another
    run in the file ``replay``. Each file is optional. Only the root reads and writes
    files.

    The first line of a file has the plan as JSON. Then each round with shared work has
    one line: its number, the call's description if it differs from the previous line,
    and the blocks of each rank.

    Attributes:
        request: the arguments ``record`` and ``replay``, as far as they were given, by name.
    """

    def __init__(self, path: Path | None, replay: Path | None) -> None:
        self._path, self._replay = path, replay
        given = {"record": path, "replay": replay}
        self.request = {name: path for name, path in given.items() if path is not None}
        self._rounds: list[Dealt] = []  # the rounds to replay, on the root
        self._writer: Writer | None = None
        self._thread: threading.Thread | None = None

    def check(self, plan: Plan, deadline: Deadline) -> None:
        """Raise an error with the remedy unless a group of this plan supports records."""
        for name, path in self.request.items():
            if not isinstance(path, str | os.PathLike):
                raise TypeError(f"{name} must be the path of a file, got {path!r}")
            plan.strategy.require_blocks(f"{name}={str(path)!r}")
            if deadline.approximates:
                raise ValueError(
                    f"{name}={str(path)!r}: a record needs sums of the whole batch, so "
                    'on_deadline must be "wait" or "raise"'
                )
        files = {os.path.realpath(path or "") for path in (self._path, self._replay)}
        if self.request and len(files) == 1:
            raise ValueError(
                f"record and replay are the same file, {str(self._path)!r}: "
                "give another file to record"
            )

    def open(self, comm: MPI.Intracomm, plan: Plan) -> None:
        """Read the record to follow, and create the file for the new record.
        Collective. Raise a CodedError on every rank if the root cannot read or create
        its files.
        """

        def open_files() -> None:
            if comm.rank != plan.root:
                return
            if self._replay is not None:
                self._rounds = read(self._replay, plan)
            if self._path is not None:
                self._writer = Writer(self._path, plan)

        if self.request:
            on_all(comm, open_files, undo=lambda _: self.close())

    def follow(self, transport: Transport) -> None:
        """Let this transport follow the record in ``replay``, and write its rounds to
        ``path``."""
        if self._replay is not None:
            Engine.of(transport, _NEEDED).replay(self._rounds)
        if self._writer is not None:
            self._thread = follow(
                self._writer.while_whole(Engine.of(transport, _NEEDED).record()),
                self._writer.add,
                "jaxcoded record",
            )

    def close(self) -> None:
        """Wait, after the last round, until everything is written."""
        if self._thread is not None:
            self._thread.join()
        if self._writer is not None:
            self._writer.close()


class Writer:
    """A writer of rounds to a file. If a write fails, as on a full disk, the writer logs
    the failure and stops writing. Raise an OSError if the file cannot be made.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self._path = path
        self._call: str | None = None
        self._last = 0
        self._failed = False
        self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115
        try:
            self._write({"format": FORMAT, "plan": json.loads(plan.to_json())})
        except OSError:
            self.close()
            raise

    def add(self, dealt: Dealt) -> None:
        if self._failed:
            return
        number, call, blocks = dealt
        new_call = {} if call == self._call else {"call": call}
        try:
            self._write({"round": number} | new_call | {"blocks": blocks})
        except OSError as error:
            self._fail(error)
        self._call, self._last = call, number

    def while_whole(
        self, following: Callable[[], Dealt | None]
    ) -> Callable[[], Dealt | None]:
        """Return a function that returns the next round, or None once the engine has
        lost a round."""

        def whole() -> Dealt | None:
            try:
                return following()
            except RuntimeError as error:
                self._fail(error)
                return None

        return whole

    def _fail(self, error: Exception) -> None:
        self._failed = True
        logger.error(
            "the record %s ends with round %d: %s; the job continues without it",
            *(self._path, self._last, error),
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        while data:
            data = data[self._file.write(data) :]


def read(path: Path, plan: Plan) -> list[Dealt]:
    """Return the rounds of a record, for a group of this plan to follow. Raise a
    ValueError if the file is not a record, or is a record of another plan."""
    # the last line of a killed job may be incomplete
    head, *lines = contents(path).split(b"\n")[:-1] or [b""]
    fields = _parsed(head)
    if fields.get("format") != FORMAT:
        raise ValueError(
            f"{str(path)!r} was not written with record= by this version of jaxcoded "
            f"({FORMAT})"
        )
    if fields.get("plan") != json.loads(plan.to_json()):
        raise ValueError(
            f"{str(path)!r} is the record of another plan, "
            f"{_require.shown(fields.get('plan'))}; this group has {plan.to_json()}"
        )
    blocks, last, call = len(plan.placement.holders), 0, ""
    out: list[Dealt] = []
    for line_number, line in enumerate(lines, start=2):
        fields = _parsed(line)
        round_, call = fields.get("round"), fields.get("call", call)
        division: Any = fields.get("blocks")
        if not (
            fields.keys() <= {"round", "call", "blocks"}
            and type(round_) is int
            and last < round_ < 2**48
            and isinstance(call, str)
            and _divides(division, plan.size, blocks)
        ):
            raise ValueError(
                f"line {line_number} of {str(path)!r} is not a line of a record: {line[:80]!r}"
            )
        last = round_
        out.append((round_, call, division))
    return out


def _divides(division: Any, ranks: int, blocks: int) -> bool:
    """Return whether a division gives each block to exactly one rank."""
    if not (
        isinstance(division, list)
        and len(division) == ranks
        and all(isinstance(part, list) for part in division)
    ):
        return False
    all_ = list(itertools.chain(*division))
    return all(type(each) is int for each in all_) and sorted(all_) == [*range(blocks)]


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        fields = _parse.document(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
