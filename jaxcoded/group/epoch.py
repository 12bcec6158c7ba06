"""The batches of an epoch, and what a rank reads of each."""

import dataclasses
import operator
from collections.abc import Iterator

import numpy as np

from jaxcoded import _require
from jaxcoded.group.weights import Weights, assigned
from jaxcoded.plan import Plan


class Epoch:
    """See `CodedGroup.epoch`.

    Attributes:
        batch_size: the number of examples in a batch; a smaller last one has fewer.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        n: int,
        batch_size: int,
        *,
        seed: int | None,
        epoch: int,
        drop_last: bool,
        multiple: int,
    ) -> None:
        n = _require.integer("n, the number of examples,", n, 1, np.iinfo(np.int64).max)
        most = np.iinfo(np.int32).max  # `Weights.present` is int32
        batch_size = _require.integer("batch_size", batch_size, 1, most)
        self.batch_size = batch_size
        epoch = _require.integer("epoch", epoch, 0)
        self._batches = n // batch_size if drop_last else -(-n // batch_size)
        if not self._batches:
            raise ValueError(
                f"drop_last=True leaves no batch: {n} examples are fewer than "
                f"batch_size={batch_size}; take a smaller batch_size, or keep the last one"
            )
        self._before = epoch * self._batches  # batches, as far as one can know
        if seed is None:
            how, self._order = "in order", np.arange(n)
        else:
            seed = _require.integer("seed", seed, 0)
            how = f"shuffled with seed {seed}"
            self._order = np.random.default_rng([seed, epoch]).permutation(n)
        self._order.setflags(write=False)  # batches are views of it
        self._positions, weights = assigned(plan, rank, batch_size, multiple)
        self._weights = dataclasses.replace(
            weights, present=np.int32(batch_size), order=f" of {n} examples {how}"
        )

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[tuple[np.ndarray, Weights]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> tuple[np.ndarray, Weights]:
        """What this rank reads of one batch, and its coding weights: shapes and dtypes are the
        same for all batches."""
        batch = self.batch(number)
        positions = self._positions
        counted = self._before + operator.index(number) % len(self)
        weights = dataclasses.replace(
            self._weights, number=np.int32(counted % np.iinfo(np.int32).max)
        )
        if len(batch) == self.batch_size:
            return batch[positions], weights
        # Those that are not there are the last of the batch, and so of each chunk and block: its
        # first example stays. An example that is there takes their places, with weight 0: its
        # gradient is finite, where one of made-up numbers could be NaN, and 0 · NaN is NaN.
        there = positions < len(batch)
        filler = positions[there.argmax()] if there.any() else 0
        held = there if weights.ndim == 1 else there.reshape(*weights.shape[:2], 1)
        values = np.where(held, weights.values, 0).astype(weights.dtype)
        return batch[np.where(there, positions, filler)], dataclasses.replace(
            weights, values=values, present=np.int32(len(batch))
        )

    def batch(self, number: int) -> np.ndarray:
        """All examples of one batch, the same on all ranks: int64 ``(batch_size,)``, or fewer in
        a smaller last one, into the data set. Read-only.

        Raises:
            IndexError: there is no such batch.
        """
        try:
            number = range(len(self))[operator.index(number)]
        except IndexError:
            raise IndexError(
                f"batch {number} of an epoch of {len(self)} batches"
            ) from None
        first = number * self.batch_size
        return self._order[first : first + self.batch_size]
