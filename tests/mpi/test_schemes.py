"""Every scheme on every transport gives the batch's sum or, for approximate codes, the
sum whose coefficients the residual describes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import SIZE, engine_only
from reference import (
    BATCH,
    assert_same_bits,
    assert_sum,
    contribution,
    per_example,
    random_erasures,
)
from uncounted import coded_allreduce

import jaxcoded

pytestmark = pytest.mark.ranks(4, exhaustive=(2, 7, 13))

# code, and the other arguments of make_plan; for 3 children of every parent, or 6
EXACT = {
    4: {
        "partial_stragglers(late=1, slowdown=5)": {"stragglers": 0},
        "progressive": {},
        "adaptive": {},
        "polynomial": {"slices": 2},
        "gaussian_mds": {"slices": 2},
        "single_parity_check": {"slices": 2},
        "linear(generator=[[1, 0, 1], [0, 1, 1]])": {"slices": 2},
        "reed_solomon": {"slices": 2},
    },
    7: {
        "partial_stragglers(late=2, slowdown=3)": {"stragglers": 0},
        "progressive": {"stragglers": 2},
        "adaptive": {"stragglers": 1},  # 6 parts take a while to compile
        "polynomial(load=4)": {"stragglers": 2, "slices": 2},
        "gaussian_mds": {"slices": 2},
        "single_parity_check": {"slices": 5},
        "random_generator(load=4)": {"stragglers": 2},
    },
}
EXACT[13] = EXACT[4]  # the same codes at every parent of the (3, 2) tree
APPROXIMATE = {
    4: {
        "ignore_stragglers": {},
        "bernoulli(load=2)": {},
        "grouped(load=3)": {"slices": 2, "stragglers": 2},
    },
    7: {
        "ignore_stragglers": {"stragglers": 2},
        "expander(degree=3)": {"stragglers": 2},
        "grouped(load=3)": {"slices": 2, "stragglers": 3},
        "stochastic_block(load=2, blocks=2)": {"stragglers": 2},
    },
}
APPROXIMATE[13] = APPROXIMATE[4]
FANOUT = {4: 3, 7: 6, 13: 3}
RESIDUAL = 2e-4  # largest residual of an exact sum in float32; see `test_exact`

# A tree treats these codes in the same way as `single_parity_check`, `polynomial` and `progressive`.
ALIKE = ("adaptive", "gaussian_mds", "linear", "reed_solomon")
exact_codes = pytest.mark.parametrize(
    "code",
    [
        pytest.param(
            code,
            marks=[pytest.mark.exhaustive] * (SIZE == 13 and code.startswith(ALIKE)),
        )
        for code in EXACT.get(SIZE, {})
    ],
)
approximate_codes = pytest.mark.parametrize("code", APPROXIMATE.get(SIZE, {}))


def open_group(comm, transport, code, table):
    return jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(fanout=FANOUT[SIZE], code=code, **table[SIZE][code]),
        transport=transport,
    )


@pytest.mark.ranks(4, 7, 13, exhaustive=(2,))
@exact_codes
def test_exact(comm, transport, code):
    """Sums are exact with all ranks, and with random ranks left out."""
    gradients = {"w": per_example(5, 3), "b": per_example(7, seed=1, dtype="float32")}
    rng = np.random.default_rng(3)
    with open_group(comm, transport, code, EXACT) as group:
        reduce = jax.jit(
            lambda x, gone: coded_allreduce(x, group, erasures=gone, residual=True)
        )
        own = contribution(group, gradients)
        for mask in [
            np.zeros(SIZE, bool),
            *(random_erasures(group.plan, rng) for _ in range(3)),
        ]:
            total, residual, _ = reduce(own, mask)
            assert_sum(group, total, gradients)
            assert 0 <= residual <= max(RESIDUAL, 1e-6 * group.plan.amplification)
            assert_same_bits(comm, total)
        # without a mask, and without a residual
        assert_sum(group, jax.jit(lambda x: coded_allreduce(x, group))(own), gradients)


@pytest.mark.above_the_transport
@exact_codes
def test_training_step(comm, transport, code):
    """If the transport can, it sends each part as soon as the part is ready."""
    with open_group(comm, transport, code, EXACT) as group:
        x = np.random.default_rng(0).normal(size=(23, 4))
        params = {"w": np.ones(4), "b": np.float32(0.5)}

        def loss(params, x):
            return (x @ params["w"] - 1.0) ** 2 + params["b"].astype(np.float64) * x[
                :, 0
            ]

        part = group.batch(23)
        step = jax.jit(jaxcoded.coded_value_and_grad(loss, group, residual=True))
        expected = jax.value_and_grad(lambda p: loss(p, x).mean())(params)
        for _ in range(5):
            (total, grads), residual, _ = step(params, part.of(x[part.indices]))
            tolerance = 1e-13 * group.plan.amplification
            np.testing.assert_allclose(total, expected[0], rtol=tolerance)
            np.testing.assert_allclose(grads["w"], expected[1]["w"], atol=tolerance)
            np.testing.assert_allclose(grads["b"], expected[1]["b"], atol=1e-4)
            assert residual <= max(RESIDUAL, 1e-6 * group.plan.amplification)
            assert_same_bits(comm, (total, grads))


@approximate_codes
def test_approximate(comm, transport, code):
    """The residual describes the actual coefficients of the sum."""
    gradients = per_example(6)
    with open_group(comm, transport, code, APPROXIMATE) as group:
        plan = group.plan
        assert plan.approximate
        reduce = jax.jit(
            lambda x, gone: coded_allreduce(x, group, erasures=gone, residual=True)
        )
        rng = np.random.default_rng(5)
        masks = [random_erasures(plan, rng) for _ in range(4)]
        if transport == "mpi4jax":  # the engine continues with the first n - s
            masks.append(np.zeros(SIZE, bool))
        for mask in masks:
            total, residual, _ = reduce(contribution(group, gradients), mask)
            expected = sum_by_hand(plan, gradients, mask)
            np.testing.assert_allclose(total, expected, atol=1e-9)
            assert_same_bits(comm, total)
            np.testing.assert_allclose(
                residual, residual_by_hand(plan, mask), atol=1e-5
            )


def messages_by_hand(plan, own, mask):
    """Return the root's result by the algebra: ``own`` is ``(P, l)`` for each rank."""
    messages = [np.array(each) for each in own]
    for rank in reversed(plan.tree.order):
        children = plan.coded_children(rank)
        if not children:
            continue
        code = plan.codings[rank].code
        answered = ~mask[list(children)]
        A = code.decode(answered).coefficients
        rows = np.array(
            [messages[child][p] for child in children for p in range(code.parts)]
        )
        assert plan.parts_above[rank] == 1
        messages[rank] = messages[rank] + (A @ rows).reshape(1, -1)
    return messages[plan.root][0]


def sum_by_hand(plan, gradients, mask):
    length = gradients.shape[1] + -gradients.shape[1] % plan.padding_multiple
    padded = np.zeros((BATCH, length))
    padded[:, : gradients.shape[1]] = gradients
    own = []
    for rank in range(plan.size):
        indices, coefficients = plan.strategy.shares(plan, rank, BATCH)
        M = plan.slices_above[rank]
        slices = padded[indices].reshape(len(indices), M, length // M)
        own.append(np.einsum("epu,euq->pq", coefficients, slices))
    return messages_by_hand(plan, own, mask)[: gradients.shape[1]]


def residual_by_hand(plan, mask):
    """Return the residual for a batch so fine that atoms are whole numbers of examples."""
    fine = plan.padding_multiple
    batch = 5040
    own = []
    for rank in range(plan.size):
        indices, coefficients = plan.strategy.shares(plan, rank, batch)
        M = plan.slices_above[rank]
        probe = np.zeros((coefficients.shape[1], fine // M, batch, fine))
        for v in range(fine):
            u, w = divmod(v, fine // M)
            probe[:, w, indices, v] = coefficients[:, :, u].T
        own.append(probe.reshape(coefficients.shape[1], -1))
    found = messages_by_hand(plan, own, mask).reshape(fine, batch, fine)
    wrong = found - np.eye(fine)[:, None, :]
    return np.sqrt((wrong**2).sum() / batch / fine)


@pytest.mark.ranks(4, 7, exhaustive=(2, 13))
@engine_only
@pytest.mark.skipif(SIZE not in FANOUT, reason="no such plan for so few ranks")
def test_what_a_slow_rank_has_finished_counts(comm, transport):
    """A child still computes its second part when all other ranks end the round. The
    round needs the child's first part."""
    talk = comm.Dup()
    others = [rank for rank in range(comm.size) if rank != 1]
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(
            fanout=SIZE - 1, stragglers=0, code="partial_stragglers(late=1, slowdown=5)"
        ),
        transport=transport,
    ) as group:
        parts = []

        def stall(x):
            parts.append(len(x))
            if len(parts) == 2:
                for rank in others:
                    talk.send("at its second part", dest=rank)
                for rank in others:
                    talk.recv(source=rank)
            return np.asarray(x)

        def loss(w, x):
            if comm.rank == 1:
                like = jax.ShapeDtypeStruct(x.shape, x.dtype)
                x = jax.pure_callback(stall, like, x)
            return x @ w

        x = np.random.default_rng(0).normal(size=(4 * (SIZE - 1), 3))
        part = group.batch(len(x))
        step = jax.jit(jaxcoded.coded_value_and_grad(loss, group, mean=False))
        if comm.rank != 1:
            talk.recv(source=1)
        _, grads = jax.block_until_ready(step(np.ones(3), part.of(x[part.indices])))
        np.testing.assert_allclose(grads, x.sum(0), atol=1e-9)
        if comm.rank != 1:
            talk.send("has ended the round", dest=1)
        assert len(parts) >= 2 or comm.rank != 1
    talk.Free()


@engine_only
@pytest.mark.skipif(SIZE not in FANOUT, reason="no such plan for so few ranks")
def test_a_call_that_fails_between_its_parts(comm, transport):
    """The rank counts as missing in the round that it began, and gets the result when
    it tries again.
    """
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(fanout=SIZE - 1, code="progressive"), transport=transport
    ) as group:
        calls = []

        def fail(x):
            calls.append(len(x))
            if len(calls) == 2:
                raise ValueError("injected between the parts")
            return np.asarray(x)

        def loss(w, x):
            if comm.rank == 1:
                like = jax.ShapeDtypeStruct(x.shape, x.dtype)
                x = jax.pure_callback(fail, like, x)
            return x @ w

        xs = np.random.default_rng(0).normal(size=(4, 4 * (SIZE - 1), 3))
        part = group.batch(xs.shape[1])
        step = jax.jit(jaxcoded.coded_value_and_grad(loss, group, mean=False))
        if comm.rank == 1:
            with pytest.raises(jax.errors.JaxRuntimeError, match="injected"):
                jax.block_until_ready(step(np.ones(3), part.of(xs[0][part.indices])))
            jaxcoded.effects_barrier()
            comm.Barrier()
        else:  # the round is open until this rank has failed
            comm.Barrier()
        for x in xs:
            _, grads = jax.block_until_ready(step(np.ones(3), part.of(x[part.indices])))
            np.testing.assert_allclose(grads, x.sum(0), atol=1e-9)


def test_unequal_speeds(comm, transport):
    """Loads follow the speeds, and the sum is exact."""
    if SIZE < 4:
        pytest.skip("no redundancy")
    speeds = [1.0 + rank % 3 for rank in range(SIZE)]
    gradients = per_example(9)
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(fanout=FANOUT[SIZE], speeds=speeds), transport=transport
    ) as group:
        part = group.batch(BATCH)
        assert len(part.indices) == max(1, np.count_nonzero(part.weights))
        own = contribution(group, gradients)
        total = jax.jit(lambda v: coded_allreduce(jnp.asarray(v), group))(own)
        assert_sum(group, total, gradients)


@pytest.mark.ranks(4, 7, exhaustive=(2, 13))
@pytest.mark.skipif(SIZE not in FANOUT, reason="no such plan for so few ranks")
def test_vmap_of_parts(comm, transport):
    """An ensemble of ensembles takes one round, whose parts follow each other."""
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(fanout=FANOUT[SIZE], code="progressive"),
        transport=transport,
    ) as group:
        x = np.random.default_rng(0).normal(size=(2 * SIZE, 3))
        part = group.batch(len(x))
        step = jaxcoded.coded_value_and_grad(
            lambda w, x: (x @ w) ** 2, group, mean=False
        )
        many = jax.vmap(jax.vmap(step, (0, None)), (0, None))
        w = np.random.default_rng(1).normal(size=(2, 4, 3))
        before = group.rounds
        _, grads = jax.block_until_ready(jax.jit(many)(w, part.of(x[part.indices])))
        assert group.rounds == before + 1
        expected = 2 * np.einsum("xi,xj,abi->abj", x, x, w)
        np.testing.assert_allclose(grads, expected, atol=1e-9)


@engine_only
@pytest.mark.parametrize("computes", [False, True])
def test_the_root_cannot_skip(comm, transport, computes):
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0, root_computes=computes), transport=transport
    ) as group:
        step = jax.jit(lambda x, skip: coded_allreduce(x, group, skip=skip))
        with pytest.raises(jax.errors.JaxRuntimeError, match="cannot skip a round"):
            jax.block_until_ready(step(np.ones(2), comm.rank == 0))
        jaxcoded.effects_barrier()
        comm.Barrier()
        jax.block_until_ready(step(np.ones(2), False))


@pytest.mark.skipif(SIZE not in FANOUT, reason="no such plan for so few ranks")
def test_residual_of_a_large_amplification(comm, transport):
    """The residual is as exact as the data."""
    if SIZE != 4:
        pytest.skip("one size will do")
    generator = [[1, 1, 1], [1, 1.00001, 1.00002]]
    with jaxcoded.CodedGroup(
        comm,
        jaxcoded.Coded(code=f"linear(generator={generator})", slices=2),
        transport=transport,
    ) as group:
        assert group.plan.amplification > 1e5
        gradients = per_example(4)
        own = contribution(group, gradients)
        gone = np.arange(SIZE) == 2
        total, residual, _ = coded_allreduce(own, group, erasures=gone, residual=True)
        assert_sum(group, total, gradients)
        assert residual.dtype == np.float64
        assert residual < 1e-14 * group.plan.amplification
