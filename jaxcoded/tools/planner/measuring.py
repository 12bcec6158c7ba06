"""Measure links and ranks in about two seconds."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

from jaxcoded.tools.planner.measurement import Link, Measurement
from jaxcoded.tools.simulator import Network
from jaxcoded.tools.simulator.stragglers import Measured
from jaxcoded.transport.agreement import gathered, wait

_SECONDS = 1.0  # seconds for which ranks compute
_ROUNDS = 512  # the most rounds
_LINK_SECONDS = 0.2  # seconds for small messages, and as many for large messages
_LONGEST = 4 << 20  # the most bytes of a message
_PING, _PONG = 1, 2


def measured(
    comm: MPI.Intracomm,
    work: Callable[[], Any] | float,
    progress: Callable[[float], None] = lambda part: None,
) -> Measurement:
    """Measure links and computation on all ranks at the same time. Collective; the call lasts at least until the
    slowest rank has computed twice. No other messages may be in transit in ``comm``. Raise a RuntimeError on every
    rank if ``work`` failed on some rank.

    ``work`` is a function that computes once. It is called once to compile, and then repeatedly for a second. If
    ``work`` is a number of seconds, a loop of matrix products measures only how much ranks and times differ.
    ``progress`` is called with the finished part of the measurement."""
    compute = _loop(comm, work) if isinstance(work, float) else work
    failure: Exception | None = None
    times: list[float] = []
    try:
        jax.block_until_ready(compute())
    except Exception as error:  # noqa: BLE001  # the other ranks wait for an answer
        failure = error
    wait(comm.Ibarrier())
    links = _links(comm)
    progress(0.3)
    now = time.perf_counter()
    end = now + _SECONDS
    while failure is None and len(times) < _ROUNDS and (not times or now < end):
        begun = time.perf_counter()
        try:
            jax.block_until_ready(compute())
        except Exception as error:  # noqa: BLE001
            failure = error
        now = time.perf_counter()
        times.append(max(now - begun, 1e-9))
        progress(0.3 + 0.6 * min(1.0, 1 - (end - now) / _SECONDS))
    row = np.full(_ROUNDS + 3, np.nan)
    row[: len(times)] = times
    row[-3:] = (failure is not None, *links)
    table = np.empty((comm.size, len(row)))
    wait(comm.Iallgather(row, table))
    if table[:, -3].any():
        words = gathered(comm, f"{type(failure).__name__}: {failure}")
        rank = int(table[:, -3].argmax())
        raise RuntimeError(f"work failed on rank {rank}: {words[rank]}") from failure
    hosts = tuple(gathered(comm, MPI.Get_processor_name()))
    progress(1.0)
    return _summary(table, work, hosts)


def _summary(
    table: np.ndarray, work: Callable[[], Any] | float, hosts: tuple[str, ...]
) -> Measurement:
    columns = [row[~np.isnan(row)] for row in table[:, :_ROUNDS]]
    if isinstance(work, float):
        # Join so many loops into one round that it lasts as long as the work, if enough rounds remain.
        loops = round(work / statistics.median(float(np.median(c)) for c in columns))
        columns = [_added(column, max(loops, 1)) for column in columns]
    typical = statistics.median(float(np.median(column)) for column in columns)
    rounds = max(map(len, columns))
    # A slow rank has computed less often, so repeat its times.
    factors = np.stack([np.resize(column, rounds) for column in columns], axis=1)
    links = tuple(
        Link(rank, _partner(rank, len(table)), latency, rate)
        for rank, (latency, rate) in enumerate(table[:, -2:].tolist())
        if rate > 0
    )
    network = Network(
        latency=statistics.median(link.latency for link in links),
        bandwidth=statistics.median(link.bandwidth for link in links),
        trips=1 if len(set(hosts)) == 1 else 3,
    )
    seconds = work if isinstance(work, float) else typical
    return Measurement(network, seconds, Measured(factors / typical), links, hosts)


def _added(times: np.ndarray, together: int) -> np.ndarray:
    together = min(together, max(1, len(times) // 16))
    whole = times[: len(times) // together * together]
    return whole.reshape(-1, together).mean(axis=1)


def _loop(comm: MPI.Intracomm, seconds: float) -> Callable[[], Any]:
    """Return a function with the same computation on all ranks, which takes up to 5 ms
    on rank 0."""
    matrix = np.full((64, 64), 1 / 64)
    begun = time.perf_counter()
    for _ in range(100):
        matrix = matrix @ matrix
    taken = time.perf_counter() - begun
    turns = np.array([max(1, round(100 * min(seconds, 5e-3) / taken))])
    wait(comm.Ibcast(turns))

    def compute() -> np.ndarray:
        out = matrix
        for _ in range(int(turns[0])):
            out = out @ matrix
        return out

    return compute


def _links(comm: MPI.Intracomm) -> tuple[float, float]:
    """Return the measured seconds of a small message, and the bytes per second of a large message; both are zero on a
    rank that only answers. Neighbouring ranks are often on one host, so each rank exchanges messages with the rank
    half the job away."""
    partner = _partner(comm.rank, comm.size)
    if partner <= comm.rank:
        if partner < comm.rank:
            answer_pings(comm, partner)
        return 0.0, 0.0
    buffer = np.zeros(_LONGEST, np.uint8)
    small: list[float] = []
    end = time.perf_counter() + _LINK_SECONDS
    while len(small) < 3 or (len(small) < 200 and time.perf_counter() < end):
        small.append(ping(comm, partner, buffer[:1]))
    trip = statistics.median(small)
    size = 64 << 10
    rates: list[float] = []
    end = time.perf_counter() + _LINK_SECONDS
    while not rates or time.perf_counter() < end:
        taken = ping(comm, partner, buffer[:size])
        rates.append(size / max(taken - trip, 0.05 * taken))
        if taken < 0.02 and size < _LONGEST:
            size, rates = 2 * size, []
    end_pings(comm, partner)
    return trip / 2, statistics.median(rates)


def _partner(rank: int, size: int) -> int:
    """Return the rank half the job away. If the number of ranks is odd, the last rank has
    no partner."""
    half = size // 2
    return rank if rank >= 2 * half else (rank + half) % (2 * half)


def ping(comm: MPI.Intracomm, partner: int, message: np.ndarray) -> float:
    """Return the seconds until the partner, in `answer_pings`, has answered a message."""
    begun = time.perf_counter()
    answer = np.empty(1, np.uint8)
    requests = [comm.Irecv(answer, partner, _PONG), comm.Isend(message, partner, _PING)]
    while not MPI.Request.Testall(requests):
        time.sleep(0)  # the partner may need this core
    return time.perf_counter() - begun


def end_pings(comm: MPI.Intracomm, partner: int) -> None:
    """Let `answer_pings` of the partner return."""
    wait(comm.Isend(np.empty(0, np.uint8), partner, _PING))


def answer_pings(comm: MPI.Intracomm, partner: int) -> None:
    """Answer every `ping` of the partner, until it calls `end_pings`."""
    buffer, answer = np.empty(_LONGEST, np.uint8), np.zeros(1, np.uint8)
    status = MPI.Status()
    while True:
        request = comm.Irecv(buffer, partner, _PING)
        while not request.Test(status):
            time.sleep(0)
        if status.Get_count(MPI.BYTE) == 0:
            return
        wait(comm.Isend(answer, partner, _PONG))
