"""The program of ranks that play schedules of faults: one training, with one of the
ways of summing in `schedule`.

``play.py DIRECTORY``: play the schedules in the directory, each on the ranks that the
previous one has left. `chaos.py` starts this program, continues stopped ranks, kills
ranks that hang, and compares the results in the directory. This program checks every
step.

``play.py DIRECTORY SCHEDULE PHASE``: play the schedules in a process that joins at the end of a phase. Schedules and
phases count from 0.
"""

import ctypes
import faulthandler
import hashlib
import json
import math
import os
import pathlib
import pickle
import signal
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import compiled

compiled.share()

import jax
import jax.numpy as jnp
import numpy as np
import uncounted
from board import Board
from mpi4py import MPI
from schedule import FATAL, Fault, Phase, Schedule

import jaxcoded
from jaxcoded import errors
from jaxcoded.group.membership.new_rank import NewRank

jax.config.update("jax_enable_x64", True)

EXAMPLES, ROWS = 24, 48  # examples of a step, and rows in all
RATE = 0.02
CLOSE = 1e-9  # allowed difference, relative to the largest number
EXACT = 1e-9  # largest residual of an exact sum
TRIES = 20
SLOWNESS = float(os.environ.get("JAXCODED_SLOWNESS", "1"))
PATIENCE = 60 * SLOWNESS  # seconds in which all live ranks must come
# seconds in which ranks must come if the group puts out the other ranks
COMES = 10 * SLOWNESS
ANNOUNCES = SLOWNESS  # seconds in which a rank announces its message

directory = pathlib.Path(sys.argv[1])
place = [int(word) for word in sys.argv[2:]]  # where this process joins
world = MPI.COMM_WORLD
schedules = pickle.loads((directory / "schedules").read_bytes())
process = world.rank  # among all processes that the job has had
if place:
    process += schedules[0].ranks + sum(
        drawn.joining for drawn in schedules[: place[0]]
    )
    phases = schedules[place[0]].phases[: place[1]]
    process += sum(len(item.joining) for item in phases)
mine = Board(directory / "board").rows[process]
faulthandler.register(
    signal.SIGUSR2,
    file=(directory / f"stacks-{process}").open("w"),
)
host = MPI.Get_processor_name().rpartition("-")[2]
mine["host"] = int(host) if host.isdecimal() else 0
mine["progress"] = time.monotonic()
mine["pid"] = os.getpid()


class Wrong(Exception):
    """A step did not end as the schedule demands."""


class Training:
    """A linear fit by one process, whose batch moves through the data.

    Args:
        width: the number of parameters.
    """

    def __init__(self, width):
        random = np.random.default_rng(width)
        self.x = random.standard_normal((ROWS, width))
        self.y = random.standard_normal(ROWS)
        self.rate = RATE / width

    def rows(self, number):
        """Return the rows of the batch of a step."""
        return (np.arange(EXAMPLES) + 5 * number) % ROWS

    def after(self, w, gradient):
        return w - self.rate * gradient

    def step(self, w, number):
        """Return the parameters after a step by one process."""
        rows = self.rows(number)
        off = self.x[rows] @ w - self.y[rows]
        return self.after(w, 2 * off @ self.x[rows])


class Steps:
    """The steps of a rank in a group.

    Args:
        keeps: whether a failed step keeps the parameters and raises its error itself.
    """

    def __init__(self, of, training, group, keeps):
        self.way = of.way if of.way != "ahead" or not keeps else "jit"
        self.ahead = self.way == "ahead"
        self.exact = of.exact
        self._training, self._group = training, group
        self._part = None
        if self.way != "blocks":
            self._part = group.batch(EXAMPLES)
        self._token = jnp.int32(0)
        self.residual = 0.0
        if self.way not in ("host", "blocks"):
            donated = {"donate_argnums": 0} if self.ahead else {}
            self._jitted = jax.jit(getattr(self, f"_{self.way}_in_jit"), **donated)

    def _local(self, number):
        rows = self._training.rows(number)[self._part.indices]
        return self._training.x[rows], self._training.y[rows]

    def __call__(self, w, number, skip, flip):
        """Return the parameters after a step, in which this rank may skip or contribute
        a wrong value.
        """
        if self.way == "host":
            return self._host(w, number, skip, flip)
        if self.way == "blocks":
            return self._blocks(w, number)
        with errors.translated():
            out = self._in_jit(w, number, skip, flip)
            return out if self.ahead else np.asarray(out)

    def _in_jit(self, w, number, skip, flip):
        local = self._local(number)
        if self.way == "gradient":
            out, self._token = self._jitted(w, self._part.of(local), self._token)
        elif self.way == "shared":
            out = self._jitted(w, self._part.of(local))
        elif self.way == "started":
            out, residual = self._jitted(w, local, np.asarray(self._part.weights), skip)
        else:
            weights = np.asarray(self._part.weights)
            out, residual = self._jitted(w, local, weights, skip, flip)
            if not self.exact:
                self.residual = float(residual)
        return out

    def drop_the_error(self):
        """Drop the error of a failed step, which JAX would raise in the next one."""
        jaxcoded.effects_barrier()
        self._token = jnp.int32(0)

    def _gradient(self, w, batch, weights):
        x, y = batch
        return (weights * 2 * (x @ w - y)) @ x

    def _host(self, w, number, skip, flip):
        local = self._gradient(w, self._local(number), np.asarray(self._part.weights))
        local = np.asarray(flipped(local, flip))
        total = uncounted.allreduce(local, self._group, skip=skip)
        return self._training.after(w, total)

    def _blocks(self, w, number):
        total = np.zeros_like(w)
        rows = self._training.rows(number)
        with self._group.blocks(EXAMPLES) as blocks:
            for block in blocks:
                held = rows[block.indices]
                total += self._gradient(
                    w, (self._training.x[held], self._training.y[held]), 1.0
                )
        return self._training.after(w, uncounted.allreduce(total, self._group))

    def _jit_in_jit(self, w, batch, weights, skip, flip):
        local = flipped(self._gradient(w, batch, weights), flip)
        if self.exact:
            total = uncounted.coded_allreduce(local, self._group, skip=skip)
            return self._training.after(w, total), 0.0
        total, residual, _ = uncounted.coded_allreduce(
            local, self._group, skip=skip, residual=True
        )
        return self._training.after(w, total), residual

    _ahead_in_jit = _jit_in_jit

    def _started_in_jit(self, w, batch, weights, skip):
        halves = jnp.array_split(self._gradient(w, batch, weights), 2)
        begun = [
            uncounted.coded_allreduce_start(half, self._group, skip=skip)
            for half in halves
        ]
        done = [jaxcoded.coded_allreduce_done(each) for each in reversed(begun)]
        return self._training.after(w, jnp.concatenate(done[::-1])), 0.0

    def _losses(self, w, batch):
        x, y = batch
        return (x @ w - y) ** 2

    def _gradient_in_jit(self, w, batch, token):
        coded = jaxcoded.coded_value_and_grad(self._losses, self._group, mean=False)
        (_, gradient), _, token = coded(w, batch, token=token)
        return self._training.after(w, gradient), token

    def _shared_in_jit(self, w, batch):
        coded = jaxcoded.coded_value_and_grad(self._losses, self._group, mean=False)
        return self._training.after(w, coded(w, batch)[1])


def flipped(x, flip):
    """Return ``x``; if ``flip``, with one exponent bit of its largest number flipped."""
    bits = jax.lax.bitcast_convert_type(jnp.asarray(x), jnp.uint64)
    largest = jnp.argmax(jnp.abs(x))
    bits = bits.at[largest].set(bits[largest] ^ (jnp.uint64(flip) << 61))
    return jax.lax.bitcast_convert_type(bits, jnp.float64)


class Player:
    """Plays a schedule.

    Args:
        of: the schedule.
        number: the number of the schedule in the job.
        rank: the rank of this process in the schedule.
    """

    def __init__(self, of: Schedule, number: int, rank: int) -> None:
        self._of, self._index, self._rank = of, number, rank
        mine["schedule"], mine["steps"] = number + 1, 0
        mine["progress"] = time.monotonic()
        self._training = Training(of.width)
        self._w = self._right = np.zeros(of.width)
        self._number = 0  # steps done
        # the step that has failed in each phase; 0: none
        self._failed = np.zeros(len(of.phases), int)
        self._missed = False  # whether it missed the next phase, see `_go_on`
        self._dying = self._flips = False
        self._found: set[tuple[Phase, int]] = set()  # phases and steps of flipped bits
        self._repeated = 0
        self._missed_deadlines = 0  # in the current step
        self._met: set[int] = set()  # steps before which all ranks met
        self._befallen: set[tuple[Phase, Fault]] = set()

    def begin(self, comm):
        """Begin with the live ranks; the schedule numbers them in this order."""
        options = dict(self._of.options)
        if options.get("on_deadline") is not None:
            options["deadline"] *= SLOWNESS
        options = jaxcoded.Options(**options)
        self._group = jaxcoded.CodedGroup(
            comm, self._of.strategy, transport="engine", options=options
        )

    def join(self, phase: Phase) -> bool:
        """Join the ranks at the end of a phase; return whether this succeeded. It fails if a rank dies meanwhile."""
        self._befall(phase, phase.extending)
        if self._dying:  # at the latest before the other ranks count it as a member
            NewRank.ready = lambda *_: self._be_killed()
        try:
            self._group = jaxcoded.CodedGroup.joining()
        except jaxcoded.CodedError as error:
            if not phase.lost:
                raise
            say(str(error))
            return False
        self._failed = self._take_over()
        say(f"has joined as rank {self._group.rank} of {self._group.size}")
        return True

    def play(self, first=0):
        """Play the phases from ``first`` on; return the communicator of the ranks that
        live at the end.
        """
        for number, phase in enumerate(self._of.phases[first:], first):
            if self._missed:
                self._missed = False
                self._failed = self._take_over()
            else:
                if not self._train(phase, number):
                    self._be_killed()
                self._recover(phase, number)
            if phase.joining:
                self._extend(phase, number)
        bits = hashlib.sha256(np.asarray(self._w).tobytes()).hexdigest()
        left = {
            "seed": self._of.seed,
            "digest": bits,
            "steps": self._number,
            "failed": self._failed.tolist(),
        }
        with (directory / f"rank-{process}.jsonl").open("a") as file:
            file.write(json.dumps(left) + "\n")
        if self._group.rank == 0:
            say(f"has played seed {self._of.seed}")
        comm = self._group.comm.Dup()
        self._group.close()
        return comm

    # Steps of a phase.

    def _train(self, phase: Phase, number: int) -> bool:
        """Train in a phase with this number; return whether this rank continues."""
        keeps = phase.fails or phase.root_dies
        steps = Steps(self._of, self._training, self._group, keeps)
        first, self._met = self._number, set()
        # a step that must fail has failed by then
        past = phase.steps + (2 if phase.fails else 0)
        while self._number < first + past:
            step = self._number - first + 1
            self._flips = False
            skip = self._befall(phase, step)
            try:
                w = steps(self._w, self._number, skip, self._flips)
            except jaxcoded.DeadlineExceeded:
                if self._of.options.get("on_deadline") != "raise":
                    raise
                if self._dying:
                    return False
                self._missed_deadlines += 1
                if self._missed_deadlines == TRIES:
                    raise
                steps.drop_the_error()
                self._note()
                continue
            except jaxcoded.InconsistentMessages:
                if not phase.flips(step) or (phase, step) in self._found:
                    raise
                self._found.add((phase, step))
                steps.drop_the_error()
                self._note()
                continue
            except jaxcoded.GroupMismatch:
                if not any(
                    fault.kind == "error" and fault.step <= step
                    for fault in phase.faults
                ):
                    raise
                self._agree()
                continue
            except jaxcoded.CodedError as error:
                if self._dying:
                    return False
                if self._repeats(phase, str(error)):
                    self._note()
                    continue
                self._judge(phase, error)
                if not phase.root_dies:  # if the root dies, some ranks may have the sum
                    self._failed[number] = self._number + 1
                steps.drop_the_error()
                return True
            if self._dying:
                return False
            if phase.flips(step) and (phase, step) not in self._found:
                raise Wrong(f"no rank has found the flipped bit of step {step}")
            self._number += 1
            self._missed_deadlines = 0
            self._right = self._training.step(self._right, self._number - 1)
            self._w = w
            if not steps.ahead:
                self._check(steps.residual)
            self._note()
        if phase.fails:
            raise Wrong(f"{past} steps were done, but none of them failed")
        if steps.ahead:
            with errors.translated():
                self._w = np.asarray(self._w)
            self._check(0.0)
        if not phase.root_dies and any(fault.kind == "error" for fault in phase.faults):
            # A late rank may not know yet that its calls do not match. It would wait
            # alone for the other ranks' next call.
            self._agree()
        return True

    def _check(self, residual):
        if not np.isfinite(self._w).all():
            raise Wrong(f"after step {self._number} the parameters are not finite")
        if residual > EXACT:
            self._right = self._w
            return
        off = abs(self._w - self._right).max() / max(abs(self._right).max(), 1e-30)
        if not off < CLOSE:
            raise Wrong(
                f"after step {self._number} the parameters are off by {off:.1e}"
            )
        self._right = self._w  # otherwise rounding errors add up

    def _note(self):
        mine["steps"] = self._number
        mine["progress"] = time.monotonic()

    def _repeats(self, phase, text):
        """Return whether a step of blocks on the host must be repeated. A rank died
        with blocks that it had computed, or too many ranks are dead or given up as
        slow.
        """
        if self._of.way != "blocks":
            return False
        too_many = "nobody who is left holds" in text and not phase.fails
        again = "repeat the step" in text or too_many
        self._repeated += again
        return again and self._repeated < TRIES

    def _judge(self, phase, error):
        """Raise `Wrong` unless the schedule demands this error."""
        text = str(error)
        if not (phase.fails or phase.root_dies):  # before late ranks have all results
            raise Wrong(f"step {self._number + 1} failed: {text}") from error
        dead = [phase.living.index(rank) for rank in phase.dead]
        rootless = phase.root_dies and "the root, rank " in text
        if not (rootless or isinstance(error, jaxcoded.TooManyErasures)):
            raise Wrong(f"the dead do not cause this error: {text}") from error
        named = [
            rank
            for rank in range(len(phase.living))
            if f"rank {rank}, which is dead" in text
            or f"the root, rank {rank}, is dead" in text
        ]
        if not named or set(named) - set(dead):
            raise Wrong(
                f"the dead are ranks {dead} of the group, but: {text}"
            ) from error

    def _agree(self):
        """Continue on all ranks from the root's state after a call that did not match."""
        for _ in range(TRIES):
            state = {"number": jnp.int64(self._number), "w": jnp.asarray(self._w)}
            try:
                with errors.translated():
                    state = jax.block_until_ready(
                        jaxcoded.tree_bcast(state, self._group)
                    )
            except jaxcoded.GroupMismatch:
                jaxcoded.effects_barrier()
                continue
            self._number = int(state["number"])
            self._w = self._right = np.asarray(state["w"])
            return self._note()
        raise Wrong(f"calls have not matched {TRIES} times")

    def _take_over(self):
        """Take over the state of a new root, or on a new rank; return the failed step
        of each phase.
        """
        state = self._number, self._failed, self._w
        number, failed, w = jaxcoded.tree_bcast(
            jax.tree.map(jnp.asarray, state), self._group
        )
        if number < self._number:
            raise Wrong(f"it has done {self._number} steps, and the root {number}")
        while self._number < number:
            self._right = self._training.step(self._right, self._number)
            self._number += 1
        self._w = np.asarray(w)
        self._check(0.0 if self._of.exact else math.inf)
        return np.array(failed)  # a copy that can be written

    # Faults.

    def _befall(self, phase, step) -> bool:
        """Apply the faults of this rank in this step; return whether it skips."""
        skip = False
        if phase.errs(step) and step not in self._met:
            self._met.add(step)
            self._group.comm.Barrier()  # no rank is late, so all notice soon
        for fault in phase.of(self._rank, step):
            skip |= fault.kind == "skip"
            if (phase, fault) in self._befallen:
                continue
            self._befallen.add((phase, fault))
            self._dying |= fault.kind in ("kill", "offer", "leave")
            if fault.delay:
                threading.Timer(fault.delay, self._happen, [fault]).start()
            else:
                self._happen(fault)
        return skip

    def _happen(self, fault: Fault):
        say(f"{fault}")
        now = time.monotonic()
        match fault.kind:
            case "sleep":
                time.sleep(fault.seconds * SLOWNESS)
            case "stop":
                mine["wake"] = now + fault.seconds
                os.kill(os.getpid(), signal.SIGSTOP)
            case "cut":
                mine["cut"] = now + fault.seconds
            case "flip":
                self._flips = True
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "offer":
                threading.Thread(target=self._die_when_announced, daemon=True).start()
            case "leave":
                os.kill(os.getpid(), signal.SIGTERM)
            case "loop":
                mine["kill"] = now + fault.seconds
                while True:
                    pass
            case "exit":
                mine["kill"] = now + fault.seconds
                sys.exit()
            case "lock":
                mine["kill"] = now + fault.seconds
                ctypes.PyDLL(None).sleep(1000)  # unlike `ctypes.CDLL` it keeps the lock
            case "error":
                try:
                    uncounted.allreduce(np.zeros(3, "datetime64[D]"), self._group)
                except TypeError:
                    return
                raise Wrong("dates were summed")

    def _die_when_announced(self):
        """Die when the message is announced, or soon if there is no message or the step
        is done.
        """
        until, status = (
            time.monotonic() + ANNOUNCES,
            self._group._session.transport.status,
        )
        try:
            while time.monotonic() < until:
                text = status()
                if " calls round " in text and "offered nothing" not in text:
                    break
                time.sleep(1e-4)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    def _be_killed(self):
        time.sleep(PATIENCE)
        raise Wrong("the conductor has not killed this rank")

    # The end of a phase.

    def _recover(self, phase, number):
        for fault in phase.faults:  # if a step has failed before, this rank dies now
            if (
                fault.rank == self._rank
                and fault.rank in phase.dead
                and fault.kind in FATAL
            ):
                self._befall(phase, fault.step)
        self._befall(phase, phase.recovering)
        left = len(phase.living) - len(phase.dead)
        follows = () if phase.joining else self._of.phases[number + 1 : number + 2]
        self._go_on(left, put_out=phase.puts_out, follows=follows)
        if phase.root_dies and not self._missed:
            self._take_over()

    def _go_on(self, left: int, put_out: bool = False, follows=()):
        """Continue with ``left`` ranks, or with the survivors of the phase that
        follows: the root may die in that phase before this late rank knows that no rank
        was dead.
        """
        for _ in range(TRIES):
            mine["progress"] = time.monotonic()
            try:
                self._group = self._group.recovered(
                    timeout=COMES if put_out else PATIENCE, put_out=put_out
                )
            except jaxcoded.CodedError as error:
                if "one more rank died" not in str(error):
                    raise
                say(str(error))
                continue
            if self._group.size <= left:
                break
            if self._dying:
                self._be_killed()
        for phase in follows:
            end = len(phase.living) - len(phase.dead)
            self._missed = phase.root_dies and self._group.size == end < left
        if self._group.size != left and not self._missed:
            raise Wrong(f"{left} ranks live, but the group has {self._group.size}")
        say(f"goes on as rank {self._group.rank} of {left}")

    def _extend(self, phase, number):
        """Let ranks join at the end of the phase with this number."""
        self._befall(phase, phase.extending)
        command = [sys.executable, __file__, directory, self._index, number]
        self._note()
        try:
            group = self._group.extended(
                len(phase.joining), command=[*map(str, command)], timeout=PATIENCE
            )
        except jaxcoded.CodedError as error:
            if self._dying:
                self._be_killed()
            if not phase.lost:
                raise
            say(str(error))
            return self._go_on(len(phase.after))
        if phase.lost:
            raise Wrong("ranks have joined although one died meanwhile")
        self._group = group
        self._take_over()
        self._note()


def say(text):
    sys.stderr.write(f"[{time.monotonic():.3f}] {process}: {text}\n")
    sys.stderr.flush()


def main():
    comm, first = world, 0
    jaxcoded.leave_on_sigterm(COMES)
    if place:
        number, at = place
        phase = schedules[number].phases[at]
        player = Player(schedules[number], number, phase.joining[world.rank])
        if not player.join(phase):
            return
        comm, first = player.play(at + 1), number + 1
    for number, each in enumerate(schedules[first:], first):
        player = Player(each, number, comm.rank)
        player.begin(comm)
        comm = player.play()
    mine["schedule"] = 0
    mine["done"] = 1


try:
    main()
except SystemExit:
    raise
except BaseException as error:
    mine["failed"] = 1
    say(f"fails: {type(error).__name__}: {error}")
    time.sleep(
        PATIENCE
    )  # until all ranks have written their stacks and the job is ended
    raise
