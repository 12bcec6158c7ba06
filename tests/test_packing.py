"""Pack pytrees into one vector per dtype, and unpack them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxcoded.transport import slicing
from jaxcoded.transport.packing import Packing, pack, unpack

DTYPES = ["float32", "float16", "bfloat16"]
leaves = st.tuples(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3).map(tuple)
)
trees = st.recursive(
    leaves | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def filled(spec):
    """Return a tree of such leaves with distinct elements."""
    counter = iter(range(10**6))

    def fill(leaf):
        dtype, shape = leaf
        values = [next(counter) for _ in range(int(np.prod(shape)))]
        return np.array(values, float).reshape(shape).astype(jnp.dtype(dtype))

    return jax.tree.map(fill, spec, is_leaf=lambda leaf: isinstance(leaf, tuple))


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(one, other)


@settings(deadline=None, max_examples=25)
@given(trees)
@example(
    [("float32", (0,)), ("float16", ()), ("float32", ())]
)  # begins with an empty leaf
def test_there_and_back(spec):
    tree = filled(spec)
    vectors, packing = pack(tree)
    assert packing == Packing.of(tree)
    assert [(v.dtype, v.shape) for v in vectors] == [
        (kind.dtype, (length,)) for kind, length in packing.vectors.items()
    ]
    elements = {}  # elements of each dtype, in the order of the leaves
    for leaf in jax.tree.leaves(tree):
        elements.setdefault(leaf.dtype, []).extend(leaf.reshape(-1).tolist())
    expected = [values for values in elements.values() if values]
    assert [v.astype(float).tolist() for v in vectors] == expected
    assert_same(unpack(vectors, packing), tree)
    assert_same(unpack([jnp.append(v, 99) for v in vectors], packing), tree)  # padding


@settings(deadline=None, max_examples=25)
@given(trees, st.integers(2, 6))
@example([("float32", ()), ("float32", (3, 4)), ("float32", ())], 3)
def test_numbers_have_slices_to_themselves(spec, multiple):
    """The first slice of the vector holds numbers, and the other slices hold zeros."""
    tree = filled(spec)
    vectors, packing = pack(tree, multiple=multiple)
    assert packing == Packing.of(tree, multiple=multiple) != Packing.of(tree)
    assert [v.size for v in vectors] == list(packing.vectors.values())
    leaves = jax.tree.leaves(tree)
    numbers = {leaf.dtype.name for leaf in leaves if not leaf.shape}
    assert {kind.dtype.name for kind in packing.vectors if kind.alone} == numbers
    for kind, vector in zip(packing.vectors, vectors):
        mine = [
            leaf.reshape(-1)
            for leaf in leaves
            if leaf.dtype == kind.dtype and (not leaf.shape) == kind.alone
        ]
        held = np.asarray(vector)
        if kind.alone:
            first, *others = held.reshape(multiple, -1)
            assert not np.any(others)
            held = first
        np.testing.assert_array_equal(held, np.concatenate(mine))
    assert_same(unpack(vectors, packing), tree)
    for vector, first, length, kind in packing.apart():
        assert (length, kind) == (1, 0) and list(packing.vectors)[vector].alone
        assert first < vectors[vector].size // multiple


def test_places_beyond_int32(monkeypatch):
    monkeypatch.setattr("jaxcoded.transport.packing._MAX_INDEX", 4)
    tree = [jnp.arange(3.0), jnp.arange(4.0), jnp.arange(2.0)]
    assert_same(unpack(*pack(tree)), tree)


def test_wire_dtypes():
    tree = {
        "a": jnp.ones((2, 1), jnp.float32),
        "b": jnp.float32(2),
        "c": jnp.ones(3, jnp.bfloat16),
        "d": jnp.ones((0, 2), jnp.float32),
        "e": jnp.ones(1, jnp.float32),
    }
    vectors, packing = pack(tree, wire_dtype="bfloat16")
    assert [(v.shape, v.dtype.name) for v in vectors] == [
        ((3,), "float32"),
        ((1,), "float32"),
        ((3,), "bfloat16"),
    ]
    assert [wire.name for wire in packing.wires] == ["bfloat16", "float32", "bfloat16"]
    assert str(packing).startswith("['a'] float32[2, 1] as bfloat16, ['b'] float32[], ")
    assert_same(unpack(vectors, packing), tree)
    _, other = pack(tree, wire_dtype=jnp.float16)
    assert len({packing, other, Packing.of(tree)}) == 3
    assert len({str(packing), str(other), str(Packing.of(tree))}) == 3


def test_packing_is_a_static_value():
    trees = [{"a": np.ones((2, 3), np.float32)} for _ in range(2)]
    one, two = map(Packing.of, trees)
    assert (one, hash(one)) == (two, hash(two))
    assert one != Packing.of({"b": trees[0]["a"]})
    assert one != Packing.of({"a": trees[0]["a"].T})
    assert one != Packing.of({"a": trees[0]["a"].astype(np.float16)})
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trees[0])
    assert Packing.of(shapes) == one


def test_python_numbers():
    default = jnp.asarray(1.0).dtype
    vectors, packing = pack({"a": 1.5, "b": (np.full((2,), 2, default), None)})
    assert [v.tolist() for v in vectors] == [[1.5, 2, 2]]
    assert vectors[0].dtype == default
    assert unpack(vectors, packing)["a"].shape == ()


def test_nothing():
    vectors, packing = pack({"a": None, "b": np.zeros((2, 0), np.float32)})
    assert vectors == ()
    assert unpack((), packing)["b"].shape == (2, 0)


def test_under_jit_vmap_and_grad():
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.arange(2, dtype=jnp.bfloat16)}
    through = lambda tree: unpack(*pack(tree))
    assert_same(jax.jit(jax.vmap(through))(tree), tree)
    grads = jax.grad(lambda t: jnp.sum(through(t)["a"] ** 2))(tree)
    assert_same(grads, {"a": 2 * tree["a"], "b": jnp.zeros(2, jnp.bfloat16)})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [1.0, 2]}, r"^leaf at \['a'\]\[1\] has dtype int\d\d: coded sums need floating point; cast it"),
        (True, "^leaf has dtype bool: coded sums"),
        ({"q": jnp.zeros(2, jnp.float8_e5m2)}, r"\['q'\] has dtype float8_e5m2: .* cast it to float16, bfloat16, float32 or"),
        (np.complex64(1), "^leaf has dtype complex64, but coded sums are of real numbers: pass"),
        ({"name": "x"}, r"^leaf at \['name'\] is a str, which is not an array"),
        ([object()], r"^leaf at \[0\] is an object, which is not an array"),
    ],
)  # fmt: skip
def test_wrong_leaves(tree, message):
    with pytest.raises(TypeError, match=message):
        pack(tree)


def test_any_numbers_if_asked():
    tree = {
        "a": np.arange(3, dtype=np.int8),
        "b": np.array([True]),
        "c": np.complex64(1j),
    }
    vectors, packing = pack(tree, floats_only=False)
    assert [str(v.dtype) for v in vectors] == ["int8", "bool", "complex64"]
    assert_same(unpack(vectors, packing), jax.tree.map(np.asarray, tree))


def test_wrong_number_of_vectors():
    vectors, packing = pack(np.ones(2, np.float32))
    with pytest.raises(ValueError, match="shorter|longer"):
        unpack([*vectors, *vectors], packing)


def many_leaves(n):
    """Return leaves of one to five elements, with a large one between them."""
    tree = [np.arange(1 + i % 5, dtype=np.float32) + i for i in range(n)]
    tree.insert(n // 2, np.arange(20_000, dtype=np.float32))
    return tree


def there_and_back(tree):
    vectors, packing = pack(tree)
    return unpack(vectors, packing)


@pytest.mark.slow
def test_many_small_leaves():
    tree = many_leaves(200)
    assert_same(jax.jit(there_and_back)(tree), tree)
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, -leaf]), tree)
    assert_same(jax.jit(jax.vmap(there_and_back))(stacked), stacked)
    transposed = jax.jit(lambda t: jax.vjp(there_and_back, tree)[1](t)[0])
    assert_same(transposed(tree), tree)
    tangents = jax.jit(lambda t: jax.jvp(there_and_back, (tree,), (t,))[1])
    assert_same(tangents(tree), tree)
    # unused leaves have no cotangent
    gradients = jax.jit(jax.grad(lambda t: there_and_back(t)[3].sum()))(tree)
    assert [float(leaf.sum()) for leaf in gradients] == [
        4.0 if i == 3 else 0.0 for i in range(201)
    ]


def test_many_small_leaves_without_the_engine():
    """XLA's slices give the same leaves."""
    vector = jnp.arange(100.0)
    starts, sizes = [0, 7, 60], [7, 1, 40]
    expected = [vector[a : a + n] for a, n in zip(starts, sizes)]
    assert_same(jax.jit(lambda v: slicing.slices(v, starts, sizes))(vector), expected)
    assert_same(slicing._by_xla(vector, starts=starts, sizes=sizes), expected)


@jax.tree_util.register_pytree_node_class
class Unkeyed:
    """A pytree whose children have names that JAX does not know."""

    def __init__(self, **children):
        self.children = children

    def tree_flatten(self):
        return tuple(self.children.values()), (tuple(self.children), "static")

    @classmethod
    def tree_unflatten(cls, about, children):
        return cls(**dict(zip(about[0], children)))


def test_words_have_the_order_of_children():
    def words(*names):
        leaf = np.zeros(3, np.float32)
        return str(Packing.of({"m": Unkeyed(**dict.fromkeys(names, leaf))}))

    assert words("a", "b").endswith(", Unkeyed of a and b")
    assert words("a", "b") != words("b", "a")
    many = [f"layer {number}" for number in range(40)]
    assert words(*many) != words(*reversed(many))
    assert "(40 leaves, " in words(*many)
