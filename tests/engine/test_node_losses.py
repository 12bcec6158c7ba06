"""MPI loses messages, and tells one of the two ranks of each loss."""

import random

import pytest
from hypothesis import example, given
from schedules import many, seeds

pytest.importorskip("_nodes", reason="built without the engine")

from simulation import (
    BYE,
    DONE,
    FAILED,
    NOTE,
    OFFER,
    RESULTS,
    WANT,
    Call,
    World,
    random_plan,
    random_world,
)
from test_node_deadline import SECONDS, limits
from test_node_silent import CHAIN, TICK, ended, pass_time, world_of

from jaxcoded import Coded, make_plan


@many
@given(seeds)
@example(4)  # two lost messages on one link
def test_messages_that_mpi_loses(seed):
    """MPI tells the sender or the receiver of each lost message. No rank waits for
    ever, and no sum is wrong.
    """
    rng = random.Random(seed)
    plan = random_plan(rng, 2, 5)
    action = rng.choice(["wait", "wait", "raise"])
    world = random_world(plan, 8, rng, limits=limits(action))
    world.recovers = False
    losses, kind = (
        rng.randint(1, 4),
        rng.choice([None, None, OFFER, WANT, RESULTS, NOTE]),
    )
    for _ in range(4000):
        world.step()
        links = [
            link
            for link, queue in world.queues.items()
            if queue and kind in (None, queue[0][0])
        ]
        if links and losses and rng.random() < 0.3:
            link = rng.choice(links)
            world.lose(link, rng.choice(link))
            losses -= 1
    for _ in range(4):
        world.settle()
        world.clock += 100
    for rank, node in enumerate(world.nodes):
        assert node.next_round() > 8 or node.desynchronized(), world.describe(rank)


@pytest.mark.parametrize("told", [0, 1])
def test_a_question_that_mpi_loses_is_asked_again(told):
    """MPI tells the sender or the receiver of the lost question. Rank 3 waits below
    rank 1, whose program is away.
    """
    tree = Coded(parents=(-1, 0, 0, 1, 2), code={0: "fractional_repetition"})
    world = world_of(make_plan(5, tree), "wait")
    world.idle.add(1)
    world.open = 2
    while not (queue := world.queues[1, 0]) or queue[0][0] != WANT:
        world.step()
    world.lose((1, 0), told)
    world.settle()
    world.open = 6
    for _ in range(5):
        world.settle()
        world.clock += 100
    assert [node.next_round() for node in world.nodes] == [7, 2, 7, 7, 7]


def test_a_lost_offer_of_a_round_that_its_receiver_does_not_know():
    """Rank 2 is stopped while round 2 fails, and learns of a lost offer of round 3 before it
    learns of this failure. Round 3 fails.
    """
    world = world_of(CHAIN, "wait")
    world.open = 2
    while not (queue := world.queues[1, 0]) or queue[0][0] != OFFER:
        world.step()
    world.frozen.add(2)
    world.lose((1, 0), 0)
    pass_time(world, ended(world, {3}, 2))
    world.open = 3
    pass_time(world, lambda: world.nodes[3].next_round() == 3 and world.queues[3, 2])
    world.frozen.clear()
    while (queue := world.queues[3, 2]) and queue[0][0] != OFFER:
        world.deliver((3, 2))
    world.lose((3, 2), 2)
    world.open = 6
    for _ in range(5):
        world.settle()
        world.clock += 100
    for rank in range(4):
        outcomes = [end.outcome for end in world.ends[rank].values()]
        assert outcomes == [DONE, FAILED, FAILED, DONE, DONE, DONE]


@pytest.mark.parametrize("told", [0, 1])
@pytest.mark.parametrize("action", ["wait", "raise"])
def test_a_lost_message_that_no_more_offers_will_come(action, told):
    """Rank 1 tells the root that it cannot offer a sum any more, as the rank below it has
    left. No round is waited for.
    """
    tree = make_plan(4, Coded(parents=(-1, 0, 1, 0), stragglers=0))
    world = world_of(tree, action)
    world.leave(2)
    world.sweep_all()
    world.open = 2
    while not (queue := world.queues[1, 0]) or queue[0][0] != BYE:
        world.step()
    world.lose((1, 0), told)
    world.open = 6
    for _ in range(100):
        world.sweep_all()
        world.clock += TICK
    for rank in (0, 1, 3):
        errors = [end.error for end in world.ends[rank].values() if end.error]
        assert "MPI has lost a message" in errors[0]
        assert len(errors) == 5, world.describe(rank)
        assert all("rank 2 closed the group" in error for error in errors[1:])


def test_losses_in_rounds_that_usually_take_long():
    """Rounds take twice the 5 s that the first losses wait. A second loss on a link waits longer
    than a round, and fails none.
    """
    pair = make_plan(3, Coded(parents=(-1, 0, 0), stragglers=0))
    script = [Call((("float64", 8),), seed) for seed in range(12)]
    world = world_of(pair, "wait", script)
    for world.open in range(2, 13):
        world.idle = {2}
        world.sweep_all()
        if world.open in (10, 11):
            world.nodes[0].lost_message(1)
        pass_time(world, lambda end=world.clock + 12: world.clock > end)
        world.idle = set()
        world.sweep_all()
    failed = [n for n, end in world.ends[0].items() if end.outcome != DONE]
    assert failed == [10]


def test_a_lost_request_in_rounds_that_take_minutes():
    """MPI loses a rank's request for the result, and tells the root. It is the second loss on
    this link. The rank asks again after 5 s, not after two usual rounds.
    """
    pair = make_plan(2, Coded(parents=(-1, 0), stragglers=0))
    script = [Call((("float64", 8),), seed) for seed in range(10)]
    world = World(pair, script, random.Random(0), hosts=[0, 1], limits=limits("wait"))
    world.recovers = False
    for world.open in range(1, 9):
        world.idle = {1}
        world.sweep_all()
        world.clock += 500
        world.idle = set()
        world.settle()
    world.assert_done()
    world.nodes[0].lost_message(1)  # fails round 9
    world.open = 10
    for _ in range(1000):
        if lost := [request for request in world.requests if request[:2] == (1, 0)]:
            break
        world.step()
    world.requests.remove(lost[0])
    world.nodes[0].lost_message(1)
    pass_time(world, lambda: 10 in world.ends[1])
    assert world.ends[1][10].outcome == DONE


# Links that lose all messages.


class BrokenLink(World):
    """MPI loses all messages from a rank to another rank, and tells one of them of each."""

    broken, told, losses = None, None, 0

    def deliver(self, link):
        if link != self.broken:
            return super().deliver(link)
        self.losses += 1
        assert self.losses < 100, "the ranks keep sending over the link"
        self.lose(link, self.told)

    def pass_time(self, seconds):
        """Let time pass. Messages get lost even if the other rank is frozen."""
        end = self.clock + seconds
        while self.clock < end:
            self.sweep_all()
            while self.broken and self.queues[self.broken]:
                self.deliver(self.broken)
            self.clock += TICK

    def outcomes(self, rank):
        """Return how the rounds of a rank ended."""
        return [end.outcome for end in self.ends[rank].values()]


def broken_link(plan, link, told, action="wait", rounds=30):
    """Return a world in which a link breaks after the first round."""
    script = [Call((("float64", 8),), seed) for seed in range(rounds)]
    world = BrokenLink(plan, script, random.Random(0), limits=limits(action))
    world.recovers = False
    world.open = 1
    world.settle()
    world.assert_done()
    world.broken, world.told = link, told
    return world


links = pytest.mark.parametrize("link", [(0, 1), (1, 0)])
ends = pytest.mark.parametrize("told", [0, 1])


@links
@ends
def test_a_code_bears_a_broken_link(link, told):
    """Only one round fails because of the link to a rank that the code can do without."""
    star = make_plan(4, Coded(parents=(-1, 0, 0, 0), stragglers=1))
    world = broken_link(star, link, told)
    for world.open in range(2, 31):
        world.pass_time(1)
    for rank in (0, 2, 3):
        assert world.outcomes(rank).count(DONE) >= 29, world.describe(rank)
    assert len(world.ends[1]) <= 2, world.describe(1)


@pytest.mark.parametrize(("link", "told"), [((0, 1), 0), ((0, 1), 1), ((1, 0), 0)])
def test_without_a_code_each_round_gets_an_error(link, told):
    """The root learns that messages to or from a rank are lost, and no round can be
    decided without this rank.
    """
    star = make_plan(3, Coded(parents=(-1, 0, 0), stragglers=0))
    world = broken_link(star, link, told, rounds=10)
    world.open = 10
    world.pass_time(200)
    for rank in (0, 2):
        assert world.nodes[rank].next_round() == 11, world.describe(rank)
        errors = [end.error for end in world.ends[rank].values() if end.error]
        assert len(errors) >= 8
        assert all("MPI has lost a message to or from rank" in e for e in errors)


def without_rank_1(link, action, rounds):
    """Return a world of 9 ranks in which a link breaks. The root needs only 3 of its 4
    children.
    """
    parents = [-1, 0, 0, 0, 0, 1, 2, 3, 4]
    tree = Coded(parents=parents, code={0: "fractional_repetition"})
    return broken_link(make_plan(9, tree), link, 5, action, rounds)


@pytest.mark.parametrize("frozen", [set(), {1}])
@pytest.mark.parametrize("action", ["wait", "raise"])
def test_a_rank_further_up_has_the_result(frozen, action):
    """Rank 5 cannot reach its parent, rank 1, which may be frozen, too."""
    world = without_rank_1((5, 1), action, rounds=2)
    world.frozen = frozen
    world.open = 2
    world.pass_time(2 * SECONDS)
    assert 2 in world.ends[5], world.describe(5)
    assert world.ends[5][2] == world.ends[0][2]


@pytest.mark.parametrize("action", ["wait", "raise"])
def test_a_rank_further_up_has_the_results_of_slow_rounds(action):
    """A rank waits for its source for two usual rounds before it asks another rank. Meanwhile its question to its
    parent is lost again.
    """
    world = without_rank_1(None, action, rounds=12)
    for world.open in range(2, 7):
        world.idle = {0}  # the root's program computes
        world.pass_time(4)
        world.idle = set()
        world.pass_time(1)
    world.assert_done()
    world.broken = (5, 1)
    world.open = 12
    world.pass_time(120)
    assert [node.next_round() for node in world.nodes] == [13] * 9


@pytest.mark.parametrize("losses", ["one", "all"])
def test_lost_messages_do_not_put_off_the_deadline(losses):
    """Rank 5 cannot reach its parent, rank 1, which is frozen. Then the root freezes, too."""
    world = without_rank_1(None, "raise", rounds=3)
    world.frozen = {1}
    world.open = 2
    while 2 not in world.ends[5]:
        world.pass_time(TICK)
    if losses == "all":
        world.broken = (5, 1)
    else:
        world.lose((5, 1), 5)
    world.pass_time(TICK)
    world.frozen = {0, 1}
    world.open = 3
    world.pass_time(3 * SECONDS)
    assert "DeadlineExceeded: round 3" in world.ends[5][3].error


def test_a_bye_over_a_broken_link():
    """The rank that leaves repeats its bye, but not in each turn. It has left once the link
    works again.
    """
    pair = make_plan(2, Coded(parents=(-1, 0), stragglers=0))
    world = broken_link(pair, (1, 0), 1, rounds=1)
    world.nodes[1].leave()
    world.pass_time(100)
    assert not world.nodes[1].left()
    assert world.losses > 5
    world.broken = None
    world.pass_time(20)
    assert world.nodes[1].left()
