"""Joint actions of a test's ranks: wait, be late, call different things."""

import contextlib
import os
import re
import time

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from marks import SIZE

import jaxcoded
from jaxcoded.transport.agreement import differences

SLOWNESS = float(
    os.environ.get("JAXCODED_SLOWNESS", "1")
)  # slowness of the machine, see launch.py

# A leaf, and among 13 ranks a rank with children.
late_ranks = pytest.mark.parametrize("late", [SIZE - 1] if SIZE < 13 else [12, 1])


@contextlib.contextmanager
def lowered():
    """Return a list that gets an item for each program that JAX lowers meanwhile."""
    programs = []

    def listen(event, seconds, **_):
        if event.endswith("jaxpr_to_mlir_module_duration"):
            programs.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield programs
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def wait_for_all(comm):
    """Wait for all ranks without occupying a core, as an MPI call would."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.005)


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds * SLOWNESS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def one_late(comm, group, late, rounds, steps):
    """Run ``steps()``, which has ``rounds`` rounds, on all ranks. The late rank begins
    its calls after the other ranks have made all of their calls. The other ranks make
    no calls while the late rank makes its calls.
    """
    wait_for_all(comm)
    if comm.rank != late:
        out = finish(steps())
    wait_for_all(comm)
    if comm.rank == late:
        wait_until(lambda: group.lag() == rounds)
        out = finish(steps())
        assert group.lag() == 0
    wait_for_all(comm)
    return out


def finish(out):
    """Return the result, once all of its effects have taken place."""
    jax.block_until_ready(out)
    jax.effects_barrier()
    return out


@contextlib.contextmanager
def compilations():
    """Return a list that gets an item for each compilation in this block."""
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# Calls that do not match, if ranks may be late.


def told(text, odd, usual, unusual):
    """Return whether an error first states the difference of two calls, and then the calls of the odd rank and of
    another rank.
    """
    found = re.search(
        r"GroupMismatch: (.*) at rank (\d+), (.*) at rank (\d+): "
        r"ranks called different things in the same round, "
        r"but all ranks must make the same calls in the same order; "
        r"rank \2: round (\d+), ([^;]*); rank \4: round (\d+), ([^;\n]*?)"
        r"(?: \[executable_name=.*)?$",
        text,
        re.MULTILINE,
    )
    if not found:
        return False
    ours, one, others, other = found.groups()[:4]
    its_round, its_words, others_round, others_words = found.groups()[4:]
    assert [ours, others] == differences([its_words, others_words])
    words = {int(one): its_words.strip(), int(other): others_words.strip()}
    return (
        its_round == others_round
        and len(words) == 2
        and odd in words
        and words.pop(odd).endswith(unusual)
        and words.popitem()[1].endswith(usual)
    )


def assert_odd_one_out(comm, calls, odd, usual, unusual, check):
    """Make three calls, the first different on one rank. Check that every rank gets an
    error in the first or second call, and no wrong sum, and that the third is right.

    Args:
        calls: three functions.
        odd: the rank whose first call differs.
        usual, unusual: how the description of the first call ends on the other ranks, and on the odd rank.
        check: checks a call's result.
    """
    erred = []
    for number, call in enumerate(calls):
        try:
            total = np.asarray(call())
        except (JaxRuntimeError, jaxcoded.GroupMismatch) as error:
            erred.append(number)
            text = f"{type(error).__name__}: {error}"
            assert told(text, odd, usual, unusual), text
            jaxcoded.effects_barrier()
        else:
            check(total)
        # ranks that do not wait could be several rounds ahead of the odd rank
        wait_for_all(comm)
        time.sleep(0.05)
    assert erred in ([0], [1], [0, 1])
    assert 0 in erred or comm.rank != odd
    second = comm.allgather(1 in erred)
    assert all(second) or not any(second)
