"""Start a program on many ranks, with what the MPI in use needs.

    jaxcoded run -n 4 train.py --steps 100

Where there are more ranks than cores they take turns, and each computes with as many threads as it
has cores. The GPUs of a host are divided among its ranks. Every line of output begins with its rank.
No process of the job is left on this host when it is over, nor memory that ranks share with Open MPI.
docs/faults.md tells what a job survives that was started with --ft.
"""

import json
import pathlib
import signal
import sys
from collections.abc import Sequence

import click

from jaxcoded import _format, _require
from jaxcoded.cli import ends, job, launcher, places, rank, reaching


@click.command("run", help=__doc__, context_settings={"allow_interspersed_args": False})
@click.option(
    *places.RANKS,
    type=int,
    required=True,
    envvar="SLURM_NTASKS",
    help="How many processes. Default: the tasks of the job of Slurm.",
)
@click.option(
    "--ft",
    "fault_tolerant",
    is_flag=True,
    help="The others go on when a rank is killed: Open MPI 5, which then reports deaths.",
)
@click.option(
    "--on-error",
    type=click.Choice(["abort", "go-on"]),
    help="What the others do after an uncaught error of a rank. Default: abort; with --ft "
    "go-on.",
)
@places.options
@click.option(
    "--timeout",
    type=float,
    metavar="SECONDS",
    help="End the job after these.",
)
@click.option(
    "--all-gpus",
    is_flag=True,
    help="Each rank sees all GPUs of its host, and not its share of them. The program then chooses one, or all "
    "ranks take the first.",
)
@click.option(
    "--plain", is_flag=True, help="Output without the ranks in front of the lines."
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="At the end say on standard error, in one line of JSON, how each rank ended.",
)
@click.option("-m", "module", is_flag=True, help="PROGRAM is the name of a module.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: int,
    fault_tolerant: bool,
    on_error: str | None,
    hosts: str | None,
    hostfile: str | None,
    mpirun: str | None,
    timeout: float | None,
    all_gpus: bool,
    plain: bool,
    as_json: bool,
    module: bool,
    program: str,
    arguments: tuple[str, ...],
) -> int:
    """Start the job, and return its status."""
    ranks = _require.integer("--ranks", ranks, 1, places.MOST_RANKS)
    if timeout is not None:
        _require.positive("--timeout", timeout)
    if not (module or pathlib.Path(program).is_file()):
        raise ValueError(f"there is no file {program}")
    chosen = launcher.found(mpirun)
    launcher.check_fits(chosen)
    if on_error is None:
        on_error = "go-on" if fault_tolerant else "abort"
    asked = launcher.listed(hosts, hostfile)
    hosts = places.chosen(ranks, hosts, hostfile)
    away = hosts is not None or hostfile is not None
    names = [each.partition(":")[0] for each in hosts.split(",")] if hosts else None
    sure = places.all_here(hosts, hostfile)
    variables = {rank.ALL_GPUS: "1"} if all_gpus else {}
    if fault_tolerant:
        variables |= {rank.TAKES_IN: "1", **launcher.TAKES_IN}
    if fault_tolerant and on_error == "go-on":
        variables[rank.GOES_ON] = "1"
    with ends.listening(ranks, names if away else (), sure=sure) as heard:
        words, environment = launcher.command(
            chosen,
            ranks,
            [
                *(("-m", "mpi4py") if on_error == "abort" else ()),
                *(("-m",) if module else ()),
                *(program, *arguments),
            ],
            fault_tolerant=fault_tolerant,
            named=not plain,
            hosts=hosts,
            hostfile=hostfile,
            wrapper=ends.WRAPPER,
            variables=heard.variables | variables,
        )
        environment.pop(rank.JOINS, None)  # of a rank that has started this job
        environment.pop(rank.STARTER, None)
        stopped: set[int] = set()
        status = job.play(
            words,
            environment,
            seconds=timeout,
            ended=heard.of_job,
            own_files=not away,
            whole_lines=not plain and chosen.mpi == launcher.OPEN_MPI,
            stopped=stopped,
        )
    # which MPICH does not always tell, nor Open MPI where it has lost its daemons
    status = status or heard.failure
    first = _words(chosen, status, fault_tolerant, timeout, heard.heard_any, asked)
    if stopped:
        first += f"; stopped, as by SIGSTOP: {_format.ranks(stopped)}"
    if as_json:
        ended = {"status": status, "said": first, "ranks": heard.fields()}
        print(json.dumps(ended, ensure_ascii=False), file=sys.stderr)
        return status
    said = heard.words()
    if not first and said:
        first = "the job succeeded (status 0), though not all of its ranks"
    said.insert(0, first)
    for line in filter(None, said):
        print(f"jaxcoded run: {line}", file=sys.stderr)
    return status


def _words(
    mpirun: launcher.Launcher,
    status: int,
    fault_tolerant: bool,
    seconds: float | None,
    begun: bool,
    hosts: Sequence[str],
) -> str:
    """What the status means; empty if all went well."""
    if status == 0:
        return ""
    if status == mpirun.killed and not fault_tolerant and begun:
        return f"a rank was killed, and the job with it (status {status}). With --ft the others go on"
    if status - 128 in signal.valid_signals():
        return (
            f"the job was ended by {ends.signal_name(status - 128)} (status {status})"
        )
    unreached = None if begun else reaching.failure(hosts)
    if status == job.TOO_LONG and seconds is not None:
        why = f"it took longer than {seconds:g} s"
        return f"the job was ended, as {'; '.join((why, *(unreached or ())))}"
    if unreached:
        return f"the job failed with status {status}, as {'; '.join(unreached)}"
    who = "its ranks say" if begun else "mpirun says"
    return f"the job failed with status {status}: see what {who} above"
