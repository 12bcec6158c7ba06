"""The batches of an epoch, and the examples that a rank reads from each batch."""

import operator
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxcoded import _require
from jaxcoded.group import likeness
from jaxcoded.group.batch import Batch, number_of_examples, read
from jaxcoded.group.weights import Weights, assigned
from jaxcoded.plan import Plan
from jaxcoded.plan.costs import checked, divided


class Epoch:
    """See `CodedGroup.epoch`.

    Attributes:
        batch_size: the number of examples in a batch, except in a smaller last batch.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        data: Any,
        batch_size: int,
        *,
        seed: int | None = None,
        epoch: int = 0,
        drop_last: bool = False,
        multiple: int = 1,
        costs: Any = None,
    ) -> None:
        n = number_of_examples(data)
        most = np.iinfo(np.int32).max  # `Weights.examples` is int32
        batch_size = _require.integer("batch_size", batch_size, 1, most)
        self.batch_size = batch_size
        epoch = _require.integer("epoch", epoch, 0)
        self._batches = n // batch_size if drop_last else -(-n // batch_size)
        if not self._batches:
            raise ValueError(
                f"drop_last=True leaves no batch: {n} examples are fewer than "
                f"batch_size={batch_size}; take a smaller batch_size, or drop_last=False"
            )
        if seed is None:
            self._order = np.arange(n)
        else:
            seed = _require.integer("seed", seed, 0)
            self._order = np.random.default_rng([seed, epoch]).permutation(n)
        self._order.setflags(write=False)  # batches are views of it
        self._data, self._plan, self._rank = data, plan, rank
        self._positions, self._weights = assigned(plan, rank, batch_size, multiple)
        self._costs = None if costs is None else checked(costs, n)
        self._cuts = [] if costs is None else plan.strategy.cuts(plan, batch_size)
        whole, self._likeness = likeness.of_data(data)
        order = zlib.crc32(repr((n, batch_size, seed, whole)).encode())
        if self._costs is not None:
            order = zlib.crc32(self._costs.tobytes(), order)
        self._first = order + epoch * self._batches

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> Batch:
        """Return this rank's part of one batch. All batches have the same shapes and dtypes."""
        batch, positions, values = self.indices(number), self._positions, self._weights
        counted = self._first + operator.index(number) % len(self)
        if len(batch) < self.batch_size:
            # A smaller batch lacks the examples at its end. In their place this rank reads its first present
            # example, or the batch's first example, with weight 0. The gradient of a real example is finite. The
            # gradient of made-up numbers could be NaN, and 0 · NaN is NaN.
            present = positions < len(batch)
            filler = positions[present.argmax()] if present.any() else 0
            positions = np.where(present, positions, filler)
            held = (
                present if values.ndim == 1 else present.reshape(*values.shape[:2], 1)
            )
            values = np.where(held, values, 0).astype(values.dtype)
            values.setflags(write=False)
        weights = Weights(
            values,
            examples=np.int32(len(batch)),
            number=np.int32(counted % np.iinfo(np.int32).max),
            likeness=self._likeness,
            batch_size=self.batch_size,
            plan=self._plan.fingerprint,
            rank=self._rank,
        )
        indices = batch[positions]
        return Batch(read(self._data, indices), indices, weights)

    def indices(self, number: int) -> np.ndarray:
        """Return the places in the data set of all examples of one batch: int64 ``(batch_size,)``, or a shorter array
        for a smaller last batch. The array is read-only, and the same on all ranks. Raise an IndexError if there is
        no such batch."""
        if isinstance(number, slice):
            raise TypeError(
                "an epoch cannot be sliced: take itertools.islice(epoch, start, stop)"
            )
        try:
            number = range(len(self))[operator.index(number)]
        except IndexError:
            raise IndexError(
                f"there is no batch {number}: the epoch has {len(self)} batches"
            ) from None
        first = number * self.batch_size
        batch = self._order[first : first + self.batch_size]
        if self._costs is None:
            return batch
        # the missing examples of a smaller last batch are at its end
        rooms = [np.diff(np.minimum(cut, len(batch))).tolist() for cut in self._cuts]
        batch = batch[np.concatenate(divided(self._costs[batch], rooms))]
        batch.setflags(write=False)
        return batch
