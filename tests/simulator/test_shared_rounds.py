"""Shared work in the simulator: exact properties of its rounds, and rounds computed by
hand.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded

import jaxcoded
from jaxcoded.tools.simulator import Layout, Network, simulate, stragglers
from jaxcoded.tools.simulator.sharing import Round, Sharing

FREE = Network(latency=0.0, overhead=0.0, call=0.0, bandwidth=np.inf)
BATCH = 1.2  # seconds for the whole batch


def layout(ranks, replicas, blocks, *, root_computes=False):
    work = jaxcoded.Shared(
        replicas=replicas, blocks=blocks, root_computes=root_computes
    )
    return Layout.of(jaxcoded.make_plan(ranks, work))


def steps(shape, model=None, *, network=FREE, rounds=20, work=BATCH, payload=0.0):
    """Return the seconds of each step."""
    return simulate(
        shape,
        network,
        payload=payload,
        work=work,
        stragglers=model,
        rounds=rounds,
        seed=3,
    ).seconds


def ideals(model, ranks, rounds=20):
    """Return the seconds that each step would take if all ranks finished together."""
    drawn = itertools.islice(stragglers.as_model(model).rounds(ranks, 3), rounds)
    return np.array([BATCH / (1 / delays.factor[1:]).sum() for delays in drawn])


@given(
    ranks=st.integers(3, 9),
    replicas=st.integers(0, 8),
    blocks=st.integers(1, 6),
    root_computes=st.booleans(),
    latency=st.sampled_from([0.0, 1e-4, 0.02]),
    unequal=st.booleans(),
    seed=st.integers(0, 10**6),
)
@bounded
def test_each_block_is_computed_once(
    ranks, replicas, blocks, root_computes, latency, unequal, seed
):
    """A rank that holds a block computes it once, even if ranks are late, frozen or
    given up, and whatever blocks cost.
    """
    rng = np.random.default_rng(seed)
    workers = ranks - 1 + root_computes
    replicas = min(replicas, workers - 1)
    shape = layout(ranks, replicas, blocks, root_computes=root_computes)
    factor = 1 + rng.pareto(1.0, ranks)
    stopped = rng.random(ranks) < 0.2
    delay = stragglers.Delays(factor, stopped * rng.exponential(0.5, ranks), stopped)
    called = np.where(rng.random(ranks) < 0.3, rng.exponential(0.1, ranks), 0.0)
    called[0] = 0.0
    job = Sharing(shape, Network(latency=latency), BATCH)
    if unequal:
        job.cost(rng.pareto(1.0, workers * blocks) / (workers * blocks))
    played = Round(job, called, delay)
    assert np.isfinite(played.play())
    computed = [
        (block, m) for m, member in enumerate(played.members) for block in member.blocks
    ]
    assert sorted(block for block, _ in computed) == list(range(workers * blocks))
    holders = shape.placement.holders
    assert all(shape.ranks[m] in holders[block] for block, m in computed)


@pytest.mark.parametrize("replicas", [0, 1, 3, 11])
def test_no_rank_is_late(replicas):
    shape = layout(13, replicas, 12)
    assert steps(shape) == pytest.approx(BATCH / 12)
    everybody = layout(13, replicas, 12, root_computes=True)
    assert steps(everybody) == pytest.approx(BATCH / 13)


def test_by_hand():
    """Workers 1 and 2 take 1 s for a block and worker 3 takes 3 s, as in
    docs/sharing.md. Worker 3 computes one of its three blocks, and each of the other
    workers computes one more."""
    model = stragglers.FixedSlow(ranks=(3,), factor=3)
    assert steps(layout(4, 2, 3), model, work=9.0) == pytest.approx(4.0)
    # without replicas no other rank has the data
    assert steps(layout(4, 0, 3), model, work=9.0) == pytest.approx(9.0)


def test_a_block_that_was_begun():
    """On the host a program cannot return a block that it has begun. The round waits
    for the block unless other ranks would compute it sooner; then the rank is out of
    the round, and late.
    """
    network, job = FREE, {"payload": 0.0, "work": 9.0, "rounds": 1}
    for factor, expected in ((4.5, 4.5), (20, 5.0)):
        model = stragglers.FixedSlow(ranks=(3,), factor=factor)
        out = simulate(layout(4, 2, 3), network, stragglers=model, **job)
        assert out.ends == pytest.approx([expected])
        assert out.used[3] == (factor < 5)


def test_messages_by_hand():
    """Three messages take 2 ms each: the last block, the end of the computation, and
    the sum.
    """
    network = Network(latency=2e-3, overhead=0.0, call=1e-3, bandwidth=np.inf)
    expected = BATCH / 12 + 3 * 2e-3 + 2e-3
    assert steps(layout(13, 0, 12), network=network, rounds=1) == pytest.approx(
        expected
    )


@pytest.mark.parametrize(
    "model", ["exponential", "pareto", "bursty(begin=0.2)", "fixed"]
)
@pytest.mark.parametrize("payload", [0.0, 1e6])
def test_without_replicas_it_is_uncoded(model, payload):
    uncoded = steps(Layout.balanced(13, 12), model, payload=payload)
    alone = steps(layout(13, 0, 12), model, payload=payload)
    # in sections, a root that has no blocks adds nothing
    np.testing.assert_allclose(alone, uncoded, rtol=1e-9 if payload == 0 else 1e-5)


@pytest.mark.parametrize(
    "model", ["exponential", "pareto", "bursty(begin=0.2)", "fixed"]
)
@pytest.mark.parametrize("blocks", [1, 4, 12])
def test_no_faster_than_all_work_divided_at_will(model, blocks):
    ideal = ideals(model, 13)
    for replicas in (0, 1, 3, 11):
        seconds = steps(layout(13, replicas, blocks), model)
        # a late rank has finished its earlier blocks
        assert (np.cumsum(seconds) >= np.cumsum(ideal) * (1 - 1e-9)).all()


@pytest.mark.parametrize("model", ["exponential", "pareto", "bursty(begin=0.2)"])
def test_more_data_and_finer_blocks_help(model):
    def mean(replicas, blocks):
        return steps(layout(13, replicas, blocks), model, rounds=50).mean()

    by_data = [mean(replicas, 12) for replicas in (0, 1, 3, 11)]
    assert (np.diff(by_data) < 0.01 * by_data[-1]).all()
    assert by_data[1] < 0.9 * by_data[0]
    by_blocks = [mean(11, blocks) for blocks in (2, 6, 36)]
    assert (np.diff(by_blocks) < 0.01 * by_blocks[-1]).all()
    ideal = ideals(model, 13, 50).mean()
    assert by_blocks[-1] == pytest.approx(ideal, rel=0.1)


def test_killed():
    """Other ranks compute a dead rank's blocks if they have the data."""
    model = stragglers.Killed(ranks=(4, 5), round=3)
    assert np.isinf(steps(layout(13, 1, 12), model)[2:]).all()
    seconds = steps(layout(13, 2, 12), model)
    assert seconds[:2] == pytest.approx(BATCH / 12)
    # 50 ms until they are given up
    assert BATCH / 12 + 0.05 < seconds[2] < BATCH / 12 + 0.1
    assert ((BATCH / 10 <= seconds[3:]) & (seconds[3:] < BATCH / 10 + 3 / 120)).all()
    assert np.isinf(steps(layout(4, 2, 3), stragglers.Killed(ranks=(0,)))[9:]).all()


def test_stopped_rank_catches_up():
    model = stragglers.Stopped(ranks=(4,), round=3, seconds=0.5)
    out = simulate(
        layout(13, 2, 12), FREE, payload=0.0, work=BATCH, stragglers=model, rounds=20
    )
    assert out.seconds.max() < BATCH / 12 + 0.07
    assert 2 <= out.skipped[4] <= 5 and out.skipped.sum() == out.skipped[4]
    # in one round the rank was given up, and in another round it came after all blocks
    # were computed
    assert out.used[4] + out.skipped[4] == 18
    assert out.used[5] == 20


def test_no_work():
    shape = layout(5, 1, 3)
    np.testing.assert_allclose(steps(shape, work=0.0), 0.0)
