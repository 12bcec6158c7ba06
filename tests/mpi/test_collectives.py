"""The results and the order of the collectives, under all transformations except differentiation."""

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
import pytest
from marks import slices
from mpi4py import MPI
from reference import (
    BATCH,
    assert_same_bits,
    assert_sum,
    contribution,
    per_example,
    tolerated_masks,
)
from together import compilations
from uncounted import coded_allreduce, coded_reduce

import jaxcoded
from jaxcoded import tree_bcast

pytestmark = pytest.mark.ranks(2, 4, exhaustive=(7, 13))

VECTOR = per_example(5)


@pytest.fixture(scope="module")
def own(group):
    return jnp.asarray(contribution(group, VECTOR))


# Pytrees and dtypes.

GRADIENTS = {
    "matrix": per_example(3, 2, seed=1),
    "scalar": per_example(seed=2, dtype="float32"),
    "empty": per_example(0, 3, dtype="float32"),
    "nested": [
        per_example(4, seed=3, dtype="float32"),
        {"half": per_example(9, seed=4, dtype="float16")},
    ],
    "brain": (per_example(2, 3, seed=5, dtype="bfloat16"), None),
    "number": per_example(seed=6),
}


@pytest.mark.ranks(2, 4, 13, exhaustive=(7,))
@pytest.mark.parametrize("mean", [None, BATCH])
def test_mixed_pytree(comm, group, mean):
    tree = contribution(group, GRADIENTS)
    tree["number"] = float(tree["number"])
    before = group.rounds
    total = coded_allreduce(tree, group, divisor=mean)
    assert group.rounds == before + 1
    assert_sum(group, total, GRADIENTS, 1.0 if mean is None else 1 / mean)
    assert_same_bits(comm, total)


def test_an_empty_sum_is_still_a_round(group):
    before = group.rounds
    assert coded_allreduce({"a": None, "b": ()}, group) == {"a": None, "b": ()}
    assert coded_allreduce(np.zeros((2, 0), np.float32), group).shape == (2, 0)
    assert group.rounds == before + 2


def test_traced_mean(group, own):
    average = jax.jit(lambda x, n: coded_allreduce(x, group, divisor=n))
    assert_sum(group, average(own, 8.0), VECTOR, 1 / 8)


@pytest.mark.ranks(2, 4, 13, exhaustive=(7,))
def test_reduce(group, own):
    total = coded_reduce({"x": own}, group)
    if group.rank == group.plan.root:
        assert_sum(group, total["x"], VECTOR)
    else:
        np.testing.assert_array_equal(total["x"], np.zeros(5))


BROADCAST = [
    *("bool", "int8", "uint16", "int64", "float16", "bfloat16", "float32"),
    *("float64", "complex64", "float8_e5m2"),
]


def test_bcast_of_any_dtype(comm, group):
    def values(rank):
        tree = {
            dtype: jnp.array([[rank, 1], [2, 0]]).astype(dtype) for dtype in BROADCAST
        }
        return tree | {"number": rank, "empty": jnp.zeros((0, 2)), "none": None}

    got = tree_bcast(values(group.rank + 1), group)
    expected = values(group.plan.root + 1)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert all(got[dtype].dtype == dtype for dtype in BROADCAST)
    assert_same_bits(comm, got)


@slices
def test_slices(comm, transport):
    gradients = {"odd": per_example(7), "narrow": per_example(3, seed=1)}
    fanout = 3 if comm.size == 13 else None
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(slices=2, fanout=fanout), transport=transport
    ) as sliced:
        message = contribution(sliced, gradients)
        padded = 10 + -10 % sliced.plan.padding_multiple
        assert message.vectors[0].size * message.slices == padded
        total = coded_allreduce(message, sliced)
        assert_sum(sliced, total, gradients)
        assert_same_bits(comm, total)
        # as many factors as a child's message has numbers, so that the shape does not show the batch axis
        factors = np.arange(1.0, 1 + padded // 2)
        batched = jax.tree.map(lambda v: jnp.outer(factors, v), message)
        every = jax.jit(jax.vmap(lambda m: coded_allreduce(m, sliced)))(batched)
        for i, factor in enumerate(factors):
            one_slice = jax.tree.map(lambda v, i=i: v[i], every)
            assert_sum(sliced, one_slice, gradients, factor)


@pytest.mark.ranks(2, 4, 13, exhaustive=(7,))
def test_large_message(group):
    """The message is far longer than MPI sends eagerly."""
    weight = contribution(group, np.ones((BATCH, 1)))
    total = coded_allreduce(jnp.full(2**20, weight[0]), group)
    np.testing.assert_allclose(total, BATCH, rtol=1e-12 * group.plan.amplification)


# Control flow.


def scan(f, x):
    return jax.lax.scan(lambda c, k: (c, f(k * x)), None, jnp.arange(1.0, 4))[1].sum(0)


def while_loop(f, x):
    def grow(state):
        step, total = state
        return step + 1, total + f(x)

    # the predicate depends on the result, which is equal on all ranks
    size = jnp.abs(VECTOR.sum(0)).sum()
    far = lambda state: jnp.abs(state[1]).sum() < 5.5 * size
    return jax.lax.while_loop(far, grow, (0, jnp.zeros_like(x)))[1]


def cond(f, x):
    def step(total, i):
        add = jax.lax.cond(i % 2 == 0, lambda: f(2 * x), lambda: f(f(x) / f(x) * x))
        return total + add, None

    return jax.lax.scan(step, jnp.zeros_like(x), jnp.arange(4))[0]


@pytest.mark.parametrize("transform", [scan, while_loop, cond])
def test_control_flow(comm, group, own, transform):
    total = jax.jit(lambda x: transform(lambda y: coded_allreduce(y, group), x))(own)
    assert_sum(group, total / 6, VECTOR)
    assert_same_bits(comm, total)


# vmap.


@pytest.mark.ranks(2, 4, 13, exhaustive=(7,))
def test_vmap_is_one_round(group):
    columns = per_example(4, 3, seed=7)
    tree = contribution(group, {"batched": columns, "shared": VECTOR})

    @jax.jit
    @lambda f: jax.vmap(f, in_axes=({"batched": 1, "shared": None},), out_axes=-1)
    def total(tree):
        return coded_allreduce(tree, group)

    before = group.rounds
    result = jax.block_until_ready(total(tree))
    assert group.rounds == before + 1
    assert_sum(group, result["batched"], columns)
    for column in range(3):
        assert_sum(group, result["shared"][:, column], VECTOR)


def test_nested_vmap(group):
    cube = per_example(2, 3, 4, seed=8)
    inner = jax.vmap(lambda x: coded_allreduce(x, group), in_axes=1, out_axes=1)
    assert_sum(group, jax.vmap(inner)(contribution(group, cube)), cube)


def test_vmap_of_scan(group):
    rows = per_example(2, 3, seed=9)

    def steps(x):
        return jax.lax.scan(
            lambda c, k: (c + coded_allreduce(k * x, group), None),
            jnp.zeros(3),
            jnp.arange(3.0),
        )[0]

    total = jax.jit(jax.vmap(steps))(contribution(group, rows))
    assert_sum(group, total / 3, rows)


# Compilation.


def test_no_recompile_across_steps(group, own):
    step = jax.jit(
        lambda x, erased: coded_allreduce(x, group, erasures=erased), donate_argnums=0
    )
    masks = tolerated_masks(group.plan)
    for k in (1, 2, 3):
        assert_sum(group, step(k * own, masks[k % len(masks)]), VECTOR, k)
    assert step._cache_size() == 1


def test_eager_loop_compiles_once(group):
    with compilations() as compiled:
        coded_allreduce(np.ones(11), group)
        assert compiled  # so that this test fails when the event changes its name
        compiled.clear()
        for k in range(3):
            coded_allreduce(np.full(11, float(k)), group)
        assert not compiled


def test_equal_groups_share_nothing(comm, group, transport, own):
    step = jax.jit(lambda x, g: coded_allreduce(x, g), static_argnums=1)
    with jaxcoded.CodedGroup(comm, group.plan, transport=transport) as twin:
        assert twin.plan == group.plan
        assert twin != group
        before = group.rounds
        for calls, each in enumerate((group, twin, group, twin)):
            assert_sum(group, step(own, each), VECTOR)
            assert group.rounds == before + 1 + calls // 2
            assert twin.rounds == (1 + calls) // 2
        assert step._cache_size() == 2


# Order: two swapped calls would have mismatched shapes or a wrong sum.


@pytest.mark.ranks(2, 4, 13, exhaustive=(7,))
def test_calls_keep_their_order(comm, group, transport, own):
    """Two groups and mpi4jax keep their order in a loop of one program."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    with jaxcoded.CodedGroup(comm, group.plan, transport=transport) as other:

        def step(total, k):
            a = coded_allreduce(k * own, group)
            raw = mpi4jax.allreduce(k + comm.rank, op=MPI.SUM, comm=comm)
            b = coded_allreduce({"two": own, "of": -k * own}, other)
            mark = jnp.full(3, k + comm.rank)
            passed = mpi4jax.sendrecv(mark, mark, source=left, dest=right, comm=comm)
            c = coded_allreduce(own[:2], group)
            first = tree_bcast(k + comm.rank, other)
            out = {"a": a / k, "b": b["of"] / -k, "c": c, "raw": raw}
            return total + 1, out | {"passed": passed, "first": first}

        loop = jax.jit(lambda: jax.lax.scan(step, 0, jnp.arange(1.0, 4)))
        before = group.rounds
        steps, out = jax.block_until_ready(loop())
        assert (steps, group.rounds - before, other.rounds) == (3, 6, 6)

    for i, k in enumerate(range(1, 4)):
        assert_sum(group, [out["a"][i], out["b"][i]], [VECTOR, VECTOR])
        assert_sum(group, out["c"][i], VECTOR[:, :2])
        assert out["raw"][i] == sum(k + rank for rank in range(comm.size))
        assert out["first"][i] == k
        np.testing.assert_array_equal(out["passed"][i], np.full(3, k + left))


def test_calls_are_neither_dropped_nor_merged(group, own):
    @jax.jit
    def wasteful(x):
        coded_allreduce(x, group)  # not used
        jax.lax.fori_loop(0, 2, lambda _, c: (coded_allreduce(x, group), c)[1], 0)
        return coded_allreduce(x, group) + coded_allreduce(x, group)  # identical calls

    before = group.rounds
    assert_sum(group, wasteful(own) / 2, VECTOR)
    jax.effects_barrier()
    assert group.rounds == before + 5
