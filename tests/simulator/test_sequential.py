"""Sequential gradient coding: closed forms, cases by hand, and every pattern that its authors promise to tolerate."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxcoded.tools.simulator import (
    GradientCoding,
    Layout,
    Multiplexed,
    Network,
    SelectiveRepeat,
    simulate,
    simulate_sequence,
)
from jaxcoded.tools.simulator.bursts import Bursts
from jaxcoded.tools.simulator.stragglers import Measured

LATE = 100.0
# without a deadline, so that tests also pass on a busy machine
patient = settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)


def sequence(scheme, table, work=1.0, jobs=None, **options):
    return simulate_sequence(
        scheme,
        work=work,
        stragglers=Measured(np.array(table, float), seconds=True),
        jobs=jobs or len(table) - scheme.delay,
        **options,
    )


# The promises, as in the paper: late is bool (rounds, workers).


def bursty(late, burst, window, stragglers):
    for first in range(len(late)):
        some = late[first : first + window]
        if some.any(axis=0).sum() > stragglers:
            return False
        for worker in some.T:
            when = np.flatnonzero(worker)
            if len(when) and when[-1] - when[0] >= burst:
                return False
    return True


def arbitrary(late, burst, window, stragglers):
    for first in range(len(late)):
        some = late[first : first + window]
        if (some.any(axis=0).sum() > stragglers) or (some.sum(axis=0) > burst).any():
            return False
    return True


def thinned(proposed, fits):
    """Return as many of the proposed late workers as the promise allows."""
    late = np.zeros_like(proposed)
    for place in zip(*np.nonzero(proposed)):
        late[place] = True
        late[place] = fits(late)
    return late


def decoded(scheme, late):
    """Return the round in which each job is decoded, whatever the master's rule; -1: never."""
    jobs = len(late) - scheme.delay
    rounds = np.full(jobs, -1)
    for number, (turn, row) in enumerate(zip(scheme.play(jobs), late)):
        for job in turn.end(row & (turn.loads > 0)):
            if rounds[job] < 0:
                rounds[job] = number
    return rounds


def assert_in_time(scheme, late):
    rounds = decoded(scheme, late)
    first = np.arange(len(rounds))
    assert (first <= rounds).all() and (rounds <= first + scheme.delay).all(), rounds


@st.composite
def proposals(draw, multiple):
    """Draw workers, burst, window, stragglers, and which workers are late in which
    rounds.
    """
    workers = draw(st.integers(2, 6))
    burst = draw(st.integers(1, 3))
    times = draw(st.integers(1, 3))
    window = burst * times + 1 if multiple else burst + times
    stragglers = draw(st.integers(0, workers))
    rounds = draw(st.integers(window + burst, 14))
    flat = draw(
        st.lists(st.booleans(), min_size=rounds * workers, max_size=rounds * workers)
    )
    return workers, burst, window, stragglers, np.reshape(flat, (rounds, workers))


@pytest.mark.parametrize("kind", [SelectiveRepeat, Multiplexed])
@patient
@given(data=st.data())
def test_every_bursty_pattern_is_decoded_in_time(kind, data):
    *sizes, proposed = data.draw(proposals(kind is SelectiveRepeat))
    workers, burst, window, stragglers = sizes
    late = thinned(proposed, lambda late: bursty(late, burst, window, stragglers))
    scheme = kind(workers, stragglers, burst, window)
    assert_in_time(scheme, late)
    for turn, row in zip(scheme.play(len(late) - scheme.delay), late):
        row = row & (turn.loads > 0)
        assert turn.tolerates(row)  # so the master does not wait
        turn.end(row)


@patient
@given(proposals(multiple=False))
def test_every_arbitrary_pattern_is_decoded_in_time(proposal):
    workers, burst, window, stragglers, proposed = proposal
    late = thinned(
        proposed, lambda late: arbitrary(late, burst, window + burst - 1, stragglers)
    )
    assert_in_time(Multiplexed(workers, stragglers, burst, window), late)


@patient
@given(proposals(multiple=True))
def test_any_s_workers_in_each_round_are_not_waited_for(proposal):
    workers, burst, window, stragglers, proposed = proposal
    scheme = SelectiveRepeat(workers, stragglers, burst, window)
    late = thinned(proposed, lambda late: (late.sum(axis=1) <= scheme.tolerance).all())
    rounds = decoded(scheme, late)
    assert rounds.tolist() == list(range(len(rounds)))
    times = np.where(late, LATE, 1.0)
    assert sequence(scheme, times).ends[-1] <= 2.001 * len(rounds) * (1 + scheme.load)


@patient
@given(proposals(multiple=True))
def test_the_model_of_bursts_is_the_papers(proposal):
    workers, burst, window, stragglers, proposed = proposal
    bursts = Bursts(workers, burst, window, stragglers)
    so_far = np.zeros((0, workers), bool)
    for row in proposed:
        more = np.vstack([so_far, row])
        assert bursts.allow(row) == bursty(more, burst, window, stragglers)
        if bursts.allow(row):  # subsets of an allowed row are allowed, too
            assert all(bursts.allow(row & ~one) for one in np.eye(workers, dtype=bool))
        else:
            row = np.zeros(workers, bool)
        bursts.record(row)
        so_far = np.vstack([so_far, row])


@pytest.mark.parametrize("kind", [SelectiveRepeat, Multiplexed])
@patient
@given(data=st.data())
def test_whatever_the_delays_all_jobs_are_decoded_in_time(kind, data):
    """The master waits if it must; otherwise at most twice as long as the fastest
    worker takes.
    """
    *sizes, proposed = data.draw(proposals(kind is SelectiveRepeat))
    workers, burst, window, stragglers = sizes
    scheme = kind(workers, stragglers, burst, window)
    for one_by_one in (False, True):
        job = sequence(scheme, np.where(proposed, LATE, 1.0), one_by_one=one_by_one)
        assert np.isfinite(job.ends).all()
        assert (job.used + job.skipped <= len(proposed)).all()
        # each round ends at the latest when all workers are done
        waited = np.where(proposed.any(axis=1), LATE, 1.0) + scheme.load
        limits = np.cumsum(waited)[scheme.delay :]
        assert (job.ends <= limits + 1e-9).all()


def test_more_than_is_promised_is_not_decoded():
    """Patterns beyond the promise fail, so the tests of patterns are effective."""
    late = np.zeros((6, 4), bool)
    late[0, :2] = late[1, 0] = True  # worker 0 is late when it repeats its part
    scheme = SelectiveRepeat(4, stragglers=2, burst=1, window=2)
    assert decoded(scheme, late).tolist() == [-1, 1, 2, 3, 4]
    late = np.zeros((6, 4), bool)
    late[:3, 0] = True  # 2 chunks in 4 rounds
    scheme = Multiplexed(4, stragglers=2, burst=2, window=3)
    assert decoded(scheme, late).tolist() == [-1, 4, 5]
    late[:, :] = False
    late[2, :3] = (
        True  # one part instead of two: in a code of job 0, or once they repeat
    )
    assert decoded(scheme, late).tolist() == [-1, -1, -1]


def test_selective_repeat_by_hand():
    """s = 1, so each worker computes half of the batch in 1 s. Two workers are late with job 0, so one of them repeats
    it in round 1 instead of job 1, which then lacks one part. Job 2 lacks one part, too. In job 3 three workers are
    late, more than 2, so the master waits for all.
    """
    late = np.zeros((5, 4))
    late[0, [0, 1]] = late[2, 3] = LATE
    late[3, [0, 1, 2]] = 5.0
    scheme = SelectiveRepeat(4, stragglers=2, burst=1, window=2)
    assert (scheme.tolerance, scheme.load, scheme.delay) == (1, 0.5, 1)
    job = sequence(scheme, late, work=2.0)
    assert job.ends.tolist() == [2 + 1, 2 + 1, 2 + 1 + 2, 2 + 1 + 2 + 6]
    assert job.used.tolist() == [3, 3, 4, 3]
    assert job.skipped.tolist() == [1, 1, 0, 1]
    # one by one, the master does not wait for the last two workers; one of them repeats job 3 alone
    late[3, [0, 1, 2]] = 3.0, 4.0, 5.0
    job = sequence(scheme, late, work=2.0, one_by_one=True)
    assert job.ends.tolist() == [3, 3, 5, 5 + 4 + 1]
    assert job.used.tolist() == [3, 3, 3, 3] and job.skipped.tolist() == [1, 2, 1, 1]


def test_results_come_in_the_order_of_jobs():
    """Job 1 is decoded in round 1, after 2 + 1 s, and job 0 in round 2, by one worker's repeat."""
    late = np.zeros((4, 4))
    late[0, [0, 1]] = LATE
    scheme = SelectiveRepeat(4, stragglers=2, burst=2, window=3)
    assert decoded(scheme, late > 0).tolist() == [2, 1]
    assert sequence(scheme, late, work=2.0).ends.tolist() == [4, 4]


def test_multiplexed_by_hand():
    """The example of the paper: 4 workers, tasks of 3/32. Worker 0 is late in two
    rounds. So it lacks both chunks of job 0 and one of job 1, and repeats them in
    rounds 2 and 3."""
    scheme = Multiplexed(4, stragglers=2, burst=2, window=3)
    assert (scheme.task, scheme.load, scheme.delay) == (3 / 32, 3 / 8, 3)
    table = np.zeros((5, 4))
    table[:2, 0] = LATE
    job = sequence(scheme, table, work=32.0, jobs=2)
    # a task takes 3 s: round 0 has one of job 0, rounds 1 to 3 have one of each job,
    # and round 4 has one of job 1; in the first two rounds the master waits twice as
    # long
    assert job.ends.tolist() == [6 + 12 + 6 + 6, 6 + 12 + 6 + 6 + 3]
    assert job.used.tolist() == [3, 5, 5, 5] and job.skipped.tolist() == [2, 0, 0, 0]
    table[2, 0] = LATE  # worker 0 is late a third time, and the master waits for it
    assert sequence(scheme, table, 32.0, 2).ends[0] == 6 + 12 + LATE + 6 + 6


@pytest.mark.parametrize(
    ("scheme", "load"),
    [
        (GradientCoding(256, 15), 0.0625),
        (GradientCoding(256, 17), 0.0703125),
        (SelectiveRepeat(256, 23, 2, 3), 0.05078125),
        (SelectiveRepeat(256, 52, 1, 3), 0.07421875),
        (SelectiveRepeat(256, 22, 4, 9), 0.03515625),
        (Multiplexed(256, 27, 1, 2), 0.007543103448275862),
        (Multiplexed(256, 52, 1, 2), 0.007667824074074074),
        (Multiplexed(256, 24, 1, 2), 0.007512019230769231),
    ],
)
def test_loads_that_the_authors_published(scheme, load):
    assert scheme.load == pytest.approx(load, rel=1e-14)


def test_load_of_multiplexed_by_counting_chunks():
    """All chunks together are the batch: n (W - 1) chunks of one task each, and n chunks in each of the B codes. A task
    of a code takes λ + 1 of its chunks."""
    for n, burst, more in itertools.product(range(1, 6), range(1, 4), range(1, 4)):
        window = burst + more
        for stragglers in range(n + 1):
            scheme = Multiplexed(n, stragglers, burst, window)
            chunks = Fraction(n * (window - 1))
            if stragglers < n:
                chunks += Fraction(n * burst, stragglers + 1)
            assert scheme.load == pytest.approx(float((window - 1 + burst) / chunks))


@pytest.mark.parametrize("n", [3, 7])
def test_no_rank_is_late(n):
    """SR-SGC repeats nothing, and takes as long as gradient coding. M-SGC computes every task in some round; there are
    ``delay`` more rounds than jobs."""
    jobs, each, work = 5, 0.25, 4.0
    for scheme in (GradientCoding(n, 1), SelectiveRepeat(n, 2, 1, 2)):
        job = sequence(scheme, [[each] * n], work, jobs)
        expected = np.arange(1, jobs + 1) * (each + work * scheme.load)
        np.testing.assert_allclose(job.ends, expected)
        assert job.used.tolist() == [jobs] * n and not job.skipped.any()
    for stragglers in range(n):
        scheme = Multiplexed(n, stragglers, 2, 4)
        job = sequence(scheme, [[each] * n], work, jobs)
        expected = (jobs + scheme.delay) * each + jobs * work * scheme.load
        assert job.ends[-1] == pytest.approx(expected)
    # without stragglers to code for, only missed tasks are left for the last B rounds
    scheme = Multiplexed(n, n, 2, 4)
    expected = (jobs + 2) * each + jobs * work / n
    assert sequence(scheme, [[each] * n], work, jobs).ends[-1] == pytest.approx(
        expected
    )


def test_the_rule_of_waiting_in_closed_form():
    rng = np.random.default_rng(0)
    table = 1 + rng.pareto(2.0, (50, 9))
    for s, mu in itertools.product(range(9), (0.0, 0.3, 1.0)):
        times = table + 2.0 * (s + 1) / 9
        until = (1 + mu) * times.min(axis=1)
        few = (times > until[:, None]).sum(axis=1) <= s
        usual = np.minimum(until, times.max(axis=1))
        for one_by_one, otherwise in (
            (False, times.max(axis=1)),
            (True, np.sort(times, axis=1)[:, 9 - s - 1]),
        ):
            job = sequence(
                GradientCoding(9, s), table, 2.0, mu=mu, one_by_one=one_by_one
            )
            seconds = np.where(few, usual, otherwise)
            np.testing.assert_allclose(job.ends, np.cumsum(seconds))


def test_waiting_for_any_n_minus_s_is_a_star():
    """With mu = 0 and one job at a time, rounds match the simulator's with the same
    delays.
    """
    table = 1 + np.random.default_rng(1).pareto(2.0, (20, 6))
    network = Network(latency=0, overhead=0, call=0, combine=np.inf, bandwidth=np.inf)
    for s in (0, 3, 4):  # other s use fractional repetition, which needs fewer workers
        star = simulate(
            Layout.balanced(7, 6, s),
            network,
            payload=0,
            work=2.0,
            stragglers=Measured(table, seconds=True),
            rounds=20,
            fresh=True,
        )
        job = sequence(GradientCoding(6, s), table, 2.0, mu=0.0, one_by_one=True)
        np.testing.assert_allclose(job.ends, star.ends)


def test_schemes_for_no_stragglers_wait_for_all():
    table = 1 + np.random.default_rng(2).pareto(2.0, (12, 5))
    slowest = table.max(axis=1)
    for scheme in (GradientCoding(5, 0), SelectiveRepeat(5, 0, 2, 5)):
        job = sequence(scheme, table, work=5.0, jobs=10)
        np.testing.assert_allclose(job.ends, np.cumsum(slowest[:10] + 1))
    job = sequence(Multiplexed(5, 0, 1, 2), table, work=5.0, jobs=11)
    # half of a job in the first and in the last round
    np.testing.assert_allclose(
        job.ends, np.cumsum(slowest + 1)[1:] - 0.5 * 1 - [*[0] * 10, 0.5]
    )


def test_a_dead_worker():
    """In M-SGC no other worker has its chunks. The other codes tolerate its death."""
    dead = "killed(ranks=(0,), round=3)"
    for scheme in (GradientCoding(4, 1), SelectiveRepeat(4, 2, 1, 2)):
        job = simulate_sequence(scheme, work=1.0, stragglers=dead, jobs=9)
        assert np.isfinite(job.ends).all() and job.skipped.tolist() == [7, 0, 0, 0]
    job = simulate_sequence(Multiplexed(4, 2, 1, 2), work=1.0, stragglers=dead, jobs=9)
    assert np.isfinite(job.ends).tolist() == [True] * 2 + [False] * 7


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GradientCoding(0, 0), "workers must be an integer >= 1, got 0"),
        (lambda: GradientCoding(3, 3), "stragglers must be an integer from 0 to 2"),
        (lambda: SelectiveRepeat(1, 0, 1, 2), "workers must be an integer >= 2"),
        (lambda: SelectiveRepeat(4, 5, 1, 2), "stragglers .* from 0 to 4, got 5"),
        (lambda: SelectiveRepeat(4, 1, 0, 2), "burst must be an integer >= 1"),
        (lambda: SelectiveRepeat(4, 1, 2, 4), "got window=4; give window=5"),
        (lambda: SelectiveRepeat(4, 1, 3, 2), "got window=2; give window=4"),
        (lambda: Multiplexed(4, 1, 2, 2), "window must be an integer >= 3"),
        (lambda: sequence(GradientCoding(3, 1), [[1.0]], 0.0), "work must be"),
        (lambda: sequence(GradientCoding(3, 1), [[1.0]], mu=-1), "mu must be"),
        (lambda: sequence(GradientCoding(3, 1), [[1.0]], jobs=-1), "jobs must be"),
    ],
)
def test_misuse(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_a_layout_is_no_scheme():
    with pytest.raises(TypeError, match="got a Layout; simulate takes a Layout"):
        simulate_sequence(Layout.balanced(4, 3), work=1.0)
