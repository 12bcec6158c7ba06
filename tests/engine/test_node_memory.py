"""What nodes hold does not grow with their rounds, whoever is late, has left or is dead.

The heap is measured, so that no container of a node is left out.
"""

import ctypes
import random

import numpy as np
import pytest
from cases import more

pytest.importorskip("jaxcoded.transport._engine", reason="built without the engine")

from simulation import World, Zeros

from jaxcoded import Coded, make_plan

libc = ctypes.CDLL(None)
BYTES = 2.0  # that the heap may grow in a round: no entry of any container is as small


class Heap(ctypes.Structure):
    """As `struct mallinfo2` of the C library."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "mapped"),
            *("usmblks", "fsmblks", "used", "fordblks", "keepcost"),
        )
    ]


def heap_bytes():
    libc.mallinfo2.restype = Heap
    its = libc.mallinfo2()
    return its.used + its.mapped


def measurable():
    """Whether this process's memory is the C library's: a sanitizer has one of its own."""
    if not hasattr(libc, "mallinfo2"):
        return False
    before = heap_bytes()
    array = np.ones(1 << 20, np.uint8)
    return heap_bytes() - before >= array.nbytes


class Long(Zeros):
    """With words as of a long pytree."""

    @property
    def signature(self):
        return f"allreduce {self.seed} of " + "float32[16], " * 100


class Forgetful(World):
    """A world that keeps nothing of its rounds, and in which many of them take little time."""

    def play(self, rounds):
        for _ in range(rounds):
            self.open += 1
            while self.sweep():
                pass
            self.clock += 0.1
            while self.sweep():
                pass
            for ends in self.ends:
                ends.clear()
            for its in (
                self.results,
                self.seen,
                self.offered,
                self.fetched,
                self.summed,
            ):
                its.clear()
            for its in self.news:
                its.clear()


def die(world, rank):
    """Those that have to do with it are told by MPI."""
    world.dead.add(rank)
    world.running[rank] = None
    for link, queue in world.queues.items():
        if rank in link:
            queue.clear()
    for other in range(world.plan.size):
        if rank in world.ancestors[other] or other in world.ancestors[rank]:
            world.nodes[other].lost(rank)


# Who is missing from the sixth round on, of a root, its children 1 to 3, and one below 1.
MISSING = {
    "nobody": lambda world: None,
    "an inner rank has failed": lambda world: world.leave(1, "ValueError: no luck"),
    "a leaf has left": lambda world: world.leave(3),
    "a leaf has died": lambda world: die(world, 3),
    "a leaf is stopped": lambda world: world.frozen.add(3),
    "a leaf is late": lambda world: world.idle.add(3),
    "an inner rank is stopped": lambda world: world.frozen.add(1),
    "an inner rank is late": lambda world: world.idle.add(1),
    "an inner rank has died": lambda world: die(world, 1),
}
KINDS = ["allreduce", "reduce"]


@pytest.mark.slow
@pytest.mark.parametrize("missing", MISSING)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounds", [1500, more(100_000)])
def test_heap(missing, kind, rounds):
    if not measurable():
        pytest.skip("the heap of this process cannot be measured")
    plan = make_plan(5, Coded(parents=(-1, 0, 0, 0, 1)))
    calls = [
        Long((("float32", 16 * plan.padding_multiple),), i, kind) for i in range(8)
    ]
    limits = {"history_bytes": 10_000, "ahead_bytes": 10_000}
    world = Forgetful(plan, calls * (rounds // 4), random.Random(1), limits=limits)
    world.open = 0
    world.play(5)
    MISSING[missing](world)
    world.play(rounds // 2)
    before = heap_bytes()
    world.play(rounds // 2)
    grown = heap_bytes() - before
    called = {node.next_round() for node in world.nodes}
    assert max(called) == world.open + 1
    print(missing, kind, rounds, grown, called)
    assert grown <= BYTES * rounds / 2, {
        r: n.status() for r, n in enumerate(world.nodes)
    }
