"""One rank raises an exception. ``errors.py DIRECTORY WAY RANKS``: each of the RANKS in turn raises and catches an
exception ("caught"). Or an exception ends the program of a rank ("uncaught"), also with a call in flight ("in-flight").
"""

import sys

from harness import Board, Faults, Sums, close, run

import jaxcoded

ROUNDS, FAULT = 60, 20
AT_EXIT = 5.0  # seconds that the engine still works at the end of a process

directory, way, victims = sys.argv[1:]
victims = [int(rank) for rank in victims.split(",")]
board = Board(directory)
group = jaxcoded.CodedGroup(board.comm, jaxcoded.Coded(fanout=2), transport="engine")
sums, faults = Sums(group), Faults(board)


def fail_in_flight():
    sums.start(FAULT)
    raise RuntimeError(f"injected into rank {board.rank} while a call is in flight")


for i, victim in enumerate(victims):
    if way == "in-flight":
        # by the time the round is decided, the engine of this rank has given up
        faults.sleep_at(0, FAULT, AT_EXIT + 2)
        faults.call_at(victim, FAULT, fail_in_flight)
    else:
        faults.fail_at(victim, FAULT + 10 * i)
if way == "uncaught":
    # the other ranks run for longer than the engine of this rank
    for number in range(FAULT + 1, ROUNDS + 1):
        faults.sleep_at(0, number, (AT_EXIT + 1) / (ROUNDS - FAULT))

done = 0
while done < ROUNDS:
    try:
        run(board, group, sums, faults, ROUNDS, done + 1)
        done = ROUNDS
    except RuntimeError as error:
        if way != "caught":
            raise
        board.say(f"caught: {error}")
        done = board.done(board.rank)
board.report(digest=sums.digest)
close(board, group, timeout=10.0)
board.say("leaves the program")
