"""The examples, on any number of ranks, match one process without the library."""

import csv
import functools
import importlib.util
import itertools
import pathlib
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import SIZE, not_alone
from scipy.optimize import least_squares
from together import wait_for_all, wait_until

pytestmark = pytest.mark.ranks(4)

FOLDER = pathlib.Path(__file__).parents[2] / "examples"
DIGITS = 1500  # training examples
# Libraries are expensive to load, and one rank suffices to test that the example works
# with them; orbax needs several ranks.
with_libraries = pytest.mark.exhaustive if SIZE > 1 else lambda test: test

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.enable_x64(False):
        yield


def example(name, *needs):
    for module in needs:
        pytest.importorskip(module)
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(SIZE < 3, reason="too few ranks for its code")
def test_the_readme(capsys):
    readme = (FOLDER.parent / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(program, {})  # noqa: S102
    assert re.fullmatch(r"rank \d+: 5\.50\n", capsys.readouterr().out)


def digits(many=None):
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x[:many] / 16).astype(np.float32), y[:many]


def last_is_late(comm, monkeypatch, module, name):
    """Delay the last rank's return from each call of this function of the example."""
    function = getattr(module, name)

    def late():
        time.sleep(0.3 * (comm.rank == comm.size - 1))
        return function()

    monkeypatch.setattr(module, name, late)


def batches(n, size, epochs):
    """Return the indices of the batches of ``group.epoch(n, size, seed=0)`` as
    documented: a NumPy permutation for each epoch.
    """
    for epoch in range(epochs):
        order = np.random.default_rng([0, epoch]).permutation(n)
        yield from (order[first : first + size] for first in range(0, n, size))


def descended(loss, params, data, tx, indices):
    """Return the parameters after a step of ``tx`` for each batch, with JAX and optax
    alone.
    """

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss)(params, batch), state)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for mine in indices:
        params, state = step(params, state, [array[mine] for array in data])
    return params


def assert_close(found, expected, atol=1e-4):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=atol)


def linear(params, batch):
    x, y = batch
    return cross_entropy(x @ params["w"] + params["b"], y).mean()


def zeros():
    return {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}


@not_alone
def test_before_and_after(comm):
    """README's two programs find the same weights, with and without the library."""
    before, after = example("train_mpi4jax", "mpi4jax").w, example("train").w
    np.testing.assert_allclose(before, after, atol=1e-4)
    np.testing.assert_allclose(after, np.arange(5.0), atol=0.05)


@with_libraries
def test_flax_nnx(comm):
    trained, loss = (module := example("flax_nnx", "sklearn", "flax")).train(
        comm, epochs=1
    )
    from flax import nnx

    x, y = digits(DIGITS)
    model = module.Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss(model):
            return cross_entropy(model(x.reshape(-1, 8, 8, 1)), y).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    for mine in batches(len(x), 128, 1):
        expected = step(model, optimizer, x[mine], y[mine])
    assert loss == pytest.approx(float(expected), rel=1e-3)
    assert_close(nnx.state(trained, nnx.Param), nnx.state(model, nnx.Param), 1e-3)


@with_libraries
def test_equinox(comm):
    trained, _ = example("equinox_digits", "sklearn", "equinox").train(comm, epochs=1)
    import equinox as eqx

    model = eqx.nn.MLP(64, 10, width_size=64, depth=1, key=jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch):
        logits = jax.vmap(eqx.combine(params, rest))(batch[0])
        return cross_entropy(logits, batch[1]).mean()

    indices = batches(DIGITS, 128, 1)
    expected = descended(loss, params, digits(DIGITS), optax.adam(3e-3), indices)
    assert_close(eqx.filter(trained, eqx.is_inexact_array), expected, 1e-3)


@with_libraries
def test_optax_chain(comm):
    module = example("optax_chain", "sklearn")
    average = module.train(comm, epochs=1)

    def loss(params, batch):
        return module.losses(params, batch).mean()

    x, y = digits(DIGITS)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))

    @jax.jit
    def two_batches(params, average, state, one, other):
        average = optax.incremental_update(params, average, 0.05)
        both = [jax.grad(loss)(params, batch) for batch in (one, other)]
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *both)  # the mean of their means
        updates, state = tx.update(mean, state)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, average, 0.05), state

    params = expected = module.initial()
    state = tx.init(params)
    taken = ((x[mine], y[mine]) for mine in batches(DIGITS, 128, 1))
    for pair in zip(taken, taken):
        params, expected, state = two_batches(params, expected, state, *pair)
    assert_close(average, expected, 1e-3)


@pytest.mark.devices(exhaustive=(4,))
def test_hsdp(comm):
    """The example runs on all existing devices."""
    module = example("hsdp", "sklearn")
    trained, _ = module.train(comm, epochs=1)
    assert (
        trained["in"].addressable_shards[0].data.size * jax.device_count() == 64 * 128
    )

    def loss(params, batch):
        return cross_entropy(module.logits(params, batch[0]), batch[1]).mean()

    indices = batches(DIGITS, 128, 1)
    tx = optax.adam(3e-3)
    expected = descended(loss, module.initial(), digits(DIGITS), tx, indices)
    assert_close(trained, expected, 1e-3)


@not_alone
def test_natural_gradient(comm):
    module = example("natural_gradient", "sklearn")
    w, norms = module.train(comm)
    from sklearn.linear_model import LogisticRegression

    x, y = module.data()
    reference = LogisticRegression(
        C=1 / module.LAMBDA, fit_intercept=False, tol=1e-10, solver="newton-cholesky"
    ).fit(x.astype(np.float64), y)
    np.testing.assert_allclose(w, reference.coef_[0], atol=1e-3)
    assert norms[-1] < 1e-4 * norms[0]


@not_alone
def test_newton_cg(comm, monkeypatch):
    """The example finds scikit-learn's weights although one rank begins late."""
    module = example("newton_cg", "sklearn")
    x, digit = module.data()
    last_is_late(comm, monkeypatch, module, "data")
    w, norms = module.train(comm, steps=7)
    from sklearn.linear_model import LogisticRegression

    reference = LogisticRegression(
        C=1 / module.LAMBDA, fit_intercept=False, tol=1e-10, solver="newton-cholesky"
    ).fit(x.astype(np.float64), digit)
    np.testing.assert_allclose(w, reference.coef_.T, atol=1e-4)
    assert norms[-1] < 1e-6 * norms[0]


@not_alone
def test_batch_norm(comm):
    """The example matches one process with the whole batch."""
    module = example("batch_norm", "sklearn")
    params, seen = module.train(comm, epochs=1)
    tx, expected = optax.adam(0.01), module.start()
    state = tx.init(expected)
    x, y = module.data()
    over = lambda f: (
        lambda params, batch: jax.tree.map(lambda leaf: leaf.sum(0), f(params, batch))
    )
    gradient = jax.jit(jax.value_and_grad(module.mean_loss), static_argnums=(2, 3))
    for indices, loss in zip(batches(len(x), 256, 1), seen, strict=True):
        batch = x[indices], y[indices]
        value, grads = gradient(expected, batch, len(indices), over)
        updates, state = tx.update(grads, state)
        expected = optax.apply_updates(expected, updates)
        assert loss == pytest.approx(float(value), rel=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), params, expected
    )


@not_alone
def test_correlation(comm, monkeypatch):
    """The example matches one process with the whole batch although one rank begins
    each epoch late.
    """
    module = example("correlation", "sklearn")
    halves = module.data()
    last_is_late(comm, monkeypatch, module, "data")
    params, seen = module.train(comm, epochs=2)

    def loss(params, batch):
        ones = jnp.ones(len(batch[0]))
        return -module.correlation(module.moments(params, batch, ones))

    indices = list(batches(len(halves[0]), 512, 2))
    expected = descended(loss, module.start(), halves, optax.adam(0.003), indices)
    assert_close(params, expected)
    first = [half[indices[0]] for half in halves]
    assert seen[0] == pytest.approx(-float(loss(module.start(), first)), rel=1e-4)


def test_canonical_correlations():
    """Canonical correlations of random features equal the singular values of the
    whitened cross-covariance.
    """
    module = example("correlation", "sklearn")
    left, right = np.random.default_rng(0).normal(size=(2, 50, module.FEATURES))
    right += left[:, ::-1] ** 2
    z = np.hstack([np.ones((50, 1)), left, right])

    def whitened(x):
        c = np.cov(x.T, bias=True) + module.RIDGE * np.eye(x.shape[1])
        values, vectors = np.linalg.eigh(c)
        return (x - x.mean(0)) @ (vectors / np.sqrt(values)) @ vectors.T

    between = whitened(left).T @ whitened(right) / 50
    expected = np.sum(np.linalg.svd(between)[1] ** 2)
    assert float(module.correlation(z.T @ z)) == pytest.approx(expected, rel=1e-4)


def chain(spins, field):
    """Return the Hamiltonian of the transverse-field Ising ring, ``(2**spins,
    2**spins)``.
    """
    x, z = np.array([[0.0, 1], [1, 0]]), np.diag([1.0, -1])

    def at(*places, what):
        factors = [what if place in places else np.eye(2) for place in range(spins)]
        return functools.reduce(np.kron, factors)

    bonds = sum(at(i, (i + 1) % spins, what=z) for i in range(spins))
    return -bonds - field * sum(at(i, what=x) for i in range(spins))


def reconfigured(w, spins, hamiltonian, shift, steps):
    """Return the energies by covariances of ``log ψ``'s derivatives ``O``, in NumPy."""
    from scipy.sparse.linalg import cg

    n = spins.shape[1]
    shifted = np.stack([np.roll(spins, i, axis=1) for i in range(n)], axis=1)
    for _ in range(steps):
        angles = shifted @ w
        psi = np.cosh(angles).prod(axis=(1, 2))
        O = np.einsum("sij,sih->sjh", shifted, np.tanh(angles)).reshape(-1, w.size)
        p = np.abs(psi) ** 2 / np.sum(np.abs(psi) ** 2)
        local = hamiltonian @ psi / psi
        yield (p @ local).real
        O = O - p @ O
        force, metric = O.conj().T @ (p * local), O.conj().T @ (p[:, None] * O)
        metric += shift * np.eye(len(metric))
        delta, _ = cg(metric, force, rtol=0, maxiter=5)
        w = w - 0.2 * delta.reshape(w.shape)


@not_alone
def test_variational_energy(comm, monkeypatch):
    """The energies match covariances in NumPy although one rank begins late, and
    approach the exact ground state.
    """
    module = example("variational_energy")
    spins = module.configurations().astype(np.float64)
    hamiltonian = chain(module.SPINS, module.FIELD)
    last_is_late(comm, monkeypatch, module, "configurations")
    with jax.enable_x64(True):
        seen = np.array(module.minimise(comm, steps=12))
        w = np.asarray(module.start())
    expected = [*reconfigured(w, spins, hamiltonian, module.SHIFT, steps=12)]
    np.testing.assert_allclose(seen, expected, rtol=1e-8)
    ground = np.linalg.eigvalsh(hamiltonian)[0]
    assert (seen > ground).all()
    assert seen[-1] < ground + 0.005


@not_alone
def test_chi_square(comm):
    """The fit agrees with SciPy's least squares in one process."""
    module = example("chi_square", "sklearn")
    theta, seen = module.fit(comm)
    examples, observed = module.patients()

    def residuals(theta):
        sums = module.simulated(theta, examples.astype(np.float64)).sum(0)
        return (np.asarray(sums) - observed) / np.sqrt(observed + 1)

    with jax.enable_x64(True):
        expected = least_squares(residuals, [4.9, 0.3, 0.5])
    np.testing.assert_allclose(theta, expected.x, atol=1e-4)
    assert seen[-1] == pytest.approx(2 * expected.cost, rel=1e-4)
    # 36 bins less 3 parameters: the model fits
    assert seen[-1] < 50 < seen[0]


@not_alone
def test_evaluation(comm):
    module = example("evaluation", "sklearn")
    loss, confusions = module.evaluate(comm)
    x, y = digits()
    means = np.stack([x[y == digit].mean(axis=0) for digit in range(10)])
    logits = -((x[:, None].astype(np.float64) - means) ** 2).sum(axis=2)
    logits -= logits.max(axis=1, keepdims=True)
    each = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(y)), y]
    assert loss == pytest.approx(each.mean(), rel=1e-5)
    expected = np.zeros((10, 10), int)
    np.add.at(expected, (y, logits.argmax(axis=1)), 1)
    np.testing.assert_array_equal(confusions, expected)


@with_libraries
def test_grain_loader(comm):
    params, _ = example("grain_loader", "sklearn", "grain").train(comm, epochs=1)
    indices = batches(1797, 256, 1)
    assert_close(params, descended(linear, zeros(), digits(), optax.sgd(0.5), indices))


@not_alone
def test_slow_loader(comm):
    module = example("slow_loader")
    w, read = module.train(comm, epochs=2, slow=SIZE - 1, seconds=0.01)
    assert 0 < read <= 20
    expected = descended(
        lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2),
        *(jnp.zeros(5), (module.x, module.y), optax.sgd(0.1)),
        batches(500, 50, 2),
    )
    np.testing.assert_allclose(w, expected, atol=1e-4)


def test_orbax_checkpoint(comm, tmp_path, capsys):
    """All ranks train on seven batches, and all ranks except one on the rest; a further start has nothing left to do."""
    module = example("orbax_checkpoint", "sklearn", "orbax.checkpoint")
    folder = comm.bcast(str(tmp_path))
    _, done = module.train(comm, folder, stop_after=7)
    assert done == 7
    among = comm.rank < max(1, SIZE - 1)
    fewer = comm.Split(among)
    if among:
        params, done = module.train(fewer, folder, epochs=2)
        assert done == 16
        capsys.readouterr()
        same, done = module.train(fewer, folder, epochs=2)
        assert done == 16
        text = "nothing left to do: 16 batches are done\n" * (fewer.rank == 0)
        assert capsys.readouterr().out == text
        assert_close(same, params, atol=0)
        indices = batches(1797, 256, 2)
        expected = descended(linear, zeros(), digits(), optax.adam(3e-3), indices)
        assert_close(params, expected)
    fewer.Free()
    wait_for_all(comm)  # before the folder is deleted


def test_shakespeare(comm, monkeypatch):
    module = example("shakespeare")
    monkeypatch.setattr(module, "PLAYS", pathlib.Path("missing"))
    monkeypatch.setattr(module, "LAYERS", 1)
    # Adam divides by gradients, also by those close to rounding
    monkeypatch.setattr(optax, "adam", functools.partial(optax.adam, eps=1e-3))
    text = module.read()
    assert len(text) > 100_000
    assert (text < 128).all()
    params, losses = module.train(comm, text, steps=2)

    starts = np.arange(0, len(text) - module.LENGTH - 1, module.LENGTH)
    indices = itertools.islice(batches(len(starts), 32, 1), 2)
    expected = descended(
        lambda params, batch: module.loss(params, batch[0]) / 32,
        *(module.initial(jax.random.key(0)), [module.sequences(text, starts)]),
        *(optax.adam(1e-2), indices),
    )
    assert_close(params, expected)
    assert losses[0] == pytest.approx(np.log(128), rel=0.2)
    assert losses[1] < losses[0]
    assert len(module.write(params, "a", 3)) == 4

    # as in a copy of the example elsewhere
    monkeypatch.setattr(module, "ROOT", pathlib.Path("missing"))
    with pytest.raises(SystemExit, match="no text found: give --text FILE"):
        module.read()


def test_shakespeare_reads_the_plays():
    """The example reads the plays if they are next to the checkout, not the
    documentation.
    """
    module = example("shakespeare")
    if not module.PLAYS.exists():
        pytest.skip(f"there is no {module.PLAYS}")
    text = module.read()
    assert text.tobytes().startswith(b"First Citizen:\nBefore we proceed any further")
    assert len(text) == module.PLAYS.stat().st_size == 1_115_394


@not_alone
def test_rounds_csv(comm, tmp_path, monkeypatch):
    """With three or more ranks the last one begins after the root has done all of its
    rounds.
    """
    folder = pathlib.Path(comm.bcast(str(tmp_path)))
    module = example("rounds_csv")
    if late := SIZE > 2:
        sleep = functools.partial(wait_until, (folder / "arrivals.csv").exists)
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda _: sleep()))
    w = module.train(comm, folder, steps=9, slow=SIZE - 1)

    x = np.random.default_rng(0).normal(size=60).mean()
    assert float(w) == pytest.approx(x * (1 - 0.8**9), rel=1e-4)

    def rows(name):
        with (folder / name).open() as file:
            return list(csv.DictReader(file))

    mine = f"rounds-{comm.rank}.csv"
    wait_until(lambda: len(rows(mine)) == 9)  # written by a separate thread
    assert [int(row["round"]) for row in rows(mine)] == list(range(1, 10))
    lags = [int(row["lag"]) for row in rows(mine)]
    if late and comm.rank == SIZE - 1:
        assert lags[0] > 0 and all(lag <= 9 - at for at, lag in enumerate(lags))
    elif comm.rank == 0:
        assert lags == [0] * 9
    wait_for_all(comm)  # until the root has written its file, too
    for number, of_round in itertools.groupby(
        rows("arrivals.csv"), key=lambda row: row["round"]
    ):
        of_round = list(of_round)
        assert [int(row["rank"]) for row in of_round] == list(range(1, SIZE))
        used = [row for row in of_round if row["used"] == "True"]
        assert len(used) >= SIZE - 2, number  # any one rank may be missing
        assert {row["lag"] for row in used} <= {"0"}
        came = [row for row in of_round if row["arrived"] != "nan"]
        assert all((row["lag"] != "") == (row in came) for row in of_round)
        assert not late or of_round[-1] not in came
    wait_for_all(comm)  # before the folder is deleted
