"""Anything may happen at any moment, in any order: no sum is wrong, and each living rank gets to
the end.
"""

import random

import pytest
from hypothesis import given
from schedules import many, seeds

pytest.importorskip("jaxcoded.transport._engine", reason="built without the engine")

import test_node_sharing_alone
from simulation import (
    BYE,
    DESYNCHRONIZED,
    DONE,
    Call,
    comparing,
    random_plan,
    random_world,
    tolerated,
)
from test_node_deadline import SECONDS, limits
from test_node_everything import mixed_script
from test_node_sharing import Sharing

ROUNDS = 10


class Disorder:
    """Things that happen to a world, drawn at random.

    Args:
        kinds: the kinds of things that happen in this run. Fewer make others meet more often.
    """

    def __init__(self, world, rng, kinds):
        self.world, self.rng = world, rng
        self.kinds = kinds
        self.losses = rng.choice([1, 3, 10])
        self.unreported = set()

    def happen(self):
        getattr(self, self.rng.choice(self.kinds))()

    def living(self):
        return sorted(set(range(self.world.plan.size)) - self.world.dead)

    def _some(self):
        living = self.living()
        return set(self.rng.sample(living, self.rng.randint(0, len(living))))

    def stop(self):
        self.world.frozen = self._some()

    def stay_away(self):
        self.world.idle = self._some()

    def come_back(self):
        self.world.frozen, self.world.idle = set(), set()
        self.world.short_of_memory.clear()

    def queue_calls(self):
        self.world.started = self._some()

    def lack_memory(self):
        self.world.short_of_memory = self._some()

    def die(self):
        living = self.living()
        if len(living) > 1:
            rank = self.rng.choice(living)
            known = self.rng.random() < 0.5
            self.world.kill(rank, known=known)
            self.unreported |= set() if known else {rank}
            self.world.frozen.discard(rank)
            self.world.idle.discard(rank)

    def report(self):
        """MPI reports deaths to some ranks."""
        world = self.world
        for rank in sorted(self.unreported):
            for peer in self.living():
                if (rank, peer) in world.queues and self.rng.random() < 0.5:
                    world.nodes[peer].lost(rank)
                    world.check_end(peer)

    def leave(self):
        world = self.world
        rank = self.rng.choice(self.living() or [0])
        if rank in world.dead:
            return
        running = world.running[rank]
        shared = isinstance(running, Sharing) and not running.left
        if not shared and rank not in world.leaving | world.frozen:
            world.leave(rank)
            world.check_end(rank)

    def lose(self):
        living = set(self.living())
        queues = self.world.queues.items()
        links = [link for link, queue in queues if queue and set(link) <= living]
        if links and self.losses:
            self.losses -= 1
            link = self.rng.choice(links)
            # a rank may have ended when only its parent knows that its last message is lost
            last = self.world.queues[link][0][0] == BYE
            self.world.lose(link, link[0] if last else self.rng.choice(link))

    def raise_between_blocks(self):
        """An exception ends a program's loop over its blocks."""
        rank = self.rng.choice(self.living() or [0])
        running = self.world.running[rank]
        others = rank != self.world.plan.root
        if others and isinstance(running, Sharing) and not running.over:
            self.world.leave_share(rank)

    def call_something_else(self):
        """A rank's next call is another one."""
        world, rank = self.world, self.rng.randrange(self.world.plan.size)
        round = world.nodes[rank].next_round() + (world.running[rank] is not None)
        plain = all(type(call) is Call for call in world.script[round - 1 : round])
        if plain and round not in getattr(world, "shared", ()):
            other = Call((("float32", 5 * world.plan.padding_multiple),), round)
            world.deviations[rank, round] = other

    def wait(self):
        self.world.clock += self.rng.choice([0.1, 1, SECONDS, 10 * SECONDS])

    def settle(self):
        for _ in range(10):
            self.world.sweep()

    def go_on(self):
        for _ in range(self.rng.choice([1, 10, 100])):
            self.world.step()

    def end(self):
        """Let what can come to an end do so."""
        world = self.world
        self.come_back()
        while self.unreported:
            rank = self.unreported.pop()
            world.reported.add(rank)
            for peer in self.living():
                if (rank, peer) in world.queues:
                    world.nodes[peer].lost(rank)
                    world.check_end(peer)
            for request in [r for r in world.requests if r[1] == rank]:
                world.requests.remove(request)
                world._ask(request)
        for _ in range(4):
            world.settle()
            world.clock += 100
            for rank in set(self.living()) - world.leaving:
                if world.nodes[rank].desynchronized() and not world.recovers:
                    world.leave(rank)  # its program ends with an error


HARMLESS = ["stop", "stay_away", "come_back", "queue_calls", "settle", "report"]
KINDS = [
    *HARMLESS,
    *("lack_memory", "die", "leave", "lose", "wait"),
    *("raise_between_blocks", "call_something_else"),
]


def disorderly(world, rng):
    """Run a world in disorder to its end, and check it. Return the kinds of things that happened."""
    kinds = rng.sample(KINDS, rng.randint(1, 5))
    disorder = Disorder(world, rng, kinds + ["go_on", "go_on"])
    for _ in range(rng.choice([10, 40, 100])):
        disorder.happen()
        for node in world.nodes:
            assert node.status()
    disorder.end()
    living = set(range(world.plan.size)) - world.dead
    for rank in living - world.leaving:
        node = world.nodes[rank]
        assert node.next_round() > len(world.script) or node.desynchronized(), (
            kinds,
            world.describe(rank),
        )
    for rank in living:
        assert world.running[rank] is None or world.nodes[rank].desynchronized(), (
            kinds,
            world.describe(rank),
        )
    for rank in living - world.leaving:
        world.leave(rank)
    disorder.end()
    for rank in sorted(disorder.living()):  # as the engine does after some seconds
        world.nodes[rank].give_up()
        disorder.end()
    assert world.dead == set(range(world.plan.size)), (
        kinds,
        world.dead,
        [node.status() for node in world.nodes],
    )
    return kinds


@pytest.mark.slow
@many
@given(seeds)
def test_sums(seed):
    rng = random.Random(seed)
    plan = random_plan(rng, 2, rng.choice([3, 5, 14]))
    script = mixed_script(plan, rng)[:ROUNDS]
    action = rng.choice(["wait", "raise"])
    bounds = limits(action) | {
        "history_bytes": 0,
        "history_rounds": rng.choice([1, 3, 100]),
    }
    world = random_world(
        plan,
        ROUNDS,
        rng,
        script=script,
        limits=bounds,
        twice=rng.choice([0, 0.1]),
        again=rng.choice([0, 0.1]),
        **comparing(plan, rng),
    )
    world.rests = 0  # ranks without memory try again and again
    if rng.random() < 0.5:
        world.snapshots = [1] * plan.size
        for node in world.nodes:
            node.keep_state(1, world.state(1))
    else:
        world.recovers = False
    for round, call in enumerate(script, 1):
        if call.kind == "allreduce" and not call.erased and rng.random() < 0.1:
            world.skips |= {(rank, round) for rank in tolerated(plan, rng)}
    calm = set(disorderly(world, rng)) <= set(HARMLESS) and action == "wait"
    if calm and world.recovers:
        for end in (end for ends in world.ends for end in ends.values()):
            fine = end.outcome in (DONE, DESYNCHRONIZED)
            assert fine or end.error.startswith("refused: no. "), end


@pytest.mark.slow
@many
@given(seeds)
def test_shared_work(seed):
    rng = random.Random(seed)
    size = rng.randint(2, 6)
    world = test_node_sharing_alone.drawn(rng, size, ROUNDS)
    world.twice, world.again = rng.choice([0, 0.1]), rng.choice([0, 0.1])
    disorderly(world, rng)
