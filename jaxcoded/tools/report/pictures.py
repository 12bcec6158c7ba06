"""Draw pictures with plain axes and colours that colour-blind readers can distinguish. Each picture
makes one statement."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxcoded._files import replacing

# Okabe & Ito 2008, without the yellow, which is hard to see on white paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"

_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "figure.constrained_layout.use": True,
    "figure.dpi": 150,
    "grid.alpha": 0.3,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": "small",
    "font.size": 9,
}


@contextlib.contextmanager
def picture(
    path: str | os.PathLike[str],
    rows: int = 1,
    columns: int = 1,
    size: tuple[float, float] = (6.4, 3.8),
    **subplots: Any,
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, as ``matplotlib.pyplot.subplots`` makes them; write it to a file at the end.
    ``size`` is in inches. Missing folders are created. Raise an ImportError if matplotlib
    is missing."""
    try:
        import matplotlib as mpl
        from cycler import cycler
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from None
    colours = cycler(color=COLOURS)
    with mpl.rc_context(_STYLE | {"axes.prop_cycle": colours}):
        # Do not use pyplot, which keeps figures and needs a display.
        figure = Figure(figsize=size)
        axes = figure.subplots(rows, columns, **subplots)
        yield figure, axes
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            figure.savefig(file, format=path.suffix[1:] or None)
