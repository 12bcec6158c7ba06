"""`encode` and `decode` against einsum in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcoded import Encoded, codes, kernels
from jaxcoded.transport.kernels import decode, encode

DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def draw(*shape, seed=0, dtype="float64"):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def einsum(subscripts, *arrays):
    """Return the exact result, and the bound on its rounding in units of eps."""
    arrays = [np.asarray(array, np.float64) for array in arrays]
    return np.einsum(subscripts, *arrays), np.einsum(subscripts, *map(np.abs, arrays))


def assert_close(actual, expected_and_size, terms):
    """Check that a result was accumulated in at least float32, and rounded once to the
    dtype.
    """
    expected, size = expected_and_size
    assert actual.shape == expected.shape
    wide = float(jnp.finfo(jnp.promote_types(actual.dtype, jnp.float32)).eps)
    once = float(jnp.finfo(actual.dtype).eps) / 2 * np.abs(expected)
    # below the smallest normal number rounding is absolute
    bound = once + (terms + 2) * wide * size + float(jnp.finfo(actual.dtype).tiny)
    assert np.all(np.abs(np.asarray(actual, np.float64) - expected) <= bound)


sizes = st.integers(1, 4)


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(sizes, sizes, sizes, st.integers(1, 9), st.sampled_from(DTYPES), st.integers(0, 99))  # fmt: skip
def test_against_einsum(n, k, m, q, dtype, seed):
    B = draw(n, k, m, seed=seed)
    gradients = draw(k, q, seed=seed + 1, dtype=dtype)
    multiple = m * (1 + seed % 3)
    padded = np.pad(gradients.astype(np.float64), ((0, 0), (0, -q % multiple)))
    slices = padded.reshape(k, m, -1)

    messages = [encode({"g": gradients}, row, multiple=multiple) for row in B]
    for message, row in zip(messages, B):
        (vector,) = message.vectors
        assert (vector.dtype, message.slices, message.multiple) == (gradients.dtype, m, multiple)  # fmt: skip
        assert_close(vector, einsum("ju,jul->l", row, slices), k * m)

    A = draw(m, n, seed=seed + 2)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *messages)
    decoded = decode(stacked, A)["g"]
    assert decoded.dtype == gradients.dtype
    expected, size = einsum("ui,il->ul", A, stacked.vectors[0])
    assert_close(decoded, (expected.reshape(-1)[:q], size.reshape(-1)[:q]), n)


@settings(deadline=None, max_examples=20)
@given(sizes, sizes, st.sampled_from(DTYPES), st.integers(0, 99))
def test_without_slices(n, k, dtype, seed):
    """Without slices messages have the structure of the gradient."""
    B = draw(n, k, seed=seed)
    partials = {
        "a": draw(k, 2, 3, seed=seed + 1, dtype=dtype),
        "b": (draw(k, seed=seed + 2), None),
        "c": draw(k, 0, dtype=dtype),
    }
    messages = [encode(partials, row) for row in B]
    assert jax.tree.structure(messages[0]) == jax.tree.structure(partials)
    assert_close(messages[0]["a"], einsum("j,jab->ab", B[0], partials["a"]), k)
    assert_close(messages[0]["b"][0], einsum("j,j->", B[0], partials["b"][0]), k)
    assert messages[0]["c"].shape == (0,)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *messages)
    a = draw(n, seed=seed + 3)
    total = decode(stacked, a)
    assert_close(total["a"], einsum("i,iab->ab", a, stacked["a"]), n)
    jax.tree.map(np.testing.assert_array_equal, decode(stacked, a[None]), total)


# n = 3, s = 1, the example of Tandon et al.
B = np.array([[0.5, 1, 0], [0, 1, -1], [0.5, 0, 1]])
A = np.array([[0, 1, 2], [1, 0, 1], [2, -1, 0]], float)


@pytest.mark.parametrize("missing", range(3))
def test_missing_messages_may_hold_anything(missing):
    gradients = {"w": draw(3, 4), "b": draw(3, seed=1, dtype="float32")}
    messages = jax.vmap(lambda row: encode(gradients, row))(B)
    broken = jax.tree.map(lambda leaf: leaf.at[missing].set(jnp.nan), messages)
    total = decode(broken, A[missing])
    np.testing.assert_allclose(total["w"], gradients["w"].sum(0), rtol=1e-12)
    np.testing.assert_allclose(total["b"], gradients["b"].sum(), rtol=1e-6)
    # a partition that a child does not hold has no effect either
    partials = gradients["w"].copy()
    partials[B[missing] == 0] = np.inf
    np.testing.assert_array_equal(encode(partials, B[missing]), messages["w"][missing])


@pytest.mark.parametrize(
    "code",
    [
        codes.random_generator(6, 1, 2),
        codes.adaptive(5, 1),
        codes.gaussian_mds(6, 1, 2),
    ],
)
def test_approximate_sums_keep_numbers_apart(code):
    """In an inexact sum the arrays do not depend on the loss, nor the loss on the
    arrays. The loss matches its coefficients in float64.
    """
    arrays = {"a": draw(code.k, 3, 5, seed=2), "z": draw(code.k, 8, seed=3)}
    loss = 1e4 * (2 + draw(code.k, seed=4))
    answered = np.isin(np.arange(code.n), [0, 3, 5])
    A, residual = code.decode(answered)
    assert residual > 0.3
    rows = code.B.reshape(code.n, code.parts, code.k, code.m)

    def total(partials):
        messages = [encode(partials, row) for row in rows]
        stacked = jax.tree.map(lambda *each: jnp.stack(each), *messages)
        return decode(stacked, A)

    alone, beside = total(arrays), total(arrays | {"loss": loss, "count": loss / 2})
    for name, leaf in alone.items():
        np.testing.assert_allclose(beside[name], leaf, rtol=0, atol=1e-9)
    C = np.einsum("ui,ijv->ujv", A, code.B)
    np.testing.assert_allclose(beside["loss"], C[0, :, 0] @ loss, rtol=1e-9)
    np.testing.assert_allclose(beside["count"], C[0, :, 0] @ loss / 2, rtol=1e-9)


def test_a_nan_that_counts_is_seen():
    assert jnp.isnan(decode(jnp.array([1.0, jnp.nan]), np.ones(2)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_dtypes_accumulate_in_float32(dtype):
    # neither type can represent 2048 + 1, and 70000 overflows float16
    terms = jnp.array([[2048]] + [[1]] * 16, dtype)
    assert encode(terms, np.ones(17)) == 2064
    assert decode(terms, np.ones(17)) == 2064
    sliced = Encoded((terms,), kernels.Packing.of(terms[0]), 1, 1)
    assert decode(sliced, np.ones((1, 17))) == 2064
    steps = jnp.array([60000, 10000, -60000], dtype)
    assert encode(steps[:, None], np.ones(3)) == jnp.asarray(10000, dtype)
    assert decode(steps[:, None], np.ones(3)) == jnp.asarray(10000, dtype)


def test_accumulator():
    assert [kernels.accumulator(dtype) for dtype in DTYPES] == [
        *[np.float32] * 3,
        np.float64,
    ]


def test_divided_in_the_accumulator():
    tree = {"half": jnp.asarray(60000, "float16"), "single": jnp.ones(2, "float32")}
    halved = kernels.divided(tree, 120000)  # 120000 exceeds float16
    assert halved["half"] == np.float16(0.5)
    assert halved["single"].dtype == jnp.float32


# Composition.

GRADIENTS = {"w": draw(4, 2, 3), "b": draw(4, 1, seed=1)}  # of 4 partitions; q = 7
CODE = draw(3, 4, 2, seed=2)


def flat(tree):
    """Return ``(k, 8)``: leaves in the order of their keys, padded."""
    return np.concatenate([tree["b"], tree["w"].reshape(4, 6), np.zeros((4, 1))], 1)  # fmt: skip


def test_vmap_and_jit():
    messages = jax.jit(jax.vmap(lambda row: encode(GRADIENTS, row)))(CODE)
    expected, _ = einsum("iju,jul->il", CODE, flat(GRADIENTS).reshape(4, 2, 4))
    np.testing.assert_allclose(messages.vectors[0], expected, rtol=1e-12)
    combine = draw(5, 2, 3, seed=3)  # 5 answered sets
    totals = jax.jit(jax.vmap(decode, in_axes=(None, 0)))(messages, combine)
    expected, _ = einsum("fui,il->ful", combine, expected)
    np.testing.assert_allclose(totals["b"], expected.reshape(5, 8)[:, :1], rtol=1e-12)
    np.testing.assert_allclose(
        totals["w"].reshape(5, 6), expected.reshape(5, 8)[:, 1:7], rtol=1e-12
    )


def test_grad():
    """The map is linear in the partials, so the gradient is the transposed map."""
    cotangent = draw(4, seed=4)
    encoded = lambda partials: encode(partials, CODE[0]).vectors[0] @ cotangent
    grads = jax.grad(encoded)(GRADIENTS)
    expected, _ = einsum("ju,l->jul", CODE[0], cotangent)
    np.testing.assert_allclose(flat(grads)[:, :7], expected.reshape(4, 8)[:, :7], rtol=1e-12)  # fmt: skip
    messages = jax.vmap(lambda row: encode(GRADIENTS, row))(CODE)
    combine = draw(2, 3, seed=5)
    back = jax.grad(lambda m: jnp.sum(decode(m, combine)["w"]))(messages)
    taken = np.array([[0, 1, 1, 1], [1, 1, 1, 0]])  # b, w and padding
    np.testing.assert_allclose(
        back.vectors[0], np.einsum("ui,ul->il", combine, taken), rtol=1e-12
    )


def test_scan():
    step = lambda total, row: (jax.tree.map(jnp.add, total, encode(GRADIENTS, row)), None)  # fmt: skip
    zero = jax.tree.map(jnp.zeros_like, encode(GRADIENTS, CODE[0]))
    total, _ = jax.jit(lambda rows: jax.lax.scan(step, zero, rows))(CODE)
    expected, _ = einsum("iju,jul->l", CODE, flat(GRADIENTS).reshape(4, 2, 4))
    np.testing.assert_allclose(total.vectors[0], expected, rtol=1e-12)


def test_encoded_is_a_pytree():
    message = encode(GRADIENTS, CODE[0])
    assert len(jax.tree.leaves(message)) == 1
    assert jax.tree.structure(message) == jax.tree.structure(encode(GRADIENTS, CODE[1]))
    assert jax.tree.structure(message) != jax.tree.structure(
        encode(GRADIENTS, CODE[0], multiple=4)
    )


# Misuse.


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: encode(np.ones((3, 2)), np.ones(4)), ValueError,
         r"^leaf has shape \(3, 2\); its leading axis must stack the 4 partitions"),
        (lambda: encode({"a": np.ones(())}, np.ones(4)), ValueError,
         r"^leaf at \['a'\] has shape \(\); its leading axis must stack the 4 partitions"),
        (lambda: encode(np.ones(4), np.ones((4, 2, 1, 1))), ValueError,
         r"\(k,\), \(k, m\) or \(parts, k, m\), got \(4, 2, 1, 1\)"),
        (lambda: encode(np.ones(4), 1.0), ValueError,
         r"\(k,\), \(k, m\) or \(parts, k, m\), got \(\)"),
        (lambda: encode(np.ones((4, 2)), np.ones((4, 2)), multiple=3), ValueError,
         "the number of slices m = 2 does not divide multiple = 3"),
        (lambda: encode(np.ones((4, 2)), np.ones((4, 2)), multiple=0), ValueError,
         "m = 2 does not divide multiple = 0"),
        (lambda: encode({"a": np.ones(4, int)}, np.ones(4)), TypeError,
         r"leaf at \['a'\] has dtype int64: coded sums need floating point"),
        (lambda: encode({"a": np.ones(4, int)}, np.ones((4, 1))), TypeError,
         r"leaf at \['a'\] has dtype int64: coded sums need floating point"),
        (lambda: decode(np.ones((3, 2)), np.ones(4)), ValueError,
         r"^leaf has shape \(3, 2\); its leading axis must stack the 4 children"),
        (lambda: decode(np.ones((3, 2)), np.ones((2, 3))), ValueError,
         "the messages have no slices but the coefficients decode 2"),
        (lambda: decode(np.ones((3, 2)), np.ones((1, 1, 3))), ValueError,
         r"coefficients must have shape \(m, n\) or \(n,\), got \(1, 1, 3\)"),
        (lambda: decode(jax.vmap(lambda b: encode(GRADIENTS, b))(CODE), np.ones((3, 3))),
         ValueError, "the messages have 2 slices but the coefficients decode 3"),
    ],
)  # fmt: skip
def test_misuse(call, error, message):
    with pytest.raises(error, match=message):
        call()
