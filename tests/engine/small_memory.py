"""Let each small allocation of the engine fail in turn, see `malloc.c`: no process
ends, and no block is lost.

It prints the number of allocations that can fail.
"""

import ctypes
import itertools
import os
import random

import _nodes
from simulation import DONE, FAILED, Call, World

from jaxcoded import DEBUG, Coded, make_plan

malloc = ctypes.CDLL(os.environ["LD_PRELOAD"])
CALL = Call((("float32", 40),), 7)


def compare(number):
    """Play rounds whose messages are compared, and let the root's allocation with this number fail in the first round.
    Return whether there was such an allocation.
    """
    plan = make_plan(
        5, Coded(stragglers=1, code="cyclic_repetition", root_computes=False)
    )
    world = World(plan, [CALL] * 3, random.Random(0), check=DEBUG)
    world.open = 1
    advance, fails = world.advance, []

    def failing(rank):
        if rank or fails:
            return advance(rank)
        malloc.fail_after(number)
        more = advance(rank)
        if malloc.failed():
            fails.append(number)
        return more

    for rank in range(plan.size):
        world.submit(rank)
    for _ in range(3):
        for link, queue in world.queues.items():
            while queue:
                world.deliver(link)
        for rank in range(1, plan.size):
            advance(rank)
    world.advance = failing
    world.settle()
    world.open = 3
    world.settle()
    return bool(fails)


def share(number):
    """Let a member return a block that another one must get, and let the allocation with this number fail as its
    message arrives. Return whether there was such an allocation.
    """
    ledger = _nodes.Ledger([[1, 0], [1, 0], [1, 0], [1, 0], [0, 1]], 2, 0.05)
    members = _nodes.Share(True, [4]), _nodes.Share(True, [0, 1, 2, 3])
    ledger.begin(0.0)
    for member, share_of_member in enumerate(members):
        ledger.arrived(member, True, 0.0)
        ledger.heard(member, share_of_member.progress(0.0), 0.0)
        share_of_member.take()
    members[0].done()
    ledger.heard(0, members[0].progress(0.0), 0.01)
    recalls = [
        order for order in ledger.orders(0.01) if order.kind == _nodes.Order.Kind.recall
    ]
    assert recalls
    for order in recalls:
        members[1].recall(order.blocks)
    progress = members[1].progress(0.0)
    malloc.fail_after(number)
    try:
        ledger.heard(1, progress, 0.02)
    except MemoryError:
        ledger.heard(1, progress, 0.03)  # a second delivery
    fails = bool(malloc.failed())
    blocks = [block for granted in ledger.division for block in granted]
    assert len(blocks) + ledger.missing == 5, (number, ledger.division)
    return fails


def offer(number):
    """Let a rank offer a part of its message and then all of it, and let the allocation with this number fail as the
    root, which has not called, receives the second offer. The root calls before the message is delivered again. Return
    whether there was such an allocation.
    """
    plan = make_plan(4, Coded(code="progressive"))
    world = World(plan, [CALL] * 2, random.Random(0), inline=(1 << 20,))
    world.begins_with[1, 1] = 1
    root, queue = world.nodes[0], world.queues[1, 0]
    world.submit(1)
    world.advance(1)
    while queue:
        world.deliver((1, 0))
    world.extend(1)
    world.advance(1)
    assert queue
    message = queue.popleft()
    malloc.fail_after(number)
    try:
        root.deliver(1, message)
    except MemoryError:
        queue.appendleft(message)
    fails = bool(malloc.failed())
    world.submit(0)
    world.settle()
    world.assert_done()
    return fails


def alert(number):
    """Let MPI lose a rank's offer and tell the rank, and let the allocation with this number fail as the root, which has
    not called, receives the rank's alert. Return whether there was such an allocation.
    """
    world = World(make_plan(3, Coded(stragglers=0)), [CALL] * 2, random.Random(0))
    root, node, queue = world.nodes[0], world.nodes[1], world.queues[1, 0]
    world.open = 1
    for rank in (1, 2):
        world.submit(rank)
        world.advance(rank)
    queue.clear()
    node.lost_message(0)
    while len(queue) > 1:
        world.deliver((1, 0))
    message = queue.popleft()
    malloc.fail_after(number)
    try:
        root.deliver(1, message)
    except MemoryError:
        root.lack_memory()
        queue.appendleft(message)
    fails = bool(malloc.failed())
    world.settle()
    world.open = 2
    world.settle()
    world.clock += 1000
    world.settle()
    for ends in world.ends:
        assert [ends[n].outcome for n in (1, 2)] == [FAILED, DONE], number
    return fails


for play in compare, share, offer, alert:
    print(sum(1 for _ in itertools.takewhile(play, itertools.count())))
