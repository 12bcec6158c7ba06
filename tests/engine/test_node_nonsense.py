"""Nodes receive messages of any kind with any contents: they may fail, but do not
crash.

Nodes accept plausible contents, so sums may be wrong here. `test_node_garbled.py`
covers errors that a node can detect, which all ranks must get.
"""

import random
import struct

import pytest
from hypothesis import given
from schedules import many, seeds

pytest.importorskip("_nodes", reason="built without the engine")

import simulation
import test_node_sharing
from simulation import HEADER, Garbling, random_plan, random_world

from jaxcoded import Coded, make_plan

KINDS = 18  # number of `Kind`s in message.h
ROUNDS = 6
# most bytes that a node may take; its sums have some hundred bytes
MOST_BYTES = 64 << 20
NUMBERS = [0, 1, 2, 3, 7, 8, 255, 2**16, 2**31, 2**32 - 1]
NUMBERS += [2**32, 2**40, 2**48, 2**48 + 1, 2**62, 2**63, 2**64 - 1]
# Nodes accept a length that fits into this machine's memory. So all lengths in bodies
# are either short, or too long to be accepted.
LENGTHS = [n for n in NUMBERS if n <= 2**16 or n >= 2**48]


class Credulous(Garbling):
    """A world that does not check results."""

    def fetch(self, request, address, size):
        asker, source, what, round, piece, version = request
        if not self.wires[asker].direct(source):
            self.requests.append(request)
            return False
        data = self.nodes[source].read(what, round, piece, version)
        # a missing piece cannot be read; a wrong length could read another process's
        # memory
        return None if data is None else data[:size].ljust(size, b"\0")

    def check_piece(self, *_):
        pass

    def check_state(self, *_):
        pass

    def _check_result(self, rank, running):
        pass

    def _check_lost(self, *_):
        pass


class World(Credulous, simulation.World):
    pass


class Sharing(Credulous, test_node_sharing.World):
    pass


def nonsense(rng, message):
    """Return a damaged message, or a random one."""
    fields, body = list(HEADER.unpack_from(message)), bytearray(message[HEADER.size :])
    for _ in range(rng.choice([1, 1, 2, 3])):
        how = rng.randrange(8)
        if how == 0:
            fields[0] = rng.choice([rng.randrange(KINDS), rng.randrange(256)])
        elif how == 1:
            fields[1] ^= 1 << rng.randrange(8)
        elif how == 2:
            at = rng.randrange(2, 4)
            fields[at] = rng.choice([n for n in NUMBERS if n < 2**32])
        elif how == 3:
            at = rng.randrange(4, 8)
            near = [(fields[at] + 1) % 2**64, max(fields[at], 1) - 1]
            fields[at] = rng.choice([*NUMBERS, *near])
        elif how == 4:
            del body[rng.randint(0, len(body)) :]
        elif how == 5:
            body += rng.randbytes(rng.choice([1, 4, 8, 16, 100]))
        elif how == 6 and len(body) >= 8:
            at = rng.randrange(len(body) - 7) & ~7
            body[at : at + 8] = struct.pack("<Q", rng.choice(LENGTHS))
        elif body:
            at = rng.randrange(len(body))
            if at % 8 < 2 or at % 8 > 5:
                body[at] ^= 1 << rng.randrange(8)
    return HEADER.pack(*fields) + body


def play(world, rng):
    """Let ranks send nonsense for a while, and then let the world continue."""
    share = rng.choice([0.01, 0.1, 0.5])
    world.garble = lambda link, message: (
        nonsense(rng, message) if rng.random() < share else message
    )
    links = list(world.queues)
    for number in range(rng.choice([100, 400])):
        world.step()
        if number % 10 == 0:  # ranks also send rare messages
            source, to = rng.choice(links)
            fields = [rng.randrange(KINDS), rng.randrange(256), 0, 0]
            fields += [rng.randint(0, ROUNDS + 2) for _ in range(3)]
            message = HEADER.pack(*fields, 0, 0) + rng.randbytes(rng.choice([0, 8, 40]))
            world.nodes[to].deliver(source, nonsense(rng, message))
            world.check_end(to)
    world.garble = lambda link, message: message
    for _ in range(200):
        world.step()
    for rank, node in enumerate(world.nodes):
        assert node.status() and isinstance(node.standing(), str)
        assert node.memory_bytes() < MOST_BYTES, (node.memory_bytes(), rank)


@many
@given(seeds)
def test_nonsense(seed):
    rng = random.Random(seed)
    plan = random_plan(rng, 2, 9)
    world = random_world(plan, ROUNDS, rng)
    world.__class__ = World
    if rng.random() < 0.3:
        world.snapshots = [2] * plan.size
    play(world, rng)


@many
@given(seeds)
def test_nonsense_about_shared_work(seed):
    rng = random.Random(seed)
    world = test_node_sharing.world(rng, handed_over=False)
    world.__class__ = Sharing
    play(world, rng)


def test_invalid_text():
    """A text that is not valid UTF-8 arrives as far as Python and XLA can convert it."""
    script = [simulation.Call((("float32", 4),), 0)]
    world = simulation.World(
        make_plan(2, Coded(stragglers=0)), script, random.Random(0)
    )
    text = "CodedError: é".encode() + b"\xff\0\xe2\x82\xed\xa0\x80.\xf0\x9f\x98\x80"
    alert = HEADER.pack(simulation.ALERT, 0, 0, 0, 1, 0, 0, 0, 0) + text
    world.nodes[0].deliver(1, alert)
    world.settle()
    for rank in range(2):
        assert world.ends[rank][1].error == "CodedError: é???????.😀"
