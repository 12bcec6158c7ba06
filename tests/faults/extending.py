"""Train, and take in new ranks, as docs/recovery.md shows.

``extending.py DIRECTORY OPTION EVENTS...``: an event follows each few steps. Its
numbers are ranks of the current group, or a count.

- "kill 1,2": these ranks die in the middle of the steps, and the group is recovered;
- "leave 3": rank 3 leaves on SIGTERM;
- "join 2": two ranks join;
- "roots 2": two ranks join, and the new plan has another root;
- "differs 2": rank 2 asks for another number of ranks;
- "interrupts 2": rank 2 leaves by an exception once the other ranks connect.

In other events a new process fails to join:

- "exit 1", "exit 0": its program ends before MPI starts;
- "ends": its program ends after MPI has started;
- "alone": it makes a separate group;
- "dies hello": it dies before it reports to the other ranks;
- "dies connect": it dies while the other ranks connect with it;
- "dies open", "dies enter": it dies before it makes the group, or once all have made
  it;
- "hangs": it hangs;
- "refuses": it cannot have the group.

In the last kind of event an old rank dies, and the live ranks recover:

- "loses 2 ask": before it asks the root to start processes;
- "loses 2 start": while the processes start;
- "loses 2 connect": before it connects with the processes;
- "loses 2 ready": once it has made the group;
- "loses 2 connect stops": it is stopped instead, and put out.

OPTION is "code", "shared" (shared work) or "forgets" (new ranks receive no state).
"""

import hashlib
import os
import signal
import sys
import threading
import time

directory, option, *events = sys.argv[1:]
fails = ("exit", "ends", "alone", "dies", "hangs", "refuses")
joins = "JAXCODED_JOINS" in os.environ
way = next(
    (argument for argument in sys.argv if argument.startswith("--fails ")), ""
).removeprefix("--fails ")
events = [each for each in events if not each.startswith("--")]
if joins and way.startswith("exit"):
    sys.exit(int(way.split()[1]))

import jax
import numpy as np
import uncounted
from harness import EXAMPLES, PATIENCE, SLOWNESS, Board, pickle_nothing
from mpi4py import MPI

import jaxcoded
from jaxcoded.group.membership import joining, old_ranks
from jaxcoded.group.membership.new_rank import NewRank
from jaxcoded.group.session import Session
from jaxcoded.transport import engine

EVERY = 12  # steps between two events
COMES = 4.0 * SLOWNESS  # seconds
STARTING = 0.3  # within which no process can start
WIDTH = 400

pickle_nothing()

if joins and way == "ends":
    sys.exit()
if joins and way == "alone":
    jaxcoded.CodedGroup(MPI.COMM_WORLD, jaxcoded.Coded())
if joins and way == "hangs":
    time.sleep(1000)
if joins and way.startswith("dies") and MPI.COMM_WORLD.rank == 0:
    whose, what = {
        "hello": (engine, "fault_tolerant"),
        "connect": (joining, "joined"),
        "open": (Session, "__init__"),
        "enter": (NewRank, "enter"),
    }[way.split()[1]]
    setattr(whose, what, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
if joins and way == "refuses":
    jaxcoded.Plan.from_json = lambda text: jaxcoded.make_plan(9, jaxcoded.Coded())

random = np.random.default_rng(0)
data = random.standard_normal((EXAMPLES, WIDTH))
said, alike, sizes, compiled = [], [], [], []


def make_step(group):
    """Return the compiled step."""
    batch = group.batch(data)

    def loss(w, x):
        return jax.vmap(lambda x: ((x @ w - 1) ** 2).astype(w.dtype))(x)

    value_and_grad = jaxcoded.coded_value_and_grad(loss, group)

    @jax.jit
    def step(w, batch):
        compiled.append(group.size)
        value, gradient = value_and_grad(w, batch)
        return w - 1e-3 * gradient, value

    return lambda w: step(w, batch)[0]


def last_is_root(size):
    """Return a star whose root is the last rank."""
    return jaxcoded.Coded(parents=[size - 1] * (size - 1) + [-1])


def alone(steps):
    """Return the parameters after this number of steps by one process."""
    w = np.zeros(WIDTH)
    for _ in range(steps):
        w = w - 1e-3 * 2 * (data.T @ (data @ w - 1)) / EXAMPLES
    return w


def fall(how):
    """Die, or leave in order."""
    board.say(f"{how}s")
    jax.effects_barrier()
    # until all ranks have the last sum; then the first rank becomes the root
    time.sleep(1.0)
    if how == "leave":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)


def stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


def late(call):
    """Delay ``call`` until the other ranks may know of a death."""

    def after_a_while(*arguments):
        time.sleep(1.0)
        return call(*arguments)

    return after_a_while


def interrupt(*asked, ask=old_ranks.OldRanks.ask):
    old_ranks.OldRanks.ask = ask
    ask(*asked)
    raise ValueError("interrupted")


def too_early():
    """Return the error of a sum that does not wait for the root's state."""
    try:
        uncounted.coded_allreduce(w, group)
    except jaxcoded.CodedError as error:
        return str(error)
    return "nothing"


board = Board(directory)
group = jaxcoded.CodedGroup.joining()
assert (group is not None) == joins
if group is None:
    strategy = (
        jaxcoded.Shared(replicas=2) if option == "shared" else jaxcoded.Coded(fanout=3)
    )
    group = jaxcoded.CodedGroup(MPI.COMM_WORLD, strategy)
board.say(f"is rank {group.rank} of {group.size}")
jaxcoded.leave_on_sigterm(12.0)

w, steps, done = jax.numpy.zeros(WIDTH), 0, 0
step = None
while True:
    if not group.alike:
        alike.append(group.alike)
        if option == "forgets" and not said:
            said.append(too_early())
        steps, done, w = jaxcoded.tree_bcast((steps, done, w), group)
        steps, done = int(steps), int(done)
        assert group.alike
    if step is None:
        step = make_step(group)
        sizes.append(group.size)
    event, _, words = (events[done] if done < len(events) else "end").partition(" ")
    ranks = [int(rank) for rank in words.partition(" ")[0].split(",") if rank.isdigit()]
    try:
        while steps < EVERY * (done + 1):
            # no rank comes here twice
            falls = event in ("kill", "leave") and group.rank in ranks
            if falls and steps % EVERY == EVERY // 2 and group.size == sizes[-1]:
                fall(event)
            w = jax.block_until_ready(step(w))
            steps += 1
            board.note(steps)
    except jax.errors.JaxRuntimeError as error:  # the root has died
        said.append(str(error))
        jaxcoded.effects_barrier()
        group, step = group.recovered(timeout=PATIENCE), None
        events[done] = "done"
        continue
    done += 1
    if event == "end":
        break
    try:
        if event == "join":
            group, step = group.extended(ranks[0], timeout=PATIENCE), None
        elif event == "roots":
            star = last_is_root(group.size + ranks[0])
            group, step = group.extended(ranks[0], strategy=star), None
        elif event == "differs":
            group.extended(1 + (group.rank == ranks[0]))
        elif event == "interrupts":
            if group.rank in ranks:
                old_ranks.OldRanks.ask = interrupt
            group.extended(1, timeout=PATIENCE)
        elif event == "loses":
            _, where, *stops = words.split()
            if where == "ask" and group.rank == group.size - 1:
                old_ranks.OldRanks.ask = late(old_ranks.OldRanks.ask)
            if group.rank in ranks and where == "start":
                threading.Timer(STARTING, fall, ["kill"]).start()
            elif group.rank in ranks:
                setattr(
                    old_ranks.OldRanks,
                    where,
                    stop if stops else lambda *_: fall("kill"),
                )
            group.extended(1, timeout=COMES if words.endswith("stops") else PATIENCE)
        elif event in fails:
            limit = 8.0 * SLOWNESS if event in ("hangs", "ends") else PATIENCE
            command = [
                sys.executable,
                *sys.orig_argv[1:],
                f"--fails {event} {words}".strip(),
            ]
            group, step = group.extended(2, command=command, timeout=limit), None
        elif event in ("kill", "leave"):
            # a strategy that names each rank's parent fits only these ranks
            just_these = getattr(group.plan.strategy, "parents", None) is not None
            strategy = jaxcoded.Coded(fanout=3) if just_these else None
            group = group.recovered(strategy=strategy, timeout=PATIENCE)
            step = None
    except (jaxcoded.CodedError, ValueError) as error:
        said.append(f"{type(error).__name__}: {error}")
        board.say(said[-1])
        old = group
        while event == "loses" and group is old:
            stops = words.endswith("stops")
            try:
                limit = COMES if stops else PATIENCE
                group, step = group.recovered(timeout=limit, put_out=stops), None
            except jaxcoded.CodedError as error:
                said.append(str(error))
w = np.asarray(w)
error = abs(w - alone(steps)).max() / abs(w).max()
path = board.directory / f"rank-{group.rank}.json"
assert not path.exists()
board.rank = group.rank
board.report(
    steps=steps,
    size=group.size,
    error=error,
    digest=hashlib.sha256(w).hexdigest(),
    sizes=sizes,
    compiled=compiled,
    said=said,
    alike=alike,
    joined=joins,
    host=MPI.Get_processor_name(),
)
group.close()
