"""Every set of ranks that a plan tolerates missing, and sets that it does not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from marks import ON_GPU, SIZE, engine_only, mpi4jax_only, redundant, slices
from reference import (
    assert_same_bits,
    assert_sum,
    contribution,
    exact,
    lost,
    per_example,
    rounding,
    tolerated_masks,
)
from together import assert_odd_one_out
from uncounted import coded_allreduce, coded_reduce

import jaxcoded

pytestmark = pytest.mark.ranks(2, 4, 7, 13)

GRADIENTS = {"wide": per_example(3), "single": per_example(2, seed=1, dtype="float32")}


def sums_without(group, masks):
    """Return the sums for all masks, from one compiled loop. Erased ranks, and those
    below them, send NaN.
    """
    message = contribution(group, GRADIENTS)
    silent = np.array([lost(group.plan, mask)[group.rank] for mask in masks])

    def one(_, operands):
        mask, silent = operands
        sent = jax.tree.map(lambda v: jnp.where(silent, jnp.nan, v), message)
        return None, coded_allreduce(sent, group, erasures=mask)

    loop = jax.jit(lambda *operands: jax.lax.scan(one, None, operands)[1])
    return jax.tree.map(np.asarray, loop(masks, silent))


def assert_exact(comm, group, sums):
    # coefficients are float64: float64 sums keep their digits, and float32 sums have only their own rounding
    shares = {
        "wide": 1e-12 * group.plan.amplification,
        "single": rounding(group, np.float32) + 1e-6 * group.plan.encoded,
    }
    for name, expected in exact(GRADIENTS).items():
        error = np.abs(sums[name] - expected)
        bound = shares[name] * np.abs(GRADIENTS[name].astype(np.float64)).sum(0)
        assert np.all(error <= bound), (name, error.max(0), bound)
    assert_same_bits(comm, sums)


def test_every_tolerated_mask(comm, group, transport):
    masks = tolerated_masks(group.plan)
    if (
        SIZE == 13
    ):  # 4 of a child's 2^4 masks leave it a sum; two of three children must have one
        assert len(masks) == 4**3 + 3 * 4**2 * 12
        if transport == "mpi4jax":  # mpi4jax takes long
            masks = masks[::8]
    assert_exact(comm, group, sums_without(group, masks))


@slices
def test_every_tolerated_mask_with_slices(comm, transport):
    fanout = 3 if SIZE == 13 else None
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(slices=2, fanout=fanout), transport=transport
    ) as sliced:
        assert_exact(comm, sliced, sums_without(sliced, tolerated_masks(sliced.plan)))


@pytest.mark.skipif(SIZE != 7, reason="one size with fractional repetition will do")
def test_bits_of_fractional_repetition_do_not_depend_on_erasures(comm, group):
    assert group.plan.amplification == 1
    masks = tolerated_masks(group.plan)
    assert len(masks) == 3**3  # one rank of each pair of twins must answer
    sums = sums_without(group, masks)
    for name in GRADIENTS:
        assert {row.tobytes() for row in sums[name]} == {sums[name][0].tobytes()}


@redundant
def test_reduce_and_vmap_with_erasures(group):
    mask = tolerated_masks(group.plan)[1]
    own = contribution(group, GRADIENTS["wide"])
    total = coded_reduce(
        own * (np.nan if mask[group.rank] else 1), group, erasures=mask
    )
    if group.rank == group.plan.root:
        assert_sum(group, total, GRADIENTS["wide"])
    batched = jax.vmap(lambda x, e: coded_allreduce(x, group, erasures=e), (0, None))
    both = batched(np.stack([own, -own]), mask)
    assert_sum(group, both[0], GRADIENTS["wide"])
    assert_sum(group, both[1], GRADIENTS["wide"], -1)


@redundant
def test_derivatives_with_erasures(group):
    """The tangent and cotangent of an erased rank are erased, too."""
    mask = tolerated_masks(group.plan)[1]
    own = contribution(group, GRADIENTS["wide"])
    scale = np.nan if mask[group.rank] else 1.0

    def loss(x):
        total = coded_allreduce(x, group, erasures=mask, transposes=True)
        return jnp.sum(total**2)

    expected = exact(GRADIENTS["wide"])
    value, slope = jax.jvp(loss, (own,), (own * scale,))
    np.testing.assert_allclose(value, np.sum(expected**2), rtol=1e-10)
    np.testing.assert_allclose(slope, 2 * np.sum(expected**2), rtol=1e-10)
    np.testing.assert_allclose(jax.grad(loss)(own), 2 * expected, rtol=1e-10)


# Masks that a compiled function refuses without being harmed.


@pytest.fixture(scope="module")
def masked(group):
    own = contribution(group, GRADIENTS["wide"])
    step = jax.jit(lambda mask: coded_allreduce(own, group, erasures=mask))

    def total(*erased):
        mask = np.zeros(SIZE, bool)
        mask[list(erased)] = True
        try:
            return jax.block_until_ready(step(mask))
        finally:
            if ON_GPU:  # programs in JAX's order continue to fail there
                jaxcoded.effects_barrier()

    yield total
    assert_sum(group, total(), GRADIENTS["wide"])
    assert step._cache_size() == 1


def test_root_cannot_be_left_out(group, masked):
    with pytest.raises(JaxRuntimeError, match="TooManyErasures: rank 0 is the root"):
        masked(group.plan.root)
    assert_sum(group, masked(), GRADIENTS["wide"])


@pytest.mark.skipif(SIZE == 1, reason="nobody to leave out")
def test_too_many(group, masked):
    first, second = group.plan.coded_children(0)[0], group.plan.coded_children(0)[-1]
    wanted = {2: (1,), 4: (first, second), 7: (1, 2), 13: (first, second)}[SIZE]
    with pytest.raises(JaxRuntimeError) as error:
        masked(*wanted)
    tolerance = 0 if SIZE == 2 else 1
    assert (
        f"TooManyErasures: rank 0 cannot rebuild its sum without its children {sorted(wanted)}: "
        f"any {tolerance} of the {len(group.plan.coded_children(0))} children of rank 0 may be"
    ) in str(error.value)
    assert_sum(group, masked(), GRADIENTS["wide"])


@pytest.mark.skipif(SIZE != 13, reason="needs two layers")
def test_too_many_below_an_inner_rank(group, masked):
    first, second, _ = group.plan.coded_children(0)
    some, more = (list(group.plan.coded_children(rank)[:2]) for rank in (first, second))
    # a rank that lacks too many children is left out itself
    assert_sum(group, masked(*some), GRADIENTS["wide"])
    words = (
        f"without its children [{first}, {second}], nor rank {first} without {some}, "
        f"nor rank {second} without {more}: any 1 of the 3 children of rank 0"
    )
    with pytest.raises(JaxRuntimeError, match=re.escape(words)):
        masked(*some, *more)


@redundant
@mpi4jax_only
def test_different_masks(group, masked):
    last = group.rank == SIZE - 1
    others = "ranks " + ", ".join(map(str, range(SIZE - 1)))
    with pytest.raises(JaxRuntimeError) as error:
        masked(*([1] if last else []))
    assert "GroupMismatch: erasures of ranks [] at ranks 0" in str(error.value)
    assert "ranks called different things" in str(error.value)
    assert f"{others}: round" in str(error.value)
    assert "erasures of ranks []" in str(error.value)
    assert f"rank {SIZE - 1}: round" in str(error.value)
    assert "erasures of ranks [1]" in str(error.value)
    assert_sum(group, masked(), GRADIENTS["wide"])


@redundant
@engine_only
def test_different_masks_with_ranks_that_may_be_late(comm, group, masked):
    assert_odd_one_out(
        comm,
        [lambda: masked(*([1] if group.rank == SIZE - 1 else [])), masked, masked],
        odd=SIZE - 1,
        usual="erasures of ranks []",
        unusual="erasures of ranks [1]",
        check=lambda total: assert_sum(group, total, GRADIENTS["wide"]),
    )
