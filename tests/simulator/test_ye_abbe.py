"""The run-time table of Ye & Abbe 2018, in closed form and by simulation."""

import math

import numpy as np
import pytest
from cases import every

from jaxcoded import Coded, make_plan
from jaxcoded.tools.simulator import Layout, Network, simulate
from jaxcoded.tools.simulator.stragglers import Exponential

# Rows: load d = 1 ... 8; columns: slices m = 1 ... d. n = 8, T1 = 1.6 + Exp(0.8),
# T2 = 6 + Exp(0.1).
TABLE = (
    (36.1138,),
    (29.2288, 23.1036),
    (27.3351, 21.3994, 22.2604),
    (26.7469, 21.5369, 21.3697, 24.8036),
    (26.4574, 21.9114, 21.5749, 23.2793, 28.5800),
    (26.0891, 22.2099, 21.9095, 23.1114, 25.9827, 32.8664),
    (25.4172, 22.3189, 22.1707, 23.1862, 25.2862, 29.0745, 37.3977),
    (24.1063, 22.1405, 22.2772, 23.2611, 25.0141, 27.7904, 32.3759, 42.0638),
)
ENTRIES = [(d + 1, m + 1, t) for d, row in enumerate(TABLE) for m, t in enumerate(row)]
# n = 10, T1 = 1.5 + Exp(0.6): (λ2, t2), and the best (d, s, m) with its time.
OPTIMA = (
    (0.05, 1.5, (10, 9, 1), 25.016),
    (0.1, 6.0, (3, 1, 2), 24.422),
    (0.1, 24.0, (4, 1, 3), 31.143),
    (0.1, 96.0, (10, 4, 6), 46.845),
    (0.3, 1.5, (1, 0, 1), 14.992),
    (0.3, 96.0, (10, 5, 5), 45.641),
)


# The time of a whole message varies more than that of a part.
ROUNDS = 20_000, 5_000


def expected_runtime(n, load, slices, *, compute, communicate):
    """Return the expected seconds of an iteration (§VI), to 10 digits.

    A worker takes ``load · T1 + T2 / slices``. ``T1`` is ``t1 + Exp(rate λ1)``, and
    ``T2`` is ``t2 + Exp(rate λ2)``. The master waits for the ``n − load + slices``
    fastest: the tail of an order statistic of sums of two exponentials, integrated.
    ``compute`` is ``(t1, λ1)``, and ``communicate`` ``(t2, λ2)``.
    """
    shift = load * compute[0] + communicate[0] / slices
    fast, slow = sorted((compute[1] / load, communicate[1] * slices), reverse=True)
    waited_for = n - load + slices
    # Gauss-Legendre on panels: the tail decays as exp(-slow t), at a scale down to 1/fast
    end = (40 + math.log(n)) / slow
    edges = np.concatenate([[0], np.geomspace(1e-3 / fast / n, end, 400)])
    nodes, weights = np.polynomial.legendre.leggauss(12)
    half = np.diff(edges)[:, None] / 2
    t = edges[:-1, None] + half * (nodes + 1)
    done = sum_of_two(t, fast, slow)
    # P(fewer than `waited_for` are done); as logarithms: of many workers the binomial
    # coefficients are beyond float64
    here, missing = (np.log(np.maximum(p, 1e-300)) for p in (done, 1 - done))
    still = np.zeros_like(t)
    for j in range(waited_for):
        still += np.exp(math.log(math.comb(n, j)) + j * here + (n - j) * missing)
    return shift + float((half * weights * still).sum())


def sum_of_two(t, fast, slow):
    """Return P(X + Y ≤ t) for exponentials of these rates."""
    gap = fast - slow
    if gap < 1e-9 * fast:
        return -np.expm1(-slow * t) - slow * t * np.exp(-slow * t)
    return -np.expm1(-slow * t) - slow * np.exp(-slow * t) * -np.expm1(-gap * t) / gap


def simulated(n, d, m, compute, communicate, rounds, seed=0):
    """Return the mean time of iterations of a star whose workers hold d of n subsets
    each.
    """
    (t1, rate1), (t2, rate2) = compute, communicate
    star = Layout.balanced(n + 1, n, d - m, m)
    if star.copies[0] < n and star.copies[0] > 1:
        # fractional repetition continues with fewer than n − s
        code = "cyclic_repetition"
        star = Layout.of(make_plan(n + 1, Coded(fanout=n, stragglers=d - m, code=code)))
    assert star.loads[1:] * n == pytest.approx([d] * n)
    out = simulate(
        star,
        # t2 / m is the same for all messages; the rest of T2 is in the model
        Network(latency=t2 / m, overhead=0, call=0, combine=np.inf, bandwidth=np.inf),
        payload=0,
        work=t1 * n,
        stragglers=Exponential(work=1 / (rate1 * t1), seconds=1 / (rate2 * m)),
        rounds=rounds,
        seed=seed,
        fresh=True,
    )
    return out.mean


@pytest.mark.parametrize(("d", "m", "expected"), ENTRIES)
def test_closed_form(d, m, expected):
    time = expected_runtime(8, d, m, compute=(1.6, 0.8), communicate=(6, 0.1))
    assert round(time, 4) == expected


@pytest.mark.parametrize(("rate", "shift", "best", "expected"), OPTIMA)
def test_optima(rate, shift, best, expected):
    times = {
        (d, d - m, m): expected_runtime(
            10, d, m, compute=(1.5, 0.6), communicate=(shift, rate)
        )
        for d in range(1, 11)
        for m in range(1, d + 1)
    }
    assert min(times, key=times.__getitem__) == best
    assert round(times[best], 3) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("d", "m", "expected"), every(3, ENTRIES))
def test_simulated(d, m, expected):
    """Within 1 % by Monte Carlo."""
    time = simulated(8, d, m, (1.6, 0.8), (6, 0.1), ROUNDS[m > 1])
    assert time == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "shift", "best", "expected"), OPTIMA)
def test_simulated_optima(rate, shift, best, expected):
    d, _, m = best
    time = simulated(10, d, m, (1.5, 0.6), (shift, rate), ROUNDS[m > 1])
    assert time == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("compute", "communicate"),
    [((0, 1), (0, 1)), ((0.5, 2), (1, 4)), ((0, 50), (0, 1))],
)
def test_closed_form_against_samples(compute, communicate):
    """The formula also holds for equal rates, and for rates that are far apart."""
    rng = np.random.default_rng(0)
    shape = 200_000, 6
    work = 2 * (compute[0] + rng.exponential(1 / compute[1], shape))
    sent = communicate[0] + rng.exponential(1 / communicate[1], shape)
    expected = np.sort(work + sent, axis=1)[:, 6 - 2 + 1 - 1].mean()
    found = expected_runtime(6, 2, 1, compute=compute, communicate=communicate)
    assert found == pytest.approx(expected, rel=0.005)


def test_closed_form_of_many_workers():
    """If messages take no time, the closed form is the second largest of 2,000 exponentials."""
    harmonic = (1 / np.arange(1, 2001)).sum()
    found = expected_runtime(2000, 2, 1, compute=(0, 1), communicate=(0, 1e15))
    assert found == pytest.approx(2 * (harmonic - 1), rel=1e-10)
