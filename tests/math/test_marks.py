"""Marks reveal ranks with a different batch or different parameters."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from independent import bounded

from jaxcoded import Coded, make_plan
from jaxcoded.collectives import marks
from jaxcoded.plan import atoms
from jaxcoded.plan.placement import Placement


@bounded
@given(st.integers(2, 40), st.integers(1, 24), st.integers(1, 10**7))
def test_weights_of_blocks(owners, blocks, batch_size):
    table = marks.of_blocks(Placement(tuple(range(owners)), 1, blocks), batch_size)
    assert table.dtype == np.float32 and table.shape == (owners * blocks,)
    of_owners = table.astype(float).reshape(owners, blocks).sum(axis=1)
    assert of_owners.sum() == 0 and of_owners.all()
    # float32 sums of all numbers except the count are exact in any order
    units = np.abs(table).max() / 2.0 ** (np.floor(np.log2(batch_size)) - 15)
    assert units == round(units) and 62 * units * blocks < 2**20


def test_one_rank_alone():
    assert not marks.of_blocks(Placement((0,), 0, 3), 10).any()


@bounded
@given(
    st.integers(2, 40),
    st.integers(0, 3),
    st.integers(1, 2),
    st.integers(1, 10**6),
    st.data(),
)
def test_marks_added_to_counts(ranks, stragglers, slices, batch_size, data):
    """With equal keys the additions cancel in the sum, whichever ranks are left out."""
    try:
        plan = make_plan(
            ranks,
            Coded(
                fanout=ranks - 1,
                stragglers=stragglers,
                slices=slices,
                root_computes=False,
            ),
        )
    except ValueError:
        assume(False)
    added = np.array(
        [marks.of_rank(plan, rank, batch_size, 1e-5)[0] for rank in range(1, ranks)]
    )
    out = data.draw(st.sets(st.integers(1, ranks - 1), max_size=stragglers))
    here = [rank for rank in range(1, ranks) if rank not in out]
    weighed = np.array([atoms.coefficients(plan, rank)[:, 0] for rank in here])
    exact = np.zeros(weighed.shape[1:])
    exact[:, 0] = 1  # for the first slice, which holds the count
    matrix = weighed.reshape(len(here), -1).T
    decoding = np.linalg.lstsq(matrix, exact.ravel())[0]
    assert np.allclose(matrix @ decoding, exact.ravel())
    total = decoding @ added[np.array(here) - 1]
    assert (
        abs(total)
        <= 1e-7 * np.abs(decoding) @ np.abs(added[np.array(here) - 1]) + 1e-12
    )
    # marks add up to 0, so a rank that holds all atoms alike adds nothing
    held = [atoms.coefficients(plan, rank)[:, :, 0] for rank in range(1, ranks)]
    uneven = any(np.ptp(each, axis=0).max() > 1e-9 for each in held)
    assert (np.abs(added) > 1e-15 * batch_size).any() == uneven


@pytest.mark.parametrize(
    ("ranks", "stragglers"), [(13, 2), (12, 3), (17, 4), (24, 5), (20, 2)]
)
def test_another_batch_stands_out_of_rounding(ranks, stragglers):
    """Another batch on one rank exceeds rounding in most sums, whichever ranks are left
    out, also with codes that amplify the rounding of float32.
    """
    plan = make_plan(
        ranks, Coded(fanout=ranks - 1, stragglers=stragglers, root_computes=False)
    )
    rounding = (64 + ranks) * plan.amplification * float(np.finfo(np.float32).eps)
    numbers = range(1, ranks)
    added = np.array([marks.of_rank(plan, rank, 1, rounding)[0] for rank in numbers])
    weighed = np.array([atoms.coefficients(plan, rank)[:, 0, 0] for rank in numbers])
    assert np.abs(78 * added).max() < 78 / 64 * np.abs(weighed).sum(axis=1).max()
    keys = [
        float(marks.key(np.int32(number), [], to_the_bit=False))
        for number in range(101)
    ]
    rng = np.random.default_rng(0)
    found = 0
    for here, next_ in itertools.pairwise(keys):
        there = rng.choice(ranks - 1, ranks - 1 - stragglers, replace=False)
        decoding = np.linalg.lstsq(
            weighed[there].T, np.ones(weighed.shape[1]), rcond=None
        )[0]
        used = np.flatnonzero(np.abs(decoding) > 1e-9)
        one = rng.choice(used)  # the sum does not use other ranks
        found += abs(decoding[one] * added[there[one]] * (next_ - here)) > rounding
    assert found >= 88


def test_batches_that_follow_each_other_have_different_keys():
    keys = [
        float(marks.key(np.int32(number), [], to_the_bit=True)) for number in range(200)
    ]
    assert all(a != b for a, b in itertools.pairwise(keys))
    assert all(key == int(key) and 0 <= key < 63 for key in keys)
    assert len(set(keys)) > 40


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_parameters_that_differ_in_a_bit(dtype):
    """Almost all of the changed parameters have a different key."""
    key = functools.partial(marks.key, np.int32(5), to_the_bit=True)
    params = {"a": jnp.ones((3, 2), dtype), "b": jnp.zeros(4, dtype)}
    usual = key(params)
    assert usual == key(params)
    changed = [key(params | {"b": params["b"].at[i].set(1)}) for i in range(4)]
    others = [key(params | {"b": params["b"] + i}) for i in (1, 2)]
    assert sum(abs(float(each - usual)) >= 0.9 for each in changed + others) >= 5


@bounded
@given(st.integers(0, 2**31), st.sampled_from([1e-3, 0.1, 1.0, 100.0]))
def test_parameters_that_differ_in_rounding_alone_or_in_their_seed(seed, scale):
    rng = np.random.default_rng(seed)
    shapes = {"w": (40, 300), "b": (300,), "conv": (3, 3, 4, 8), "scale": ()}
    params = {
        name: scale * rng.standard_normal(shape) for name, shape in shapes.items()
    }
    rounded = {
        name: (x * (1 + 1e-6 * rng.uniform(-1, 1, x.shape)))
        for name, x in params.items()
    }
    others = [
        {name: scale * rng.standard_normal(shape) for name, shape in shapes.items()}
        for _ in range(3)
    ]
    keys = [
        float(marks.key(0, jax.tree.map(jnp.float32, each), to_the_bit=False))
        for each in (params, rounded, *others)
    ]
    assert abs(keys[1] - keys[0]) < 1e-3  # a thousandth of a batch number's effect
    # some of the other parameters may have the same key by chance
    assert max(abs(key - keys[0]) for key in keys[2:]) > 1e-3 or scale < 0.01


@pytest.mark.parametrize("shape", [(1000,), (30, 40), (4, 20, 20)])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_cotangents_that_differ_at_their_end(shape, dtype):
    """All numbers of the cotangents count, on any scale; rounding does not."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    other, rounded = x.copy(), x * (1 + 1e-6 * rng.uniform(-1, 1, shape))
    other[-1] *= 1.5

    def key(moving, scale):
        moving = jnp.asarray(scale * moving, dtype)
        return float(marks.key(0, [], [moving], to_the_bit=False))

    for scale in (1e-8, 1, 1e8):
        usual = key(x, scale)
        assert abs(key(rounded, scale) - usual) < 1e-3
        assert abs(key(other, scale) - usual) > 1e-3


LARGE = [0.0, -1e3, -1e9, -3e38, -np.inf, np.nan]


@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("moving", [False, True])
def test_a_large_number_hides_no_difference(large, moving):
    """Neither a mask, nor a large statistic among the parameters, nor a cotangent that is not finite hides a
    difference."""

    def key(w):
        its = [{"w": jnp.asarray(w, jnp.float32), "m": jnp.float32([0, large])}]
        its = ([], its) if moving else (its, [])
        return float(marks.key(np.int32(9), *its, to_the_bit=False))

    w = np.random.default_rng(0).normal(size=5)
    assert key(w) == key(w)
    if moving and 1e6 < abs(large) < np.inf:
        return  # the difference may be only rounding
    assert max(abs(key(w) - key(1.5 * w)), abs(key(w) - key(w + 1))) > 0.1


def test_numbers_that_are_not_finite_say_nothing():
    for x in (np.nan, np.inf):
        params = [{"w": jnp.full((2, 3), each)} for each in (x, 0.0)]
        keys = [marks.key(np.int32(9), each, to_the_bit=False) for each in params]
        assert keys[0] == keys[1]


def test_cotangents_beyond_float32():
    with jax.enable_x64(True):
        for scale in (1e300, 1e50, 1e-50):
            x = np.array([1.0, 2.0])
            keys = [
                float(marks.key(0, [], [scale * each], to_the_bit=False))
                for each in (x, 1.5 * x, x[::-1].copy())
            ]
            assert len({round(key, 3) for key in keys}) == 3
