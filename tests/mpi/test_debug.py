"""Groups with ``check``: correct training passes with every code. Typical mistakes raise an error on every rank that
names parent, children and remedy.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_schemes as schemes
import uncounted
from cases import more
from jax.errors import JaxRuntimeError
from marks import SIZE
from mpi4py import MPI
from reference import assert_sum, contribution, per_example
from uncounted import coded_allreduce

import jaxcoded
from jaxcoded import GroupMismatch, InconsistentMessages
from jaxcoded.transport import engine

pytestmark = [
    pytest.mark.skipif(bool(engine.missing()), reason=engine.missing()),
    pytest.mark.skipif(SIZE not in schemes.EXACT, reason="no redundancy"),
]
RANK = MPI.COMM_WORLD.rank
VECTOR = per_example(7)
EXAMPLES = 60  # in a batch of digits


@contextlib.contextmanager
def opened(comm, **options):
    """Open a group. Other tests cover the warning about parents without redundancy."""
    how = {"check": jaxcoded.DEBUG} | {
        k: options.pop(k) for k in ("check", "on_deadline") if k in options
    }
    transport = options.pop("transport", "engine")
    coded = jaxcoded.Coded(**{"fanout": schemes.FANOUT[SIZE]} | options)
    with jaxcoded.CodedGroup(
        comm, coded, transport=transport, options=jaxcoded.Options(**how)
    ) as group:
        yield group


# Honest training.


@pytest.fixture(scope="module")
def digits(comm):
    data = None
    if comm.rank == 0:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        data = (x / 16).astype(np.float32), y.astype(np.int32)
    return comm.bcast(data)


def parameters():
    rng = np.random.default_rng(0)
    shapes = {"w1": (64, 16), "b1": (16,), "w2": (16, 10), "b2": (10,)}
    return {
        name: jnp.asarray(rng.normal(size=shape) / 8, np.float32)
        for name, shape in shapes.items()
    }


def losses(params, batch):
    x, y = batch
    logits = jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


CODES = schemes.EXACT.get(SIZE, {}) | schemes.APPROXIMATE.get(SIZE, {})
CODES |= {"fractional_repetition": {"stragglers": 2}, "cyclic_repetition": {}}
ALIKE = {"adaptive", "gaussian_mds", "grouped(load=3)", "progressive"}
# 7 ranks, whose tree is as flat as that of 4 ranks, test the codes that 4 ranks do not
# test
ON_7 = {"random_generator(load=4)", "expander(degree=3)"}
FEW = ON_7 if SIZE == 7 else set(CODES) - ALIKE


@pytest.mark.ranks(4, 7, exhaustive=(2,))
@pytest.mark.parametrize(
    "code",
    [code if code in FEW else more(code) for code in CODES],
)
def test_honest_training_passes(comm, digits, code):
    x, y = digits
    options = CODES[code]
    plan = jaxcoded.make_plan(
        SIZE, jaxcoded.Coded(fanout=schemes.FANOUT[SIZE], code=code, **options)
    )
    if not plan.checked:
        with pytest.raises(ValueError, match="has nothing to compare"):
            opened(comm, code=code, **options).__enter__()
        return
    with opened(comm, code=code, **options) as group:
        part = group.batch(EXAMPLES)
        wire = "bfloat16" if "repetition" in code else None
        gradient = jaxcoded.coded_value_and_grad(losses, group, wire_dtype=wire)

        @jax.jit
        def step(params, batch):
            loss, grads = gradient(params, part.of(batch))
            return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

        params = parameters()
        batches = np.random.default_rng(1)
        history = []
        for _ in range(12):
            mine = batches.permutation(300)[:EXAMPLES][part.indices]
            params, loss = step(params, (x[mine], y[mine]))
            history.append(float(loss))
        assert history[-1] < history[0]


def in_16_bits(params, batch):
    """Compute the layers in bfloat16; parameters, and so gradients, are float32."""
    x, y = batch
    out = x.astype(jnp.bfloat16)
    for number, layer in enumerate(params):
        w, b = (array.astype(jnp.bfloat16) for array in layer)
        out = (jnp.tanh(out) if number else out) @ w + b
    logits = out.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def test_honest_training_in_mixed_precision_passes(comm, digits):
    """Computation in 16 bits rounds more than messages in 32 bits."""
    x, y = digits
    keys = jax.random.split(jax.random.key(0), 3)
    params = [
        (
            jax.random.normal(key, (rows, columns), jnp.float32) / rows**0.5,
            jnp.zeros(columns, jnp.float32),
        )
        for key, rows, columns in zip(keys, (64, 32, 32), (32, 32, 10))
    ]
    with opened(comm, fanout=SIZE - 1, code="cyclic_repetition") as group:
        gradient = jaxcoded.coded_value_and_grad(in_16_bits, group)

        @jax.jit
        def step(params, batch):
            loss, grads = gradient(params, batch)
            return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

        for epoch in range(3):
            for batch in group.epoch((x, y), 128, seed=0, epoch=epoch):
                params, loss = step(params, batch)
        assert loss < 1


def squares(params, batch):
    x, y = batch
    return (x @ params["w"] + params["b"] - y) ** 2 / 2


def expanded(params, batch):
    """Return the same loss, written so that its gradient is a difference of two sums
    over the batch. Where the gradient vanishes, only the ranks' rounding is left.
    """
    x, y = batch
    of_square, of_product = (x @ params["w"] + params["b"] for _ in range(2))
    return of_square**2 / 2 - of_product * y + y**2 / 2


@pytest.mark.parametrize(
    ("loss", "mean", "wire"),
    [  # each pair of two settings once
        (squares, False, None),
        (squares, True, "bfloat16"),
        (expanded, False, "bfloat16"),
        (expanded, True, None),
        more(squares, True, None),
        more(squares, False, "bfloat16"),
        more(expanded, True, "bfloat16"),
        more(expanded, False, None),
    ],
)
def test_a_perfect_fit_passes(comm, loss, mean, wire):
    """At the end gradient and loss consist of rounding alone, on any scale."""
    data = None
    if comm.rank == 0:
        rng = np.random.default_rng(3)
        x = rng.standard_normal((EXAMPLES, 8)).astype(np.float32)
        w = rng.standard_normal(8).astype(np.float32)
        data = x, x @ w + 1, w
    x, y, w = comm.bcast(data)
    s = 1 if SIZE == 4 else 2
    rate = 0.4 / (1 if mean else EXAMPLES)
    with opened(comm, code="cyclic_repetition", stragglers=s) as group:
        part = group.batch(EXAMPLES)
        gradient = jaxcoded.coded_value_and_grad(
            loss, group, mean=mean, wire_dtype=wire
        )

        @jax.jit
        def train(params, batch, scale):
            def step(params, _):
                loss, grads = gradient(params, part.of(batch))
                params = {
                    "w": params["w"] - rate / scale**2 * grads["w"],
                    "b": params["b"] - rate * grads["b"],
                }
                return params, (loss, jnp.abs(grads["w"]).max())

            return jax.lax.scan(step, params, None, length=300)

        for scale in (1.0, 1e3):
            params = {"w": jnp.zeros(8, np.float32), "b": jnp.float32(scale)}
            batch = scale * x[part.indices], scale * y[part.indices]
            params, (losses, slopes) = train(params, batch, np.float32(scale))
            np.testing.assert_allclose(params["w"], w, atol=1e-4)
            assert slopes[-1] < 1e-5 * slopes[0]
            if loss is squares:
                assert losses[-1] < 1e-11 * losses[0]
            else:  # a wrong contribution that the check must not report
                assert 0 < slopes[-1]


# Mistakes. Each function returns this rank's contribution.


def weighted(digits, which, weights, scale=1.0):
    batch = digits[0][which], digits[1][which]
    params = jax.tree.map(lambda leaf: scale * leaf, parameters())
    return weighted_gradient(params, batch, weights.astype(np.float32))


@jax.jit
def weighted_gradient(params, batch, weights):
    return jax.grad(lambda p: weights @ losses(p, batch))(params)


def mine(group, examples=EXAMPLES):
    part = group.batch(examples)
    return part.indices, part.weights


def right(group, digits):
    return weighted(digits, *mine(group))


def shard(group, digits):
    """Return the gradient of the mean of this rank's part, as users of other libraries may do."""
    which = np.arange(max(RANK - 1, 0), EXAMPLES, SIZE - 1)
    return weighted(digits, which, np.full(len(which), 1 / len(which)))


def uniform(group, digits):
    part = group.batch(EXAMPLES)
    return weighted(digits, part.indices, (part.weights != 0).astype(np.float32))


def others_weights(group, digits):
    """Let rank 2 use the weights of rank 1."""
    rank = 1 if RANK == 2 else RANK
    weights = group.plan.strategy.assignment(group.plan, rank, EXAMPLES)[1]
    return weighted(digits, mine(group)[0], weights)


def other_batch_size(group, digits):
    """Let rank 2 assume three examples fewer."""
    return weighted(digits, *mine(group, EXAMPLES - 3 * (RANK == 2)))


def other_parameters(group, digits):
    return weighted(digits, *mine(group), 1.3 if RANK == 2 else 1.0)


@pytest.mark.ranks(4, 7, exhaustive=(2,))
@pytest.mark.parametrize(
    "mistake", [shard, uniform, others_weights, other_batch_size, other_parameters]
)
def test_mistakes_are_found(comm, digits, mistake):
    s = 1 if SIZE == 4 else 2
    with opened(comm, code="cyclic_repetition", stragglers=s) as group:
        reduce = jax.jit(lambda x: coded_allreduce(x, group, divisor=EXAMPLES))
        jax.block_until_ready(reduce(right(group, digits)))
        with pytest.raises(JaxRuntimeError) as error:
            jax.block_until_ready(reduce(mistake(group, digits)))
        jaxcoded.effects_barrier()
        text = str(error.value)
        assert len(set(comm.allgather(text))) == 1
        assert "InconsistentMessages: round 2, coded_allreduce of " in text
        assert " sent to rank 0 does not fit" in text
        assert "group.epoch or group.batch" in text
        if SIZE == 7 and mistake in (others_weights, other_batch_size):
            assert "what rank 2 has sent to rank 0 does not fit" in text
        # all ranks are in step again
        total = reduce(right(group, digits))
        x, y = digits[0][:EXAMPLES], digits[1][:EXAMPLES]
        mean = np.full(EXAMPLES, np.float32(1 / EXAMPLES))
        expected = weighted_gradient(parameters(), (x, y), mean)
        for a, b in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def regression(group, targets, offset=0.0):
    """Return loss and gradient of a linear model, with ``offset`` added to all losses.
    Rank 2 has other targets, and a gradient that is off by 19 %.
    """
    rng = np.random.default_rng(5)
    x = rng.standard_normal((EXAMPLES, 8)).astype(np.float32)
    y = (targets * rng.standard_normal(EXAMPLES)).astype(np.float32)
    y *= 1.19 if RANK == 2 else 1.0
    part = group.batch(EXAMPLES)
    params = {"w": np.zeros(8, np.float32), "b": np.float32(0)}

    def losses(params, batch):
        return offset + squares(params, batch)

    return losses, params, part.of((x[part.indices], y[part.indices]))


SMALL = [
    (1e-3, True, {}),
    (1e-3, True, {"wire_dtype": "bfloat16"}),
    (1e-3, True, {"residual": True}),
    (1.0, False, {"offset": 1e3}),
]


@pytest.mark.parametrize(
    ("code", "targets", "mean", "options"),
    [
        *(("cyclic_repetition", *it) for it in SMALL),
        *(("random_generator", *SMALL[0]), ("adaptive", *SMALL[0])),
        # the compared numbers do not depend on the code
        *(more("random_generator", *it) for it in SMALL[1:]),
        *(more("adaptive", *it) for it in SMALL[1:]),
    ],
)
def test_small_gradients_are_compared(comm, code, targets, mean, options):
    """Small gradients are compared although the loss and the number of examples are
    large.
    """
    s = 1 if SIZE == 4 else 2
    slices = 2 if code == "random_generator" and SIZE != 4 else 1
    options = dict(options)
    offset = options.pop("offset", 0.0)
    with opened(comm, code=code, stragglers=s, slices=slices) as group:
        if group.plan.amplification > 10:
            options.pop("wire_dtype", None)
        losses, *args = regression(group, targets, offset)
        step = jaxcoded.coded_value_and_grad(losses, group, mean=mean, **options)
        with pytest.raises(JaxRuntimeError, match=r"InconsistentMessages: round 1, "):
            jax.block_until_ready(jax.jit(step)(*args))
        jaxcoded.effects_barrier()


def test_a_gradient_next_to_a_custom_loss(comm):
    """The library does not know which numbers of a tree are losses."""
    s = 1 if SIZE == 4 else 2
    with opened(comm, code="cyclic_repetition", stragglers=s) as group:
        losses, params, batch = regression(group, 1.0, 1e3)

        @jax.jit
        def step(params):
            pair = jax.value_and_grad(lambda p: batch.weights @ losses(p, batch.data))(
                params
            )
            return coded_allreduce(pair, group)

        with pytest.raises(JaxRuntimeError, match=r"InconsistentMessages: round 1, "):
            jax.block_until_ready(step(params))
        jaxcoded.effects_barrier()


def test_a_plain_shard_does_not_pass_with_copies(comm, digits):
    if SIZE % 2:  # 6 children in groups of two
        with opened(comm, stragglers=1, code="fractional_repetition") as group:
            reduce = jax.jit(lambda x: coded_allreduce(x, group))
            with pytest.raises(JaxRuntimeError, match="InconsistentMessages"):
                jax.block_until_ready(reduce(shard(group, digits)))
            jaxcoded.effects_barrier()


def test_without_the_check_a_shard_passes(comm, digits):
    """Without the check the result is another sum, which follows from the code."""
    s = 1 if SIZE == 4 else 2
    gone = (np.arange(SIZE) > 0) & (np.arange(SIZE) <= s)
    with opened(comm, check=False, code="cyclic_repetition", stragglers=s) as group:

        def total(mine):
            return coded_allreduce(mine, group, erasures=gone, divisor=EXAMPLES)

        def flat(tree):
            leaves = jax.tree.leaves(tree)
            return np.concatenate([np.ravel(leaf) for leaf in leaves])[None]

        mine = shard(group, digits)
        messages = comm.allgather(flat(mine))
        expected = schemes.messages_by_hand(group.plan, messages, gone) / EXAMPLES
        found = flat(total(mine))[0]
        np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())
        meant = flat(total(right(group, digits)))[0]
        assert np.abs(found - meant).max() > 0.1 * np.abs(meant).max()


def test_on_the_host_and_after_replan(comm):
    with opened(comm, stragglers=1) as group:
        group = group.replan(speeds=[1.0 + (rank > 2) for rank in range(SIZE)])
        own = contribution(group, VECTOR)
        assert_sum(group, uncounted.allreduce(own, group), VECTOR)
        with pytest.raises(InconsistentMessages, match=r"round 3, .* sent to rank 0"):
            uncounted.allreduce(own * (2 if RANK == 1 else 1), group)
        assert_sum(group, uncounted.allreduce(own, group), VECTOR)


def test_ranks_left_out_are_not_compared(comm):
    with opened(comm, stragglers=1) as group:
        own = contribution(group, VECTOR)
        wrong = own * (2 if RANK == 1 else 1)
        gone = np.arange(SIZE) == 1
        assert_sum(group, uncounted.allreduce(wrong, group, erasures=gone), VECTOR)
        total = uncounted.allreduce(wrong, group, skip=RANK == 1)
        assert_sum(group, total, VECTOR)


# How to enable the check.


def test_unsupported_groups(comm):
    for options, words in [
        ({"transport": "mpi4jax"}, "needs the engine"),
        (
            {"stragglers": 0},
            "has nothing to compare: messages of the children of rank 0 cannot",
        ),
        ({"on_deadline": "approximate"}, "waits for all ranks"),
        (
            {"check": 1},
            "check must be a jaxcoded.Check such as jaxcoded.DEBUG, False or None",
        ),
    ]:
        with pytest.raises(ValueError, match=words):
            opened(comm, **options).__enter__()


def test_ranks_that_differ(comm):
    with pytest.raises(GroupMismatch, match=r"check=(Check\(.*\)|False)"):
        opened(comm, check=jaxcoded.DEBUG if RANK == 1 else False).__enter__()


def test_the_environment(comm, monkeypatch):
    monkeypatch.setenv("JAXCODED_DEBUG", "1")
    with opened(comm, check=None) as group:
        assert group.options.check == jaxcoded.DEBUG
    with opened(comm, check=False) as group:
        assert not group.options.check
    warns = pytest.warns(RuntimeWarning, match="JAXCODED_DEBUG is ignored: DEBUG has")
    with (
        warns if RANK == 0 else contextlib.nullcontext(),
        opened(comm, check=None, stragglers=0) as group,
    ):
        assert not group.options.check
    monkeypatch.setenv("JAXCODED_DEBUG", "yes")
    with pytest.raises(ValueError, match="JAXCODED_DEBUG 1 or 0"):
        opened(comm, check=None).__enter__()


def test_parents_that_cannot_check_are_named(comm):
    parents = [-1, 0, 0, 1, *[0] * (SIZE - 4)]  # rank 1 has a single child
    plan = jaxcoded.make_plan(SIZE, jaxcoded.Coded(parents=parents))
    warns = pytest.warns(RuntimeWarning, match="children of rank 1 cannot be")
    with (
        warns if RANK == 0 else contextlib.nullcontext(),
        jaxcoded.CodedGroup(
            comm, plan, options=jaxcoded.Options(check=jaxcoded.DEBUG)
        ) as group,
    ):
        own = contribution(group, VECTOR)
        assert_sum(group, uncounted.allreduce(own, group), VECTOR)
        with pytest.raises(InconsistentMessages):
            uncounted.allreduce(own * (2 if RANK == 2 else 1), group)
