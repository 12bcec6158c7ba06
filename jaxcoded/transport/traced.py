import abc
from collections.abc import Sequence
from typing import Any

import jax

from jaxcoded._jax_compat import mlir
from jaxcoded.transport.base import Carrier
from jaxcoded.transport.round import Round


class Traced(Carrier):
    """A carrier that lowers a round by tracing its method `carry`."""

    @abc.abstractmethod
    def carry(
        self, round: Round, vectors: Sequence[jax.Array], erasures: jax.Array | None
    ) -> Sequence[jax.Array]:
        """Trace a round of this rank's vectors ``(..., length)``, which have the dtypes
        in which they are sent. Leave out the ranks in ``erasures``, bool ``(size,)``.
        Return the resulting vectors, in the same dtypes.
        """

    def lower(
        self, ctx: Any, operands: Sequence[Any], round: Round, platform: str | None
    ) -> Any:
        del platform

        def carried(*operands: jax.Array) -> list[jax.Array]:
            given = dict(zip(round.leading, operands))
            vectors = operands[len(round.leading) :]
            sent = [v.astype(kind.wire) for v, kind in zip(vectors, round.vectors)]
            out = self.carry(round, sent, given.get("erasures"))
            return [x.astype(v.dtype) for x, v in zip(out, vectors)]

        return mlir.lower_fun(carried, multiple_results=True)(ctx, *operands)
