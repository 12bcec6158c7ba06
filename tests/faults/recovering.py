"""Train, lose ranks, and continue with the live ones, as docs/recovery.md shows.

``recovering.py DIRECTORY WAY RANKS...``: the RANKS of each argument fall together, and
then the group is recovered. An argument names the ranks and how they fall:

- "3,6": they are killed;
- "3,6:lock": they hang as in `harness.hang`, and the group puts them out;
- "3:device": they hang in their compiled step, and the group puts them out;
- "3:leaves", "3:leaves busy": they leave in order, in Python or while they are busy;
- "3:raises": their program ends with an error.

WAY is one of:

- "trains", "shared": the training uses a code, or shared work;
- "continues": no recovery, as the plan tolerates all these deaths;
- "root", "root-shared": the root dies, the step fails, and the new root passes its state on;
- "root-holds": as "root", with a root that holds data;
- "root-donated": the step consumes the state; it is read from the root's checkpoint;
- "behind": rank 2 was stopped meanwhile, and lacks results;
- "wakes": the root was stopped, and continues after the other ranks have missed the
  round in which it announces the roll call.

Other WAYs add a fault after the first deaths:

- "beyond": more ranks die than a parent tolerates, so that the step raises an error;
- "explicit": the strategy names the tree;
- "few": no plan fits the ranks that are left;
- "stopped": a live rank does not come for a while;
- "apart": a rank calls something else;
- "again": the last rank dies while the ranks make the new group;
- "waits", "stops": while the ranks make the new group, the last rank is late, or stopped.
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

EVERY = 20  # steps between two checks for dead ranks
# the number on the board for ranks that are about to recover, larger than any step
MET = 1000
# WAYs in which a step fails
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
victims = [list(map(int, victim.partition(":")[0].split(","))) for victim in victims]
board = Board(directory)
pids = board.comm.allgather(os.getpid())
pickle_nothing()
heard = []
logging.getLogger("jaxcoded").addHandler(
    type(
        "Heard",
        (logging.Handler,),
        {"emit": lambda _, record: heard.append(record.getMessage())},
    )()
)
if any(hangs):
    logging.getLogger("jaxcoded").addHandler(logging.StreamHandler())
size = board.size
options = jaxcoded.Options()
# a hanging rank delays the other ranks
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
    fanout, stragglers = {"few": (size - 1, size - 2), "continues": (3, 2)}.get(
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
group.on_round(lambda seen: rounds.append(seen.number))

took = {}  # seconds that leaving ranks take
if any(how.startswith("leaves") for how in hangs):
    jaxcoded.leave_on_sigterm(NOTICE)

random = np.random.default_rng(0)
data = random.standard_normal((EXAMPLES, WIDTH))
compiled, device = [], Device()


def make_step(group):
    """Return the compiled step, and the part of each batch that this rank reads."""
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

    # a failed step consumes its donated arguments
    donates = way not in FAILS or way == "root-donated"
    jitted = jax.jit(step, donate_argnums=0 if donates else ())
    return lambda w: jitted(w, part.of(x))


def loss_of_each(loss):
    return jax.vmap(loss, in_axes=(None, 0))


def alone(steps):
    """Return the parameters after this number of steps by one process."""
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
            jaxcoded.effects_barrier()  # drops the error
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
    """Leave, with the last step in flight, as if this machine were reclaimed."""
    if busy:
        threading.Timer(0.5 * SLOWNESS, told_to_leave).start()
        hang("busy")
    told_to_leave()
    time.sleep(PATIENCE)


def told_to_leave():
    file = board.directory / f"told-{board.rank}"
    file.write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGTERM)


def see_off(rank, process):
    """Note how long the process of a rank takes to leave."""
    select.select([process], [], [])
    end = time.monotonic()
    file = board.directory / f"told-{rank}"
    took[rank] = end - float(file.read_text())


def recover(round_):
    """Continue without the ranks that have fallen in a round."""
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
    # meetings are counted, not steps: some ranks may have one more result, which a stopped root could not send to all
    meetings += 1
    board.note(MET + meetings)
    fallen = {rank for ranks in victims[: round_ + 1] for rank in ranks}
    board.wait(set(range(size)) - fallen, MET + meetings)
    group = group.recovered(timeout=COMES, put_out=True)


def sums_too_early():
    """Return the error of a sum that does not wait for the root's state."""
    try:
        uncounted.coded_allreduce(w, group)
    except jaxcoded.CodedError as error:
        return str(error)
    return "nothing"


def fails(**arguments):
    """Return the error that `recovered` raises."""
    try:
        group.recovered(**arguments)
    except (ValueError, jaxcoded.CodedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wake():
    """Continue the root once the other ranks are in `recovered`."""
    stat = pathlib.Path(f"/proc/{pids[0]}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    time.sleep(1.0)
    os.kill(pids[0], signal.SIGCONT)


said, failed_at, alike, too_early, read = [], [], [], [], []
watchers = []
for how, ranks in zip(hangs, victims):
    if how.startswith("leaves") and board.rank == size - 2:  # the rank that stays
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
        jaxcoded.effects_barrier()  # drops the error
    if way in ("explicit", "few"):
        said.append(fails())
        train((round_ + 1) * EVERY + 3)  # the old group continues
        group = group.recovered(strategy=jaxcoded.Coded(fanout=2))
    elif way == "continues":
        continue
    elif way == "stopped":
        if board.rank == board.size - 1:
            board.wait({0}, 1000)  # until the other ranks have given up
        else:
            said.append(fails(timeout=3.0))
            board.note(1000)
        old = group
        while group is old:  # the late rank may first get an error that it was late
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
            # the other ranks wait for it in the new group's communicator
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
        while group is old:  # the rank's death may be reported late
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
    assert group.recovered() is group  # no rank has died since
    assert way.endswith("shared") or group.plan.tolerance(group.plan.root) == 1
    if way not in FAILS[1:]:
        step = make_step(group)
train(steps + EVERY)
for each in watchers:
    each.join(PATIENCE)
if way == "continues":
    children = group.plan.coded_children(group.rank)
    fallen = [rank for ranks in victims for rank in ranks if rank in children]
    until = time.monotonic() + PATIENCE
    while str(heard).count("is dead, as MPI") < len(fallen):
        assert time.monotonic() < until, heard
        time.sleep(0.01)  # MPI may report the death after the last step
w = np.asarray(w)
error = abs(w - alone(steps)).max() / abs(w).max()
until = time.monotonic() + PATIENCE
while rounds[-1:] != [group.rounds] and time.monotonic() < until:
    time.sleep(0.01)  # another thread reports the deaths
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
group.close(2.0 if way == "continues" else 60.0)  # the old group, which has dead ranks
