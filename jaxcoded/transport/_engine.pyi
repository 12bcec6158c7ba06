"""The types of the functions and classes in `cpp/module.cpp`."""

from collections.abc import Sequence
from typing import Any, TypeAlias, overload

import numpy as np

class Closed(RuntimeError): ...  # raised if the group is not open

class Family:
    def __init__(
        self,
        rank: int,
        ancestors: list[int],
        children: list[int],
        descendants: list[int],
        leaves: list[int],
        siblings: list[int],
        delegates: bool = False,
    ) -> None: ...

class Decoder:
    @overload
    def __init__(self) -> None: ...  # for a leaf, which has nothing to decode
    @overload
    def __init__(
        self,
        B: np.ndarray,
        parts: int,
        stragglers: int,
        decoding: str,
        promises: Sequence[tuple[int, int, int]],
        limit: float,
    ) -> None: ...
    def decode(self, order: list[int], possible: list[bool]) -> list[float]: ...
    def approximate(self, answered: list[bool]) -> list[float]: ...
    @property
    def questions(self) -> int: ...
    def check(
        self, checks: list[list[float]], below: list[tuple[float, float, float, float]]
    ) -> None: ...

class Erasures:
    def __init__(
        self, root: int, parents: list[tuple[int, list[int], Decoder]]
    ) -> None: ...
    def missing(self, erased: list[bool]) -> list[bool]: ...
    def why_not(self, erased: list[bool]) -> str: ...

class OnDeadline: ...  # an enumeration: wait, raise, approximate
class OnContradiction: ...  # an enumeration: raise, warn, drop

class Compares:  # an enumeration
    what_has_come: Compares
    until_deadline: Compares
    all: Compares

class Limits:
    piece_bytes: int
    announced_bytes: int
    history_bytes: int
    history_rounds: int
    history_most: int
    ahead_bytes: int
    orphan_seconds: float
    stall_seconds: float
    stuck_seconds: float
    silent_seconds: float
    on_deadline: OnDeadline
    compares: Compares
    waits_for_all: bool
    on_contradiction: OnContradiction
    deadline_seconds: float
    deadline_rounds: float
    deadline_share: float
    telemetry_rounds: int
    step_times_seconds: float
    sections_from: int
    section_pieces: int
    slices: int
    parts: int
    least_piece_bytes: int

def section_shares(
    makers: list[int],
    choices: list[dict[int, float]],
    ports: int,
    pieces: int,
    taker: int | None = None,
) -> tuple[list[tuple[int, int, int]], float]: ...

# The dtype (0 bytes, 1 float16, 2 bfloat16, 3 float32, 4 float64), the number of
# elements, and the address of a vector.
_Vector: TypeAlias = tuple[int, int, int]
_Card: TypeAlias = tuple[int, int, int, int, int, int, int]

round_handler: Any
part_handler: Any
start_handler: Any
done_handler: Any
lag_handler: Any
slices_handler: Any
take_handler: Any
devices_round_handler: Any
devices_start_handler: Any
devices_done_handler: Any
devices_lag_handler: Any
cuda_round_handler: Any
cuda_part_handler: Any
cuda_take_handler: Any
cuda_computed_handler: Any
cuda_lag_handler: Any

most_started: int

sources: str  # a digest of `cpp/`

def mpi_library() -> str: ...
def thread_multiple() -> bool: ...
def start() -> None: ...
def introduce() -> _Card: ...
def forget(card: _Card) -> None: ...
def let_read(cards: list[_Card]) -> None: ...
def open(
    index: int,
    comm: int,
    session: int,
    cards: list[_Card],
    family: Family,
    decoder: Decoder,
    limits: Limits,
    erasures: Erasures,
    reports: bool,
    holders: Sequence[Sequence[int]],
) -> None: ...
def fault_tolerant() -> bool: ...
def enter(comm: int, root: int, silent_seconds: float) -> None: ...
def join() -> None: ...
def discard(index: int) -> None: ...
def run(
    index: int,
    fingerprint: int,
    signature: str,
    up: bool,
    down: bool,
    skipped: bool,
    erased: list[bool],
    own: list[_Vector],
    out: list[_Vector],
) -> tuple[int, str]: ...
def take(
    index: int, fingerprint: int, signature: str, first: bool, costs: list[float]
) -> int | None: ...
def end_of_blocks(index: int) -> tuple[int, str]: ...
def leave_share(index: int) -> None: ...
def load_cuda(library: str) -> str: ...
def device_run(
    index: int,
    stream: int,
    fingerprint: int,
    signature: str,
    up: bool,
    down: bool,
    continues: bool,
    skipped: int,
    erased: int,
    ranks: int,
    own: list[_Vector],
    out: list[_Vector],
) -> tuple[int, str]: ...
def device_extend(
    index: int,
    stream: int,
    fingerprint: int,
    signature: str,
    continues: bool,
    skipped: int,
    own: list[_Vector],
    message: list[_Vector],
    total: list[_Vector],
) -> str: ...
def device_copies(
    stream: int, own: int, out: int, bytes: int
) -> tuple[float, float]: ...
def pinned_bytes() -> tuple[int, int]: ...
def note_failure(index: int, words: str) -> None: ...
def close(index: int, seconds: float) -> list[int]: ...
def abandon(index: int, failure: str) -> None: ...
def stop(seconds: float, failure: str, status: int) -> bool: ...
def lag(index: int) -> int: ...
def status(index: int) -> str: ...
def next_round(index: int) -> int: ...
def drained(index: int, seconds: float) -> bool: ...
def decided(index: int) -> int: ...
def rounds_of_all(index: int) -> int: ...
def expect_state(index: int) -> None: ...
def watch(index: int, whether: bool) -> None: ...
def alike(index: int) -> bool: ...
def departed(index: int) -> list[tuple[int, str]]: ...
def history_bytes(index: int) -> int: ...
def memory_bytes(index: int) -> int: ...
def fetched_bytes(index: int) -> int: ...
def telemetry(index: int) -> dict[str, list[Any]]: ...
def reports(index: int) -> Any: ...
def next_warning() -> tuple[int, str] | None: ...
def next_report(reports: Any) -> tuple[Any, ...] | None: ...
def record(index: int) -> Any: ...

# Wait like `next_report`, then return the round's number, the call's description, and the
# blocks of each member of the family.
def next_dealt(reports: Any) -> tuple[int, str, list[list[int]]] | None: ...
def replay(index: int, rounds: list[tuple[int, str, list[list[int]]]]) -> None: ...
def replan(
    index: int,
    next: int,
    children: list[int],
    decoder: Decoder,
    erasures: Erasures,
) -> None: ...
def computes_with(index: int, eps: float) -> None: ...
def keep_state(index: int, address: int, bytes: int) -> None: ...
def fetch_state(index: int, seconds: float) -> int: ...
def state(index: int) -> bytes: ...
def resume(index: int) -> bool: ...
def undone(index: int) -> int: ...

class LoneNode:
    """A node without a network, which tests control."""

    def __init__(
        self, family: Family, decoder: Decoder, limits: Limits, wire: Any
    ) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
