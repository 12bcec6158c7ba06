"""A training that goes on with the ranks that live, as docs/recovery.md shows it.

``recovering.py DIRECTORY WAY RANKS...``: RANKS ("3,6") are killed one group after the other, and
after each the group is recovered; or they hang, as `harness.hang` does ("3,6:lock") or in their compiled step ("3:device"), and are put out; or they leave in order, in Python
("3:leaves") or while they are busy ("3:leaves busy"); or their program ends with an error ("3:raises").
WAY is "trains", with a code, or "shared", with shared work; "goes on" (nothing is recovered: the plan can do
without all of them); "root" or
"root-shared" (the root is among the dead, the step fails, and the state is handed on), "root-holds" (the same, where
the root holds data), "root-donated" (the state is lost with the step, and is read from the root's last checkpoint), "behind" (and
rank 2 was stopped meanwhile, so that it knows less), "wakes" (the root was stopped, and goes on once
others have missed the round in which it says that the roll is called); or what goes wrong once the first are dead: "beyond" (more than a parent can do without, which is an error),
"explicit" (the tree was given), "few" (no plan for so many ranks), "stopped" (a rank that lives does
not come for a while), "apart" (a rank calls something else), "again" (one more rank, the last,
dies while the group is made anew), "waits" (the last rank keeps the others waiting there), "stops" (it is
stopped there).
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import select
import signal
import sys
import threading
import time

import jax
import numpy as np
import uncounted
from harness import EXAMPLES, PATIENCE, SLOWNESS, Board, Device, hang, pickle_nothing

import jaxcoded
from jaxcoded.group.membership import change
from jaxcoded.transport import engine

EVERY = 20  # steps between two looks for the dead
MET = 1000  # more than steps: on the board of ranks that are about to recover
# a step does
FAILS = (
    "beyond",
    "root",
    "root-shared",
    "root-holds",
    "root-donated",
    "behind",
    "wakes",
)
SAVED = 4  # steps between two checkpoints
WIDTH = 400
NOTICE = 12.0  # seconds
STUCK, COMES = 8.0 * SLOWNESS, 4.0 * SLOWNESS  # seconds

directory, way, *victims = sys.argv[1:]
hangs = [words.partition(":")[2] for words in victims]
victims = [list(map(int, it.partition(":")[0].split(","))) for it in victims]
board = Board(directory)
pids = board.comm.allgather(os.getpid())
pickle_nothing()
heard = []
logging.getLogger("jaxcoded").addHandler(
    type(
        "Heard",
        (logging.Handler,),
        {"emit": lambda _, it: heard.append(it.getMessage())},
    )()
)
if any(hangs):
    logging.getLogger("jaxcoded").addHandler(logging.StreamHandler())
size = board.size
options = jaxcoded.Options()
# who hangs holds the others up
if set(hangs) - {"", "leaves", "raises"} and way in FAILS:
    seconds = STUCK / 4 if way == "wakes" else STUCK
    options = jaxcoded.Options(deadline=seconds, on_deadline="raise")
if way == "explicit":
    parents = jaxcoded.make_plan(size, jaxcoded.Coded(fanout=2)).parents
    group = jaxcoded.CodedGroup(board.comm, jaxcoded.Coded(parents=parents))
elif way.endswith("shared"):
    group = jaxcoded.CodedGroup(
        board.comm, jaxcoded.Shared(replicas=2), options=options
    )
else:
    fanout, stragglers = {"few": (size - 1, size - 2), "goes on": (3, 2)}.get(
        way, (2, 1)
    )
    group = jaxcoded.CodedGroup(
        board.comm,
        jaxcoded.Coded(
            fanout=fanout, stragglers=stragglers, root_computes=way == "root-holds"
        ),
        options=options,
    )
rounds = []
group.on_round(lambda it: rounds.append(it.number))

took = {}  # seconds, of those that leave
if any(how.startswith("leaves") for how in hangs):
    jaxcoded.leave_on_sigterm(NOTICE)

random = np.random.default_rng(0)
data = random.standard_normal((EXAMPLES, WIDTH))
compiled, device = [], Device()


def make_step(group):
    """The compiled step, and what this rank reads of each batch."""
    part = group.batch(EXAMPLES)
    assert len(part.indices) or (group.rank == group.plan.root and way != "root-holds")
    x = data[part.indices]

    def loss(w, x):
        return ((x @ w - 1) ** 2).astype(w.dtype)

    value_and_grad = jaxcoded.coded_value_and_grad(loss_of_each(loss), group)

    def step(w, batch):
        compiled.append(group.size)
        if "device" in hangs:
            w = device(w)
        value, gradient = value_and_grad(w, batch)
        return w - 1e-3 * gradient, value

    # a step that fails takes with it what was donated
    donates = way not in FAILS or way == "root-donated"
    jitted = jax.jit(step, donate_argnums=0 if donates else ())
    return lambda w: jitted(w, part.of(x))


def loss_of_each(loss):
    return jax.vmap(loss, in_axes=(None, 0))


def alone(steps):
    """The parameters after so many steps, of one process."""
    w = np.zeros(WIDTH)
    for _ in range(steps):
        w = w - 1e-3 * 2 * (data.T @ (data @ w - 1)) / EXAMPLES
    return w


w, step = jax.numpy.zeros(WIDTH), make_step(group)
steps, meetings = 0, 0
checkpoint = board.directory / "checkpoint.npy"
written = board.directory / "written.npy"


def train(to):
    global step, w, steps
    while steps < to:
        dying = victims[steps // EVERY] if steps // EVERY < len(victims) else []
        if steps == EVERY // 2 - 3 and way == "behind" and board.rank == 0:
            os.kill(pids[2], signal.SIGSTOP)
        if steps % EVERY == EVERY // 2 and board.rank in dying:
            how = hangs[steps // EVERY]
            board.say(how or "is killed")
            if how.startswith("leaves"):
                leave(busy=how == "leaves busy")
            jax.block_until_ready(w)
            if way == "behind":
                board.wait({1}, steps)
            if how == "device":
                device.stuck = True
            elif how == "raises":
                raise ArithmeticError("injected")
            elif how == "wakes":
                if not failed_at:
                    os.kill(os.getpid(), signal.SIGSTOP)
            else:
                hang(how) if how else os.kill(os.getpid(), signal.SIGKILL)
        try:
            new, _ = step(w)
            if way in FAILS:
                jax.block_until_ready(new)
        except jax.errors.JaxRuntimeError as error:
            if way not in FAILS[1:]:
                raise
            said.append(str(error))
            jaxcoded.effects_barrier()  # drops it
            if way == "behind" and board.rank == 1:
                os.kill(pids[2], signal.SIGCONT)
            failed_at.append(steps)
            recover(steps // EVERY)
            alike.append(group.alike)
            step = make_step(group)
            if not group.alike:
                too_early.append(sums_too_early())
            if way == "root-donated":
                assert w.is_deleted()
                *saved, steps = np.load(checkpoint)
                w = jax.numpy.asarray(saved)
                read.append(int(steps))
            steps, w = jaxcoded.tree_bcast((steps, w), group)
            steps = int(steps)
            continue
        w = new
        steps += 1
        board.note(steps)
        saves = way == "root-donated" and group.rank == group.plan.root
        if saves and steps % SAVED == 0:
            np.save(written, np.append(w, steps))
            written.rename(checkpoint)


def leave(*, busy):
    """As a machine that is taken back makes this rank, with its last step in flight."""
    if busy:
        threading.Timer(0.5 * SLOWNESS, told_to_leave).start()
        hang("busy")
    told_to_leave()
    time.sleep(PATIENCE)


def told_to_leave():
    told = board.directory / f"told-{board.rank}"
    told.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGTERM)


def see_off(rank, process):
    """Note how long the process of a rank takes to leave."""
    select.select([process], [], [])
    end = time.monotonic()
    told = board.directory / f"told-{rank}"
    took[rank] = end - float(told.read_text())


def recover(round_):
    """Go on without those that have fallen in a round."""
    global group, meetings
    if way == "wakes":
        if board.rank == 1:
            threading.Thread(target=wake, daemon=True).start()
        group = group.recovered(timeout=PATIENCE, put_out=True)
        return
    how = hangs[round_] if round_ < len(victims) else ""
    if not how or how.startswith("leaves") or how == "raises":
        group = group.recovered()
        return
    jax.block_until_ready(w)
    # not of steps: some may have a result more that a stopped root could not tell to all
    meetings += 1
    board.note(MET + meetings)
    fallen = {rank for ranks in victims[: round_ + 1] for rank in ranks}
    board.wait(set(range(size)) - fallen, MET + meetings)
    group = group.recovered(timeout=COMES, put_out=True)


def sums_too_early():
    """What a sum says that does not wait for the state of the root."""
    try:
        uncounted.coded_allreduce(w, group)
    except jaxcoded.CodedError as error:
        return str(error)
    return "nothing"


def fails(**arguments):
    """What `recovered` raises."""
    try:
        group.recovered(**arguments)
    except (ValueError, jaxcoded.CodedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wake():
    """Let the root go on once the others are in `recovered`."""
    stat = pathlib.Path(f"/proc/{pids[0]}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    time.sleep(1.0)
    os.kill(pids[0], signal.SIGCONT)


said, failed_at, alike, too_early, read = [], [], [], [], []
watchers = []
for how, ranks in zip(hangs, victims):
    if how.startswith("leaves") and board.rank == size - 2:  # which stays
        for rank in ranks:
            process = rank, os.pidfd_open(pids[rank])
            watchers.append(threading.Thread(target=see_off, args=process, daemon=True))
            watchers[-1].start()
for round_ in range(len(victims)):
    try:
        train((round_ + 1) * EVERY)
    except jax.errors.JaxRuntimeError as error:
        if way != "beyond":
            raise
        said.append(str(error))
        jaxcoded.effects_barrier()  # drops it
    if way in ("explicit", "few"):
        said.append(fails())
        train((round_ + 1) * EVERY + 3)  # the old group goes on
        group = group.recovered(strategy=jaxcoded.Coded(fanout=2))
    elif way == "goes on":
        continue
    elif way == "stopped":
        if board.rank == board.size - 1:
            board.wait({0}, 1000)  # until the others have given up
        else:
            said.append(fails(timeout=3.0))
            board.note(1000)
        old = group
        while group is old:  # the late one may hear first that it was late
            with contextlib.suppress(jaxcoded.CodedError):
                group = group.recovered(timeout=PATIENCE)
    elif way == "again":
        if board.rank == board.size - 1:
            engine.missing = lambda: os.kill(os.getpid(), signal.SIGKILL)
        said.append(fails())
        group = group.recovered()
    elif way == "waits":
        change.OPENS, missing = 2.0, engine.missing
        if board.rank == board.size - 1:
            # the others wait for it in the new group's communicator
            engine.missing = lambda: time.sleep(change.OPENS + 4.0) or ""
        said.append(fails())
        change.OPENS, engine.missing = 120.0, missing
        group = group.recovered()
    elif way == "stops":
        change.OPENS, missing = 2.0, engine.missing
        if board.rank == board.size - 1:
            engine.missing = lambda: os.kill(os.getpid(), signal.SIGSTOP)
        said.append(fails(timeout=3.0 * SLOWNESS, put_out=True))
        change.OPENS, engine.missing = 120.0, missing
        old = group
        while group is old:  # its death may be reported late
            with contextlib.suppress(jaxcoded.CodedError):
                group = group.recovered(timeout=PATIENCE)
    elif way == "apart":
        try:
            if board.rank == 2:
                jax.block_until_ready(step(w))
            else:
                group.recovered(timeout=2.0)
        except (jaxcoded.CodedError, jax.errors.JaxRuntimeError) as error:
            said.append(str(error))
        board.report(said=said)
        jaxcoded.effects_barrier()
        group.close()
        sys.exit()
    else:
        recover(round_)
    assert group.recovered() is group  # nobody has died since
    assert way.endswith("shared") or group.plan.tolerance(group.plan.root) == 1
    if way not in FAILS[1:]:
        step = make_step(group)
train(steps + EVERY)
for each in watchers:
    each.join(PATIENCE)
if way == "goes on":
    children = group.plan.coded_children(group.rank)
    fallen = [rank for ranks in victims for rank in ranks if rank in children]
    until = time.monotonic() + PATIENCE
    while str(heard).count("is dead, as MPI") < len(fallen):
        assert time.monotonic() < until, heard
        time.sleep(0.01)  # MPI may report it after the last step
w = np.asarray(w)
error = abs(w - alone(steps)).max() / abs(w).max()
until = time.monotonic() + PATIENCE
while rounds[-1:] != [group.rounds] and time.monotonic() < until:
    time.sleep(0.01)  # they are told of by another thread
board.report(
    digest=hashlib.sha256(w).hexdigest(),
    error=error,
    size=group.size,
    rank=group.rank,
    said=said,
    steps=steps,
    rounds=group.rounds,
    took=took,
    notice=NOTICE,
    compiled=compiled,
    heard=heard,
    failed_at=failed_at,
    alike=alike,
    read=read,
    too_early=too_early,
    followed=rounds[-1:] == [group.rounds] and rounds.count(1) > 1,
)
group.close(2.0 if way == "goes on" else 60.0)  # which has its dead
