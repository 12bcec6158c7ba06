"""Make schedules of faults from a seed: which rank has which fault at which training
step, and what must result.

This module starts nothing. A schedule holds all that the ranks need to play it
(`play.py`) and that the conductor needs to judge it (`chaos.py`). Equal seeds and
numbers of ranks give equal schedules.
"""

import dataclasses
import functools
import math
import random
from typing import Any

import jaxcoded

FEWEST, MOST = 6, 13  # ranks at the beginning of a schedule
LEFT = 5  # least ranks that live at its end
MOST_DEAD = (0, 0, 1, 2, 2, 4)  # drawn for a schedule
# A rank checks each of these steps before the next one. "ahead" runs ahead of its
# rounds and donates its parameters.
CODED = ("host", "host", "jit", "ahead", "gradient", "started")
SHARED = ("shared", "blocks")
SKIPPING = ("host", "jit", "started")
FLIPPING = ("host", "jit")
DONATING = "ahead"
# Faults after which every live rank still comes: a group that compares messages waits
# for all of them.
PASSING = ("sleep", "stop", "kill", "offer", "leave", "skip")
LAST_ERROR = 3  # steps after an error
# How often ranks join, and how often if few ranks are left. JAX takes seconds to start.
JOIN, JOIN_FEW, FEW = 0.06, 0.3, 7
MOST_JOIN = 4
IN_VAIN = 0.35  # how often the first attempt to join fails
# Seconds in which joining processes certainly start. A dying old rank dies within this time: if it died later, in MPI's
# `Shrink`, Open MPI could crash live ranks.
STARTING = 0.5
WIDTHS = (50, 50, 3000, 3000, 40_000)
# Lengths around the longest message sent with its offer, on one host and between hosts,
# and around the length of a piece.
NEAR = (128, 129, 256, 257, 4096, 4097, 8192, 8193, 32_768, 32_769)
LATE = 0.3  # seconds for which a parent sleeps while a child announces its message


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of a rank.

    Attributes:
        kind: what happens to the rank. "sleep": it sleeps. "stop": it gets SIGSTOP, and
            SIGCONT later. "kill": it gets SIGKILL. "offer": it gets SIGKILL after it has announced a message that its
            sleeping parent has not fetched. "loop": its program loops for ever. "lock": its program loops for ever with
            Python's lock. "exit": it leaves the program, and is killed while it waits
            for the other ranks. "leave": it leaves in order after SIGTERM. "cut": the
            cable of its host is cut for a while. "skip": it has nothing to contribute.
            "error": its program catches the error of wrong arguments. "flip": a bit of
            its contribution is flipped, which the other ranks detect.
        rank: the rank's number in the schedule, which counts the ranks at the beginning, and then ranks that join.
        step: the step in which it happens, from 1 in each phase. The step after the
            last is `recovered`, and the next one `extended` or `joining`.
        delay: seconds after the beginning of the step.
        seconds: how long it lasts, or until the rank is killed; infinite: until the
            other ranks put it out.
    """

    kind: str
    rank: int
    step: int
    delay: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        delay = f" after {self.delay:.3f} s" if self.delay else ""
        length = f" for {self.seconds:.2f} s" if self.seconds else ""
        if self.seconds == math.inf:
            length = " until it is put out"
        return f"rank {self.rank}: {self.kind} in step {self.step}{delay}{length}"


FATAL = ("kill", "offer", "loop", "lock", "exit", "leave")


@dataclasses.dataclass(frozen=True)
class Phase:
    """A number of steps, after which the live ranks continue in a new group, and ranks may join.

    Attributes:
        steps: number of steps.
        living: the ranks that live at its beginning.
        faults: the faults in the order of their steps.
        fails: whether more ranks die than the plan tolerates. Then a step fails on all
            live ranks, and the next phase repeats it.
        joining: the ranks that join at its end.
    """

    steps: int
    living: tuple[int, ...]
    faults: tuple[Fault, ...]
    fails: bool
    joining: tuple[int, ...] = ()

    @property
    def recovering(self) -> int:
        """Return the number of the step that calls `recovered`."""
        return self.steps + 1

    @property
    def extending(self) -> int:
        """Return the number of the step that calls `extended`."""
        return self.steps + 2

    @functools.cached_property
    def dead(self) -> tuple[int, ...]:
        """Return the ranks that die in this phase before other ranks join."""
        return tuple(
            sorted(
                fault.rank
                for fault in self.faults
                if fault.kind in FATAL and fault.step < self.extending
            )
        )

    @functools.cached_property
    def lost(self) -> tuple[int, ...]:
        """Return the old or new ranks that die while ranks join, so that none joins."""
        return tuple(
            fault.rank
            for fault in self.faults
            if fault.kind in FATAL and fault.step == self.extending
        )

    @functools.cached_property
    def after(self) -> tuple[int, ...]:
        """Return the ranks that live at its end, in the order of the group."""
        gone = {*self.dead, *self.lost}
        joined = () if self.lost else self.joining
        return *(rank for rank in self.living if rank not in gone), *joined

    @property
    def puts_out(self) -> bool:
        """Return whether a rank hangs until the group puts it out."""
        return any(
            fault.kind in FATAL and fault.seconds == math.inf for fault in self.faults
        )

    @property
    def root_dies(self) -> bool:
        """Return whether the root dies: then the rank with the most results becomes the
        root, and ranks are renumbered.
        """
        return self.living[0] in self.dead

    def errs(self, step: int) -> bool:
        """Return whether a rank calls with wrong arguments in a step."""
        return any((fault.kind, fault.step) == ("error", step) for fault in self.faults)

    def flips(self, step: int) -> bool:
        """Return whether a rank flips a bit in a step."""
        return any((fault.kind, fault.step) == ("flip", step) for fault in self.faults)

    def of(self, rank: int, step: int) -> list[Fault]:
        """Return the faults of a rank in a step."""
        return [
            fault for fault in self.faults if (fault.rank, fault.step) == (rank, step)
        ]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """
    Attributes:
        seed, ranks: the seed and the number of ranks from which it was made.
        way: how the program sums its gradients, one of `CODED` and `SHARED`.
        width: length of a gradient.
        strategy: the group's strategy.
        options: arguments of `Options`; the deadline in seconds on an idle machine.
        phases: the phases, in order.
    """

    seed: int
    ranks: int
    way: str
    width: int
    strategy: jaxcoded.Strategy
    options: dict[str, Any]
    phases: tuple[Phase, ...]

    @property
    def survivors(self) -> int:
        """Return the number of ranks that live at its end."""
        return len(self.phases[-1].after)

    @property
    def waits(self) -> bool:
        """Return whether a parent waits without a limit."""
        return "on_deadline" not in self.options

    @property
    def exact(self) -> bool:
        """Return whether all sums contain the whole batch."""
        return self.options.get("on_deadline") != "approximate"

    @property
    def joining(self) -> int:
        """Return the number of processes that are started to join."""
        return sum(len(phase.joining) for phase in self.phases)

    def plan(self, size: int) -> jaxcoded.Plan:
        """Return the plan of a group of ``size`` ranks."""
        return jaxcoded.make_plan(size, self.strategy)

    def has_plan(self, size: int) -> bool:
        """Return whether there is a plan for ``size`` ranks."""
        try:
            self.plan(size)
        except ValueError:
            return False
        return True

    def __str__(self) -> str:
        lines = [
            (
                f"seed {self.seed} on {self.ranks} ranks: {self.way}, {self.width} numbers, "
                f"{self.strategy}, {self.options}"
            )
        ]
        for phase in self.phases:
            end = ", and fails" if phase.fails else ""
            lines.append(f"  {phase.steps} steps of {len(phase.living)} ranks{end}")
            lines += [f"    {fault}" for fault in phase.faults]
            if phase.joining:
                join = "are to join, and do not" if phase.lost else "join"
                lines.append(f"  ranks {list(phase.joining)} {join}")
        return "\n".join(lines)


def tolerates(plan: jaxcoded.Plan, missing: list[int]) -> bool:
    """Return whether the plan's sums are exact without these ranks."""
    if plan.root in missing:
        return False
    if plan.strategy.by_blocks:
        return all(set(holders) - set(missing) for holders in plan.placement.holders)
    return not plan.unrecoverable([rank in missing for rank in range(plan.size)])


def schedule(seed: int, ranks: int, *, hosts: bool = False) -> Schedule:
    """Return the schedule of a seed for this number of ranks, at least `FEWEST`.

    Args:
        hosts: whether the ranks are on several hosts. Then cables may be cut, and no
            ranks join.
    """
    rng = random.Random(f"{seed} {ranks}")
    to_die = max(0, min(rng.choice(MOST_DEAD), ranks - LEFT))
    way, strategy = _strategy(rng, ranks, ranks - to_die)
    options = _options(rng, way)
    out = Schedule(
        *(seed, ranks, way, rng.choice(WIDTHS), strategy, options),
        phases=(),
    )
    living, phases = tuple(range(ranks)), []
    number = rng.choice((1, 2, 2, 3))
    for i in range(number):
        root = i == number - 1 and to_die > 0 and rng.random() < 0.4
        phase = _phase(rng, out, living, to_die, hosts, root and out.waits)
        phases.append(phase)
        living = phase.after
        to_die -= len(phase.dead)
    if phases[-1].root_dies:
        phases.append(Phase(3, living, (), fails=False))
    out = dataclasses.replace(out, phases=tuple(phases))
    if not hosts:
        out = _with_joins(random.Random(f"{seed} {ranks} joins"), out)
    out = _with_offers(random.Random(f"{seed} {ranks} offers"), out)
    return _with_flips(random.Random(f"{seed} {ranks} flips"), out)


def _with_joins(rng: random.Random, of: Schedule) -> Schedule:
    """Return the schedule, perhaps with ranks that join at the end, and with more steps of all ranks. The first attempt
    to join may fail.
    """
    phases, living = list(of.phases), of.phases[-1].after
    most = min(MOST - len(living), MOST_JOIN)
    numbers = [n for n in range(1, most + 1) if of.has_plan(len(living) + n)]
    often = JOIN_FEW if len(living) <= FEW else JOIN
    if not numbers or rng.random() >= often:
        return of
    number = rng.choice(numbers)
    new = tuple(range(of.ranks, of.ranks + number))
    # after the root's death ranks have other numbers in the plan
    known = not any(phase.root_dies for phase in phases)
    if rng.random() < IN_VAIN:
        may_die = list(new)
        if known and len(living) > LEFT and of.has_plan(len(living) - 1):
            may_die += living[1:]
        phases[-1] = _with_join(rng, phases[-1], new, rng.choice(may_die))
        phases.append(Phase(rng.randint(2, 4), phases[-1].after, (), fails=False))
    phases[-1] = _with_join(rng, phases[-1], new)
    living = phases[-1].after
    if known and rng.random() < 0.6:
        to_die = rng.randint(0, number)
        root_dies = of.waits and to_die > 0 and rng.random() < 0.4
        phases.append(_phase(rng, of, living, to_die, False, root_dies))
        if root_dies:
            phases.append(Phase(3, phases[-1].after, (), fails=False))
    return dataclasses.replace(of, phases=tuple(phases))


def _with_join(
    rng: random.Random, phase: Phase, new: tuple[int, ...], dies: int | None = None
) -> Phase:
    """Return the phase with ranks that join at its end. If an old or new rank dies
    meanwhile, none joins. Ranks may be late.
    """
    out = dataclasses.replace(phase, joining=new)
    faults = list(phase.faults)
    for rank in rng.sample((*phase.after, *new), rng.choice((0, 0, 1, 2))):
        if rank != dies:
            kind = rng.choice(("sleep", "stop"))
            delay = 0.0 if kind == "sleep" else rng.uniform(0.0, STARTING)
            seconds = rng.uniform(0.02, 0.5)
            faults.append(Fault(kind, rank, out.extending, delay, seconds))
    if dies is not None:
        delay = rng.choice((0.0, rng.uniform(0.0, 0.05), rng.uniform(0.0, STARTING)))
        faults.append(Fault("kill", dies, out.extending, delay))
    faults.sort(key=lambda fault: (fault.step, fault.rank, fault.kind))
    return dataclasses.replace(out, faults=tuple(faults))


def _with_offers(rng: random.Random, of: Schedule) -> Schedule:
    """Return the schedule in which some killed ranks have announced messages that no
    rank has fetched.
    """
    phases: list[Phase] = []
    for phase in of.phases:
        plan, faults = of.plan(len(phase.living)), []
        moved = any(each.root_dies for each in phases)
        ends = {each.rank: each.step for each in phase.faults if each.kind in FATAL}
        for fault in phase.faults:
            killed = fault.kind == "kill" and fault.step <= phase.steps and not moved
            parent = plan.parents[phase.living.index(fault.rank)] if killed else -1
            if parent >= 0 and rng.random() < 0.5:
                above = phase.living[parent]
                if fault.step < ends.get(above, math.inf):
                    fault = dataclasses.replace(fault, kind="offer", delay=0.0)
                    faults.append(Fault("sleep", above, fault.step, 0.0, LATE))
            faults.append(fault)
        faults.sort(key=lambda value: (value.step, value.rank, value.kind))
        phases.append(dataclasses.replace(phase, faults=tuple(faults)))
    offers = any(each.kind == "offer" for phase in phases for each in phase.faults)
    width = rng.choice(NEAR) if offers else of.width
    return dataclasses.replace(of, width=width, phases=tuple(phases))


def _with_flips(rng: random.Random, of: Schedule) -> Schedule:
    """Return the schedule with flipped bits and a group that detects them, if its plan
    allows that. In each step with a flipped bit the sum is exact without that rank.
    With donated vectors no bit is flipped, and no rank may be accused.
    """
    kinds = {fault.kind for phase in of.phases for fault in phase.faults}
    ways = (*FLIPPING, DONATING)
    if of.way not in ways or not of.waits or kinds - set(PASSING):
        return of
    phases: list[Phase] = []
    for phase in of.phases:
        plan, faults = of.plan(len(phase.living)), list(phase.faults)
        moved = any(each.root_dies for each in phases)
        number = 0 if moved or of.way == DONATING else rng.randint(0, 2)
        for step in rng.sample(range(1, phase.steps + 1), number):
            rank = rng.randrange(1, plan.size)
            missing = [
                phase.living.index(fault.rank)
                for fault in phase.faults
                if (fault.kind in FATAL and fault.step <= step)
                or (fault.kind, fault.step) == ("skip", step)
            ]
            if (
                not phase.fails
                # no rank can detect a flipped bit that enters no sum
                and all(
                    _sends(plan, holder, missing)
                    for holder in (rank, *_above(plan, rank))
                )
                and tolerates(plan, [*missing, rank])
            ):
                faults.append(Fault("flip", phase.living[rank], step))
        faults.sort(key=lambda fault: (fault.step, fault.rank, fault.kind))
        phases.append(dataclasses.replace(phase, faults=tuple(faults)))
    options = of.options | {"check": jaxcoded.Check(wait=True), "deadline": 100.0}
    return dataclasses.replace(of, options=options, phases=tuple(phases))


def _sends(plan: jaxcoded.Plan, rank: int, missing: list[int]) -> bool:
    """Return whether a rank can form its message to its parent without the missing
    ranks.
    """
    lacks = [
        child for child in plan.tree.children[rank] if not _sends(plan, child, missing)
    ]
    return rank not in missing and len(lacks) <= plan.tolerance(rank)


def _above(plan: jaxcoded.Plan, rank: int) -> list[int]:
    """Return the ranks between one rank and the root."""
    out = []
    while (rank := plan.parents[rank]) != plan.root:
        out.append(rank)
    return out


def _strategy(
    rng: random.Random, most: int, least: int
) -> tuple[str, jaxcoded.Strategy]:
    """Draw how the work is done, and a strategy that fits ``least`` to ``most`` ranks."""
    while True:
        way = rng.choice(CODED + SHARED)
        if way in SHARED:
            replicas, blocks = rng.choice((1, 2, 2, 3)), rng.choice((2, 4, 6))
            strategy: jaxcoded.Strategy = jaxcoded.Shared(
                replicas=replicas, blocks=blocks
            )
        else:
            group: dict[str, Any] = {
                "stragglers": rng.choice((1, 1, 2, 3)),
                "fanout": rng.choice((2, 3, 4, 6, most)),
                "code": "auto",
            }
            if group["fanout"] < 6:  # a code for many children takes long to construct
                group["code"] = rng.choice(("auto", "auto", "cyclic_repetition"))
            if way == "gradient":
                group["slices"] = rng.choice((1, 1, 2))
            strategy = jaxcoded.Coded(**group)
        try:
            for size in range(least, most + 1):
                jaxcoded.make_plan(size, strategy)
        except ValueError:
            continue
        return way, strategy


def _options(rng: random.Random, way: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        "piece_bytes": rng.choice((2048, 65536, None)),
        "history_bytes": rng.choice((1, 256 << 20)),
        "sections_from": rng.choice((None, 1)),
    }
    action = rng.choice(("wait",) * 6 + ("raise", "approximate"))
    if action == "wait":
        options["deadline"] = rng.choice((0.2, 10.0, None))
    elif action == "raise":
        options |= {"deadline": 2.0, "on_deadline": "raise"}
    elif way == "jit":
        options |= {"deadline": 0.3, "on_deadline": "approximate"}
    return options


def _phase(
    rng: random.Random,
    of: Schedule,
    living: tuple[int, ...],
    to_die: int,
    hosts: bool,
    root_dies: bool,
) -> Phase:
    plan = of.plan(len(living))
    steps = rng.randint(4, 20)
    mood = rng.choice(("calm", "within", "within", "beyond"))
    dead: list[int] = []  # ranks in the plan
    if root_dies:
        others = rng.sample(
            range(1, plan.size), min(to_die - 1, rng.choice((0, 0, 1, 2)))
        )
        mood, dead = "beyond", [plan.root, *others]
    elif mood != "calm":
        workers = list(range(1, plan.size))
        rng.shuffle(workers)
        if mood == "beyond":  # first the ranks without which the root lacks a sum
            workers.sort(key=lambda rank: plan.tree.parents[rank] != plan.root)
        wanted = rng.randint(1, 3)
        for rank in workers:
            if len(dead) == to_die or (mood == "within" and len(dead) == wanted):
                break
            if mood == "beyond" and not tolerates(plan, dead):
                break
            if mood == "beyond" or tolerates(plan, [*dead, rank]):
                dead.append(rank)
    fails = of.exact and not tolerates(plan, dead)
    faults = []
    # ranks whose deaths make a step fail die at about this step
    together = rng.randint(2, steps)
    for rank in dead:
        kind = rng.choice(
            ("kill",) * 4 + ("loop", "lock", *("exit", "leave") * (not fails))
        )
        step = (
            min(steps, together + rng.randint(0, 1)) if fails else rng.randint(2, steps)
        )
        if (root_dies or not fails) and kind == "kill" and rng.random() < 0.2:
            step = steps + 1  # while the other ranks recover
        if kind == "leave":
            faults.append(Fault(kind, living[rank], step, _delay(rng)))
        elif kind == "kill":
            delay = rng.uniform(0.0, 0.3) if step > steps else _delay(rng)
            faults.append(Fault(kind, living[rank], step, delay))
        else:
            seconds = rng.uniform(0.1, 1.0)
            # Blocks on the host may need late ranks; and only ranks of the same host can put out a hanging rank.
            neighbours = not hosts or of.ranks - len(living) + len(dead) == 1
            lasts = of.way != "blocks" and neighbours and seconds < 0.5
            if kind != "exit" and not fails and lasts:
                seconds = math.inf
            faults.append(Fault(kind, living[rank], step, 0.0, seconds))
    doomed = {fault.rank: fault.step for fault in faults}
    in_steps = [rank for rank in dead if doomed[living[rank]] <= steps]
    fails = of.exact and not tolerates(plan, in_steps)
    may_cut = hosts and of.waits
    roots = of.options.get("on_deadline") != "raise"  # the root may be stopped
    for _ in range(rng.randint(0, 6)):
        kind = rng.choice(("sleep", "stop", *("cut",) * may_cut))
        rank = living[rng.randrange(0 if roots or kind == "sleep" else 1, plan.size)]
        step = rng.randint(1 if kind == "sleep" else 2, steps + 1)
        if step >= doomed.get(rank, steps + 2):
            continue
        delay = 0.0 if kind == "sleep" else _delay(rng)
        faults.append(Fault(kind, rank, step, delay, rng.uniform(0.02, 0.5)))
    if of.way in SKIPPING and rng.random() < 0.5:
        faults += _skips(rng, plan, living, dead, doomed, steps)
    if of.way == "host" and mood == "calm" and of.exact and steps > LAST_ERROR + 1:
        # the other ranks must know before they call anything but a step
        rank, step = rng.randrange(1, plan.size), rng.randint(2, steps - LAST_ERROR)
        if not any(
            fault.rank == living[rank] and fault.step <= step for fault in faults
        ):
            faults.append(Fault("error", living[rank], step))
            faults.append(Fault("sleep", living[0], step + 1, 0.0, 0.3))
    faults.sort(key=lambda fault: (fault.step, fault.rank, fault.kind))
    return Phase(steps, living, tuple(faults), fails)


def _delay(rng: random.Random) -> float:
    """Draw seconds after the beginning of a step, often in the middle of its round."""
    return rng.choice((0.0, rng.uniform(0.0, 0.004), rng.uniform(0.0, 0.05)))


def _skips(
    rng: random.Random,
    plan: jaxcoded.Plan,
    living: tuple[int, ...],
    dead: list[int],
    doomed: dict[int, int],
    steps: int,
) -> list[Fault]:
    """Draw ranks that skip: as many as the plan tolerates in addition to the dead ranks."""
    out = []
    for step in rng.sample(range(1, steps + 1), rng.randint(1, 4)):
        missing = list(dead)
        for rank in rng.sample(range(1, plan.size), rng.randint(1, 2)):
            if tolerates(plan, [*missing, rank]) and step < doomed.get(
                living[rank], steps + 1
            ):
                missing.append(rank)
                out.append(Fault("skip", living[rank], step))
    return out
