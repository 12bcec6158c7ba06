"""The command line: ``jaxcoded COMMAND``, or ``python -m jaxcoded COMMAND``."""

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any

# Each is a module of jaxcoded.cli: `add_arguments(parser)`, `run(args)`, which may return a status, and
# a docstring.
COMMANDS = ("doctor", "run", "plan", "report")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. An error is printed in one line."""
    parser = argparse.ArgumentParser(
        prog="jaxcoded", description="Coded collective operations for JAX over MPI."
    )
    parser.add_argument("--version", action=_Version, help="say which one it is")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    given = sys.argv[1:] if arguments is None else arguments
    # one that is asked for needs nothing of the others
    for name in set(COMMANDS).intersection(given[:1]) or COMMANDS:
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
        return args.run(args) or 0
    except (ValueError, OSError, ImportError) as error:
        print(f"jaxcoded {args.command}: {error}", file=sys.stderr)
        return 2


class _Version(argparse.Action):
    """Looks for the version only where it is asked for: a checkout need not be installed."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, **options: Any
    ) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"jaxcoded {importlib.metadata.version('jaxcoded')}")
        parser.exit()
