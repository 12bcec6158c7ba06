"""Straggler models: distributions, texts and seeds."""

import itertools

import numpy as np
import pytest

from jaxcoded.tools.simulator import stragglers

TEXTS = (
    "none",
    "exponential(work=1, seconds=0.5)",
    "pareto(shape=3, scale=2)",
    "fixed(ranks=(0, -1), factor=4)",
    "bursty(begin=0.1, end=0.3, factor=2)",
    "stopped(ranks=1, round=2, seconds=3, every=2)",
    "killed(round=2)",
    "exponential + fixed",
)


def times(text, size, rounds, seed=0, work=1.0):
    model = stragglers.named(text)
    drawn = itertools.islice(model.rounds(size, seed), rounds)
    return np.array([delays.time(work) for delays in drawn])


@pytest.mark.parametrize("text", TEXTS)
def test_seeds(text):
    """Equal seeds give equal delays, and work takes at least its time."""
    one, again = (times(text, 5, 20, seed=3) for _ in range(2))
    np.testing.assert_array_equal(one, again)
    assert one.shape == (20, 5) and (one >= 1).all()
    other = times(text, 5, 20, seed=4)
    assert (one == other).all() == (text[0] in "nfsk")


def test_exponential():
    found = times("exponential(work=0.5, seconds=2)", 1000, 100, work=3.0)
    assert found.mean() == pytest.approx(3 * 1.5 + 2, rel=0.01)
    assert found.std() == pytest.approx(np.hypot(1.5, 2), rel=0.02)


def test_pareto():
    found = times("pareto(shape=3, scale=2)", 1000, 200) - 1
    assert found.mean() == pytest.approx(2 / (3 - 1), rel=0.02)
    for t in (1.0, 5.0):
        assert (found > t).mean() == pytest.approx((1 + t / 2) ** -3, rel=0.03)


def test_bursty():
    """Ranks are slow for a quarter of the time, and each time for 1 / 0.3 rounds on average."""
    found = times("bursty(begin=0.1, end=0.3, factor=2)", 1000, 400) == 2
    assert found.mean() == pytest.approx(0.25, rel=0.03)
    beginnings = (found[1:] & ~found[:-1]).mean()
    assert found.mean() / beginnings == pytest.approx(1 / 0.3, rel=0.03)


def test_stopped_and_killed():
    assert times("stopped(ranks=1, round=2, seconds=3, every=2)", 3, 6)[
        :, 1
    ].tolist() == [1, 4, 1, 4, 1, 4]
    assert times("killed(round=2)", 3, 3).tolist() == [
        [1, 1, 1],
        [1, 1, np.inf],
        [1, 1, np.inf],
    ]


def test_a_rank_without_work_is_late_only_if_it_is_stopped():
    (delays,) = itertools.islice(stragglers.Exponential(seconds=1).rounds(2), 1)
    assert delays.time(np.array([0.0, 1.0]))[0] == 0
    stopped = stragglers.Stopped(ranks=(0,), round=1, seconds=2)
    assert next(stopped.rounds(2)).time(np.zeros(2)).tolist() == [2, 0]


@pytest.mark.parametrize("kind", [np.float32, np.int64])
def test_numbers_of_numpy(kind):
    assert stragglers.Exponential(seconds=kind(2)) == stragglers.Exponential(seconds=2)


def test_both_are_independent():
    found = times("exponential(work=1) + exponential(work=1)", 20_000, 1)
    # the variance of a product of two independent factors
    assert found.mean() == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize("suffix", ["csv", "npy"])
def test_trace(tmp_path, suffix):
    path = tmp_path / f"trace.{suffix}"
    table = np.array([[1.0, 2, 3], [4, 5, 6]])
    if suffix == "csv":
        np.savetxt(path, table, delimiter=",")
    else:
        np.save(path, table)
    assert times(f"trace(path={str(path)!r})", 4, 3).tolist() == [
        [1, 2, 3, 1],
        [4, 5, 6, 4],
        [1, 2, 3, 1],
    ]
    assert times(f"trace(path={str(path)!r}, seconds=True)", 1, 2).tolist() == [
        [2],
        [5],
    ]


def test_a_trace_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf1,2\r\n3,4\r\n")
    assert stragglers.Trace(path).table.tolist() == [[1, 2], [3, 4]]


def test_wrong_trace(tmp_path):
    """Errors name the path, and no warning appears."""
    path = tmp_path / "trace.csv"
    for text, words in (
        ("1,-2\n", "must be numbers >= 0, got -2.0 for round 1 in column 2"),
        ("1,2\n1,nan\n", "must be numbers >= 0, got nan for round 2 in column 2"),
        ("", "must be numbers >= 0"),
        ("1,2\n3\n", "has no table of numbers"),
        ("1 2\n", "has no table of numbers"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"trace.csv {words}"):
            next(stragglers.Trace(path).rounds(2))
    path = tmp_path / "trace.npy"
    for data in (b"", b"\x93NUMPY", b"PK\x03\x04", b"text"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="trace.npy has no table of numbers"):
            next(stragglers.Trace(path).rounds(2))
    for table in (np.full((2, 2), 1j), np.array([["a"]]), np.ones(3)):
        np.save(path, table)
        with pytest.raises(ValueError, match="trace.npy must be numbers >= 0"):
            next(stragglers.Trace(path).rounds(2))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slow", "model must be one of none, exponential"),
        ("pareto(1.5)", "arguments need their names"),
        ("pareto(form=1)", "'form'; it has shape, scale"),
        ("bursty(faktor=8)", "did you mean 'factor'\\? It has begin, end, factor"),
        ("none(a=1)", "none has no argument 'a'; it has none"),
        ("trace", r"trace needs 'path', as in 'trace\(path=\.\.\.\)'"),
        ("pareto(shape=0)", "shape must be above 0"),
        ("bursty(begin=2)", "must be probabilities"),
        ("fixed(ranks='x')", "ranks must be integers"),
        ("fixed(ranks=1.5)", "ranks must be integers"),
        ("fixed(ranks=((1, 2), (3,)))", "ranks must be integers"),
        ("killed(ranks=(10**30,))", "not a Python literal"),
        (f"killed(ranks=({10**30},))", "ranks must be integers"),
        ("killed(round=0)", "round must be an integer >= 1, got 0"),
        ("stopped(round=1.5)", "round must be an integer >= 1, got 1.5"),
        ("stopped(every=0.5)", "every must be an integer >= 0, got 0.5"),
        ("trace(path=5)", "path must be the path of a file, got 5"),
        ("exponential(work=-1)", "work must be at least 0"),
        ("none + x", "model must be one of"),
    ],
)
def test_misuse(text, says):
    with pytest.raises(ValueError, match=says):
        stragglers.named(text)


def test_no_such_rank():
    with pytest.raises(ValueError, match="no rank 5 among 3"):
        next(stragglers.FixedSlow(ranks=(5,)).rounds(3))


def test_measured_ranks_die():
    """Measured ranks die, even a rank without work, which no factor changes."""
    table = np.array([[1.0, 2.0], [1.0, np.inf]])
    for model in (stragglers.Measured(table), stragglers.Measured(table, seconds=True)):
        first, second, third = itertools.islice(model.rounds(2), 3)
        assert np.isfinite(first.time(0.0)).all() and not first.stopped.any()
        assert np.isinf(second.time(0.0)).tolist() == [False, True]
        assert second.stopped.tolist() == [False, True]
        np.testing.assert_array_equal(third.time(1.0), first.time(1.0))
    for wrong in (-table, np.full((2, 2), np.nan), np.ones(3), np.ones((0, 2))):
        with pytest.raises(ValueError, match="factors must be numbers >= 0"):
            stragglers.Measured(wrong)


@pytest.mark.parametrize("text", ["fixed() + bursty()", "fixed()+bursty()"])
def test_two_models_in_a_text(text):
    both = stragglers.named(text)
    assert both == stragglers.FixedSlow() + stragglers.Bursty()


def test_a_plus_that_joins_nothing():
    assert stragglers.named("pareto(scale=2e+1)") == stragglers.Pareto(scale=20.0)
    for quote in "'\"":
        text = f"fixed() + trace(path={quote}a+b.csv{quote}) + none"
        assert stragglers.named(text) == (
            stragglers.FixedSlow()
            + stragglers.Trace("a+b.csv")
            + stragglers.NoStragglers()
        )


def test_models_texts_and_others():
    slow = stragglers.FixedSlow()
    assert stragglers.as_model(slow) is slow
    assert stragglers.as_model("fixed") == slow
    assert stragglers.as_model(None) == stragglers.NoStragglers()
    with pytest.raises(TypeError, match="a text such as 'pareto.*got 3"):
        stragglers.as_model(3)
