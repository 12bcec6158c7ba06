"""Compare static balancing, loads in proportion to the last step's speeds, with closed
forms.
"""

import numpy as np
import pytest

import jaxcoded
from jaxcoded.tools.simulator import Layout, Network, Ring, simulate
from jaxcoded.tools.simulator.stragglers import Measured

SLOWNESS = np.array([1.0, 2.0, 4.0, 4.0])
LAYOUTS = {
    "star": Layout.of(jaxcoded.make_plan(4, jaxcoded.Uncoded(fanout=3))),
    "tree": Layout.of(jaxcoded.make_plan(4, jaxcoded.Uncoded(fanout=2))),
    "ring": Ring(4),
}


def seconds(layout, rows, **how):
    model = Measured(np.array(rows))
    network = Network(latency=0, overhead=0, call=0)
    out = simulate(
        layout, network, payload=0, work=8.0, stragglers=model, rounds=6, **how
    )
    return out.seconds


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_steady_speeds_are_balanced_after_one_step(layout):
    """After the first step, a step takes the total work over the total speed."""
    fair = 8.0 / (1 / SLOWNESS).sum()
    usual, balanced = (
        seconds(layout, [SLOWNESS], balanced=each) for each in (False, True)
    )
    np.testing.assert_allclose(
        usual, 8.0
    )  # a quarter of the work, at a quarter of the speed
    np.testing.assert_allclose(balanced, [8.0] + [fair] * 5)


def test_a_rank_slow_in_the_last_step_gets_less():
    """Two ranks are slow in turn: each division fits the step before, and takes longer than an equal division."""
    rows = [[3.0, 1, 1, 1], [1, 3.0, 1, 1]]
    found = seconds(LAYOUTS["star"], rows, balanced=True)
    speeds = [np.ones(4)] + [1 / np.array(rows[step % 2]) for step in range(5)]
    wanted = [
        (8.0 * speed / speed.sum() * rows[step % 2]).max()
        for step, speed in enumerate(speeds)
    ]
    np.testing.assert_allclose(found, wanted)
    assert found[2:].mean() > seconds(LAYOUTS["star"], rows).mean()


def test_a_root_without_data_stays_without():
    star = Layout.of(jaxcoded.make_plan(4, jaxcoded.Uncoded(root_computes=False)))
    found = seconds(star, [SLOWNESS], balanced=True)
    np.testing.assert_allclose(found[1:], 8.0 / (1 / SLOWNESS[1:]).sum())


@pytest.mark.parametrize("strategy", [jaxcoded.Shared(), jaxcoded.Coded()])
def test_a_strategy_with_stragglers_is_not_balanced(strategy):
    with pytest.raises(ValueError, match="needs a layout that waits for all ranks"):
        seconds(Layout.of(jaxcoded.make_plan(4, strategy)), [SLOWNESS], balanced=True)
