"""Compare the rounding bound of docs/theory.md for 16-bit messages with float64, on
whole trees of the engine's nodes, whose vectors are rounded as by `coded_allreduce`.
"""

import dataclasses
import functools
import random

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded, random_missing

pytest.importorskip("_nodes", reason="built without the engine")

from simulation import EXAMPLES, Call, World, held

from jaxcoded import Coded, Uncoded, make_plan

COUNT = 600
WIRES = ["bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class Rounded(Call):
    """Float32 gradients, encoded, and only then rounded to the segment's dtype."""

    @functools.cached_property
    def gradients(self):
        rng = np.random.default_rng(self.seed)
        ((_, count),) = self.segments
        return [rng.uniform(0.5, 1.5, (EXAMPLES, count)).astype(np.float32)]

    def own(self, plan, rank):
        indices, coefficients = held(plan, rank)
        slices = plan.slices_above[rank]
        ((dtype, count),) = self.segments
        shape = (len(indices), slices, count // slices)
        pieces = self.gradients[0][indices].astype(np.float64).reshape(shape)
        return [
            np.einsum("eu,euq->q", coefficients[:, part], pieces)
            .astype(np.float32)
            .astype(jnp.dtype(dtype))
            for part in range(plan.parts_above[rank])
        ]

    def check(self, plan, rank, vectors):
        pass

    def check_message(self, *_):
        return True

    __hash__ = Call.__hash__


def share_of_bound(plan, wire, seed):
    """Return the largest error of a sum without some ranks, in units of the bound."""
    rng = np.random.default_rng(seed)
    erased = frozenset(random_missing(plan, rng)) if seed % 2 else frozenset()
    call = Rounded(((wire, COUNT),), seed, erased=erased)
    world = World(plan, [call], random.Random(seed))
    world.settle()
    world.assert_done()
    total = np.frombuffer(world.results[1], jnp.dtype(wire)).astype(np.float64)
    (gradients,) = call.gradients
    size = np.abs(gradients.astype(np.float64)).sum(0)
    if plan.strategy.slices > 1:  # decoding mixes slices
        size = size.max()
    u = float(jnp.finfo(wire).eps) / 2
    bound = plan.amplification * ((1 + u) ** (1 + plan.tree.depth) - 1)
    # plus the error of float32
    fanout = max(map(len, plan.tree.children))
    added = plan.amplification * plan.tree.depth * (fanout + 3) * 2**-24
    return (np.abs(total - gradients.astype(np.float64).sum(0)) / size).max() / (
        bound + added
    )


@st.composite
def plans(draw):
    slices = draw(st.integers(1, 2))
    stragglers = draw(st.integers(0, 1))
    return make_plan(
        draw(st.integers(stragglers + slices + 1, 13)),
        Coded(
            fanout=draw(st.integers(stragglers + slices, 5)),
            stragglers=stragglers,
            slices=slices,
            code=draw(st.sampled_from(["auto", "random_generator"])),
            root_computes=draw(st.booleans()),
            seed=draw(st.integers(0, 3)),
        ),
    )


@bounded
@given(plans(), st.sampled_from(WIRES), st.integers(0, 100))
def test_bound(plan, wire, seed):
    assert share_of_bound(plan, wire, seed) <= 1


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("plan", "least"),
    [
        (make_plan(2, Uncoded()), 0.3),
        (make_plan(7, Coded(fanout=6)), 0.3),  # fractional repetition
        (make_plan(4, Coded(fanout=3)), 0.1),
        (make_plan(13, Coded(fanout=3)), 0.02),
        (make_plan(5, Coded(fanout=4, slices=2)), 0.02),
    ],
)
def test_bound_is_not_vacuous(plan, wire, least):
    assert least < max(share_of_bound(plan, wire, seed) for seed in range(4)) <= 1
