"""Rounds on a GPU's memory, simulated by `tests/cuda/driver.cpp`: the code behind XLA's
handlers, and the handlers themselves, without XLA.
"""

import contextlib
import itertools
import pathlib
import sys
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uncounted
from cases import every, more
from marks import SIZE, engine_only, not_alone, redundant, several, slices
from mpi4py import MPI
from reference import (
    assert_same_bits,
    contribution,
    per_example,
    random_erasures,
    rounding,
)
from together import wait_for_all, wait_until

import jaxcoded
from jaxcoded import errors
from jaxcoded.transport.engine import _BYTES, _DTYPES, _engine

sys.path.append(str(pathlib.Path(__file__).parent.parent / "cuda"))
import fake

pytestmark = [engine_only, pytest.mark.ranks(4)]

RANK = MPI.COMM_WORLD.rank
CHUNK = (4 << 20) // 4  # float32 numbers that are copied at a time
DONE = 1
LOST = int(SIZE > 2)  # stragglers
CALL, NAME = "a test of staging", 1234567  # the call's description and fingerprint


@pytest.fixture(scope="module")
def gpu(comm, transport):
    if not fake.compiler():
        pytest.skip("there is no C++ compiler")
    with tempfile.TemporaryDirectory() as directory:
        directory = comm.bcast(directory)
        if RANK == 0:
            fake.compile_all(directory)
        comm.Barrier()
        gpu = fake.Gpu(directory)
        gpu.xla = fake.Xla(directory)
        comm.Barrier()
        if reasons := [reason for reason in comm.allgather(gpu.reason) if reason]:
            pytest.skip(reasons[0])
        yield gpu


@pytest.fixture
def stream(comm, gpu):
    yield gpu.renew()
    wait_for_all(comm)
    assert gpu.misuses() == ""


def vector(array, part=0, parts=1):
    size = array.size // parts
    code = _DTYPES.get(array.dtype, _BYTES)
    nbytes = array.nbytes // parts
    return (code, size if code else nbytes, array.address + part * nbytes)


def device_round(
    gpu,
    stream,
    group,
    own,
    *,
    up=True,
    down=True,
    in_place=False,
    skipped=None,
    erased=None,
    apart=False,
    seconds=0.0,
    signature=CALL,
):
    """Do a round on vectors that the stream computes for a while; return the results.

    Args:
        own: this rank's vectors; several parts follow each other.
        in_place: whether the result replaces a vector of the same length.
        skipped, erased: arrays on the GPU, too.
        apart: whether all parts but the last are sent ahead.
    """
    plan, rank = group.plan, group.rank
    parts = plan.parts_above[rank] if up else 1
    operands = [gpu.array(stream, values, seconds=seconds) for values in own]
    outs, mine = [], []
    for operand in operands:
        length = plan.result_length(rank, operand.size) if up else operand.size
        if in_place and length == operand.size:
            outs.append(operand)
        else:
            mine.append(gpu.array(stream, np.full(length, 7, operand.dtype)))
            outs.append(mine[-1])
    flag = mask = None
    if skipped is not None:
        flag = gpu.array(stream, np.int32(skipped))
    if erased is not None:
        mask = gpu.array(stream, np.asarray(erased, bool))
    name = NAME + (signature != CALL)
    message = [vector(v, p, parts) for p in range(parts) for v in operands]
    total = [vector(v) for v in outs]
    address = 0 if flag is None else flag.address
    ahead = parts - 1 if apart else 0
    for part in range(ahead):
        here = message[part * len(operands) : (part + 1) * len(operands)]
        words_of_error = _engine.device_extend(
            group._session.index,
            stream,
            name,
            signature,
            part > 0,
            address,
            here,
            message,
            total,
        )
        assert words_of_error == ""
    try:
        outcome, text = _engine.device_run(
            group._session.index,
            stream,
            name,
            signature,
            up,
            down,
            ahead > 0,
            address,
            0 if mask is None else mask.address,
            0 if mask is None else mask.size,
            message[ahead * len(operands) :],
            total,
        )
        if outcome != DONE:
            raise errors.CodedError(text)
        if any(out.read() is None for out in outs):
            raise errors.CodedError("CUDA_ERROR_ILLEGAL_ADDRESS, after the round")
        return [out.read() for out in outs]
    finally:
        for array in (*operands, *mine, flag, mask):
            if array is not None:
                array.read()  # no memory is in use any more
                array.free()


SCALE = per_example()  # the scale of each example's gradient


def gradients(*sizes, dtypes=("float32",)):
    """Return base vectors for each size and dtype; each example's gradient is a
    multiple of them.
    """
    rng = np.random.default_rng(5)
    return [
        rng.uniform(0.5, 1, size).astype(jnp.dtype(dtype))
        for size in sizes
        for dtype in dtypes
    ]


def vectors_of(group, tree):
    """Return this rank's vectors."""
    if group.plan.encoded:
        each = [(SCALE[:, None] * shape).astype(shape.dtype) for shape in tree]
        return [np.asarray(v).ravel() for v in contribution(group, each).vectors]
    weight = contribution(group, SCALE)
    return [(weight * shape).astype(shape.dtype) for shape in tree]


def check(comm, group, out, tree):
    for result, shape in zip(out, tree, strict=True):
        assert result.dtype == shape.dtype
        exact = SCALE.sum() * shape.astype(np.float64)
        bound = rounding(group, shape.dtype) * np.abs(SCALE).sum()
        error = np.abs(result[: shape.size].astype(np.float64) - exact)
        assert np.all(error <= bound), (shape.dtype, error.max(), bound)
    assert_same_bits(comm, out)


SIZES = [
    (0,),
    (1,),
    (1000, 3),
    (CHUNK,),
    (CHUNK + 1, 5),
    (3 * CHUNK + 77, 0, 1, 2 * CHUNK),
]


@pytest.mark.parametrize("in_place", [more(False), True], ids=["apart", "in_place"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sums(comm, gpu, stream, group, sizes, in_place):
    tree = gradients(*sizes)
    for _ in range(2):
        out = device_round(
            gpu, stream, group, vectors_of(group, tree), in_place=in_place
        )
        check(comm, group, out, tree)


def formed(comm, group):
    """Return the bytes of sums that ranks have formed in sections."""
    return comm.allreduce(group.statistics()["formed_bytes"])


@several
@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in_place"])
@pytest.mark.parametrize("stragglers", sorted({0, LOST}))
def test_sums_in_sections(comm, gpu, stream, stragglers, in_place):
    """Other ranks read the part of a vector that is on the host, and assemble the sum there."""
    wanted = jaxcoded.Options(sections_from=1)
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(fanout=SIZE - 1, stragglers=stragglers), options=wanted
    ) as group:
        tree = gradients(CHUNK + 1, 5)
        own = vectors_of(group, tree)
        for _ in range(2):
            out = device_round(gpu, stream, group, own, in_place=in_place, seconds=0.01)
            check(comm, group, out, tree)
        assert formed(comm, group) >= 2 * sum(v.nbytes for v in tree)


def test_dtypes(comm, gpu, stream, group):
    tree = gradients(700_001, dtypes=("float16", "bfloat16", "float32", "float64"))
    out = device_round(gpu, stream, group, vectors_of(group, tree), in_place=True)
    check(comm, group, out, tree)


def test_the_round_waits_for_the_stream(comm, gpu, stream, group):
    tree = gradients(1000, 2 * CHUNK)
    out = device_round(gpu, stream, group, vectors_of(group, tree), seconds=0.05)
    check(comm, group, out, tree)


@slices
@pytest.mark.parametrize(
    ("code", "sections_from"),
    every(3, list(itertools.product(["gaussian_mds", "single_parity_check"], [0, 1]))),
)
def test_slices(comm, gpu, stream, code, sections_from):
    wanted = jaxcoded.Options(sections_from=sections_from)
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(fanout=3, code=code, slices=2), options=wanted
    ) as group:
        tree = gradients(2 * CHUNK + 78)
        out = device_round(gpu, stream, group, vectors_of(group, tree))
        check(comm, group, out, tree)
        assert bool(formed(comm, group)) == bool(sections_from)


@redundant
@pytest.mark.parametrize(
    ("apart", "flagged"), every(3, list(itertools.product([False, True], repeat=2)))
)
def test_parts(comm, gpu, stream, apart, flagged):
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(fanout=3, code="progressive")
    ) as group:
        tree = gradients(CHUNK + 3)
        for _ in range(2):
            out = device_round(
                gpu,
                stream,
                group,
                vectors_of(group, tree),
                apart=apart,
                seconds=0.01,
                skipped=0 if flagged else None,
            )
            check(comm, group, out, tree)


@several  # a root has no parts
@pytest.mark.parametrize("same", [True, False])
def test_parts_on_two_streams(comm, gpu, stream, same):
    """Each part is read after its own stream has computed it, and each stream sees the
    result.
    """
    last = stream if same else gpu.stream()
    tree = gradients(2 * CHUNK, 2 * CHUNK)
    with jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0)) as group:
        own = vectors_of(group, tree)
        streams = stream, last
        operands = [
            gpu.array(on, values, seconds=seconds)
            for on, values, seconds in zip(streams, own, (0.01, 0.3))
        ]
        outs = [gpu.array(last, np.full(2 * CHUNK, 7, np.float32)) for _ in own]
        message, total = [[vector(v) for v in them] for them in (operands, outs)]
        index = group._session.index
        call = NAME, CALL
        error = _engine.device_extend(
            index, stream, *call, False, 0, message[:1], message, total
        )
        assert error == ""
        outcome, text = _engine.device_run(
            index, last, *call, True, True, True, 0, 0, 0, message[1:], total
        )
        assert outcome == DONE, text
        check(comm, group, [out.read() for out in outs], tree)
        for array in (*operands, *outs):
            array.free()


@redundant
def test_a_call_that_fails_between_its_parts(comm, gpu, stream):
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(fanout=3, code="progressive")
    ) as group:
        tree = gradients(CHUNK + 3)
        own = vectors_of(group, tree)
        if RANK == SIZE - 1:
            part = gpu.array(stream, own[0])
            message = [vector(part, p, 2) for p in range(2)]
            _engine.device_extend(
                group._session.index,
                stream,
                NAME,
                CALL,
                False,
                0,
                message[:1],
                message,
                message,
            )
            part.read()
            part.free()
        check(comm, group, device_round(gpu, stream, group, own), tree)


@redundant
def test_skipped_ranks(comm, gpu, stream, group):
    """The vectors of a rank that skips are not read."""
    tree = gradients(2 * CHUNK)
    own = vectors_of(group, tree)
    skips = RANK == SIZE - 1
    if skips:
        own = [np.full_like(v, np.nan) for v in own]
    out = device_round(gpu, stream, group, own, skipped=int(skips))
    check(comm, group, out, tree)


@redundant
def test_erasures(comm, gpu, stream, group):
    tree = gradients(1000, 2 * CHUNK)
    rng = np.random.default_rng(11)
    for _ in range(3):
        erased = random_erasures(group.plan, rng)
        own = vectors_of(group, tree)
        check(comm, group, device_round(gpu, stream, group, own, erased=erased), tree)


@redundant
def test_late_ranks_copy_nothing_to_the_host(comm, gpu, stream, group):
    tree = gradients(2 * CHUNK)
    own = vectors_of(group, tree)
    wait_for_all(comm)
    late = RANK == SIZE - 1
    if not late:
        outs = [device_round(gpu, stream, group, own) for _ in range(3)]
    wait_for_all(comm)
    if late:
        wait_until(lambda: group.lag() == 3)
        before = gpu.copied_bytes()
        outs = [device_round(gpu, stream, group, own) for _ in range(3)]
        assert gpu.copied_bytes() - before == 3 * own[0].nbytes
    for out in outs:
        check(comm, group, out, tree)


@pytest.mark.parametrize("size", [10, 3 * CHUNK + 1])
def test_one_way(comm, gpu, stream, group, size):
    root = RANK == group.plan.root
    tree = gradients(size)
    own = vectors_of(group, tree)
    (out,) = device_round(gpu, stream, group, own, down=False)
    if root:
        exact = SCALE.sum() * tree[0].astype(np.float64)
        bound = rounding(group, "float32") * np.abs(SCALE).sum()
        np.testing.assert_allclose(out[:size], exact, rtol=0, atol=bound)
    else:
        assert not out.any()
    mine = np.arange(size, dtype=np.float32) + RANK
    for in_place in (False, True):
        (out,) = device_round(gpu, stream, group, [mine], up=False, in_place=in_place)
        np.testing.assert_array_equal(out, mine - RANK + group.plan.root)
    number = np.arange(7) * (1 if root else 0)  # not summed, so any dtype works
    (out,) = device_round(gpu, stream, group, [number], up=False)
    np.testing.assert_array_equal(out, np.arange(7))


def test_the_same_as_on_the_host(comm, gpu, stream):
    """Results match the host's results to the bit if all messages are used."""
    with jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0)) as group:
        tree = gradients(2 * CHUNK + 5)
        own = vectors_of(group, tree)
        (out,) = device_round(gpu, stream, group, own)
        np.testing.assert_array_equal(out, uncounted.allreduce(own[0].copy(), group))


def test_memory_is_used_again(comm, gpu, stream, group):
    tree = gradients(CHUNK)
    own = vectors_of(group, tree)
    totals = set()
    for _ in range(6):
        device_round(gpu, stream, group, own)
        totals.add(sum(_engine.pinned_bytes()))
    assert len(totals) <= 2


def test_nothing_is_pinned_again_if_lengths_alternate(comm, gpu, stream):
    """Pinning takes longer than a round. `tests/engine/pool.cpp` alternates much more
    often.
    """
    lengths = [CHUNK, 1000, 3 * CHUNK, CHUNK // 2, CHUNK // 20, 10, 4 * CHUNK]
    pins = []
    # without redundancy no rank can be late or lack a contribution
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(stragglers=0), transport="engine"
    ) as group:
        trees = [vectors_of(group, gradients(length)) for length in lengths]
        for _ in range(3):
            for own in trees:
                device_round(gpu, stream, group, own)
            pins.append(gpu.pins())
    assert pins[1] == pins[2]


def test_copies_without_a_round(gpu, stream):
    values = np.zeros(3 * CHUNK + 7, np.float32)
    own, out = gpu.array(stream, values), gpu.array(stream, values)
    assert min(_engine.device_copies(stream, own.address, out.address, own.nbytes)) > 0
    gpu.fail("cuMemcpyHtoDAsync_v2", 2)
    with pytest.raises(RuntimeError, match="cuMemcpyHtoDAsync_v2 failed: CUDA_ERROR"):
        _engine.device_copies(stream, own.address, out.address, own.nbytes)
    for array in (own, out):
        array.read()
        array.free()


def test_two_gpus_and_threads_without_a_context(comm, gpu, stream):
    """Each thread of the process has a separate group and context."""
    with (
        jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=LOST)) as one,
        jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=LOST)) as other,
    ):
        tree = gradients(CHUNK)
        results = {}

        def rounds(group, stream):
            gpu.no_context()
            own = vectors_of(group, tree)
            results[group] = [
                device_round(gpu, stream, group, own, signature=CALL) for _ in range(4)
            ]

        streams = [stream, gpu.renew()]
        threads = [
            threading.Thread(target=rounds, args=pair)
            for pair in zip((one, other), streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for group in (one, other):
            for out in results[group]:
                check(comm, group, out, tree)


@pytest.mark.parametrize("tokened", [False, True])
def test_programs_for_a_gpu(group, tokened):
    """Programs for a GPU can be built without one. Only a number that orders is
    aliased. If XLA's token type gives the order, a barrier keeps slices out of the
    call: XLA would abort with them.
    """

    def step(x, token):
        if tokened:
            return uncounted.coded_allreduce(x[64:], group, token=token)
        return uncounted.coded_allreduce(x[64:], group), token

    traced = jax.jit(step).trace(jnp.ones(128), jnp.int32(0))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = [line for line in text.splitlines() if "@jaxcoded_round" in line]
    assert call.count("output_operand_alias<") == 1 + tokened
    assert text.count("optimization_barrier") == (not tokened)


# The handlers, called as XLA does.


@contextlib.contextmanager
def arrays_on(gpu, stream, *values):
    arrays = [gpu.array(stream, each) for each in values]
    try:
        yield arrays
    finally:
        for array in arrays:
            array.read()
            array.free()


def attributes(group, **others):
    names = {"up": 1, "down": 1, "parts": 1, "last_part": 0, "skips": 0, "erases": 0}
    return {"group": group._session.index, "fingerprint": NAME, **names, **others}


@pytest.mark.parametrize("order", ["token", "number", "aliased"])
def test_round_handler(comm, gpu, stream, group, order):
    tree = gradients(2 * CHUNK, 3)
    own = vectors_of(group, tree)
    numbers = [np.int32(5), np.int32(0), np.int32(0), np.zeros(SIZE, bool)]
    results = [np.full_like(v, 7) for v in own]
    with arrays_on(gpu, stream, *numbers, *own, *results) as arrays:
        before, after, skipped, erased = arrays[:4]
        if order == "aliased":
            after = before
        first = fake.TOKEN if order == "token" else before.buffer()
        last = fake.TOKEN if order == "token" else after.buffer()
        vectors = [array.buffer() for array in arrays[4:]]
        extras = [skipped.buffer(), erased.buffer()]
        text = gpu.xla(
            "round",
            stream,
            [first, *extras, *vectors[:2]],
            [last, *vectors[2:]],
            signature=CALL,
            **attributes(group, skips=1, erases=1),
        )
        assert text == ""
        check(comm, group, [array.read() for array in arrays[6:]], tree)
        assert after.read() == (0 if order == "token" else 5)


@redundant
def test_part_handler(comm, gpu, stream):
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(fanout=3, code="progressive")
    ) as group:
        tree = gradients(2 * CHUNK)
        own = np.split(vectors_of(group, tree)[0], group.plan.parts_above[RANK])
        result = np.full(group.plan.result_length(RANK, own[0].size * len(own)), 7.0)
        operands = (*own, result.astype(np.float32), np.int32(1), np.int32(0))
        with arrays_on(gpu, stream, *operands) as (*parts, out, order, flag):
            number = order.buffer()
            for i, part in enumerate(parts[:-1]):
                text = gpu.xla(
                    "part",
                    stream,
                    [number, flag.buffer(), part.buffer()],
                    [number],
                    signature=CALL,
                    group=group._session.index,
                    fingerprint=NAME,
                    parts=len(parts),
                    number=i,
                    slices=group.plan.slices_above[RANK],
                    skips=1,
                )
                assert text == ""
            text = gpu.xla(
                "round",
                stream,
                [number, parts[-1].buffer()],
                [number, out.buffer()],
                signature=CALL,
                **attributes(group, last_part=int(len(parts) > 1)),
            )
            assert text == ""
            check(comm, group, [out.read()], tree)


def test_lag_handler_and_use_after_close(comm, gpu, stream):
    with jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=LOST)) as group:
        index = group._session.index
        with arrays_on(gpu, stream, np.int32(5), np.int32(0), np.int32(9)) as arrays:
            _, after, lag = arrays
            buffers = [array.buffer() for array in arrays]
            assert not gpu.xla("lag", stream, buffers[:1], buffers[1:], group=index)
            assert (after.read(), lag.read()) == (5, 0)
    with arrays_on(gpu, stream, np.int32(5), np.int32(0), np.ones(3)) as arrays:
        order, lag, vector_ = (array.buffer() for array in arrays)
        text = gpu.xla("lag", stream, [order], [order, lag], group=index)
        assert "use after close" in text
        text = gpu.xla(
            "round",
            stream,
            [order, vector_],
            [order, vector_],
            signature=CALL,
            **attributes(group),
        )
        assert "use after close" in text


# Failures of the driver.

REFUSED = [
    "cuMemHostRegister_v2",
    "cuEventSynchronize",
    "cuMemcpyDtoHAsync_v2",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuLaunchHostFunc",
    "cuMemcpyHtoDAsync_v2",
]
who = pytest.mark.parametrize("who", [0, SIZE - 1] if SIZE > 1 else [0])


@not_alone
def test_a_refusal_after_the_round_is_told_to_all(comm, gpu, stream):
    """The round is decided, so the other ranks get the error in the next round. Without
    this error, later sums would lack this rank, whose state lacks the result.
    """
    texts = []
    with jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0)) as group:
        for step in range(1, 5):
            if (step, RANK) == (2, SIZE - 1):
                gpu.fail("cuMemcpyDtoDAsync_v2")
            own = np.full(5, step, np.float32)
            arrays = np.int32(5), np.int32(0), own, np.zeros_like(own)
            with arrays_on(gpu, stream, *arrays) as (before, after, vector, out):
                text = gpu.xla(
                    "round",
                    stream,
                    [before.buffer(), vector.buffer()],
                    [after.buffer(), out.buffer()],
                    signature=CALL,
                    **attributes(group),
                )
            texts.append(text)
            wait_for_all(comm)
    assert texts[0] == texts[3] == ""
    assert (texts[1] != "") == (RANK == SIZE - 1)
    assert f"rank {SIZE - 1}" in texts[2]
    assert "after an error in the last call: cuMemcpyDtoDAsync_v2" in texts[2]


def errors_of(comm, gpu, stream, group, tree, rounds=4):
    """Return the errors of ``rounds`` rounds, by round. A late rank copies less, and a
    failure of its last copy is reported in the next round.
    """
    out = []
    for _ in range(rounds):
        text = ""
        try:
            device_round(gpu, stream, group, vectors_of(group, tree))
        except errors.CodedError as error:
            text = str(error)
        out.append(text)
        wait_for_all(comm)
    return out


def assert_said(comm, texts, who, words):
    """Check that every rank has the error, and that it names the rank."""
    everybody = comm.allgather(texts)
    assert all(any(words in text for text in each) for each in everybody), everybody
    named = [f"rank {who}: ", "the root: ", f"rank {who}: round"]
    for each in everybody[:who] + everybody[who + 1 :]:
        assert any(name in text for name in named for text in each), everybody


def refusals():
    """Return cases: the function, the number of calls before its failure, and the rank.
    Memory is registered once. Failures of later calls are exhaustive cases, since these
    calls may not happen. For each function, either the root or the leaf is also an
    exhaustive case.
    """
    for function, after, rank in itertools.product(REFUSED, [1, 3], {0, SIZE - 1}):
        if function == "cuMemHostRegister_v2" and after > 1:
            continue
        at_root = REFUSED.index(function) % 2 == 0
        marks = [] if after == 1 and at_root == (rank == 0) else pytest.mark.exhaustive
        yield pytest.param(function, after, rank, marks=marks)


@not_alone
@pytest.mark.parametrize(("function", "after", "who"), list(refusals()))
def test_a_failure_of_the_driver_fails_the_round(
    comm, gpu, stream, function, after, who
):
    with jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=LOST)) as group:
        tree = gradients(2 * CHUNK + 9)
        check(
            comm, group, device_round(gpu, stream, group, vectors_of(group, tree)), tree
        )
        # for other functions the engine may reuse memory
        fresh = function == "cuMemHostRegister_v2"
        if RANK == who:
            # the engine asks once more after it has given back unused memory
            gpu.fail(function, after, times=1 + fresh)
        if fresh:
            tree = gradients((8 + who) * CHUNK)  # longer than all earlier messages
        texts = errors_of(comm, gpu, stream, group, tree)
        happened = comm.bcast(any(function in text for text in texts), who)
        if happened:
            assert_said(comm, texts, who, function)
        else:
            assert after == 3, texts  # the function was not called that often
        if RANK == who:
            gpu.renew()  # nothing fails any more
        wait_for_all(comm)
        again = gpu.renew()
        check(
            comm, group, device_round(gpu, again, group, vectors_of(group, tree)), tree
        )


@not_alone
def test_memory_that_the_driver_registers_at_the_second_try(comm, gpu, stream):
    """Between the tries, the engine has given back unused memory."""
    with jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=LOST)) as group:
        tree = gradients(4 * CHUNK)
        gpu.fail("cuMemHostRegister_v2")
        check(
            comm, group, device_round(gpu, stream, group, vectors_of(group, tree)), tree
        )


@who
@pytest.mark.parametrize("after", [1, 2, 4, 6])
def test_a_gpu_that_is_lost(comm, gpu, stream, after, who):
    """The GPU is lost in the middle of a round: no rank hangs, and every rank gets an
    error.
    """
    with jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=LOST)) as group:
        tree = gradients(2 * CHUNK)
        if RANK == who:
            gpu.lose(after)
        texts = errors_of(comm, gpu, stream, group, tree)
        assert_said(comm, texts, who, "CUDA_ERROR_ILLEGAL_ADDRESS")
        again = gpu.renew()
        tree = gradients(1000)
        for _ in range(3):  # the error may come a round later
            with contextlib.suppress(errors.CodedError):
                device_round(gpu, again, group, vectors_of(group, tree))
            wait_for_all(comm)
        check(
            comm, group, device_round(gpu, again, group, vectors_of(group, tree)), tree
        )


@several
def test_calls_that_do_not_fit(comm, gpu, stream):
    with jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0)) as group:
        tree = gradients(CHUNK)
        own = vectors_of(group, tree)
        signature = "another call" if RANK == SIZE - 1 else CALL
        with pytest.raises(errors.CodedError, match="called different things"):
            device_round(gpu, stream, group, own, signature=signature)
        check(comm, group, device_round(gpu, stream, group, own), tree)


def of_blocks(size):
    """Return the values of blocks, chosen so that sums are exact."""
    return (np.arange(size) % 1000 + 1).astype(np.float32)


def shared_round(gpu, stream, group, size, pause=0.0):
    """Do a round of shared work; return the sum, and the blocks in this rank's final
    vector. Block ``b`` gives ``b + 1`` times `of_blocks`.
    """
    words = {"signature": CALL, "group": group._session.index, "fingerprint": NAME}
    vector_, mine, first = np.zeros(size, np.float32), [], True
    while True:
        with arrays_on(gpu, stream, np.full(3, 9, np.int32), vector_) as (work, own):
            operands = [fake.TOKEN, own.buffer()]
            text = gpu.xla(
                "take",
                stream,
                operands,
                [fake.TOKEN, work.buffer()],
                first=int(first),
                **words,
            )
            assert text == ""
            block, fresh, _ = map(int, work.read())
        first = False
        if block < 0:
            break
        time.sleep(pause)
        if fresh:
            vector_, mine = np.zeros_like(vector_), []
        vector_ = vector_ + (block + 1) * of_blocks(size)
        mine.append(block)
    with arrays_on(gpu, stream, np.full(size, 7, np.float32)) as (out,):
        names = attributes(group, last_part=1) | words
        result = [fake.TOKEN, out.buffer()]
        assert gpu.xla("round", stream, [fake.TOKEN], result, **names) == ""
        return out.read(), mine


@several
@pytest.mark.parametrize(
    ("size", "sections_from"), [(1, 0), (1000, 0), (2 * CHUNK + 77, 0), (CHUNK + 1, 1)]
)
def test_shared_work(comm, gpu, stream, size, sections_from):
    """Each rank is late in turn: other ranks compute the blocks that it has not computed, and each block counts once."""
    work = jaxcoded.Shared(replicas=min(2, SIZE - 1), blocks=3)
    wanted = jaxcoded.Options(sections_from=sections_from or None)
    with jaxcoded.CodedGroup(comm, work, options=wanted) as group:
        blocks = 3 * SIZE
        expected = blocks * (blocks + 1) / 2 * of_blocks(size)
        for number in range(2 * SIZE):
            late = RANK == number % SIZE
            total, mine = shared_round(gpu, stream, group, size, pause=0.02 * late)
            np.testing.assert_array_equal(total, expected.astype(np.float32))
            assert_same_bits(comm, total)
            assert len(set(mine)) == len(mine)
        if sections_from:
            assert formed(comm, group) > 0
        wait_for_all(comm)


@several
def test_lent_vectors_come_to_the_host_once_a_round(comm, gpu, stream):
    """A lent vector is copied once, when the program waits with nothing more to
    compute.
    """
    size = 2 * CHUNK
    with jaxcoded.CodedGroup(comm, jaxcoded.Shared(replicas=0, blocks=4)) as group:
        shared_round(gpu, stream, group, size)
        before = gpu.copied_bytes()
        shared_round(gpu, stream, group, size)
        # the vector to the host, and the sum to the GPU
        assert gpu.copied_bytes() - before == 2 * 4 * size
        wait_for_all(comm)


@several
@pytest.mark.parametrize(
    ("function", "after"),
    [
        ("cuMemcpyDtoHAsync_v2", 1),
        ("cuEventRecord", 1),
        # calls after the first copy, which may still be in progress
        ("cuEventRecord", 3),
        ("cuStreamWaitEvent", 2),
        ("cuLaunchHostFunc", 1),
    ],
)
def test_vectors_that_cannot_be_lent(comm, gpu, stream, function, after):
    """Only this rank gets the error, and the other ranks do its work."""
    size, last = 2 * CHUNK, SIZE - 1
    with jaxcoded.CodedGroup(comm, jaxcoded.Shared(blocks=2)) as group:
        shared_round(gpu, stream, group, size)
        wait_for_all(comm)
        if RANK == last:
            gpu.fail(function, after)
            with pytest.raises(AssertionError, match=function):
                shared_round(gpu, stream, group, size)
        else:
            total, _ = shared_round(gpu, stream, group, size)
            blocks = 2 * SIZE
            assert total[0] == blocks * (blocks + 1) / 2
        # a rank that continues after the error is in the same round as the other ranks
        assert set(comm.allgather(_engine.next_round(group._session.index))) == {3}


def test_blocks_computed_handler(comm, gpu, stream):
    with jaxcoded.CodedGroup(comm, jaxcoded.Shared(replicas=0, blocks=2)) as group:
        with group.blocks(4 * SIZE) as blocks:
            mine = [block.number for block in blocks]
        with arrays_on(gpu, stream, np.full(2 * SIZE, 9, np.float32)) as (out,):
            text = gpu.xla(
                "computed",
                stream,
                [fake.TOKEN],
                [fake.TOKEN, out.buffer()],
                group=group._session.index,
            )
            assert text == ""
            assert np.flatnonzero(out.read()).tolist() == sorted(mine)
        uncounted.allreduce(np.zeros(1), group)
