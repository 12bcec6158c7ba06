"""Start ranks that examine something, and read rank 0's answer."""

import json
import tempfile
from collections.abc import Sequence
from typing import Any

import click

from jaxcoded import _parse, _require
from jaxcoded.tools.launch import job, launcher, misfits, places, reaching
from jaxcoded.tools.terminal import output

_SECONDS = 120.0
_MARK = "jaxcoded answers "  # marks the line with the answer among other output


class NoAnswer(click.ClickException):
    """The ranks have failed, took too long, or gave no answer that can be read. ``problem``
    says what happened, and ``remedy`` what to do."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n→ {remedy}")
        self.problem, self.remedy = problem, remedy


def answered(
    mpirun: launcher.Launcher,
    ranks: int,
    program: Sequence[str],
    *,
    hosts: str | None = None,
    hostfile: str | None = None,
) -> Any:
    """Start ``python *program`` on this many ranks, and return what rank 0 passes to `answer`. Raise `NoAnswer` if the
    job failed or took too long, or its answer cannot be read."""
    where = places.chosen(ranks, hosts, hostfile)
    # A user's file in this folder, such as random.py, must not replace a Python module.
    command, environment = launcher.command(
        mpirun,
        ranks,
        ["-P", *program],
        named=False,
        hosts=where.hosts,
        hostfile=where.hostfile,
    )
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed,
        output.waiting(f"asking {ranks} ranks"),
    ):
        end = job.play(
            command,
            environment,
            seconds=_SECONDS,
            own_files=not where.away,
            output=printed,
        )
        printed.seek(0)
        text = printed.read()
    lines = [line for line in text.splitlines() if line.startswith(_MARK)]
    if end.status == 0 and lines:
        text = lines[-1].removeprefix(_MARK)
        try:
            return _parse.document(text)
        except ValueError:
            raise unreadable(ranks, text) from None
    if end.status and (away := reaching.failure(where.asked)):
        problem, remedy = away
        raise NoAnswer(f"{ranks} ranks were not started, as {problem}", remedy)
    words = (
        f"did not end within {_SECONDS:g} s"
        if end.too_long
        else f"failed with status {end.status}"
    )
    if why := misfits.blame(mpirun):
        raise NoAnswer(f"{ranks} ranks {words}: {why[0]}", why[1])
    remedy = "fix what this output reports; docs/troubleshooting.md lists symptoms"
    if where.asked:
        remedy += ", and docs/several-hosts.md lists what several hosts need"
    raise NoAnswer(f"{ranks} ranks {words}: {text.strip()[-2000:]}", remedy)


def unreadable(ranks: int, value: Any) -> NoAnswer:
    """Return the error for an answer of rank 0 that cannot be read."""
    return NoAnswer(
        f"the answer of {ranks} ranks cannot be read: {_require.shown(value)}",
        "install the same jaxcoded on all hosts",
    )


def answer(value: Any) -> None:
    """Print rank 0's answer. Called on rank 0 only."""
    print(_MARK + json.dumps(value), flush=True)
