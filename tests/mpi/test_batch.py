"""A batch is one pytree for any data, and a loss may return a scalar."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import more
from marks import SIZE, engine_only, once
from reference import assert_same_bits
from together import finish

import jaxcoded

pytestmark = pytest.mark.ranks(4)

EXAMPLES, BATCH = 41, 12
_random = np.random.default_rng(1)
DATA = {
    "inputs": [_random.normal(size=(EXAMPLES, 5)), _random.normal(size=(EXAMPLES, 2))],
    "y": _random.normal(size=EXAMPLES),
}
PARAMS = {"w": _random.normal(size=5), "v": _random.normal(size=2)}

STRATEGIES = {
    "uncoded": jaxcoded.Uncoded(),
    "shared": jaxcoded.Shared(replicas=0, blocks=3),
}
if SIZE > 2:
    STRATEGIES |= {
        "replicated": jaxcoded.Shared(),
        "coded": jaxcoded.Coded(stragglers=1),
        "root": jaxcoded.Coded(stragglers=1, root_computes=True),
    }
if SIZE > 3:
    STRATEGIES |= {
        "slices": jaxcoded.Coded(slices=2),
        "parts": jaxcoded.Coded(code="progressive"),
        "speeds": jaxcoded.Coded(stragglers=1, speeds=range(1, SIZE + 1)),
    }


def errors(params, data):
    x, z = data["inputs"]
    return jnp.tanh(x @ params["w"] + z @ params["v"]) - data["y"]


def losses(params, data):
    return errors(params, data) ** 2


def mean_loss(params, data):
    return jnp.mean(errors(params, data) ** 2)


# compiled once, and not step by step for each batch of each strategy
expected_of_batch = jax.jit(jax.value_and_grad(mean_loss))


def of_batch(indices):
    return jax.tree.map(lambda leaf: leaf[indices], DATA)


@engine_only
@pytest.mark.parametrize(
    ("loss", "strategy"),
    [
        *((mean_loss, it) for it in STRATEGIES),
        # `test_schemes` has losses of examples with every code
        *((losses, it) if it == "shared" else more(losses, it) for it in STRATEGIES),
    ],
)
def test_a_scalar_loss_is_as_good_as_losses_of_examples(
    comm, transport, strategy, loss
):
    """The result is exact in every batch, even in a smaller last batch. Another seed,
    epoch or batch does not trace the function again.
    """
    traces = 0

    def traced(params, data):
        nonlocal traces
        traces += 1
        return loss(params, data)

    with jaxcoded.CodedGroup(comm, STRATEGIES[strategy], transport=transport) as group:
        step = jax.jit(jaxcoded.coded_value_and_grad(traced, group))
        first = 0
        for seed, epoch in ((0, 0), (0, 1), (1, 0)):
            batches = group.epoch(DATA, batch_size=BATCH, seed=seed, epoch=epoch)
            assert len(batches.indices(3)) == 5
            for number, batch in enumerate(batches):
                out = finish(step(PARAMS, batch))
                first = first or traces
                expected = expected_of_batch(PARAMS, of_batch(batches.indices(number)))
                jax.tree.map(
                    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9),
                    out,
                    expected,
                )
        assert traces == first and step._cache_size() == 1
        assert_same_bits(comm, out)


@engine_only
def test_sum_of_a_scalar_loss_with_auxiliary_data(group):
    """The auxiliary data belong to the examples that this rank has computed."""

    def loss(params, data):
        return mean_loss(params, data), {"y": data["y"].sum()}

    batch = group.batch(DATA)
    step = jaxcoded.coded_value_and_grad(loss, group, mean=False, has_aux=True)
    (value, aux), grads = finish(jax.jit(step)(PARAMS, batch))
    expected = jax.value_and_grad(lambda p: losses(p, DATA).sum())(PARAMS)
    np.testing.assert_allclose(value, expected[0], rtol=1e-9)
    np.testing.assert_allclose(grads["w"], expected[1]["w"], rtol=1e-9)
    assert set(aux["y"].tolist()) <= {0, *batch.data["y"].tolist()}


@once
def test_kinds_of_data(group, tmp_path):
    """The library reads only the batch's examples of each leaf."""
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(EXAMPLES, 3))
    mapped[:] = np.arange(3 * EXAMPLES).reshape(-1, 3)
    keys = jax.random.split(jax.random.key(0), EXAMPLES)
    data = [mapped, {"a": {"b": jnp.arange(EXAMPLES)}}, (np.arange(EXAMPLES),), keys]
    parts = group.epoch(EXAMPLES, BATCH, seed=3)
    for batch, part in zip(group.epoch(data, BATCH, seed=3), parts, strict=True):
        np.testing.assert_array_equal(batch.indices, part.indices)
        np.testing.assert_array_equal(batch.weights, part.weights)
        assert part.data is None
        assert jax.tree.structure(batch.data) == jax.tree.structure(data)
        np.testing.assert_array_equal(batch.data[0], mapped[part.indices])
        np.testing.assert_array_equal(batch.data[1]["a"]["b"], part.indices)
        assert (batch.data[3] == keys[part.indices]).all()
        again = jax.tree.map(lambda leaf: leaf, batch)
        assert isinstance(again, jaxcoded.Batch) and again.weights.batch_size == BATCH


@once
@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        ((np.ones(4), 3.0), ValueError, r"data\[1\] is a float, which has no leading"),
        ({"a": np.ones(())}, ValueError, r"data\['a'\] is a numpy array of shape \(\)"),
        (
            {"x": np.ones((4, 2)), "y": [np.ones(5)]},
            ValueError,
            r"data\['y'\]\[0\] has 5 examples, but data\['x'\] has 4: all arrays need",
        ),
        ("a text", ValueError, r"data is a str, which has no leading axis"),
        (
            [object()],
            TypeError,
            r"data\[0\] is an object, not an array of NumPy or JAX",
        ),
        ((), ValueError, r"data is a tuple without arrays: with your own loader"),
        (np.ones((0, 3)), ValueError, "the number of examples of data must be an int"),
        (0, ValueError, "n, the number of examples, must be an integer from 1 to"),
        (True, ValueError, "n, the number of examples, must be an integer from 1 to"),
        (2.0, ValueError, "data is a float, which has no leading axis"),
    ],
)
def test_data_that_cannot_be(group, data, error, text):
    for make in (group.batch, lambda data: group.epoch(data, batch_size=2)):
        with pytest.raises(error, match=text):
            make(data)
