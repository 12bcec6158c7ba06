"""Sums in sections: how much each rank sends, and the bits of the sum."""

import collections
import random
import re

import numpy as np
import pytest

pytest.importorskip("_nodes", reason="built without the engine")

from simulation import (
    ALERT,
    DELEGATE,
    HEADER,
    MESSAGE,
    OWN,
    RESULT,
    SECTION,
    Call,
    World,
    Zeros,
)
from test_node_deadline import SECONDS, limits
from test_node_sharing import Partial

from jaxcoded import Coded, make_plan
from jaxcoded.tools.simulator import Layout, Network
from jaxcoded.tools.simulator.sections import Sections
from jaxcoded.transport import _engine

PIECE = 64  # bytes


def sent(plan):
    """Return how many pieces of messages and sections each rank sends, by kind and
    rank. All ranks call the round at once.
    """
    world = World(
        plan,
        [Call((("float64", 2 * PIECE * plan.size // 8),), 0)],
        random.Random(0),
        hosts=list(range(plan.size)),
        limits={"piece_bytes": PIECE, "announced_bytes": 128, "sections_from": 1},
    )
    world.settle()
    return collections.Counter(
        (what, source) for _, source, what, _, _ in world.fetched
    )


@pytest.mark.parametrize(
    ("n", "s", "m"),
    [(3, 0, 1), (12, 0, 1), (12, 1, 1), (12, 2, 1), (6, 1, 1), (70, 1, 1)]
    + [(12, 0, 2), (6, 0, 2)],
)
def test_as_simulated(n, s, m):
    """Copies of a message take turns, and all ranks form equal sections, up to a piece
    or two.
    """
    plan = make_plan(
        n + 1, Coded(fanout=n, stragglers=s, slices=m, root_computes=False)
    )
    payload = 2.0 * PIECE * plan.size
    everybody = np.ones(n, bool)
    job = Sections(Layout.of(plan), Network(piece=PIECE), payload)
    traffic = job.traffic(everybody, everybody, ~everybody)
    found = sent(plan)
    for kind, simulated in (
        (MESSAGE, traffic.terms_sent),
        (SECTION, traffic.sections_sent),
    ):
        in_engine = [found[kind, rank] for rank in range(plan.size)]
        np.testing.assert_allclose(simulated / PIECE, in_engine, atol=2)
    assert not found[MESSAGE, 0]  # zeros are not sent


def short_pieces(sections_from):
    return {
        "piece_bytes": PIECE,
        "announced_bytes": 128,
        "sections_from": sections_from,
    }


def star(seed, sections_from, dtype="float64"):
    """Play rounds of a root and six ranks; each message is sent by two of these ranks."""
    plan = make_plan(7, Coded(fanout=6, stragglers=1, code="fractional_repetition"))
    return World(
        plan,
        [Call(((dtype, 100), (dtype, 7)), number) for number in range(3)],
        random.Random(seed),
        hosts=list(range(plan.size)),
        limits=short_pieces(sections_from),
    )


def by_root(dtype):
    """Return the bits of the sum that the root forms alone."""
    world = star(0, 0, dtype)
    world.settle()
    world.assert_done()
    assert not any(what == SECTION for _, _, what, _, _ in world.fetched)
    return world.results


def makers(world):
    """Return the ranks that still form sections, as far as the root knows."""
    words = r"rank (\d+) forms pieces \d+ to (\d+), formed before (\d+)"
    found = re.findall(words, world.nodes[world.plan.root].status())
    return {int(rank) for rank, last, formed in found if formed != last}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(3))
def test_the_bits_of_a_sum_by_the_root(seed, dtype):
    """The bits do not depend on which rank came first, or which copy of a message was
    used.
    """
    world = star(seed, 1, dtype)
    for _ in range(random.Random(seed).randint(0, 1000)):
        world.step()
    world.settle()
    world.assert_done()
    assert {r for _, _, what, r, _ in world.fetched if what == SECTION} == {1, 2, 3}
    assert world.results == by_root(dtype)


def coded(seed, sections_from, hosts, **code):
    """Play rounds of seven ranks, one of them stopped, so that the sum needs the
    messages of all other ranks.
    """
    plan = make_plan(7, Coded(fanout=6, stragglers=1, **code))
    world = World(
        plan,
        [Call((("float32", 120), ("float64", 36)), number) for number in range(3)],
        random.Random(seed),
        hosts=hosts,
        limits=short_pieces(sections_from),
    )
    world.frozen = {6}
    for _ in range(random.Random(seed).randint(0, 1000)):
        world.step()
    world.settle()
    world.assert_done(set(range(6)))
    return world


@pytest.mark.parametrize("hosts", [[0] * 7, list(range(7)), [0, 0, 1, 1, 2, 2, 2]])
@pytest.mark.parametrize("slices", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_messages_shorter_than_the_sum(seed, slices, hosts):
    """A maker fetches each piece of the messages once, and forms a piece of each slice
    from it. The sum has the same bits as if the root forms it.
    """
    world = coded(seed, 1, hosts, slices=slices)
    assert {r for _, _, what, r, _ in world.fetched if what == SECTION} == {1, 2, 3}
    assert world.results == coded(seed, 0, hosts, slices=slices).results
    pieces = collections.Counter(
        (asker, source, round, piece)
        for asker, source, what, round, piece in world.fetched
        if what == MESSAGE and source
    )
    message = sum(-(-bytes_ // slices // PIECE) for bytes_ in (4 * 120, 8 * 36))
    # a maker does not fetch its own message
    assert 3 * 4 * message <= len(pieces) == sum(pieces.values()) <= 3 * 5 * message


@pytest.mark.parametrize("code", ["progressive", "adaptive"])
@pytest.mark.parametrize("seed", range(3))
def test_messages_of_several_parts(seed, code):
    world = coded(seed, 1, list(range(7)), code=code)
    assert world.plan.codings[0].code.parts > 1
    assert {r for _, _, what, r, _ in world.fetched if what == SECTION} == {1, 2, 3}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", range(3))
def test_the_bits_where_a_maker_is_replaced(seed, dtype):
    """The maker is stopped, and another rank forms its section from the message of the
    maker's twin.
    """
    world = star(seed, 1, dtype)
    root = world.plan.root
    while not (found := makers(world) - {root}):
        world.step()
    maker = random.Random(seed).choice(sorted(found))
    world.frozen = {maker}
    round = world.nodes[root].next_round()
    for _ in range(1000):
        if maker not in makers(world):
            break
        world.step()
    assert makers(world) and world.nodes[root].next_round() == round
    world.settle()
    world.assert_done(set(range(world.plan.size)) - {maker})
    world.frozen = set()
    world.settle()
    world.assert_done()
    assert world.results == by_root(dtype)


def tree(seed, sections_from, rounds=3, **options):
    """Play rounds of a root, four inner parents and four leaves of each; pairs of
    children send the same message.
    """
    plan = make_plan(21, Coded(fanout=4, stragglers=1, code="fractional_repetition"))
    return World(
        plan,
        [Call((("float32", 160), ("float64", 7)), number) for number in range(rounds)],
        random.Random(seed),
        hosts=list(range(plan.size)),
        limits=short_pieces(sections_from),
        **options,
    )


PIECES = 160 * 4 // PIECE + 1


def test_inner_parents_move_each_piece_once():
    """However many children a parent has, its port sends its vector, its message and
    the result once, and fetches the sections of its children.
    """
    world = tree(0, 1, rounds=1)
    world.settle()
    world.assert_done()
    sent = collections.Counter(
        (what, source) for _, source, what, _, _ in world.fetched
    )
    to = collections.Counter((what, asker) for asker, _, what, _, _ in world.fetched)
    for parent in range(1, 5):
        assert sent[OWN, parent] == sent[RESULT, parent] == PIECES
        leaves = world.plan.tree.children[parent]
        own_family = [
            (what, source)
            for asker, source, what, _, _ in world.fetched
            if asker == parent and source in leaves
        ]
        assert collections.Counter(what for what, _ in own_family) == {SECTION: PIECES}
        # the result; each leaf forms a quarter of it
        assert sum(to[RESULT, leaf] for leaf in leaves) == PIECES
        assert sum(sent[SECTION, leaf] for leaf in leaves) == (1 + 3) * PIECES
    assert not to[RESULT, 0]


@pytest.mark.parametrize("options", [{}, {"in_place": 1.0}, {"unreadable": 0.2}])
@pytest.mark.parametrize("seed", range(4))
def test_the_bits_of_a_tree(seed, options):
    """The sum has the same bits as without sections, whichever rank comes first or is stopped, even a parent."""
    without = tree(0, 0)
    without.settle()
    world = tree(seed, 1, **options)
    rng = random.Random(seed)
    while not all(node.next_round() > 3 for node in world.nodes):
        world.frozen = set()
        if rng.random() < 0.5:
            world.frozen = set(rng.sample(range(1, 21), rng.randint(1, 3)))
        for _ in range(rng.randint(0, 600)):
            world.step()
        if rng.random() < 0.5:
            world.frozen = set()
            world.settle()
    world.frozen = set()
    world.settle()
    world.assert_done()
    assert {r for _, _, what, r, _ in world.fetched if what == OWN}
    assert world.results == without.results


@pytest.mark.parametrize("seed", range(4))
def test_a_leaf_that_is_stopped_while_it_forms(seed):
    """The leaf's siblings form its part of their parent's message, and fetch its part of the result from the parent."""
    world = tree(seed, 1)
    rng = random.Random(seed)
    stopped = set()
    while not stopped:
        world.step()
        for parent in rng.sample(range(1, 5), 4):
            words = r"rank (\d+) forms pieces \d+ to (\d+), formed before (\d+)"
            found = re.findall(words, world.nodes[parent].status())
            stopped = {int(r) for r, last, done in found if last != done and int(r) > 4}
            if stopped:
                stopped = {rng.choice(sorted(stopped))}
                break
    world.frozen = stopped
    world.settle()
    world.assert_done(set(range(21)) - stopped)
    world.frozen = set()
    world.settle()
    world.assert_done()


@pytest.mark.parametrize("rounds_before", [0, 1, 4])
def test_patience_for_late_ranks_excludes_the_roots_stop(rounds_before):
    """The root is stopped for an hour while a sum is formed. In the next round rank 12
    is late, and the code tolerates that.
    """
    world = World(
        make_plan(13, Coded(fanout=12, stragglers=1, code="fractional_repetition")),
        [Call((("float64", 400),), number) for number in range(rounds_before + 2)],
        random.Random(1),
        hosts=list(range(13)),
        limits=short_pieces(1),
    )
    world.open = rounds_before
    world.settle()
    world.open += 1
    while "forms pieces" not in world.nodes[0].status():
        world.step()
    world.frozen = {0}
    for _ in range(50):
        world.step()
    world.clock += 3600
    world.frozen = set()
    world.settle()
    world.assert_done()
    world.open += 1
    world.idle = {12}
    begun = world.clock
    while world.nodes[0].frontier() <= world.open:
        world.sweep_all()
        world.clock += 0.01
        assert world.clock < begun + 1
    world.idle = set()
    world.settle()
    world.assert_done()


@pytest.mark.parametrize(
    ("code", "action"),
    [("cyclic_repetition", "raise"), ("fractional_repetition", "approximate")],
)
def test_a_stop_in_a_short_sum_does_not_extend_the_wait_in_a_long_sum(code, action):
    """Rank 12 stops while it forms its section. The next sum is a thousand times longer, and does not need it."""
    plan = make_plan(13, Coded(fanout=12, stragglers=1, code=code))
    short = 64 * plan.padding_multiple
    world = World(
        plan,
        [Zeros((("float32", short * times),), times) for times in (1, 1000, 1000)],
        random.Random(3),
        hosts=list(range(13)),
        limits={
            "piece_bytes": 1 << 18,
            "sections_from": 1,
            "section_pieces": 40,
            "least_piece_bytes": 16,
            "deadline_seconds": 5.0,
            "on_deadline": getattr(_engine.OnDeadline, action),
        },
    )
    world.open = 1
    while not any(
        asker == 12 and what == MESSAGE for asker, _, what, *_ in world.fetched
    ):
        world.step()
    world.frozen = {12}
    others = set(range(12))
    for world.open, most in ((1, 5), (2, 1), (3, 1)):
        begun = world.clock
        while not all(world.done(rank) for rank in others):
            world.sweep_all()
            world.clock += 0.01
            assert world.clock < begun + most, world.describe(0)


def test_long_rounds_do_not_extend_the_wait_for_a_stopped_maker():
    plan = make_plan(7, Coded(fanout=6, stragglers=1))
    rounds = 6
    world = World(
        plan,
        [Call((("float32", 160),), k) for k in range(rounds)],
        random.Random(0),
        hosts=list(range(plan.size)),
        limits=short_pieces(1),
    )
    for number in range(1, rounds):  # each round takes 20 s, until the root calls
        world.open, world.idle = number, {0}
        world.sweep_all()
        world.clock += 20
        world.idle = set()
        world.settle()
    world.open = rounds
    found = None
    while not found:
        world.step()
        words = r"rank (\d+) forms pieces \d+ to (\d+), formed before (\d+)"
        found = [
            int(rank)
            for rank, last, done in re.findall(words, world.nodes[0].status())
            if last != done and int(rank)
        ]
    world.frozen = {found[0]}
    start = world.clock
    world.sweep_all()
    while world.nodes[0].next_round() == rounds:
        world.clock += 0.05
        world.sweep_all()
    assert 0.5 < world.clock - start < 3


@pytest.mark.parametrize("inline", [(0,), (64,), (0, 256)])
@pytest.mark.parametrize("seed", range(4))
def test_no_rank_waits_for_a_sibling_that_forms_nothing(seed, inline):
    """A rank that got the result elsewhere reports that, and its siblings do not wait
    for it.
    """
    plan = make_plan(13, Coded(fanout=3, stragglers=1))
    world = World(
        plan,
        [Call((("float32", 160), ("float64", 7)), number) for number in range(3)],
        random.Random(seed),
        hosts=list(range(plan.size)),
        inline=inline,
        limits={
            "piece_bytes": PIECE,
            "announced_bytes": 1 << 20,
            "sections_from": 1,
            "silent_seconds": 1e6,
        },
    )
    for _ in range(random.Random(seed).randint(0, 3000)):
        world.step()
    world.settle()
    world.assert_done()


@pytest.mark.parametrize(
    ("plan", "stopped"),
    [
        (make_plan(5, Coded(fanout=4, stragglers=0)), 2),
        (make_plan(13, Coded(fanout=3, stragglers=0)), 6),
    ],
    ids=["star", "tree"],
)
def test_no_queue_grows_before_a_rank_that_every_sum_needs(plan, stopped):
    """The rank is stopped once the other ranks must form its part, too. They do not
    restart that part again and again."""
    world = World(
        plan,
        [Call((("float32", 4000),), 0)],
        random.Random(0),
        hosts=list(range(plan.size)),
        limits=short_pieces(1),
    )
    parent = plan.tree.parents[stopped]
    while " forms pieces " not in world.nodes[parent].status():
        world.step()
    world.frozen = {stopped}
    piles = []
    for _ in range(2):
        for _ in range(300):
            world.sweep()
            world.clock += 1
        words = sum(
            len(queue) for (_, to), queue in world.queues.items() if to == stopped
        )
        piles.append((words, sum(node.memory_bytes() for node in world.nodes)))
    assert piles[0] == piles[1] and piles[0][0] < 10, piles
    assert f"waits for rank {stopped};" in world.nodes[parent].waiting_for()
    world.frozen = set()
    world.settle()
    world.assert_done()


@pytest.mark.parametrize("seed", range(6))
def test_no_rank_waits_for_the_section_of_a_rank_that_left(seed):
    plan = make_plan(13, Coded(fanout=3, stragglers=seed % 2))
    rounds = 3
    world = World(
        plan,
        [Call((("float32", 320), ("float64", 7)), k) for k in range(rounds)],
        random.Random(seed),
        hosts=list(range(plan.size)),
        limits=short_pieces(1) | {"announced_bytes": 1 << 20, "silent_seconds": 1e6},
    )
    leaves = {rank for rank in range(plan.size) if not plan.tree.children[rank]}
    while leaves - world.leaving:
        assert world.clock < 1000
        for _ in range(1000):
            world.step()
            for rank in leaves - world.leaving:
                if world.nodes[rank].next_round() > rounds:
                    world.leave(rank)  # the rank's process ends
        if not world.sweep():
            world.clock += 1
    world.settle()
    world.assert_done()


def test_a_message_within_an_offer_whose_first_part_was_elsewhere():
    """A section is formed from a part of a message, which lies with its rank. The rank then offers a short message,
    which carries all its parts. The section takes long, and another rank gets it.
    """
    plan = make_plan(4, Coded(code="progressive"))
    world = World(
        plan,
        [Call((("float64", 60),), 0)],
        random.Random(0),
        hosts=list(range(4)),
        limits={
            "sections_from": 1,
            "section_pieces": 6,
            "least_piece_bytes": 16,
            "piece_bytes": 64,
            "announced_bytes": 64,
        },
    )
    world.inline[1, 0] = 1 << 20
    world.begins_with[1, 1] = 1
    world.submit(1)
    world.submit(2)
    world.idle = {1, 2, 3}
    while "forms pieces" not in world.nodes[0].status():
        world.step()
    world.extend(1)
    world.advance(1)
    while world.queues[1, 0]:
        world.deliver((1, 0))
    world.clock += 1000
    world.advance(0)
    world.idle = set()
    world.settle()
    world.assert_done()


def decided_by_the_root(world, lost, told):
    """Let ranks continue until the root and rank 1 have ended the open round. The root's message to rank 1 for which
    ``lost`` is true gets lost, as MPI tells the rank ``told``, and rank 1's alert comes too late. If ``told`` is
    ``None``, MPI tells the root after the round.
    """
    later = []
    while not all(world.nodes[rank].next_round() > world.open for rank in (0, 1)):
        for rank in (0, 2, 1):
            world.advance(rank)
            for link in [link for link in world.queues if link[1] == rank]:
                while queue := world.queues[link]:
                    if link == (0, 1) and lost(queue[0]):
                        if told is None:
                            later.append(queue.popleft())
                        else:
                            world.lose(link, told)
                    elif link == (1, 0) and queue[0][0] == ALERT:
                        break
                    else:
                        world.deliver(link)
            for request in [r for r in world.requests if r[1] == rank]:
                world.requests.remove(request)
                world.answer(request)
            for answer in [a for a in world.answers if a[0] == rank]:
                world.answers.remove(answer)
                world.arrive(answer)
        world.clock += 0.05
    for _ in later:
        world.nodes[0].lost_message(1)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(
    "why", ["lost", "lost again", "told later", "too little memory"]
)
def test_the_message_that_gives_sections_up_does_not_come(seed, why):
    """At the deadline a rank is missing, and the root forms another sum by itself. MPI loses the root's message about
    this, and tells the receiver; or it tells the root, after an earlier loss or after the round; or the receiver has
    too little memory. The receiver does not mix pieces of both sums.
    """
    call = Partial((("float64", 160),), 3)
    world = World(
        make_plan(4, Coded(stragglers=0)),
        [call, call, call],
        random.Random(seed),
        hosts=list(range(4)),
        limits=limits("approximate", piece_bytes=64, announced_bytes=128)
        | {"sections_from": 1},
    )
    told, world.open = 1, 0
    if why == "lost again":
        told, world.open = 0, 1
        world.nodes[0].lost_message(1)  # fails round 1
        world.settle()
        world.clock = 0.0
    elif why == "told later":
        told = None
    world.open += 1
    for _ in range(random.Random(seed).randint(100, 1000)):
        world.step()
        world.clock = 0.0
    if world.nodes[0].next_round() > world.open:
        return
    world.frozen.add(3)
    if why == "too little memory":
        world.short_of_memory.add(1)
    for _ in range(200):
        world.sweep()
    if "forms pieces" not in world.nodes[0].status():
        return
    world.clock += SECONDS + 1

    def lost(m):
        gives_up = m[0] == DELEGATE and not any(m[HEADER.size :][:8])
        return why != "too little memory" and gives_up

    decided_by_the_root(world, lost, told)
    world.frozen.clear()
    world.short_of_memory.clear()
    world.open += 1
    world.settle()  # the world compares the bytes
    assert all(world.open in ends for ends in world.ends)


def test_the_root_hands_its_own_sum_over_while_others_form_sections():
    """Rank 2 dies, and rank 3's message came within its offer, where no other rank can fetch it. So the root forms the
    sum by itself. The sum takes the place of the root's own vector, piece by piece. Rank 1 does not know this yet, and
    reads that vector for its section.
    """
    world = World(
        make_plan(4, Coded(fanout=3, stragglers=1, root_computes=True)),
        [Call((("float64", 160),), 0)],
        random.Random(0),
        hosts=[0] * 4,
        in_place=1.0,
        limits=short_pieces(1) | {"announced_bytes": 64},
    )
    world.inline[3, 0] = 1 << 20
    world.idle = {3}
    while "rank 1 forms pieces" not in world.nodes[1].status():
        world.step()
    world.frozen = {1}
    world.idle = set()
    world.kill(2, known=True)
    world.submit(3)
    while "decoded 19 of" not in world.nodes[0].status():
        assert world.nodes[0].next_round() == 1
        for rank in (3, 0):
            world.advance(rank)
            for link in [link for link in world.queues if link[1] == rank]:
                while world.queues[link]:
                    world.deliver(link)
    read = len(world.fetched)
    world.advance(1)  # the world checks what this rank reads
    assert any(what == OWN for _, _, what, _, _ in world.fetched[read:])
    world.frozen = set()
    world.settle()
    world.assert_done({0, 1, 3})


def test_an_approximate_sum_uses_a_rank_that_was_silent_for_a_while():
    """Rank 2 is stopped while sections are formed, and rank 1 dies. There is no deadline yet, as no round has ended.
    Rank 2 comes back, and the root sums what ranks 2 and 3 have.
    """
    world = World(
        make_plan(4, Coded(stragglers=0)),
        [Partial((("float64", 160),), 3)],
        random.Random(0),
        hosts=[0, 1, 0, 1],  # rank 2 sends the root no pieces
        limits=short_pieces(1)
        | {
            "on_deadline": _engine.OnDeadline.approximate,
            "deadline_rounds": 2.0,
        },
    )
    while "forms pieces" not in world.nodes[2].status():
        world.step()
    world.frozen = {2}
    while "child 2 offers 20 of round 1 (stalled)" not in world.nodes[0].status():
        world.sweep()
        world.clock += 0.05
    world.kill(1, known=True)
    for _ in range(100):
        world.sweep()
        world.clock += 0.05
    world.frozen = set()
    world.settle()
    assert all(1 in world.ends[rank] for rank in (0, 2, 3))


class CutOff(World):
    """Ranks 1 and 2 fetch nothing from each other, and MPI reports no error."""

    cut_off = False

    def answer(self, request):
        if not (self.cut_off and {request[0], request[1]} == {1, 2}):
            super().answer(request)


@pytest.mark.parametrize("action", ["wait", "raise"])
def test_siblings_that_do_not_reach_each_other(action):
    """The root notices once that a section is not formed, although all ranks answer. It forms the sums of the next 8
    rounds alone. Then it tries again, and the next pause is twice as long.
    """
    plan = make_plan(3, Coded(parents=(-1, 0, 0), stragglers=0))
    script = [Call((("float64", 64),), number) for number in range(28)]
    world = CutOff(
        plan,
        script,
        random.Random(0),
        hosts=[0, 1, 2],
        limits=limits(action) | short_pieces(1),
    )
    world.open = 1
    world.settle()
    assert any(what == SECTION for _, _, what, _, _ in world.fetched)
    assert not world.news[0]
    world.cut_off = True
    slow = []
    for world.open in range(2, 29):
        start = world.clock
        while any(node.next_round() <= world.open for node in world.nodes):
            assert world.clock < start + 10, world.describe(0)
            world.sweep_all()
            world.clock += 0.1
        if world.clock > start + 1:
            slow.append(world.open)
    world.assert_done()
    assert slow == [2, 11, 28]
    first, second, third = world.news[0]
    assert "gets no data from other ranks, although all ranks answer" in first
    assert "rank 0 forms the long sums of the next 8 rounds alone" in first
    assert "the next 16 rounds alone" in second and "the next 32 rounds alone" in third


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_stops_is_not_taken_for_an_error_of_the_network(seed):
    """It is late, so another rank forms its section, and the next sums are formed in sections, too."""
    plan = make_plan(7, Coded(fanout=6, stragglers=1, code="fractional_repetition"))
    script = [Call((("float64", 400 * plan.padding_multiple),), k) for k in range(3)]
    world = World(
        plan, script, random.Random(seed), hosts=range(7), limits=short_pieces(1)
    )
    world.open = 1
    world.settle()
    world.open = 2
    while not makers(world):
        world.step()
    world.frozen = {1 + seed}
    end = world.clock + 10
    while world.clock < end and world.nodes[0].next_round() == 2:
        world.clock += 0.002
        world.sweep()
    assert world.nodes[0].next_round() == 3
    assert not any("gets no data" in text for text in world.news[0])
