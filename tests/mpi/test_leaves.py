"""Typical leaves of data sets and models give a right value, or an error that names the
leaf and the remedy.
"""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uncounted
from marks import SIZE, engine_only, redundant, several
from uncounted import coded_allreduce

import jaxcoded
from jaxcoded import kernels, tree_bcast

pytestmark = [engine_only, pytest.mark.ranks(4)]
BATCH = 20
X = np.random.default_rng(0).normal(size=(BATCH, 3))
GRADIENT = 2 * (X @ np.ones(3)) @ X
BEYOND = 5_000_000_000  # beyond 32 bits

INTEGERS = {
    "i": np.array([[2**31 - 1, -5]] * BATCH, np.int32),
    "small": np.arange(BATCH, dtype=np.int8) * 100,
    "wide": np.arange(BATCH) * 2**58 - 7,
    "unsigned": np.arange(BATCH, dtype=np.uint16) * 5000,
    "bool": np.arange(BATCH) % 3 == 0,
}

REFUSED = {
    "text": (np.array(["a", "b"]), "<U1, text: leave it out, or .* token ids"),
    "objects": (np.array([np.ones(2), np.ones(3)], object), "pad them to one length"),
    "dates": (np.array(["2020-01-01"], "datetime64[D]"), r"\(x - x.min\(\)\) / np"),
    "durations": (np.ones(2, "timedelta64[s]"), r"x / np.timedelta64"),
    "fields": (np.ones(2, [("a", "f4")]), "structured array: pass its fields"),
    "masked": (np.ma.masked_array(np.ones(2), [0, 1]), r"pass x.filled\(0\)"),
    "name": ("adam", "is a str, which is not an array: leave it out"),
    "function": (len, "which is not an array: leave it out"),
    "long double": (
        np.ones(2, np.longdouble),
        r"(pass x.astype\(np.float64\)|cast it to .*float64)",
    ),
}
refused = pytest.mark.parametrize("label", REFUSED)


@pytest.fixture(params=[True, False], ids=["x64", "x32"])
def x64(request):
    with jax.enable_x64(request.param):
        yield request.param


@pytest.fixture(params=["code", "shared"], scope="module")
def own(request, comm, transport):
    """A group with a code, and a group with shared work."""
    code = jaxcoded.Coded(stragglers=int(comm.size > 2))
    shared = jaxcoded.Shared(replicas=0, blocks=2)
    strategy = shared if request.param == "shared" else code
    with jaxcoded.CodedGroup(comm, strategy) as group:
        yield group


def losses(w, batch):
    return (batch["x"] @ w) ** 2


def gradient_of(losses, group):
    """Return the gradient of the sum of the losses."""
    return jaxcoded.coded_value_and_grad(losses, group, mean=False)


def gradient(group, **more):
    part = group.batch(BATCH)
    data = {"x": X[part.indices]} | {
        name: make(len(part.indices)) for name, make in more.items()
    }
    return gradient_of(losses, group)(np.ones(3), part.of(data))[1]


@refused
def test_in_a_batch(own, label):
    leaf, remedy = REFUSED[label]
    with pytest.raises(TypeError, match=rf"^data\['{label}'\] .*{remedy}"):
        gradient(
            own,
            **{
                label: lambda n: (
                    np.ones(n, leaf.dtype) if label == "long double" else leaf
                )
            },
        )
    # all ranks have the error, and continue
    np.testing.assert_allclose(gradient(own), GRADIENT, rtol=1e-9)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: np.ones(n, ">f4"),
        lambda n: np.ones((n, 6), np.float32)[:, ::-2],
        lambda n: np.broadcast_to(np.float32(1), (n,)),
        lambda n: np.full(n, 2**40),
        lambda n: jax.random.split(jax.random.key(0), n),
        lambda n: np.ones(n, np.float16),
        lambda n: None,
    ],
    ids=["big-endian", "strided", "broadcast", "int64", "keys", "float16", "none"],
)
def test_taken_in_a_batch(own, make):
    np.testing.assert_allclose(gradient(own, more=make), GRADIENT, rtol=1e-9)


def test_replaced_leaves_are_used(own):
    batch = own.batch({"x": X.astype(">f8")})
    _, out = gradient_of(losses, own)(np.ones(3, ">f8"), batch)
    np.testing.assert_allclose(out, GRADIENT, rtol=1e-9)


def test_a_list_is_no_array(own):
    message = r"data\['x'\]\[0\] has shape \(\), .* convert a list to one array"
    part = own.batch(BATCH)
    step = gradient_of(losses, own)
    with pytest.raises(ValueError, match=message):
        step(np.ones(3), part.of({"x": [1.0] * len(part.indices)}))
    with pytest.raises(ValueError, match=message), jax.enable_x64(False):
        step(np.ones(3), part.of({"x": [1] * len(part.indices)}))


@refused
def test_among_parameters(own, label):
    step = gradient_of(losses, own)
    with pytest.raises(TypeError, match=rf"^params\['{label}'\] (is|has dtype) .*: .*"):
        step({label: REFUSED[label][0]}, own.batch({"x": X}))


def test_complex_parameters(own):
    """The gradient follows JAX's convention."""
    batch = own.batch(X)
    w = {"w": np.array([1 + 2j, -1j, 0.5])}

    def of(p, x):
        return jnp.abs(x @ p["w"]) ** 2

    value, grads = gradient_of(of, own)(w, batch)
    wanted = jax.value_and_grad(lambda w: of(w, X).sum())(w)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-9)
    np.testing.assert_allclose(grads["w"], wanted[1]["w"], rtol=1e-9)


def test_complex_sums(group):
    """Every code sums complex numbers as pairs of real numbers."""
    batch = group.batch(X)
    mine = {"c": batch.weights @ (batch.data * 1j), "r": batch.weights @ batch.data}
    total = jax.jit(lambda x: coded_allreduce(x, group, divisor=2))(mine)
    assert total["c"].dtype == np.complex128
    np.testing.assert_allclose(total["c"], X.sum(0) * 0.5j, rtol=1e-9)
    np.testing.assert_allclose(total["r"], X.sum(0) / 2, rtol=1e-9)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_sums_on_the_host(group, dtype):
    """Sums on the host are the rounds of a jitted call, in place with ``out``."""
    weights = group.batch(X).weights
    mine = (np.asarray(weights) @ group.batch(X).data * (2 + 1j)).astype(dtype)
    wanted, rtol = X.sum(0) * (2 + 1j), 1e-4 if dtype == "complex64" else 1e-9
    number = jaxcoded.host.allreduce(mine[0], group, weights)
    np.testing.assert_allclose(number, wanted[0], rtol=rtol)
    if group.rank == 1:
        mine = np.asarray(jaxcoded.coded_allreduce(mine, group, weights))
    else:
        out = jaxcoded.host.allreduce(mine, group, weights, out=mine)
        assert out is mine
    assert mine.dtype == dtype
    np.testing.assert_allclose(mine, wanted, rtol=rtol)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_on_the_host(comm, transport, name):
    """Integers keep their width, even if JAX has only 32 bits."""
    mine = INTEGERS[name] + np.array(comm.rank).astype(INTEGERS[name].dtype)
    with (
        jax.enable_x64(False),
        jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport=transport) as plain,
    ):
        out = jaxcoded.host.allreduce(mine, plain)
    wanted = sum(comm.allgather(mine.astype(out.dtype)))
    assert out.dtype == (np.int64 if name == "bool" else mine.dtype)
    np.testing.assert_array_equal(out, wanted)


OF_0_AND_1 = [jaxcoded.Shared(), jaxcoded.Uncoded()]
if SIZE == 4:  # all three copies are counted
    OF_0_AND_1.append(jaxcoded.Coded(stragglers=2, code="fractional_repetition"))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("strategy", OF_0_AND_1, ids=repr)
def test_integers(comm, transport, strategy, jit):
    """Sums of integers are exact in their width, and overflow as in NumPy; bools are counted."""
    with jaxcoded.CodedGroup(comm, strategy, transport=transport) as group:
        count = jaxcoded.coded_sum(lambda _, data: data, group)
        count = jax.jit(count) if jit else count
        out = count(0.0, group.batch(INTEGERS))
    with np.errstate(over="ignore"):
        for name, leaf in INTEGERS.items():
            wanted = leaf.sum(0, dtype=np.int64 if name == "bool" else leaf.dtype)
            assert out[name].dtype == wanted.dtype
            np.testing.assert_array_equal(out[name], wanted)


def test_integers_that_add_up(comm, transport):
    """Integers of each rank add up if no code multiplies them; the wire dtype would
    round them.
    """
    mine = np.int32(2**30 + SIZE)
    with jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport=transport) as plain:
        out = jax.jit(lambda x: jaxcoded.coded_allreduce(x, plain))(mine)
        with pytest.raises(ValueError, match="wire_dtype='bfloat16' would round"):
            jaxcoded.coded_allreduce(mine, plain, wire_dtype="bfloat16")
    assert out == np.array(SIZE * int(mine)).astype(np.int32)


@pytest.mark.parametrize("bucket", [None, 1])
def test_leaves_of_started_rounds(comm, transport, bucket):
    """A started round sums the same values as a round that is called."""
    mine = {
        "i": np.array([comm.rank - 5, 7], np.int16),
        "bool": np.array(True),
        "z": np.complex64(1 - 2j) * comm.rank,
        "x": np.float32(0.5),
    }
    with jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport=transport) as plain:
        handle = jaxcoded.coded_allreduce_start(mine, plain, bucket_bytes=bucket)
        out = jaxcoded.coded_allreduce_done(handle)
        wanted = jaxcoded.coded_allreduce(mine, plain)
    jax.tree.map(np.testing.assert_array_equal, out, wanted)
    assert jax.tree.map(lambda leaf: leaf.dtype, out) == {
        "i": np.int16,
        "bool": np.int64,
        "z": np.complex64,
        "x": np.float32,
    }
    np.testing.assert_array_equal(out["i"], [sum(range(SIZE)) - 5 * SIZE, 7 * SIZE])
    assert (out["bool"], out["z"]) == (SIZE, (1 - 2j) * sum(range(SIZE)))


@several
@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        (np.ones(2, np.int8), np.ones(2, np.uint8), r"uint8\[2\] at .* int8\[2\]"),
        (
            np.ones(2, np.int64),
            np.ones(2, bool),
            r"bool as int64\[2\] at .*, int64\[2\]",
        ),
        (
            np.ones(2, np.int16),
            [np.ones(2, np.float32)] * 2,
            r"float32\[2\] .*int16\[2\]",
        ),
        (
            np.ones(2, np.float64),
            np.ones(2, complex),
            r"complex128\[2\] .*float64\[2\]",
        ),
    ],
    ids=["sign", "bool", "bytes", "complex"],
)
def test_leaves_of_other_dtypes_on_one_rank(comm, transport, first, other, words):
    """Ranks compare the dtypes of leaves, not those of the numbers that are sent."""
    last = comm.rank == SIZE - 1
    with jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport=transport) as plain:
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=f"GroupMismatch: .*{words}"
        ):
            jax.block_until_ready(
                jaxcoded.coded_allreduce(other if last else first, plain)
            )
        jaxcoded.effects_barrier()
        assert jaxcoded.coded_allreduce(np.int32(1), plain) == SIZE


@redundant
def test_integers_that_a_code_would_round(comm, transport):
    cyclic = jaxcoded.Coded(stragglers=1, fanout=3, code="cyclic_repetition")
    with jaxcoded.CodedGroup(comm, cyclic, transport=transport) as group:
        batch = group.batch(INTEGERS)
        for call in (
            lambda: jaxcoded.coded_sum(lambda _, data: data["i"], group)(0.0, batch),
            lambda: coded_allreduce(np.int32(3), group),
            lambda: uncounted.allreduce(np.int32([3]), group),
        ):
            with pytest.raises(TypeError, match=r"take Shared\(\), Uncoded\(\) or"):
                call()


APPROXIMATE = {
    "deadline": (
        jaxcoded.Shared(),
        jaxcoded.Options(deadline=600, on_deadline="approximate"),
    ),
    "code": (jaxcoded.Coded(code="ignore_stragglers"), jaxcoded.Options()),
}


@pytest.mark.parametrize("kind", ["deadline", pytest.param("code", marks=redundant)])
def test_integers_in_approximate_sums(comm, transport, kind):
    strategy, options = APPROXIMATE[kind]
    with jaxcoded.CodedGroup(
        comm, strategy, options=options, transport=transport
    ) as group:
        batch = group.batch(INTEGERS)
        with pytest.raises(TypeError, match="'small'.* sums of this group may be app"):
            jaxcoded.coded_sum(lambda _, data: {"small": data["small"]}, group)(
                0.0, batch
            )


def summing(group):
    """Return the calls that sum leaves, by name."""
    update = jaxcoded.optax.sum_gradients(group)
    weights = group.batch(BATCH).weights

    def transform(x):
        return update.update(x, update.init(x), weights=weights)

    return {
        "coded_allreduce": lambda x: coded_allreduce(x, group),
        "start": lambda x: uncounted.coded_allreduce_start(x, group),
        "buckets": lambda x: uncounted.coded_allreduce_start(x, group, bucket_bytes=8),
        "optax": transform,
        "encode": lambda x: kernels.encode(x, np.ones((2, 1))),
        "tree_bcast": lambda x: tree_bcast(x, group),
    }


@refused
@pytest.mark.parametrize(
    "call", ["coded_allreduce", "start", "buckets", "optax", "encode", "tree_bcast"]
)
def test_in_a_sum(group, call, label):
    leaf, remedy = REFUSED[label]
    with pytest.raises(TypeError, match=rf"^leaf at \['{label}'\] .*{remedy}"):
        summing(group)[call]({label: leaf})


@refused
def test_on_the_host(group, label):
    leaf, remedy = REFUSED[label]
    if label in ("name", "function"):
        remedy = "host.allreduce sums one numpy array, got "
    elif label == "long double":
        remedy = (
            "has dtype float128: .* cast it to float16, bfloat16, float32 or float64"
        )
    with pytest.raises(TypeError, match=remedy):
        uncounted.allreduce(leaf, group)


def test_another_byte_order(group):
    """Arrays from files in another byte order are converted."""
    batch = group.batch(X)
    mine = np.asarray(batch.weights) @ batch.data
    swapped = mine.astype(">f8")
    for out in (
        jaxcoded.coded_allreduce(swapped, group, batch.weights),
        jaxcoded.host.allreduce(swapped, group, batch.weights),
    ):
        assert out.dtype.isnative
        np.testing.assert_allclose(out, X.sum(0), rtol=1e-9)
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3, dtype=">i4") + group.rank)
    buffer.seek(0)
    assert tree_bcast(np.load(buffer), group).tolist() == [0, 1, 2]


# The state of a training, from one rank to all ranks.


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_keys_go_round(group, x64, implementation):
    def keys(seed):
        key = jax.random.key(seed, impl=implementation)
        return {
            "one": key,
            "many": jax.random.split(key, (2, 3)),
            "none": key[None][:0],
        }

    out = tree_bcast(keys(group.rank), group)
    inside = jax.jit(lambda keys: tree_bcast(keys, group))(keys(group.rank))
    for received in (out, inside):
        for name, wanted in keys(0).items():
            assert (received[name].dtype, received[name].shape) == (
                wanted.dtype,
                wanted.shape,
            )
            np.testing.assert_array_equal(
                *map(jax.random.key_data, (received[name], wanted))
            )
    assert jax.random.normal(out["one"]) == jax.random.normal(keys(0)["one"])


def test_a_whole_state_goes_round(group, x64):
    """Every rank gets the root's state to the bit. The other ranks have leaves with the same names."""

    def state(rank):
        big = BEYOND * (rank == 0)
        return {
            "w": jnp.arange(3.0) + rank,
            "half": jnp.full(2, rank, jnp.bfloat16),
            "key": jax.random.key(rank),
            "step": 7 + rank,
            "tokens": big + rank,
            "counter": np.int64(-big),
            "unsigned": np.uint64(2**63 + rank),
            "seen": np.array([[rank, big], [-big, 2**62]]),
            "small": np.arange(3) + rank,
            "many": np.arange(3, dtype=np.uint64) + np.uint64(big),
            # without x64 a counter may be JAX's on the root, and Python's elsewhere
            "count": 3 if rank and not x64 else jnp.int32(4 + rank),
            "flag": rank == 0,
            "empty": np.zeros((0, 2), np.int64),
        }

    out, wanted = tree_bcast(state(group.rank), group), state(0)
    assert out.keys() == wanted.keys()
    for name in wanted.keys() - {"key", "half", "w", "flag"}:
        assert np.array_equal(np.asarray(out[name]), np.asarray(wanted[name])), name
        narrow = not x64 and np.array_equal(
            np.asarray(wanted[name]), np.asarray(wanted[name]).astype(np.int32)
        )
        assert isinstance(out[name], jax.Array) == (x64 or narrow), name
        assert out[name].dtype.itemsize == (4 if narrow else 8) or name == "count"
    for name in ("half", "w", "flag"):
        assert np.array_equal(out[name], wanted[name]), name
    assert jax.random.key_data(out["key"]).tolist() == [0, 0]


def test_integers_that_do_not_fit(group):
    with pytest.raises(ValueError, match=r"leaf at \['a'\] is 100000.*into int64"):
        tree_bcast({"a": 10**20}, group)
    with jax.enable_x64(False):
        with pytest.raises(
            ValueError, match=r"leaf at \['a'\] is 100.*several numbers"
        ):
            tree_bcast({"a": 10**20}, group)
        inside = jax.jit(lambda: tree_bcast({"a": np.int64(BEYOND)}, group))
        with pytest.raises(ValueError, match=r"leaf at \['a'\] has numbers of int64"):
            inside()
        for beyond, words in (
            (BEYOND, "is 5000000000"),
            (np.int64([BEYOND]), "has numbers of int64"),
        ):
            with pytest.raises(
                (TypeError, ValueError), match=rf"leaf at \['a'\] {words}|take Shared"
            ):
                coded_allreduce({"a": beyond}, group)
        step = gradient_of(losses, group)
        with pytest.raises(TypeError, match=r"params\['w'\] has dtype int32, which"):
            step({"w": BEYOND}, group.batch({"x": X}))


@pytest.mark.parametrize("kind", ["array", "number", "unsigned"])
def test_integers_that_jax_would_cut_off(comm, transport, kind):
    """Every call that is passed such integers raises an error that names the leaf."""
    beyond = {
        "array": np.array([BEYOND, 1]),
        "number": np.int64(-BEYOND),
        "unsigned": np.uint64(2**63),
    }[kind]
    rows = np.full(BATCH, beyond.reshape(-1)[0])
    with (
        jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport=transport) as group,
        jax.enable_x64(False),
    ):
        total = jaxcoded.coded_sum(lambda w, data: data["x"] @ w["w"], group)
        params = {"w": np.ones(3, np.float32), "ids": beyond}
        x = X.astype(np.float32)
        batch, with_ids = group.batch({"x": x}), group.batch({"x": x, "ids": rows})
        for name, call in (
            ("params", lambda: total(params, batch)),
            ("params", lambda: jaxcoded.spread(params, group)),
            ("data", lambda: total({"w": params["w"]}, with_ids)),
            ("leaf at ", lambda: coded_allreduce({"ids": beyond}, group)),
        ):
            with pytest.raises(ValueError, match=rf"{name}\['ids'\].*do not fit into"):
                call()
        fits = jaxcoded.spread({"ids": np.array([2**31 - 1])}, group)
        assert fits["ids"].tolist() == [2**31 - 1]
