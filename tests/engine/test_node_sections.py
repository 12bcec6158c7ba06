"""Sums in sections: who sends how much."""

import collections
import random

import numpy as np
import pytest

pytest.importorskip("jaxcoded.transport._engine", reason="built without the engine")

from simulation import MESSAGE, SECTION, Call, World

from jaxcoded import make_plan
from jaxcoded.simulator import Layout, Network
from jaxcoded.simulator.sections import Sections

PIECE = 64  # bytes


def sent(plan):
    """How many pieces each rank has sent of its message, and of its section, in a round that all
    call at once: by kind and rank."""
    world = World(
        plan,
        [Call((("float64", 2 * PIECE * plan.size // 8),), 0)],
        random.Random(0),
        hosts=list(range(plan.size)),
        limits={"piece_bytes": PIECE, "announced_bytes": 128, "sections_from": 1},
    )
    world.settle()
    return collections.Counter(
        (what, source) for _, source, what, _, _ in world.fetched
    )


@pytest.mark.parametrize(
    ("n", "s"), [(3, 0), (12, 0), (12, 1), (12, 2), (6, 1), (70, 1)]
)
def test_as_simulated(n, s):
    """Copies of a message take turns, and all form equal sections: but for a piece or two."""
    plan = make_plan(n + 1, fanout=n, stragglers=s, root_computes=False)
    payload = 2.0 * PIECE * plan.size
    everybody = np.ones(n, bool)
    job = Sections(Layout.of(plan), Network(piece=PIECE), payload)
    traffic = job.traffic(everybody, everybody, ~everybody)
    found = sent(plan)
    for kind, simulated in (
        (MESSAGE, traffic.terms_sent),
        (SECTION, traffic.sections_sent),
    ):
        in_engine = [found[kind, rank] for rank in range(plan.size)]
        np.testing.assert_allclose(simulated / PIECE, in_engine, atol=2)
    assert not found[MESSAGE, 0]  # zeros are not sent
