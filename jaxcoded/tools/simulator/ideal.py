import itertools

import numpy as np

from jaxcoded import _require
from jaxcoded.tools.simulator.costs import Costs
from jaxcoded.tools.simulator.stragglers import Stragglers, as_model


def ideal_seconds(
    size: int,
    *,
    work: float,
    stragglers: Stragglers | str | None = None,
    rounds: int = 100,
    seed: int = 0,
    costs: Costs | None = None,
) -> np.ndarray:
    """Return the seconds of ideal steps, in which all ranks compute until all work is done, and messages take no
    time. A step takes ``w / Σ_i v_i`` (``docs/theory.md``). With ``costs`` it takes at least as long as the fastest
    rank needs for the most costly example, since an example is not divided.

    Each rank begins after the seconds that the model adds for it, and is slowed down by the
    model's factor.

    Args:
        size: number of ranks.
        work: seconds that one usual rank would take for the whole batch.
        stragglers, rounds, seed, costs: as in `simulate`, whose draws are the same.

    Returns:
        float64 ``(rounds,)``; infinite if no rank is alive.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> from jaxcoded.tools.simulator import ideal_seconds
        >>> # 3 usual ranks, and one that takes twice as long: 1 / 3.5
        >>> ideal_seconds(4, work=0.7, stragglers="fixed(factor=2)", rounds=1).round(9).tolist()
        [0.2]
    """
    size = _require.integer("size", size, 1)
    rounds = _require.integer("rounds", rounds, 1)
    work = _require.not_negative("work", work)
    drawn = as_model(stragglers).rounds(size, _require.integer("seed", seed, 0))
    # the cost of each batch, and of the batch's most costly example
    works, largest = np.array([work]), np.zeros(1)
    if costs is not None:
        batches = work * costs.batches(seed)
        works, largest = batches.mean(axis=1), batches.max(axis=1) / costs.batch_size
    out = np.empty(rounds)
    for number, delays in enumerate(itertools.islice(drawn, rounds)):
        order = np.argsort(delays.seconds)
        begins = delays.seconds[order]
        with np.errstate(divide="ignore", invalid="ignore"):
            speeds = np.where(np.isfinite(begins), 1 / delays.factor[order], 0.0)
            head_start = np.cumsum(np.where(speeds > 0, begins * speeds, 0.0))
            # Compute the time if only the first one, two, … ranks to begin took part. The actual
            # number of ranks gives the shortest time.
            at = number % len(works)
            all_work = np.nanmin(
                (works[at] + head_start) / np.cumsum(speeds), initial=np.inf
            )
            out[number] = max(
                all_work, (begins + largest[at] * delays.factor[order]).min()
            )
    return out
