import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(what: str, *, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on standard error if it is a terminal. Yield a function that updates the bar; it takes
    the finished part of the work, from 0 to 1."""
    if quiet or not sys.stderr.isatty():
        yield lambda part: None
        return
    # import rich only if there is something to show
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda part: bar.update(task, completed=min(part, 1.0))
