"""The command line: ``jaxcoded COMMAND``, or ``python -m jaxcoded COMMAND``."""

import ast
import importlib
import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

import jaxcoded
from jaxcoded.tools.terminal import plain

# Each command is a module of jaxcoded.tools.cli with a function `command`. The module's
# docstring is the help.
COMMANDS = ("doctor", "run", "bench", "plan", "simulate", "report")
_USAGE, _FAILURE, _INTERRUPTED = 2, 1, 130


class _Formatter(click.HelpFormatter):
    """Write help in characters that standard output can encode. Click would print other characters even to an ASCII
    terminal."""

    def getvalue(self) -> str:
        return plain.words(super().getvalue())


class _Context(click.Context):
    formatter_class = _Formatter


class _Commands(click.Group):
    """Import commands on use, and print an error as one line."""

    context_class = _Context

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(
            f"jaxcoded.tools.cli.{cmd_name}"
        ).command
        command.help = _help(cmd_name)
        command.context_class = _Context
        return command

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, _help(name).splitlines()[0]) for name in COMMANDS]
            )

    def __call__(self, args: Sequence[str] | None = None) -> NoReturn:
        """Run a command, and exit with its status: 2 after wrong use, 1 after a failure."""
        plain.use()
        given = sys.argv[1:] if args is None else list(args)
        try:
            sys.exit(self.main(given, "jaxcoded", standalone_mode=False) or 0)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(_USAGE)
        except click.UsageError as error:
            place = error.ctx.command_path if error.ctx else "jaxcoded"
            words = " ".join(error.format_message().split()).removesuffix(".")
            _fail(given, f"{words} ({place} --help tells more)", _USAGE)
        except click.Abort:
            _fail(given, "interrupted", _INTERRUPTED)
        except ValueError as error:
            # Python and NumPy raise subclasses of ValueError, such as UnicodeEncodeError
            kind = type(error)
            ours = kind is ValueError or kind.__module__.startswith("jaxcoded.")
            _fail(given, str(error), _USAGE if ours else _FAILURE)
        except BrokenPipeError:  # the reader has closed the pipe
            sys.stdout = sys.stderr
            sys.exit(_FAILURE)
        except (click.ClickException, OSError, ImportError) as error:
            _fail(given, str(error), _FAILURE)


def _fail(given: list[str], words: str, status: int) -> NoReturn:
    name = " ".join(["jaxcoded", *(word for word in given[:1] if word in COMMANDS)])
    print(f"{name}: {words}", file=sys.stderr)
    sys.exit(status)


def _help(name: str) -> str:
    # from the source, since `python -OO` does not keep docstrings in memory
    path = pathlib.Path(__file__).with_name(f"{name}.py")
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


@click.group(
    "jaxcoded",
    cls=_Commands,
    help="Coded collective operations for JAX over MPI.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(
    jaxcoded.__version__, message="jaxcoded %(version)s", help="Print the version."
)
def main() -> None:
    """Run the requested command."""
