"""What tells ranks at another batch from the others, where work is shared."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcoded.collectives import marks
from jaxcoded.plan.placement import Placement


@given(st.integers(2, 40), st.integers(1, 24), st.integers(1, 10**7))
def test_weights_of_blocks(owners, blocks, batch_size):
    table = marks.weights(Placement(tuple(range(owners)), 1, blocks), batch_size)
    assert table.dtype == np.float32 and table.shape == (owners * blocks,)
    of_owners = table.astype(float).reshape(owners, blocks).sum(axis=1)
    assert of_owners.sum() == 0 and of_owners.all()
    # sums in float32 are exact in any order, beside the count
    units = np.abs(table).max() / 2.0 ** (np.floor(np.log2(batch_size)) - 15)
    assert units == round(units) and 62 * units * blocks < 2**20


def test_one_rank_alone():
    assert not marks.weights(Placement((0,), 0, 3), 10).any()


def test_batches_that_follow_each_other_have_different_keys():
    keys = [float(marks.key(np.int32(number))) for number in range(200)]
    assert all(a != b for a, b in itertools.pairwise(keys))
    assert all(key == int(key) and 0 <= key < 63 for key in keys)
    assert len(set(keys)) > 40


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_parameters_that_differ_in_a_bit(dtype):
    """Almost all of them have another key."""
    params = {"a": jnp.ones((3, 2), dtype), "b": jnp.zeros(4, dtype)}
    usual = marks.key(np.int32(5), params)
    assert usual == marks.key(np.int32(5), params)
    changed = [
        marks.key(np.int32(5), params | {"b": params["b"].at[i].set(1)})
        for i in range(4)
    ]
    others = [marks.key(np.int32(5), params | {"b": params["b"] + i}) for i in (1, 2)]
    assert sum(bool(key != usual) for key in changed + others) >= 5
