import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any, Self

import jax
import numpy as np

from jaxcoded import _jax_compat, _require
from jaxcoded.errors import CodedError
from jaxcoded.group.session import Session
from jaxcoded.plan.costs import relative
from jaxcoded.transport import primitive
from jaxcoded.transport.engine import Engine


@dataclasses.dataclass
class Block:
    """A part of the batch for this rank to compute.

    Attributes:
        number: this block's number, from 0.
        indices: int64 ``(examples,)``, the positions of its examples in the global batch, in increasing order. Some
            blocks are empty if the batch has fewer examples than blocks, or if a single example costs more
            than a block should.
    """

    number: int
    indices: np.ndarray
    _result: Any = None

    def done(self, result: Any) -> None:
        """Set the result of the block: a pytree of arrays, such as the sum so far. The
        block counts as finished when these arrays are computed. Without this call, it
        counts as finished when all of JAX's pending work is done."""
        self._result = result


class Blocks:
    """See `CodedGroup.blocks`."""

    def __init__(
        self, session: Session, batch_size: int, costs: np.ndarray | None = None
    ) -> None:
        placement = session.plan.placement
        self._session = session
        self._work = Engine.of(session.transport, "shared work needs")
        self._words = f"the blocks of a batch of {batch_size}"
        self._starts = placement.examples(batch_size)
        self._divided: list[np.ndarray] | None = None
        self._costs: list[float] = []
        if costs is not None:
            self._words += f" with the costs {zlib.crc32(costs.tobytes()):08x}"
            self._divided = placement.divided(costs)
            self._costs = relative([costs[block].sum() for block in self._divided])
        self._entered = self._begun = self._over = False

    def __enter__(self) -> Self:
        if self._entered:
            raise CodedError(
                "these blocks were computed before: call group.blocks again for each batch"
            )
        self._entered = True
        return self

    def __iter__(self) -> Iterator[Block]:
        if not self._entered or self._begun or self._over:
            raise CodedError(
                "loop over the blocks once, inside their with statement: "
                "with group.blocks(batch_size) as blocks: for block in blocks: ..."
            )
        # A second loop over the same object would be a second round, with its own sum.
        self._begun = True
        self._session.blocks = True
        primitive.effects_barrier()  # wait for the rounds in flight, which come before this round
        failed = _failed()
        number = self._work.take_block(self._words, first=True, costs=self._costs)
        while number is not None:
            if self._divided is None:
                indices = np.arange(*self._starts[number : number + 2])
            else:
                indices = self._divided[number]
            block = Block(number, indices)
            yield block
            _wait_for(block, failed)
            number = self._work.take_block(self._words, first=False)
        self._over = True
        self._work.end_of_blocks()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if self._over:
            return
        self._over = True
        why = "leaving the loop early" if error is None else _require.kind(error)
        self._work.leave_blocks()
        self._work.note_failure(f" after {why} in group.blocks")
        if error is None:
            raise CodedError(
                "the loop over group.blocks was left before its end: do not use what this rank "
                "has added up, since other ranks compute its blocks. Let the loop run to its "
                "end; it ends once the whole batch is computed"
            )


def _failed() -> list[jax.Array]:
    """Return the arrays whose computation has failed. The program gets the error when
    it waits for these arrays.
    """
    failed = []
    for array in _live():
        try:
            array.block_until_ready()
        except Exception:  # noqa: BLE001  # any error
            failed.append(array)
    return failed


def _wait_for(block: Block, failed: list[jax.Array]) -> None:
    """Wait until the block is computed, since JAX's calls return before their results
    are computed."""
    if block._result is not None:
        jax.block_until_ready(block._result)
        return
    for array in _live():
        if all(array is not other for other in failed):
            array.block_until_ready()


def _live() -> list[jax.Array]:
    if not _jax_compat.started():
        return []
    return [array for array in jax.live_arrays() if not array.is_deleted()]
