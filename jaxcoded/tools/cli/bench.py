"""Measure the links between ranks and how fast each rank is, for jaxcoded plan.

    jaxcoded bench -n 4 --save cluster.json

    jaxcoded plan --measured cluster.json --payload 4MB --compute 1.2

Without -n the command measures the ranks of the job in which it runs:

    jaxcoded run -n 4 --hosts a:2,b:2 -m jaxcoded bench --save cluster.json

Each rank exchanges messages by MPI with the rank half the job away, all pairs at the same time. Then all ranks
multiply matrices for about a second. Start as many ranks on each host as the job will have, since ranks on one
host slow each other down.
"""

import pathlib
import socket
from typing import Any

import click
import numpy as np

from jaxcoded import _format, _require
from jaxcoded.tools.doctor import machine
from jaxcoded.tools.launch import asking, launcher, places
from jaxcoded.tools.planner.measurement import Measurement
from jaxcoded.tools.terminal import output
from jaxcoded.tools.terminal.progress import progress

_TURN = 5e-3  # seconds of one computation, which is repeated
_PROGRAM = ["-m", "mpi4py", "-m", "jaxcoded.tools.cli.bench"]
_MANY = 32  # the most rows of a table


@click.command("bench")
@click.option(
    *places.RANKS,
    type=int,
    help="Number of ranks to start. Without this option the command measures the job in which it runs.",
)
@places.options
@click.option(
    "--save",
    metavar="FILE",
    help="Write the measurement to FILE as JSON, for jaxcoded plan --measured FILE.",
)
@output.json_option
def command(
    ranks: int | None,
    save: str | None,
    json: bool,
    mpirun: str | None,
    **where: str | None,
) -> None:
    """Print what was measured."""
    if save is not None and not pathlib.Path(save).absolute().parent.is_dir():
        raise ValueError(f"--save {save}: there is no such folder")
    if save is not None and pathlib.Path(save).is_dir():
        raise ValueError(f"--save {save}: is a folder: give the name of a file in it")
    if ranks is None:
        if any(value is not None for value in (mpirun, *where.values())):
            raise ValueError(
                "--mpirun, --hosts and --hostfile are for ranks that this command starts: give their number with -n"
            )
        seen = _measured()
    else:
        ranks = _require.integer("--ranks", ranks, 2, places.MOST_RANKS)
        chosen = launcher.located(mpirun)
        launcher.check_fits(chosen)
        answer = asking.answered(chosen, ranks, _PROGRAM, **where)
        try:
            seen = Measurement.from_fields(answer)
        except ValueError:
            raise asking.unreadable(ranks, answer) from None
    if seen is None:
        return
    if save is not None:
        seen.save(save)
    if json:
        output.as_json(_fields(seen))
        return
    _show(seen)
    if save is not None:
        output.say()
        output.code(
            f"jaxcoded plan --measured {save} --payload BYTES --compute SECONDS"
        )


def _measured() -> Measurement | None:
    """Measure links and ranks. Return the results on rank 0, and None on other ranks.
    Collective."""
    from mpi4py import MPI

    from jaxcoded.tools.planner.measuring import measured

    comm = MPI.COMM_WORLD
    if comm.size < 2:
        raise ValueError(
            "a link needs two ranks, but this job has one: give -n 4, or run jaxcoded run -n 4 -m jaxcoded bench"
        )
    with progress("measuring", quiet=comm.rank > 0) as tell:
        seen = measured(comm, _TURN, tell)
    return seen if comm.rank == 0 else None


def _fields(seen: Measurement) -> dict[str, Any]:
    """Return the fields of the JSON output, in seconds and bytes per second."""
    return {
        "ranks": len(seen.speeds),
        "latency": seen.network.latency,
        "bandwidth": seen.network.bandwidth,
        "links": [link._asdict() for link in seen.links],
        "hosts": list(seen.hosts),
        "speeds": seen.speeds.tolist(),
        "usual": np.median(seen.stragglers.factors, axis=0).tolist(),
        "worst": np.quantile(seen.stragglers.factors, 0.99, axis=0).tolist(),
        "rounds": seen.rounds,
    }


def _show(seen: Measurement) -> None:
    links = sorted(seen.links, key=lambda link: link.bandwidth)
    output.table(
        ["link", "hosts", "latency", "Gb/s"],
        [
            [
                f"{link.rank} – {link.partner}",
                " – ".join(
                    dict.fromkeys((seen.hosts[link.rank], seen.hosts[link.partner]))
                ),
                _format.seconds(link.latency),
                _gigabits(link.bandwidth),
            ]
            for link in links[:_MANY]
        ],
        wraps=["hosts"],
    )
    _rest(len(links), "faster links")
    output.say()
    low, high, worst = np.quantile(seen.stragglers.factors, [0.05, 0.95, 0.99], axis=0)
    speeds = seen.speeds
    order = np.argsort(speeds, kind="stable")
    output.table(
        ["rank", "host", "speed", "5 … 95 % of turns", "99 %"],
        [
            [
                str(rank),
                seen.hosts[rank],
                f"{speeds[rank]:.2f}",
                f"{low[rank]:.2f} … {high[rank]:.2f}",
                f"{worst[rank]:.2f}",
            ]
            for rank in order[:_MANY].tolist()
        ],
    )
    _rest(len(speeds), "faster ranks")
    output.say()
    output.say(
        f"speed: relative to the fastest rank; turns: a turn's time divided by the median rank's, "
        f"in {seen.rounds} turns"
    )
    output.say(
        f"the median link has {_format.seconds(seen.network.latency)} and "
        f"{_gigabits(seen.network.bandwidth)} Gb/s"
    )
    ranks, cores = len(seen.hosts), machine.cores()
    if set(seen.hosts) == {socket.gethostname()} and ranks > cores:
        output.say(
            f"{ranks} ranks take turns on {cores:g} cores, which makes links slow and turns uneven: "
            "measure with no more ranks than cores, or on the cluster itself"
        )


def _rest(count: int, what: str) -> None:
    if count > _MANY:
        output.say(f"and {count - _MANY} {what}")


def _gigabits(rate: float) -> str:
    return f"{rate * 8e-9:.3g}"


if __name__ == "__main__":
    seen = _measured()
    if seen is not None:
        asking.answer(seen.to_fields())
