"""Start a program on many ranks, with what the MPI in use needs.

    jaxcoded run -n 4 train.py --steps 100

Where there are more ranks than cores they take turns, and each computes with as many threads as it
has cores. Every line of output begins with its rank. Nothing of the job is left on this host when
it is over. docs/faults.md tells what a job survives that was started with --ft.
"""

import argparse
import os
import pathlib
import sys

from jaxcoded import _require
from jaxcoded.cli import job, launcher


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        *("-n", "--ranks"),
        type=int,
        default=os.environ.get("SLURM_NTASKS"),
        required="SLURM_NTASKS" not in os.environ,
        help="how many processes. Default: the tasks of the job of Slurm",
    )
    parser.add_argument(
        "--ft",
        action="store_true",
        help="the others go on when a rank is killed: Open MPI 5, which then reports deaths",
    )
    parser.add_argument(
        "--on-error",
        choices=("abort", "go-on"),
        help="what the others do after an uncaught error of a rank. Default: abort; with --ft go-on",
    )
    launcher.add_arguments(parser)
    parser.add_argument(
        "--timeout", type=float, help="seconds after which the job is ended"
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="output without the ranks in front of the lines",
    )
    parser.add_argument(
        "-m",
        dest="module",
        action="store_true",
        help="the program is the name of a module",
    )
    parser.add_argument("program", help="of Python")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")


def run(args: argparse.Namespace) -> int:
    """Start the job, and return its status."""
    ranks = _require.integer("--ranks", args.ranks, 1)
    if args.timeout is not None:
        _require.not_negative("--timeout", args.timeout)
    if not (args.module or pathlib.Path(args.program).is_file()):
        raise ValueError(f"there is no file {args.program}")
    mpirun = launcher.found(args.mpirun)
    launcher.check_fits(mpirun)
    on_error = args.on_error or ("go-on" if args.ft else "abort")
    program = [
        *(("-m", "mpi4py") if on_error == "abort" else ()),
        *(("-m",) if args.module else ()),
        args.program,
        *args.arguments,
    ]
    command, environment = launcher.command(
        mpirun,
        ranks,
        program,
        fault_tolerant=args.ft,
        named=not args.plain,
        hosts=args.hosts,
        hostfile=args.hostfile,
    )
    away = args.hosts is not None or args.hostfile is not None
    status = job.play(command, environment, seconds=args.timeout, own_files=not away)
    if words := _words(mpirun, status, args.ft, args.timeout):
        print(f"jaxcoded run: {words}", file=sys.stderr)
    return status


def _words(
    mpirun: launcher.Launcher, status: int, fault_tolerant: bool, seconds: float | None
) -> str:
    """What the status means; empty if all went well."""
    if status == 0:
        return ""
    if status == job.TOO_LONG and seconds is not None:
        return f"the job was ended, as it took longer than {seconds:g} s"
    if status == mpirun.killed and not fault_tolerant:
        return f"a rank was killed, and the job with it (status {status}). With --ft the others go on"
    if status > 128:
        return f"the job ended of signal {status - 128} (status {status})"
    return f"the job failed with status {status}: see what its ranks say above"
