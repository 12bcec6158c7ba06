"""Progress on a terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(what: str, *, quiet: bool = False) -> Iterator[Callable[[float], None]]:
    """A bar on standard error if that is a terminal, by tqdm where that is installed.

    Args:
        what: is going on.
        quiet: show nothing.

    Yields:
        A function that takes the part that is done, from 0 to 1.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda part: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda part: print(
            f"\r{what}: {part:4.0%}",
            end="\n" * (part >= 1),
            file=sys.stderr,
            flush=True,
        )
        return
    layout = "{desc}: {percentage:3.0f} %|{bar}| {elapsed}"
    with tqdm(total=1.0, desc=what, bar_format=layout, leave=False) as bar:
        yield lambda part: bar.update(min(part, 1.0) - bar.n) and None
