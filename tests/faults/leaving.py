"""A rank leaves in a wrong way. ``leaving.py DIRECTORY WAY RANK``: all ranks do
`ROUNDS` rounds, and then RANK leaves in this WAY.
"""

import gc
import signal
import sys
import time

from harness import SLOWNESS, Board, Faults, Sums, close, run
from mpi4py import MPI

import jaxcoded
from jaxcoded.transport import ending

ROUNDS, FAULT = 60, 20
ending.SILENT_SECONDS = 4.0 * SLOWNESS

directory, way, victim = sys.argv[1:]
victim = int(victim)
board = Board(directory)
group = jaxcoded.CodedGroup(board.comm, jaxcoded.Coded(fanout=2), transport="engine")
sums, faults = Sums(group), Faults(board)


def leave():
    board.say(f"exits before round {FAULT}")
    sys.exit(0)


match way:
    case "late":
        faults.sleep_at(victim, ROUNDS - 10, 3.0)
    case "stopped" | "stopped-unclosed" | "stopped-status":
        faults.stop_at([victim], FAULT)
    case "finalize" if victim >= 0:
        faults.stop_at([victim], FAULT)
    case "killed":
        faults.signal_at(victim, FAULT, signal.SIGKILL)
    case "exit":
        faults.call_at(victim, FAULT, leave)
    case "exit-1":
        faults.call_at(victim, FAULT, lambda: sys.exit(1))
    case "interrupt":
        faults.signal_at(victim, FAULT, signal.SIGINT)

try:
    run(board, group, sums, faults, ROUNDS)
    board.report(digest=sums.digest)
    match way:
        case "stopped-unclosed":
            if board.rank == 3:
                raise RuntimeError("injected into rank 3 at its end")
        case "stopped-status":
            if board.rank == 0:
                sys.exit(3)
        case "deleted":
            # a second group that is never closed
            del group
            gc.collect()
            group = jaxcoded.CodedGroup(
                board.comm, jaxcoded.Coded(fanout=2), transport="engine"
            )
            run(board, group, Sums(group), Faults(board), ROUNDS)
        case "in-flight":
            # the root has not called this round when the other ranks leave
            if board.rank == 0:
                time.sleep(1.0)
            flying = sums.start(ROUNDS + 1)
        case "stopped" | "killed":
            close(board, group, timeout=3.0)
        case "finalize":
            MPI.Finalize()
            board.say("has finalized MPI")
        case _:
            close(board, group)
finally:
    board.say("leaves the program")
