"""`Roll` with one rank that sends invalid messages: the other ranks continue, or raise
an error.

Ranks and time are simulated, see `test_roll_model`.
"""

import dataclasses
import json

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_roll_model import ENDS, LATEST, SECONDS, Process, World, rolls

from jaxcoded.errors import CodedError
from jaxcoded.group.membership import messages, roll

VISITS = 4
KINDS = {
    roll._FROM_CALLER: (
        *(messages.Call, messages.Kill, messages.Stay, messages.Late, messages.Regroup),
    ),
    roll._TO_CALLER: (messages.Answer, messages.GivesUp),
}
NUMBERS = [0, 1, 2, 3, 4, 5, -1, 6, 0.5, 2**53, -1e300, 1e300, np.nan, np.inf, -np.inf]
NONSENSE = [*NUMBERS, True, None, "", [], {}, [[]], ["0"], [10**9], [True], "ranks"]


def words(random, size, tag):
    """Draw the words of a message: nearly valid, or anything."""
    kind = KINDS[tag][random.integers(len(KINDS[tag]))]
    fields = {}
    for field in dataclasses.fields(kind):
        usual = int(random.integers(0, 3))
        if field.type is bool:
            usual = bool(usual)
        elif field.type not in (int, float):
            of_each = field.name in ("known", "hindered")
            count = size if of_each else random.integers(size)
            usual = random.integers(0, size, count).tolist()
        fields[field.name] = usual
    for name in fields:
        if random.random() < 0.1:
            fields[name] = NONSENSE[random.integers(len(NONSENSE))]
    text = json.dumps({"kind": kind.__name__, "fields": fields}).encode()
    if random.random() < 0.1:
        text = text[: random.integers(len(text))]
    return np.frombuffer(text, np.uint8)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(2, 5),
    sender=st.integers(0, 4),
    dies=st.booleans(),
    failed=st.booleans(),
    put_out=st.booleans(),
)
def test_nonsense_is_an_error_with_a_message(
    seed, size, sender, dies, failed, put_out, monkeypatch
):
    random = np.random.default_rng(seed)
    world = World(size, random)
    sender %= size
    texts = []

    def kill(self):
        assert 0 <= self._rank < size
        world.kill(self._rank)
        return 0

    with monkeypatch.context() as patched:
        patched.setattr(Process, "kill", kill)
        each = rolls(world, [0] * size, patched)

        def nonsense(rank):
            comm = each[rank]._to_caller._comm
            while world.now < (ENDS / 2 if dies else ENDS):
                to = int(random.integers(size))
                tag = list(KINDS)[random.integers(2)]
                if to != rank and to not in world.dead:
                    comm.Isend(words(random, size, tag), to, tag)
                world.sleep(random.uniform(0, SECONDS))
            world.kill(rank)

        def program(rank):
            if rank == sender:
                nonsense(rank)
            for _ in range(VISITS):
                world.sleep(random.uniform(0, SECONDS))
                try:
                    regroup = each[rank].call(SECONDS, put_out, broken=failed)
                    assert regroup in (True, False)
                except CodedError as error:
                    texts.append(str(error))
            world.kill(rank)

        world.run(program)
    assert world.now < LATEST
    assert all(20 < len(each) < 3000 for each in texts)
