"""Compare functions of sums, and their derivatives, with closed forms for the whole batch.

The model is that of `test_gradients`: L(θ) = φ(Σ_j g_j(θ)), so that the sum must be
exact before the nonlinear φ.
"""

import importlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import more
from marks import SIZE, engine_only, once, redundant, several, slices
from reference import BATCH, assert_same_bits
from test_gradients import DIRECTION, THETA, A, Whole, phi
from together import finish, lowered, one_late, wait_for_all

import jaxcoded
from jaxcoded import Coded, Shared, Uncoded, coded_sum, spread
from jaxcoded.collectives import composed

SLICED = Coded(stragglers=1, slices=2)
STRATEGIES = {
    "shared": Shared(),
    "coded": Coded(stragglers=1 if SIZE > 2 else 0),
    "slices": pytest.param(SLICED, marks=slices),
    "uncoded": Uncoded(),
    # on 4 ranks this is the same code as "coded"
    "cyclic": pytest.param(
        Coded(stragglers=1, fanout=3, code="cyclic_repetition"),
        marks=[redundant, pytest.mark.exhaustive],
    ),
}
every_strategy = pytest.mark.parametrize(
    "strategy", STRATEGIES.values(), ids=STRATEGIES.keys(), indirect=True
)
# For derivatives that take long to compile: a sum without a code has the program of a
# coded sum, with other weights, and `test_derivatives_with_codes` has slices.
OTHERS = {
    "uncoded": more(Uncoded()),
    "slices": pytest.param(SLICED, marks=[slices, pytest.mark.exhaustive]),
}
every_program = pytest.mark.parametrize(
    "strategy", (STRATEGIES | OTHERS).values(), ids=STRATEGIES.keys(), indirect=True
)


@pytest.fixture
def strategy(request, comm):
    """A group with this strategy on the engine."""
    with jaxcoded.CodedGroup(comm, request.param) as group:
        yield group


def values(theta, examples):
    return jnp.sin(examples @ theta)


def loss_of(group):
    batch = group.batch(A)
    total = coded_sum(values, group)
    return lambda theta: phi(total(theta, batch))


def close(actual, expected, group, digits=1e-12):
    tolerance = digits * group.plan.amplification
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@every_strategy
def test_first_derivatives(strategy, comm):
    loss, whole = loss_of(strategy), Whole(THETA)

    @jax.jit
    def derivatives(theta, direction):
        value, grad = jax.value_and_grad(loss)(theta)
        _, slope = jax.jvp(loss, (theta,), (direction,))
        _, linear = jax.linearize(loss, theta)
        return value, grad, slope, linear(direction)

    out = derivatives(THETA, DIRECTION)
    expected = (whole.loss, whole.grad, *[whole.grad @ DIRECTION] * 2)
    for actual, exact in zip(out, expected):
        close(actual, exact, strategy)
    assert_same_bits(comm, out)


@every_program
def test_second_derivatives(strategy, comm):
    loss, whole = loss_of(strategy), Whole(THETA)
    grad = jax.grad(loss)
    products = {
        "forward over reverse": lambda: jax.jvp(grad, (THETA,), (DIRECTION,))[1],
        "reverse over reverse": lambda: jax.grad(lambda t: grad(t) @ DIRECTION)(THETA),
        "reverse over forward": lambda: jax.grad(
            lambda t: jax.jvp(loss, (t,), (DIRECTION,))[1]
        )(THETA),
        "hessian": lambda: jax.hessian(loss)(THETA) @ DIRECTION,
    }
    for product in products.values():
        out = jax.jit(product)()
        close(out, whole.hessian @ DIRECTION, strategy, 1e-11)
        assert_same_bits(comm, out)


# Codes on 13 ranks use the (3, 2) tree, in which every layer decodes.
CODES = {
    "shared": Shared(),
    "repetition": Coded(stragglers=1, fanout=3),
    "fractional": Coded(stragglers=2, fanout=3, code="fractional_repetition"),
    "polynomial": Coded(stragglers=1, fanout=3, code="polynomial"),
    "slices": Coded(fanout=3, code="polynomial", slices=2),
    "random": Coded(stragglers=1, fanout=3, code="random_generator(load=2)"),
    "progressive": Coded(fanout=3, code="progressive"),
    "adaptive": Coded(fanout=3, code="adaptive"),
    "speeds": Coded(
        stragglers=1, fanout=3, speeds=[1 + rank % 3 for rank in range(SIZE)]
    ),
}
# A deeper tree shows nothing new about the other codes, which take long to compile.
DEEP = ("shared", "repetition", "slices")
# On 4 ranks `test_second_derivatives` has the programs of these codes.
KNOWN = ("shared", "repetition", "polynomial", "random")


@pytest.mark.ranks(4, 13)
@pytest.mark.skipif(SIZE not in (4, 13), reason="codes of 3 children")
@pytest.mark.parametrize(
    "code",
    DEEP if SIZE == 13 else [more(it) if it in KNOWN else it for it in CODES],
)
def test_derivatives_with_codes(comm, code):
    """Two steps of Newton's kind at once: the value, the gradient, the slope and the Hessian along a direction."""
    with jaxcoded.CodedGroup(comm, CODES[code]) as group:
        derivatives = jax.jit(
            lambda theta: jax.jvp(
                jax.value_and_grad(loss_of(group)), (theta,), (DIRECTION,)
            )
        )
        theta = THETA
        for _ in range(2):
            (value, grad), (slope, product) = out = derivatives(theta)
            whole = Whole(theta)
            close(value, whole.loss, group, 1e-11)
            close(grad, whole.grad, group, 1e-11)
            close(slope, whole.grad @ DIRECTION, group, 1e-11)
            close(product, whole.hessian @ DIRECTION, group, 1e-10)
            assert_same_bits(comm, out)
            theta = theta - 0.01 * grad


@every_program
def test_jacobians(strategy):
    batch = strategy.batch(A)
    total = coded_sum(values, strategy)
    for jacobian in (jax.jacrev, jax.jacfwd):
        out = jax.jit(jacobian(lambda theta: total(theta, batch)))(THETA)
        close(out, Whole(THETA).jacobian, strategy)


@every_program
def test_outside_of_jit(strategy):
    loss, whole = loss_of(strategy), Whole(THETA)
    value, grad = jax.value_and_grad(loss)(THETA)
    close(value, whole.loss, strategy)
    close(grad, whole.grad, strategy)


@every_strategy
def test_calls_outside_jit_compile_once(strategy):
    loss = loss_of(strategy)
    grad = jax.grad(loss)
    product = lambda theta: jax.jvp(grad, (theta,), (DIRECTION,))[1]
    for function, expected in (
        (loss, lambda whole: whole.loss),
        (grad, lambda whole: whole.grad),
        (product, lambda whole: whole.hessian @ DIRECTION),
    ):
        compiled = []
        for step in range(3):
            theta = jnp.asarray(THETA * (1 + 0.1 * step))
            with lowered() as programs:
                out = function(theta)
            compiled.append(len(programs))
            close(out, expected(Whole(theta)), strategy, 1e-11)
        assert compiled[0] > 0
        assert compiled[1:] == [0, 0]


def test_calls_outside_jit_use_their_own_rules(comm):
    """Two functions have the same values, but other rules for derivatives."""

    def sines(factor):
        @jax.custom_jvp
        def sine(x):
            return jnp.sin(x)

        @sine.defjvp
        def _(primals, tangents):
            return sine(*primals), factor * tangents[0]

        return lambda theta, x: sine(x @ theta).sum(-1)

    with jaxcoded.CodedGroup(comm) as group:
        batch = group.batch(A)
        for factor in (2.0, 3.0):
            total = coded_sum(sines(factor), group)
            out = jax.grad(lambda theta, total=total: total(theta, batch))(THETA)
            np.testing.assert_allclose(out, factor * A.sum((0, 1)), rtol=1e-11)


@every_strategy
def test_without_parameters(strategy):
    batch = strategy.batch(A)
    for params in (None, (), {}):
        total = coded_sum(lambda _, x: x, strategy)
        close(total(params, batch), A.sum(0), strategy)
        close(jax.jit(total)(params, batch), A.sum(0), strategy)


@every_program
def test_rounds(strategy):
    """The sum takes one round, and its derivative another; loops and `jax.checkpoint`
    repeat none.
    """
    loss = loss_of(strategy)
    layers = lambda f: (
        lambda theta: jax.lax.scan(
            lambda sum, k: (sum + f(k * theta), None), 0.0, jnp.arange(1.0, 4)
        )[0]
    )
    branch = lambda theta: jax.lax.cond(theta[0] < 9, loss, lambda _: 0.0, theta)
    expected = sum(k * Whole(k * THETA).grad for k in range(1, 4))
    for f, grad, rounds in (
        (loss, Whole(THETA).grad, 2),
        (branch, Whole(THETA).grad, 2),
        (jax.checkpoint(loss), Whole(THETA).grad, 2),
        (layers(loss), expected, 6),
        (layers(jax.checkpoint(loss)), expected, 6),
    ):
        before = strategy.rounds
        out = jax.block_until_ready(jax.jit(jax.grad(f))(THETA))
        jax.effects_barrier()
        assert strategy.rounds == before + rounds
        close(out, grad, strategy)


@every_program
def test_cotangents_of_a_vmap_are_one_round(strategy):
    batch = strategy.batch(A)
    total = coded_sum(values, strategy)

    @jax.jit
    def jacobian(theta):
        value, back = jax.vjp(lambda theta: total(theta, batch), theta)
        return jax.vmap(back)(jnp.eye(len(value)))[0]

    before = strategy.rounds
    out = jax.block_until_ready(jacobian(THETA))
    jax.effects_barrier()
    assert strategy.rounds == before + 2  # the sum, and all rows of its derivative
    close(out, Whole(THETA).jacobian, strategy)


@every_strategy
def test_a_function_is_traced_seldom(strategy, monkeypatch):
    """The function's round and its derivative's round share traces: one while JAX traces, and one while it lowers. A
    model may take seconds to trace.
    """
    module = importlib.import_module("jaxcoded.collectives.coded_sum")
    evaluated = module._evaluated
    traced = []

    def counted(*args):
        traced.append(args)
        return evaluated(*args)

    monkeypatch.setattr(module, "_evaluated", counted)
    grad = jax.jit(jax.grad(loss_of(strategy)))(THETA)
    close(grad, Whole(THETA).grad, strategy)
    assert len(traced) <= 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", [Uncoded(), Shared()])
def test_memory_of_a_gradient(comm, how):
    """The memory is that of one backward pass over this rank's examples, at the point
    where intermediate values need most memory.
    """
    rng = np.random.default_rng(0)
    layers = [jnp.asarray(rng.normal(size=(32, 32)) / 6) for _ in range(8)]

    def deep(layers, x):
        for layer in layers:
            x = jnp.tanh(x @ layer)
        return x.sum(1)

    def planned(loss, data):
        compiled = jax.jit(jax.grad(loss)).lower(layers, data).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    with jaxcoded.CodedGroup(comm, how) as group:
        batch = group.batch(rng.normal(size=(4000, 32)))
        total = coded_sum(deep, group)
        here = planned(
            lambda layers, batch: jnp.log1p(total(layers, batch) ** 2), batch
        )
        alone = planned(
            lambda layers, x: jnp.log1p(deep(layers, x).sum() ** 2), batch.data
        )
        # this shows that the memory includes intermediate values
        assert alone > 8 * jnp.asarray(batch.data).nbytes
        assert here < 1.1 * alone, (here, alone)


@every_program
def test_rounds_of_a_hessian_vector_product(strategy):
    """The rounds are the sum, its jvp, its transpose, and the jvp of the transpose."""
    product = lambda theta, v: jax.jvp(jax.grad(loss_of(strategy)), (theta,), (v,))
    before = strategy.rounds
    jax.block_until_ready(jax.jit(product)(THETA, DIRECTION))
    jax.effects_barrier()
    assert strategy.rounds == before + 4


@every_program
def test_rounds_of_conjugate_gradients(strategy, comm):
    """There is one round for the gradient, and two for each product with the Hessian."""
    loss, whole = loss_of(strategy), Whole(THETA)
    shift = 1 + np.abs(np.linalg.eigvalsh(whole.hessian)).max()

    @jax.jit
    def solved(theta):
        grad, hessian = jax.linearize(jax.grad(loss), theta)
        shifted = lambda v: hessian(v) + shift * v
        return jax.scipy.sparse.linalg.cg(shifted, grad, tol=0, maxiter=3)[0]

    before = strategy.rounds
    out = jax.block_until_ready(solved(THETA))
    jax.effects_barrier()
    assert strategy.rounds == before + 2 + 2 * 4  # one product before the three steps
    exact = np.linalg.solve(whole.hessian + shift * np.eye(3), whole.grad)
    close(out, exact, strategy, 1e-10)
    assert_same_bits(comm, out)


def test_a_third_derivative(comm):
    """The third derivative along one direction matches JAX's in one process."""
    with jaxcoded.CodedGroup(comm) as group:
        loss, plain = loss_of(group), lambda theta: phi(values(theta, A).sum(0))

        def third(f):
            along = lambda t: f(THETA + t * DIRECTION)
            return jax.jit(jax.grad(jax.grad(jax.grad(along))))(0.0)

        np.testing.assert_allclose(third(loss), third(plain), rtol=1e-10)


@every_strategy
def test_descent_with_a_late_rank(strategy, comm):
    """The rank is late in some rounds, forward or backward, and ends with the same
    bits.
    """
    loss = loss_of(strategy)

    def step(theta, _):
        return theta - 0.01 * jax.grad(loss)(theta), None

    descend = jax.jit(lambda theta: jax.lax.scan(step, theta, length=3)[0])
    theta, expected = jnp.asarray(THETA), THETA
    for number in range(4):
        if comm.rank == comm.size - 1 and number % 2:
            time.sleep(0.3)
        theta = descend(theta)
        for _ in range(3):
            expected = expected - 0.01 * Whole(expected).grad
    close(theta, expected, strategy, 1e-11)
    assert_same_bits(comm, theta)


@redundant
@pytest.mark.parametrize("code", ["shared", "cyclic", "slices"])
def test_a_late_rank_computes_nothing(comm, code):
    """The late rank skips rounds that are over, forward and backward, and gets the same
    bits.
    """
    strategy = {
        "shared": Shared(),
        "cyclic": Coded(stragglers=1, fanout=3),
        "slices": Coded(stragglers=1, fanout=3, slices=2),
    }[code]
    computed = []

    def each(theta, x):
        def note(x):
            computed.append(len(x))
            return x

        return values(theta, jax.pure_callback(note, jax.typeof(x), x))

    with jaxcoded.CodedGroup(comm, strategy) as group:
        batch, late = group.batch(A), comm.size - 1
        total = coded_sum(each, group)
        grad = jax.jit(jax.grad(lambda theta: phi(total(theta, batch))))
        finish(grad(THETA))  # all ranks take part

        def steps():
            computed.clear()
            theta = jnp.asarray(THETA)
            for _ in range(2):
                theta = theta - 0.01 * grad(theta)
            return theta

        theta, expected = one_late(comm, group, late, 4, steps), THETA
        counts = comm.allgather(len(computed))
        assert counts[late] == 0 < sum(counts)
        for _ in range(2):
            expected = expected - 0.01 * Whole(expected).grad
        close(theta, expected, group, 1e-11)
        assert_same_bits(comm, theta)


@every_program
def test_values_from_outside_the_function(strategy):
    """Values from outside count as parameters if they are differentiated; integers and
    constants do not.
    """
    batch = strategy.batch(A)
    two = np.full((), 2)

    @jax.jit
    def loss(theta, scale, shift):
        outer = jnp.sin(theta)
        total = coded_sum(
            lambda t, x: values(t * outer, x) * scale + shift * two, strategy
        )
        return jnp.sum(total(theta, batch))

    @jax.jit
    def plain(theta, scale, shift):
        return jnp.sum(values(theta * jnp.sin(theta), A) * scale + shift * two)

    for argument in (0, 1):
        out = jax.grad(loss, argument)(THETA, 3.0, 1)
        close(out, jax.grad(plain, argument)(THETA, 3.0, 1), strategy)


@every_strategy
def test_pytrees_and_epochs(strategy, comm):
    """Leaves have different dtypes; a smaller last batch counts only its examples."""
    data = {"x": A[:, 0], "y": np.arange(BATCH, dtype=np.float32)}

    def moments(w, batch):
        x, y = batch["x"], batch["y"]
        return {"xx": x[:, :, None] * x[:, None, :] * w["a"], "y": y * w["b"]}

    total = jax.jit(
        jax.value_and_grad(
            lambda w, batch: (
                (out := coded_sum(moments, strategy)(w, batch))["xx"].sum() + out["y"]
            )
        )
    )
    w = {"a": jnp.float64(2), "b": jnp.float32(3)}
    seen = []
    for batch in strategy.epoch(data, batch_size=BATCH - 7, seed=0):
        weights = np.asarray(batch.weights)
        held = (weights != 0).any(axis=-1) if weights.ndim == 3 else weights != 0
        mine = batch.indices[held.reshape(-1)].tolist()
        examples = sorted(set().union(*comm.allgather(mine)))
        assert len(examples) == int(batch.weights.examples)
        seen += examples
        value, grad = total(w, batch)
        assert (grad["a"].dtype, grad["b"].dtype) == (np.float64, np.float32)
        x = data["x"][examples]
        xx, y = np.einsum("ji,jk->", x, x), data["y"][examples].sum()
        for actual, exact in ((grad["a"], xx), (grad["b"], y), (value, 2 * xx + 3 * y)):
            close(actual, exact, strategy, 1e-6)
    assert sorted(seen) == list(range(BATCH))


@every_program
def test_a_function_that_sums_its_examples(strategy):
    """With ``weighted`` a function sums its examples itself."""
    batch = strategy.batch(A)
    weighted = lambda theta, x, weights: weights @ values(theta, x)
    total = coded_sum(weighted, strategy, weighted=True)
    loss = jax.jit(jax.value_and_grad(lambda theta: phi(total(theta, batch))))
    value, grad = loss(THETA)
    close(value, Whole(THETA).loss, strategy)
    close(grad, Whole(THETA).grad, strategy)


@once
def test_a_function_that_ignores_its_weights(group):
    """The error names the result."""

    def sums(theta, x, weights):
        return {"right": weights @ values(theta, x), "wrong": values(theta, x).sum(0)}

    total = coded_sum(sums, group, weighted=True)
    with pytest.raises(ValueError, match=r"\['wrong'\] does not depend on its weights"):
        total(THETA, group.batch(A))


@every_strategy
def test_narrow_messages(strategy):
    batch = strategy.batch(A.astype(np.float32))
    total = coded_sum(values, strategy, wire_dtype="bfloat16")
    out = jax.jit(total)(THETA.astype(np.float32), batch)
    whole = Whole(THETA).total
    bound = 0.05 * np.abs(np.sin(A @ THETA)).sum(0).max() * strategy.plan.amplification
    assert (out.dtype, np.abs(out - whole).max() < bound) == (np.float32, True)


@pytest.mark.skipif(SIZE != 4, reason="codes of 3 children")
@pytest.mark.parametrize("code", [more("repetition"), "slices", "adaptive"])
def test_complex_values_of_few_digits(comm, code):
    """Values and gradients in complex64 match complex128 in one process, also if they
    are cut into slices."""
    x = (A[:, 0] + 1j * A[:, 1]).astype(np.complex64)

    def energy(w, sums):
        return jnp.abs(sums["x"]) ** 2 + jnp.sum(sums["rows"].real ** 2) * w.real

    each = lambda w, x: {"x": jnp.exp(w * x[:, 0]), "rows": w**2 * x.conj()}
    with jaxcoded.CodedGroup(comm, CODES[code]) as group:
        batch, w = group.batch(x), np.complex64(0.3 - 0.2j)
        total = coded_sum(each, group)
        derivatives = jax.jit(jax.value_and_grad(lambda w: energy(w, total(w, batch))))
        value, grad = derivatives(w)
        assert (value.dtype, grad.dtype) == (np.float32, np.complex64)
        plain = lambda w: energy(
            w, {k: v.sum(0) for k, v in each(w, x.astype(np.complex128)).items()}
        )
        expected = jax.value_and_grad(plain)(np.complex128(w))
        for actual, exact in zip((value, grad), expected):
            bound = 2e-5 * group.plan.amplification * abs(exact)
            assert abs(actual - exact) <= bound, (actual, exact)
        assert_same_bits(comm, (value, grad))


@every_strategy
def test_counts_and_values_in_one_sum(strategy):
    """Integers have no derivative, and cause no round for a derivative."""
    if strategy.plan.amplification != 1 or strategy.plan.encoded:
        pytest.skip("its code would round integers")
    batch = strategy.batch(A)
    total = coded_sum(lambda theta, x: (values(theta, x), x[:, 0] > 0), strategy)

    def loss(theta):
        sums, counts = total(theta, batch)
        return phi(sums), counts

    (_, counts), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(THETA)
    close(grad, Whole(THETA).grad, strategy)
    np.testing.assert_array_equal(counts, (A[:, 0] > 0).sum(0))
    only = coded_sum(lambda theta, x: theta.sum() + x[:, 0] > 0, strategy)
    before = strategy.rounds
    jax.block_until_ready(jax.jvp(lambda t: only(t, batch), (THETA,), (DIRECTION,)))
    assert strategy.rounds == before + 1


@pytest.mark.parametrize("transport", ["mpi4jax", "engine"], indirect=True)
def test_both_transports(group, comm):
    loss, whole = loss_of(group), Whole(THETA)
    value, grad = jax.jit(jax.value_and_grad(loss))(THETA)
    close(value, whole.loss, group)
    close(grad, whole.grad, group)
    assert_same_bits(comm, grad)


@several
@every_strategy
@pytest.mark.parametrize(
    ("differs", "scale"),
    [
        *(("much", 1.0), ("much", 1e-5), ("little", 1e-5), ("tangent", 1e-5)),
        *(more("little", 1.0), more("tangent", 1.0)),  # easier to find
    ],
)
def test_cotangents_that_differ(strategy, comm, differs, scale):
    """Each rank computes something different after the sum: all get an error. This
    holds also if cotangents are much smaller than the parameters, as for a mean of many
    examples.
    """
    if strategy.plan.encoded and SIZE == 4:
        pytest.skip("each child has the whole batch, so that one alone may be counted")
    batch = strategy.batch(A)
    total = coded_sum(values, strategy)
    # any two ranks differ, as a late rank may contribute to no sum
    mine = {"much": (-2.0) ** comm.rank, "little": 1 + comm.rank / 10}

    @jax.jit
    def grad(theta, mine):
        gradient = jax.grad(lambda t: scale * jnp.sum(total(t, batch) ** 2) * mine)
        return gradient(theta)

    @jax.jit
    def hessian_product(theta, mine):
        gradient = jax.grad(lambda t: jnp.sum(total(t, batch) ** 2))
        return jax.jvp(gradient, (theta,), (scale * mine * DIRECTION,))[1]

    of = hessian_product if differs == "tangent" else grad
    jax.block_until_ready(of(THETA, 1.0))  # so that all ranks start at the same time
    # one rank may have computed everything before the other ranks came
    for _ in range(5):
        wait_for_all(comm)
        try:
            jax.block_until_ready(of(THETA, mine.get(differs, mine["much"])))
        except jax.errors.JaxRuntimeError as error:
            assert "InconsistentMessages" in str(error)
            break
    else:
        pytest.fail("five sums of cotangents that differ")
    jaxcoded.effects_barrier()
    comm.Barrier()


@several
@pytest.mark.parametrize(
    ("strategy", "share"),
    [(Shared(), 0.003), (Uncoded(), 0.1)],
    ids=["shared", "uncoded"],
    indirect=["strategy"],
)
def test_parameters_that_differ_by_a_share(strategy, comm, share):
    """At least one of eight steps detects the difference. Ranks whose parameters differ
    only in rounding get no error.
    """
    batch = strategy.batch(A)
    total = jax.jit(coded_sum(values, strategy))
    start = np.random.default_rng(0).normal(size=(8, *np.shape(THETA)))
    for theta in start:
        finish(total(theta * (1 + 1e-6 * comm.rank), batch))
    with pytest.raises(jax.errors.JaxRuntimeError, match="InconsistentMessages"):
        for theta in start:
            wait_for_all(comm)
            finish(total(theta * (1 + share * comm.rank), batch))
    jaxcoded.effects_barrier()
    comm.Barrier()


@redundant
@pytest.mark.ranks(4)
@every_strategy
def test_a_branch_that_one_rank_does_not_take(strategy, comm):
    """The next call of another kind raises an error on every rank, which names both
    calls. Ranks that do not wait for a late rank get the error one round later.
    """
    batch, odd = strategy.batch(A), comm.rank == comm.size - 1
    total = coded_sum(values, strategy)

    @jax.jit
    def branch(theta, take):
        return jax.lax.cond(
            take, lambda: total(theta, batch), lambda: jnp.zeros_like(A[0, :, 0])
        )

    finish(branch(THETA, True))
    all_wait = isinstance(strategy.plan.strategy, Uncoded)
    errors = []
    for number in range(4):
        try:
            if number % 2:
                finish(jaxcoded.tree_bcast(THETA, strategy))
            else:
                finish(branch(THETA, number > 0 or not odd))
        except jax.errors.JaxRuntimeError as error:
            errors.append(str(error))
            jaxcoded.effects_barrier()
            if all_wait:
                break
        if not all_wait:  # so that no rank is several rounds ahead
            wait_for_all(comm)
            time.sleep(0.05)
    comm.Barrier()
    text = errors[0] if errors else ""
    named = all(word in text for word in ("GroupMismatch", "coded_sum", "tree_bcast"))
    assert all(comm.allgather(named)), (errors, comm.rank)


@redundant
@pytest.mark.ranks(4)
def test_a_branch_and_the_same_sum_again(comm):
    """In a group that waits for all ranks, a sum at other parameters raises an error on every rank."""
    with jaxcoded.CodedGroup(comm, Uncoded()) as group:
        batch, odd = group.batch(A), comm.rank == comm.size - 1
        total = coded_sum(values, group)
        branch = lambda theta, take: jax.lax.cond(
            take, lambda: total(theta, batch).sum(), lambda: 0.0
        )
        grad = jax.jit(jax.grad(branch))
        finish(grad(THETA, True))
        if odd:
            finish(grad(THETA, False))
        with pytest.raises(jax.errors.JaxRuntimeError, match="InconsistentMessages"):
            finish(grad((1 + odd) * THETA, True))
        jaxcoded.effects_barrier()
        comm.Barrier()


@every_strategy
def test_spread(strategy):
    """The sum and `spread` are each other's transposes for contributions of each rank."""
    batch = strategy.batch(A)
    if strategy.plan.encoded or strategy.plan.strategy.by_blocks:
        pytest.skip("its messages are not one weighted sum")

    def loss(theta):
        mine = batch.weights @ values(spread(theta, strategy), batch.data)
        return phi(jaxcoded.coded_allreduce(mine, strategy, batch.weights))

    whole = Whole(THETA)
    before = strategy.rounds
    value, grad = jax.block_until_ready(jax.jit(jax.value_and_grad(loss))(THETA))
    jax.effects_barrier()
    assert strategy.rounds == before + 2
    close(value, whole.loss, strategy)
    close(grad, whole.grad, strategy)
    product = jax.jit(lambda: jax.jvp(jax.grad(loss), (THETA,), (DIRECTION,))[1])()
    close(product, whole.hessian @ DIRECTION, strategy, 1e-11)


@once
def test_spread_of_integers(group):
    out = spread({"a": 1, "b": jnp.ones(2)}, group)
    assert (int(out["a"]), out["b"].tolist()) == (1, [1.0, 1.0])


@once
@pytest.mark.parametrize(
    "per_example, error, words",
    [
        (lambda t, x: jnp.sum(t), ValueError, "needs a leading axis of"),
        (lambda t, x: "adam", TypeError, "is a str"),
        (lambda t, x: {"a": jnp.ones((2, 3))}, ValueError, r"\['a'\]"),
    ],
)
def test_values_of_other_shapes(group, per_example, error, words):
    with pytest.raises(error, match=words):
        coded_sum(per_example, group)(THETA, group.batch(A))


def test_random_keys(comm):
    """Random keys may be used among the parameters. They have no sum: an error names them."""
    with jaxcoded.CodedGroup(comm, Uncoded()) as group:
        batch, key = group.batch(A), jax.random.key(3)
        drawn = lambda p, x: values(p["w"], x) * jax.random.normal(p["key"])
        loss = lambda w: phi(coded_sum(drawn, group)({"w": w, "key": key}, batch))
        factor = jax.random.normal(key)
        plain = lambda w: phi((values(w, A) * factor).sum(0))
        close(jax.grad(loss)(THETA), jax.grad(plain)(THETA), group)
        for weighted, name in (
            (False, r"per_example\(params, data\)"),
            (True, "the sum"),
        ):
            keys = lambda key, x, *_: {"key": jax.random.split(key, len(x))}
            total = coded_sum(keys, group, weighted=weighted)
            with pytest.raises(TypeError, match=rf"{name}\['key'\] has random keys"):
                total(key, batch)


@once
def test_axes_of_a_vmap_around_it(group):
    """Inside ``per_example`` the axis of a vmap around the sum does not exist, as one
    round sums for all.
    """
    batch = group.batch(A)
    for use in (
        lambda theta: jax.lax.psum(theta, "i"),
        lambda theta: theta * jax.lax.axis_index("i"),
        lambda theta: jax.jit(lambda t: jax.lax.pmean(t, "i"))(theta),
    ):
        total = coded_sum(lambda theta, x, use=use: values(use(theta), x), group)
        over = jax.vmap(lambda theta, total=total: total(theta, batch), axis_name="i")
        with pytest.raises(NotImplementedError, match=r"axes \['i'\] of a vmap"):
            over(np.stack([THETA, DIRECTION]))
    total = coded_sum(values, group)
    branch = lambda it: jax.lax.cond(it, lambda: total(THETA, batch)[0], lambda: 0.0)
    with pytest.raises(NotImplementedError, match=r"take jnp.where of the sum"):
        jax.vmap(branch)(np.array([True, False]))
    inside = lambda theta, x: jax.vmap(
        lambda row: values(theta, row) / jax.lax.psum(1, "i"), axis_name="i"
    )(x)
    assert coded_sum(inside, group)(THETA, batch).shape == (4,)


@engine_only
def test_an_implicit_function(group):
    """`jax.lax.custom_root` differentiates all values that it closes over, including
    the batch."""
    batch = group.batch(A[:, 0])
    total = coded_sum(lambda w, x: w * x**2, group)
    slope = (A[:, 0] ** 2).sum()

    def root(a, still):
        mine = jax.lax.stop_gradient if still else lambda batch: batch
        return jax.lax.custom_root(
            lambda w: jnp.sum(total(w, mine(batch))) - a,
            1.0,
            lambda f, w: w - f(w) / slope,
            lambda g, y: y / g(1.0),
        )

    value, grad = jax.value_and_grad(root)(2.0, True)
    close((value, grad), (2 / slope, 1 / slope), group)
    with pytest.raises(NotImplementedError, match=r"stop_gradient\(batch\)"):
        jax.grad(root)(2.0, False)


@once
def test_examples_are_not_differentiated(group):
    batch = group.batch(A)
    total = coded_sum(values, group)

    def loss(scale):
        scaled = batch.of(jnp.asarray(batch.data) * scale)
        return phi(total(THETA, scaled))

    with pytest.raises(NotImplementedError, match="Inside per_example"):
        jax.grad(loss)(2.0)


@engine_only
def test_tokens(group):
    """Tokens order sums, and have no derivative, as integers do not."""
    batch = group.batch(A)
    total = coded_sum(values, group)

    @jax.jit
    def twice(theta, token):
        first = total(theta, batch, token=token)
        second = total(2 * theta, batch, token=first.token)
        return first.value, second.value, second.token

    one, two, _ = twice(THETA, jnp.int32(0))
    close(one, Whole(THETA).total, group)
    close(two, Whole(2 * THETA).total, group)
    with pytest.raises(NotImplementedError, match="token"):
        jax.grad(lambda t: phi(total(t, batch, token=jnp.int32(0)).value))(THETA)


def test_batches_of_a_wrong_kind(group):
    with pytest.raises(TypeError, match=r"group\.batch"):
        coded_sum(values, group)(THETA, A)


@every_strategy
def test_a_collective_inside_is_refused(strategy):
    """A late rank would skip the function, and with it the collective."""
    batch = strategy.batch(A)
    inner = coded_sum(values, strategy)

    def nested(theta, data):
        return values(theta, data) * inner(theta, batch).sum()

    def losses(theta, data):
        return nested(theta, data).sum(-1)

    for call, name in (
        (coded_sum(nested, strategy), "per_example"),
        (jaxcoded.coded_value_and_grad(losses, strategy), "losses"),
    ):
        for outside in (call, jax.jit(call)):
            with pytest.raises(TypeError, match=f"{name} calls a collective"):
                outside(THETA, batch)


def test_integers_among_the_parameters(group):
    """Integers do not hide that other parameters differ."""
    from jaxcoded.collectives import marks

    def key(w, n):
        return float(marks.key(3, [jnp.float32(w), n], to_the_bit=False))

    count = jnp.int32(100_000)
    assert abs(key(1.0, count) - key(2.0, count)) > 0.1
    assert key(1.0, count) != key(1.0, count + 1)
    typed = jax.random.key(7)
    assert key(1.0, typed) == key(1.0, jax.random.key(7)) != key(1.0, jax.random.key(8))


# Functions that ranks, and rounds, must not mix up.


@pytest.mark.parametrize(
    "strategy", [Shared(), STRATEGIES["coded"]], ids=["shared", "coded"], indirect=True
)
def test_a_first_axis_that_is_as_long_by_chance(strategy):
    """`x.T @ x` has one row for each feature, whose number may be that of a block's examples."""
    data = np.ones((BATCH, 3))
    batch = strategy.batch(data)
    length = jax.tree.leaves(composed.unit(strategy, batch.data, batch.weights))[
        0
    ].shape[0]
    x = np.ones((BATCH, length))
    gram = jaxcoded.coded_sum(lambda _, x: x.T @ x, strategy)
    features = jaxcoded.coded_value_and_grad(lambda w, x: (w * x).mean(0), strategy)
    for call in (gram, features):
        with pytest.raises(ValueError, match=f"even for {2 * length} examples: return"):
            call(1.0, strategy.batch(x))
    right = jaxcoded.coded_sum(lambda _, x: x[:, :, None] * x[:, None], strategy)
    np.testing.assert_allclose(right(1.0, strategy.batch(x)), x.T @ x)


@pytest.mark.parametrize(
    "strategy", [Shared(), STRATEGIES["coded"]], ids=["shared", "coded"], indirect=True
)
def test_an_average_instead_of_a_sum(strategy):
    average = lambda w, x, weights: jnp.average(w * x, axis=0, weights=weights)
    batch = strategy.batch(np.ones((BATCH, 3)))
    power = lambda w, x, weights: weights @ (w * x) * weights.sum() ** -1
    root = lambda w, x, weights: weights @ (w * x) * jax.lax.rsqrt(weights.sum())
    for function in (average, jax.checkpoint(average), power, root):
        total = jaxcoded.coded_sum(function, strategy, weighted=True)
        with pytest.raises(ValueError, match="divides by its weights, as an average"):
            total(1.0, batch)
    right = jax.checkpoint(lambda w, x, weights: weights @ (w * x))
    total = jaxcoded.coded_sum(right, strategy, weighted=True)
    np.testing.assert_allclose(total(1.0, batch), BATCH)


def mean_of(_, x):
    return x


def square_of(_, x):
    return x**2


@pytest.mark.parametrize("strategy", [Uncoded()], ids=repr, indirect=True)
def test_sums_in_another_order(strategy):
    """Ranks take the functions of a set in different orders. With shared work the other
    ranks may be done before a late rank calls: then only the late rank gets the error.
    """
    if strategy.size == 1:
        return
    batch = strategy.batch(np.arange(float(BATCH)))
    functions = [mean_of, square_of]
    for function in functions[:: -1 if strategy.rank == strategy.size - 1 else 1]:
        with pytest.raises(
            jax.errors.JaxRuntimeError, match="GroupMismatch.*square_of"
        ):
            jax.block_until_ready(jaxcoded.coded_sum(function, strategy)(1.0, batch))
        jaxcoded.effects_barrier()


class Times:
    """A function that is equal to all functions of its class."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, w, x):
        return self.factor * w * x

    def __eq__(self, other):
        return isinstance(other, Times)

    def __hash__(self):
        return 0


@pytest.mark.parametrize("strategy", [Uncoded()], ids=repr, indirect=True)
def test_functions_that_are_equal(strategy):
    batch = strategy.batch(np.ones(BATCH))
    for factor in (1.0, 3.0):
        total = jaxcoded.coded_sum(Times(factor), strategy)(1.0, batch)
        mean, _ = jaxcoded.coded_value_and_grad(Times(factor), strategy)(1.0, batch)
        np.testing.assert_allclose([total, mean], [factor * BATCH, factor])


@pytest.mark.parametrize("strategy", [Shared()], ids=repr, indirect=True)
def test_calls_with_and_without_a_token(strategy):
    """Nothing orders calls with a token relative to calls without a token, so ranks
    would wait for each other."""
    batch = strategy.batch(np.ones(BATCH))
    total = coded_sum(lambda w, x: w * x, strategy)

    @jax.jit
    def both(w):
        return total(w, batch, token=jnp.int32(0)).value + total(w, batch)

    with pytest.raises(ValueError, match="all calls of a group have a token, or none"):
        both(1.0)
    assert jax.jit(lambda w: total(w, batch) + total(w, batch))(1.0) == 2 * BATCH
