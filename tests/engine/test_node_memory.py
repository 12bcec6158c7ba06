"""The memory of nodes does not grow with their rounds, even if ranks are late, have
left or are dead.

The tests measure the heap, which includes every container of a node.
"""

import ctypes
import random

import numpy as np
import pytest
from cases import more

pytest.importorskip("_nodes", reason="built without the engine")

from simulation import World, Zeros

from jaxcoded import Coded, make_plan

libc = ctypes.CDLL(None)
BYTES = 2.0  # allowed growth of the heap in a round, less than any entry


class Heap(ctypes.Structure):
    """The C library's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "mapped"),
            *("usmblks", "fsmblks", "used", "fordblks", "keepcost"),
        )
    ]


def heap_bytes():
    libc.mallinfo2.restype = Heap
    info = libc.mallinfo2()
    return info.used + info.mapped


def measurable():
    """Return whether this process uses the C library's allocator: sanitizers replace
    it.
    """
    if not hasattr(libc, "mallinfo2"):
        return False
    before = heap_bytes()
    array = np.ones(1 << 20, np.uint8)
    return heap_bytes() - before >= array.nbytes


class Long(Zeros):
    """A call with a long signature, like that of a large pytree."""

    @property
    def signature(self):
        return f"allreduce {self.seed} of " + "float32[16], " * 100


class Forgetful(World):
    """A world that keeps nothing of its rounds, so that many rounds take little time."""

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
            for node in (
                self.results,
                self.seen,
                self.offered,
                self.fetched,
                self.summed,
            ):
                node.clear()
            for node in self.news:
                node.clear()


def die(world, rank):
    """Let a rank die; MPI reports that to its peers."""
    world.dead.add(rank)
    world.running[rank] = None
    for link, queue in world.queues.items():
        if rank in link:
            queue.clear()
    for other in range(world.plan.size):
        if rank in world.ancestors[other] or other in world.ancestors[rank]:
            world.nodes[other].lost(rank)


# The ranks that are missing from the sixth round on. The tree has a root, its children
# 1 to 3, and a child of rank 1.
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
    heap = [heap_bytes()]
    for _ in range(2):
        world.play(rounds // 4)
        heap.append(heap_bytes())
    # memory that grows with rounds grows in both halves; the rest of the process may take a little in one half
    grown = min(np.diff(heap))
    called = {node.next_round() for node in world.nodes}
    assert max(called) == world.open + 1
    print(missing, kind, rounds, grown, called)
    assert grown <= BYTES * rounds / 4, {
        r: n.status() for r, n in enumerate(world.nodes)
    }
