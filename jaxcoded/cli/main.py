"""The command line: ``jaxcoded COMMAND``, or ``python -m jaxcoded COMMAND``."""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

# Each is a module of jaxcoded.cli: `add_arguments(parser)`, `run(args)` and a docstring.
COMMANDS = ("plan", "report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. An error is printed in one line."""
    parser = argparse.ArgumentParser(
        prog="jaxcoded", description="Coded collective operations for JAX over MPI."
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"jaxcoded {importlib.metadata.version('jaxcoded')}",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"jaxcoded.cli.{name}")
        doc = str(module.__doc__)
        command = commands.add_parser(
            name,
            help=doc.splitlines()[0],
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        args.run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"jaxcoded {args.command}: {error}", file=sys.stderr)
        return 2
    return 0
