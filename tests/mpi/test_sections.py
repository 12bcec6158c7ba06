"""Long sums are formed in sections, each by a different rank."""

import itertools
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import uncounted
from marks import SIZE, engine_only, several
from mpi4py import MPI
from reference import BATCH, assert_same_bits, assert_sum, contribution, per_example
from together import late_ranks, one_late, wait_for_all, wait_until
from uncounted import coded_allreduce, coded_allreduce_start

import jaxcoded
from jaxcoded import coded_allreduce_done

pytestmark = [engine_only, several, pytest.mark.ranks(4, 7, exhaustive=(2,))]

RANK = MPI.COMM_WORLD.rank
CODES = [{"stragglers": 0}]
if SIZE >= 4:
    CODES += [
        {"stragglers": 1, "code": "cyclic_repetition"},
        {"stragglers": 2 if SIZE == 4 else 1},
        {"strategy": jaxcoded.Shared(replicas=min(2, SIZE - 1))},
    ]
CODED = []  # messages that differ in length from the sum: half of it, or two parts
if SIZE >= 4:
    CODED = [
        {"stragglers": 1, "slices": 2},
        {"stragglers": 1, "code": "progressive"},
    ]
if SIZE in (7, 13):  # the root's children add up their children's messages
    CODES += [{"fanout": 2 if SIZE == 7 else 3, "stragglers": s} for s in (0, 1)]
ALIKE = [{"stragglers": 0}]  # the bits do not depend on the chosen messages
if SIZE in (4, 7):
    repeated = {"stragglers": 2 if SIZE == 4 else 1, "code": "fractional_repetition"}
    ALIKE.append(repeated)
PIECE = 16 << 10  # bytes
NUMBERS = 30_000  # 15 pieces, and 8 pieces in single precision
MOST = 50  # attempts, as a loaded machine may prevent success


@pytest.fixture(autouse=True)
def engine(transport):
    """All groups use the engine."""


def opened(comm, strategy=None, options=None, **coded):
    """Open a group that forms its sums in sections; all other ranks are the root's
    children.
    """
    wanted = jaxcoded.Options(sections_from=1, piece_bytes=PIECE)
    strategy = strategy or jaxcoded.Coded(**{"fanout": SIZE - 1, **coded})
    return jaxcoded.CodedGroup(
        comm, strategy, transport="engine", options=options or wanted
    )


@pytest.fixture(params=CODES, ids=str)
def family(comm, request):
    with opened(comm, **request.param) as group:
        yield group


def vectors(numbers, seed=0):
    """Return vectors of two dtypes for each example of the batch."""
    return {
        "double": per_example(numbers, seed=seed),
        "single": per_example(numbers // 2 + 3, seed=seed + 1, dtype="float32"),
    }


def own(group, gradients):
    """Return this rank's contribution."""
    if not group.plan.strategy.by_blocks:
        return contribution(group, gradients)
    mine = slice(RANK * BATCH // SIZE, (RANK + 1) * BATCH // SIZE)
    return jax.tree.map(lambda leaf: leaf[mine].sum(0).astype(leaf.dtype), gradients)


def makers(group):
    """Return the ranks other than the root that may form sections."""
    return group.plan.coded_children(group.plan.root)


def formed(group):
    """Return the bytes of sums that this rank has formed for all ranks."""
    return group.statistics()["formed_bytes"]


@pytest.mark.parametrize(
    ("family", "donated"),
    [*itertools.product(CODES, [True, False]), *((code, False) for code in CODED)],
    indirect=["family"],
    ids=str,
)
def test_the_same_bits_everywhere(comm, family, donated):
    gradients = vectors(NUMBERS)
    mine = own(family, gradients)
    step = jax.jit(
        lambda x, token: coded_allreduce(x, family, token=token),
        donate_argnums=(0,) if donated else (),
    )
    token = jnp.int32(0)
    each = family.plan.padding_multiple  # the multiple to which a vector is padded
    bytes_of_all = sum(
        -(-leaf[0].size // each) * each * leaf.itemsize for leaf in gradients.values()
    )
    by_rank, by_all = [0] * SIZE, []
    # The last rank may form nothing. A root whose children form the whole sum from
    # their own copies forms nothing either. On a loaded machine a section may be formed
    # twice, if its maker sleeps for a while.
    others = makers(family)
    for _ in range(MOST):
        total, _, token = step(jax.tree.map(jnp.asarray, mine), token)
        assert_sum(family, total, gradients)
        assert_same_bits(comm, total)
        before, by_rank = by_rank, comm.allgather(formed(family))
        by_all.append(sum(by_rank) - sum(before))
        if all(by_rank[rank] for rank in others) and bytes_of_all in by_all:
            break
    assert [rank for rank in range(1, SIZE) if by_rank[rank]] == sorted(others)
    assert bytes_of_all in by_all
    assert SIZE == 2 or max(by_rank) < sum(by_rank)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("code", ALIKE, ids=str)
def test_the_bits_of_a_sum_by_the_root(comm, code, dtype):
    by_root = jaxcoded.Options(sections_from=0, piece_bytes=PIECE)
    with (
        opened(comm, **code) as group,
        opened(comm, options=by_root, **code) as other,
    ):
        for seed in range(3):
            gradients = per_example(NUMBERS, seed=seed, dtype=dtype)
            mine = own(group, gradients)
            total = uncounted.allreduce(mine, group)
            assert_sum(group, total, gradients)
            assert total.tobytes() == uncounted.allreduce(mine, other).tobytes()
            assert_same_bits(comm, total)
        assert sum(comm.allgather(formed(group))) >= 3 * total.nbytes
        assert not formed(other)


def test_other_lengths_in_turns(comm, family):
    """Lengths alternate, and some are too short for sections. NumPy arrays are summed,
    also in place.
    """
    for numbers in [1, 2_049, 5, NUMBERS, 16_384]:
        gradients = per_example(numbers)
        mine = np.array(own(family, gradients))
        assert_sum(family, uncounted.allreduce(mine, family), gradients)
        out = uncounted.allreduce(mine, family, out=mine)
        assert_sum(family, out, gradients)
        assert_same_bits(comm, out)


def test_ranks_that_come_at_random(comm, family):
    """Ranks come while other ranks form the sum, or later."""
    gradients = per_example(NUMBERS)
    mine = own(family, gradients)
    for number in range(30):
        random = np.random.default_rng(100 * number + RANK)
        time.sleep(random.choice([0, 0.001, 0.004, 0.02]))
        total = uncounted.allreduce(mine, family)
        assert_sum(family, total, gradients)
    assert_same_bits(comm, total)


@late_ranks
@pytest.mark.skipif(SIZE < 4, reason="no redundancy")
@pytest.mark.parametrize(
    "shape",
    [{}] + [{"fanout": SIZE // 4}] * (SIZE == 13) + [{"fanout": 2}] * (SIZE == 7),
    ids=str,
)
def test_a_late_rank_delays_no_other(comm, late, shape):
    with opened(comm, stragglers=1, **shape) as group:
        gradients = per_example(NUMBERS)
        mine = own(group, gradients)

        def steps():
            for _ in range(3):
                total = uncounted.allreduce(mine, group)
                assert_sum(group, total, gradients)
            return total

        may = {group.plan.root, *makers(group)} - {late}
        # In a tree, ranks whose own sums are late form less, or nothing. On a loaded machine any rank may be late.
        for _ in range(1 if shape else MOST):
            assert_same_bits(comm, one_late(comm, group, late, 3, steps))
            by_rank = comm.allgather(formed(group))
            do = {rank for rank in range(SIZE) if by_rank[rank]}
            assert do <= may
            if do == may:
                break
        assert shape or do == may


def test_started_rounds_and_ranks_with_nothing_to_contribute(comm, family):
    gradients = [vectors(NUMBERS, seed) for seed in range(3)]
    handles = [coded_allreduce_start(own(family, each), family) for each in gradients]
    for each, handle in zip(gradients, handles):
        assert_sum(family, coded_allreduce_done(handle), each)
    if family.plan.strategy.by_blocks or not family.plan.strategy.stragglers:
        return
    skip = RANK == SIZE - 1
    total = coded_allreduce(own(family, gradients[0]), family, skip=skip)
    assert_sum(family, total, gradients[0])
    assert_same_bits(comm, total)


@pytest.mark.skipif(SIZE < 4, reason="nobody else holds the blocks")
def test_blocks(comm):
    """A rank that calls for another block has changed the vector that other ranks may
    be reading.
    """
    gradients = per_example(NUMBERS)
    with opened(comm, jaxcoded.Shared(replicas=min(2, SIZE - 1))) as group:
        for number in range(6):
            total = np.zeros(NUMBERS)
            with group.blocks(BATCH) as blocks:
                for block in blocks:
                    time.sleep(0.02 if RANK == 1 + number % (SIZE - 1) else 0.001)
                    total += gradients[block.indices].sum(0)
            total = uncounted.allreduce(total, group)
            assert_sum(group, total, gradients)
            assert_same_bits(comm, total)
        assert sum(comm.allgather(formed(group))) >= 6 * total.nbytes


def test_other_threads_get_their_turn(comm):
    """Other threads need not wait until the engine has nothing more to do for a round."""
    mine = np.ones(1 << 22)
    pieces = -(-mine.nbytes // PIECE)
    with opened(comm, stragglers=0) as group:

        def seen_in(number):
            """Return the states of the round that another thread of the root sees."""
            offered = f"offers {pieces} of round {number}"
            wait_until(lambda: offered in group._session.transport.status())
            seen, over = set(), threading.Event()

            def look():
                while not over.is_set():
                    here = re.findall(
                        r"here before (\d+)", group._session.transport.status()
                    )
                    # states before and after the round do not count
                    seen.add(tuple(here))

            looking = threading.Thread(target=look)
            looking.start()
            uncounted.allreduce(mine, group)
            over.set()
            looking.join()
            return seen - {()}

        for number in range(1, MOST + 1):
            seen = set()
            if group.plan.root == RANK:
                seen = seen_in(number)
            else:
                uncounted.allreduce(mine, group)
            # on a loaded machine the thread may sleep during a round
            if comm.bcast(len(seen) > 1, group.plan.root):
                return
        raise AssertionError(seen)


def test_groups_are_closed_while_others_still_fetch(comm):
    """The other ranks get their sums, even if the first rank to leave has formed a
    section."""
    gradients = per_example(NUMBERS)
    for number in range(10):
        with opened(comm, stragglers=1 if SIZE > 3 else 0) as group:
            time.sleep(0.01 if RANK == number % SIZE else 0)
            assert_sum(
                group, uncounted.allreduce(own(group, gradients), group), gradients
            )
    wait_for_all(comm)
