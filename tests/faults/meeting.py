"""Ranks meet in `recovered` only after some of them have given up there.

``meeting.py DIRECTORY WAY``, where WAY is one of:

- "late": the root comes late, and no rank is dead;
- "late without one": as "late", but the last rank has died before;
- "stops": the last rank is dead; the root is stopped just before MPI's part begins, and
  continues after the other ranks have given it up;
- "fails": the root's program ends with an error;
- "exits": the last rank's program ends in a way that MPI does not report;
- "caught": rank 1 leaves the group in a ``with`` block whose error its program catches;
- "in vain": the last two ranks are late, and the other ranks may not put them out;
- "successor": the root dies, and its successor dies before it passes its state on; rank 2 then lacks one sum;
- "asked for": as "successor", but the other ranks have asked for that state before,
  without success;
- "overtaken": rank 1 is stopped just before all agree on the new group. It continues
  after the other ranks were interrupted and have done more rounds in the old group.

The live ranks call `recovered` until they have met.
"""

import contextlib
import errno
import os
import pathlib
import signal
import sys
import time

import jax
import numpy as np
import uncounted
from harness import PATIENCE, SLOWNESS, Board, Sums

import jaxcoded
from jaxcoded.group.membership import recovery, roll
from jaxcoded.group.process import Process

COMES = 1.0 * SLOWNESS  # seconds in which ranks must come
GIVES_UP, LEAVES = 1000, 2000  # numbers on the board

directory, way = sys.argv[1:]
board = Board(directory)
last, rank = board.size - 1, board.rank
pids = board.comm.allgather(os.getpid())
stragglers = 2 if way == "overtaken" else 1
group = first = jaxcoded.CodedGroup(board.comm, jaxcoded.Coded(stragglers=stragglers))
said, rounds = [], 0


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop(comm):
    """Stop this rank before the communicator shrinks."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return shrunk(comm)


def stop_to_agree(*what):
    os.kill(os.getpid(), signal.SIGSTOP)
    return agree(*what)


class Interrupted(jaxcoded.CodedError):
    """Raised by a signal handler."""


def interrupt(*_):
    raise Interrupted


def meet():
    """Call `recovered` until all live ranks have met."""
    global group
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            group = group.recovered(timeout=COMES)
            return
        except jaxcoded.CodedError as error:
            said.append(str(error))
            board.note(GIVES_UP + len(said))
            if way == "stops" and rank == 0:
                os.kill(pids[1], signal.SIGCONT)
    raise TimeoutError(said)


def sums(count):
    """Do ``count`` rounds, and check each."""
    global rounds
    recorder = Sums(group)
    for number in range(rounds + 1, rounds + count + 1):
        recorder.check(number, recorder.start(number))
    rounds += count


sums(5)
others = set(range(board.size)) - {0}
if way in ("late without one", "stops") and rank == last:
    die()
if way.startswith("late") and rank == 0:
    board.wait(others - ({last} if "one" in way else set()), GIVES_UP + 2)
if way == "stops" and rank == 1:
    shrunk, recovery.shrunk = recovery.shrunk, stop
if way == "fails" and rank == 0:
    raise ArithmeticError("injected")
if way == "exits" and rank == last:
    os._exit(7)
if way == "caught":
    if rank == 1:
        try:
            with group:
                raise ArithmeticError("injected")
        except ArithmeticError:
            board.note(LEAVES)
        board.wait(set(range(board.size)) - {1}, GIVES_UP + 1)
        board.report(lives=True)
    else:
        board.wait({1}, LEAVES)
        try:
            group.recovered(timeout=COMES)
        except jaxcoded.CodedError as error:
            board.report(lives=True, said=str(error))
        board.note(GIVES_UP + 1)
    sys.exit()
if way == "in vain":
    roll.REPORTED = 1.0
    if rank < last - 1:
        Process.kill = lambda _: errno.EPERM
    else:
        board.wait(set(range(last - 1)), GIVES_UP + 1)
    if rank == last:  # unless the other rank kills it on the caller's order
        board.wait({last - 1}, GIVES_UP + 1)
    try:
        group.recovered(timeout=COMES, put_out=rank < last - 1)
    except jaxcoded.CodedError as error:
        said.append(str(error))
        board.note(GIVES_UP + 1)
    board.wait(range(board.size), GIVES_UP + 1)
    meet()
if way in ("successor", "asked for"):
    # rank 2 lacks the last sum, as far as the other ranks can know
    if rank == 2:
        group._session.transport.rounds_of_all = lambda: 4
    board.note(LEAVES)
    board.wait(range(board.size), LEAVES)
    if rank == 0:
        die()
    while group is first:
        meet()
    assert not group.alike
    successor = rank == 1
    board.note(LEAVES + 1)
    board.wait(others, LEAVES + 1)
    if successor and way == "asked for":
        board.wait(others - {rank}, LEAVES + 2)
    if successor:
        die()
    if way == "asked for":
        # ask in a jitted call: its tracing does not show how the call ends
        ask = jax.jit(lambda state: jaxcoded.tree_bcast(state, group))
        board.note(LEAVES + 2)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.block_until_ready(ask(np.zeros(1)))
            raise AssertionError("recovered without the dead root's state")
        refused = []
        for call in uncounted.coded_allreduce, uncounted.allreduce:
            try:
                call(np.zeros(1), group).block_until_ready()
            except (jaxcoded.CodedError, jax.errors.JaxRuntimeError) as error:
                refused.append("tree_bcast(params, group)" in str(error))
        board.report(refused=refused)
    second = group
    while group is second:
        meet()
    board.report(rank=group.rank, alike=group.alike, size=group.size)
    jaxcoded.tree_bcast(np.zeros(1), group)
if way == "overtaken":
    if rank == last:
        die()
    if rank == 1:
        agree, recovery.agreed = recovery.agreed, stop_to_agree
        group = group.recovered(timeout=PATIENCE)
        try:
            uncounted.allreduce(np.zeros(1), group)
        except jaxcoded.CodedError as error:
            board.report(said=str(error))
        raise ArithmeticError("injected")
    stat = pathlib.Path(f"/proc/{pids[1]}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        with contextlib.suppress(Interrupted):
            signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, COMES)
            group.recovered(timeout=PATIENCE)
    sums(3)
    board.note(GIVES_UP)
    board.wait(others - {1, last} | {0}, GIVES_UP)
    if rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    try:
        group.recovered(timeout=PATIENCE)
    except jaxcoded.CodedError as error:
        said.append(str(error))
while way not in ("late", "successor", "asked for", "in vain") and group is first:
    meet()
if way == "late":
    meet()
if not group.alike:
    jaxcoded.tree_bcast(np.zeros(1), group)
sums(5)
board.report(size=group.size, same=group is first, said=said)
group.close(COMES)
