"""Visit all states of a model of work sharing, or play random schedules of the model."""

import collections
import random

from model import wrong


class Wrong(AssertionError):
    """A schedule that ends in a wrong sum, or in a state from which the round cannot
    end.
    """


def schedule(parents, state):
    """Return the moves that lead to a state."""
    steps = []
    while parents[state] is not None:
        step, state = parents[state]
        steps.append(step)
    return "\n".join(reversed(steps))


def recoverable(model, state):
    """Return whether the round can end: a live rank that is not out holds every block,
    or the sum may lack the block.
    """
    if model.approximates:
        return True
    out = {r for r, account in enumerate(state.accounts) if account.out}
    gone = state.stopped | state.dead | out
    return all(holders - gone for holders in model.holders)


def after(model, steps, **faults):
    """Return the state after some steps, each given by the beginning of its name."""
    state = model.start(**faults)
    for step in steps:
        moves = [*model.moves(state), *model.faults(state)]
        (state, *_) = [to for name, to in moves if name.startswith(step)]
    return state


def explore(model, start=None, most=10**6, **faults):
    """Visit every reachable state; return their number.

    Raises:
        Wrong: a sum is wrong, or a round cannot end although live ranks hold every
            block and no more faults come.
    """
    start = start or model.start(**faults)
    parents = {start: None}
    before = collections.defaultdict(list)  # by moves, without faults
    todo = collections.deque([start])
    while todo:
        state = todo.popleft()
        if words := wrong(model, state):
            raise Wrong(f"{words}:\n{schedule(parents, state)}")
        if state.over:
            continue
        for moves, are_faults in (
            (model.moves(state), False),
            (model.faults(state), True),
        ):
            for step, after in moves:
                if after not in parents:
                    parents[after] = step, state
                    todo.append(after)
                if not are_faults:
                    before[after].append(state)
        if len(parents) > most:
            raise RuntimeError(f"more than {most:,} states")
    ends = [state for state in parents if state.over]
    can_end = set(ends)
    while ends:
        for state in before[ends.pop()]:
            if state not in can_end:
                can_end.add(state)
                ends.append(state)
    for state in parents:
        if state not in can_end and recoverable(model, state):
            raise Wrong(f"the round cannot end after\n{schedule(parents, state)}")
    return len(parents)


def run(model, seed, most=5000, **faults):
    """Play a random schedule; return whether the round ended.

    Raises:
        Wrong: a sum is wrong, or the round does not end although live ranks hold every
            block.
    """
    rng = random.Random(seed)
    state = model.start(**faults)
    steps = []
    share = rng.choice([0.002, 0.02, 0.2])  # fraction of faults among the moves
    for step in range(most):
        if state.over:
            return True
        # In the second half live ranks continue without more faults until the round is
        # over.
        faulty = step < most // 2 and rng.random() < share
        moves = list(model.faults(state)) if faulty else []
        moves = moves or list(model.moves(state))
        if not moves:
            break
        name, state = rng.choice(moves)
        steps.append(name)
        if words := wrong(model, state):
            raise Wrong(f"seed {seed}, {words}:\n" + "\n".join(steps))
    if recoverable(model, state):
        raise Wrong(f"seed {seed}: the round does not end:\n" + "\n".join(steps[-60:]))
    return False
