"""Options of commands that start ranks: by which mpirun, and on which hosts."""

from collections.abc import Callable
from typing import Any

import click


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``hosts``, ``hostfile`` and ``mpirun``."""
    for option in (
        click.option(
            "--mpirun",
            metavar="COMMAND",
            help="The mpirun to use. Default: $JAXCODED_MPIRUN, that of this Python, or on the "
            "PATH.",
        ),
        click.option(
            "--hostfile",
            metavar="FILE",
            help="A file of hosts, in the form that the MPI reads.",
        ),
        click.option("--hosts", help="Hosts, and how many ranks on each: a:2,b:2."),
    ):
        command = option(command)
    return command
