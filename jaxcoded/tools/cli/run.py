"""Start a program on many ranks, with the settings that the MPI in use needs.

    jaxcoded run -n 4 train.py --steps 100

If there are more ranks than cores, ranks take turns. Each rank computes with as many threads as it has cores. The GPUs
of a host are divided among its ranks. Every line of output begins with its rank, and a terminal shows progress bars of
ranks below each other. The job leaves no process and no shared memory on this host, even if this command is killed.
docs/faults.md says what a job with --ft survives.
"""

import json
import os
import pathlib
import signal
import sys
from collections.abc import Sequence

import click

from jaxcoded import _format, _require
from jaxcoded.tools.launch import ends, job, launcher, misfits, places, rank, reaching
from jaxcoded.tools.terminal import lines


@click.command("run", context_settings={"allow_interspersed_args": False})
@click.option(
    *places.RANKS,
    type=int,
    envvar="SLURM_NTASKS",
    help="Number of processes. Default in a Slurm job: SLURM_NTASKS.",
)
@click.option(
    "--ft",
    "fault_tolerant",
    is_flag=True,
    help="Let the other ranks continue when a rank is killed. This needs Open MPI 5, which reports deaths.",
)
@click.option(
    "--on-error",
    type=click.Choice(["abort", "go-on"]),
    help="What the other ranks do after an uncaught error on a rank. Default: abort; with --ft: go-on.",
)
@places.options
@click.option(
    *("-x", "variables"),
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Pass a variable of the environment to ranks on other hosts, too. Variables that begin with JAX or XLA_ are "
    "always passed.",
)
@click.option(
    "--timeout", type=float, metavar="SECONDS", help="End the job after this time."
)
@click.option(
    "--all-gpus",
    is_flag=True,
    help="Let each rank see all GPUs of its host, instead of some of them. The program must choose a GPU, or all ranks "
    "use the first GPU.",
)
@click.option(
    "--plain", is_flag=True, help="Print lines of output without their ranks."
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="At the end, print a line of JSON on standard error that says how each rank ended.",
)
@click.option(
    "-m", "module", is_flag=True, help="PROGRAM is the name of a Python module."
)
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    ranks: int | None,
    fault_tolerant: bool,
    on_error: str | None,
    hosts: str | None,
    hostfile: str | None,
    mpirun: str | None,
    variables: tuple[str, ...],
    timeout: float | None,
    all_gpus: bool,
    plain: bool,
    as_json: bool,
    module: bool,
    program: str,
    arguments: tuple[str, ...],
) -> int:
    """Start the job, and return its status."""
    if ranks is None:
        raise ValueError("how many ranks? Give -n 4, for example")
    ranks = _require.integer("--ranks", ranks, 1, places.MOST_RANKS)
    if timeout is not None:
        _require.positive("--timeout", timeout)
    if not (module or pathlib.Path(program).is_file()):
        raise ValueError(f"there is no file {program}")
    chosen = launcher.located(mpirun)
    launcher.check_fits(chosen)
    if on_error is None:
        on_error = "go-on" if fault_tolerant else "abort"
    where = places.chosen(ranks, hosts, hostfile)
    given = dict(map(_variable, variables))
    if all_gpus:
        given[rank.ALL_GPUS] = "1"
    if fault_tolerant:
        given |= {rank.TAKES_IN: "1", **launcher.TAKES_IN}
    if fault_tolerant and on_error == "go-on":
        given[rank.GOES_ON] = "1"
    marked = not plain and chosen.mpi == launcher.OPEN_MPI
    if marked:
        given = lines.variables(ranks) | given
    with ends.listening(ranks, where.names, sure=where.sure) as heard:
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
            hosts=where.hosts,
            hostfile=where.hostfile,
            wrapper=ends.WRAPPER,
            variables=heard.variables | given,
        )
        environment.pop(rank.JOINS, None)  # this is set if a rank has started this job
        environment.pop(rank.STARTER, None)
        end = job.play(
            words,
            environment,
            seconds=timeout,
            ended=heard.of_job,
            own_files=not where.away,
            marked=marked,
        )
    # MPICH, and Open MPI without its daemons, do not always report a failed rank.
    status = end.status or heard.failure
    limit = timeout if end.too_long else None
    first = _words(chosen, status, fault_tolerant, limit, heard.heard_any, where.asked)
    failed = status and status - 128 not in signal.valid_signals()
    if failed and (why := misfits.blame(chosen, begun=bool(heard.begun))):
        first += f"; {': '.join(why)}"
    if end.stopped:
        first += f"; stopped, as by SIGSTOP: {_format.ranks(end.stopped)}"
    if as_json:
        ended = {"status": status, "said": first, "ranks": heard.fields()}
        print(json.dumps(ended), file=sys.stderr)
        return status
    texts = heard.words()
    if not first and texts:
        first = "the job succeeded (status 0), although not all of its ranks did"
    texts.insert(0, first)
    for line in filter(None, texts):
        print(f"jaxcoded run: {line}", file=sys.stderr)
    return status


def _variable(text: str) -> tuple[str, str]:
    """Return a variable's name and value, from ``NAME=VALUE`` or the environment."""
    name, given, value = text.partition("=")
    if not name:
        raise ValueError(f"-x {text}: must be NAME or NAME=VALUE")
    if not given and name not in os.environ:
        raise ValueError(f"-x {text}: there is no such variable: give {text}=VALUE")
    return name, value if given else os.environ[name]


def _words(
    mpirun: launcher.Launcher,
    status: int,
    fault_tolerant: bool,
    seconds: float | None,
    begun: bool,
    hosts: Sequence[str],
) -> str:
    """Return a text that says what a status means; it is empty after success.
    ``seconds`` is the job's time limit."""
    if status == 0:
        return ""
    killed = 9 if mpirun.mpi == launcher.MPICH else 137  # if a rank was killed
    if status == killed and not fault_tolerant and begun:
        return f"a rank was killed, and the job with it (status {status}). With --ft the other ranks continue"
    if status - 128 in signal.valid_signals():
        return (
            f"the job was ended by {ends.signal_name(status - 128)} (status {status})"
        )
    unreached = None if begun else reaching.failure(hosts)
    if seconds is not None:
        why = f"it took longer than {seconds:g} s"
        return f"the job was ended, as {'; '.join((why, *(unreached or ())))}"
    if unreached:
        return f"the job failed with status {status}, as {'; '.join(unreached)}"
    who = "its ranks say" if begun else "mpirun says"
    return f"the job failed with status {status}: see what {who} above"
