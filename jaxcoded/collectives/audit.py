"""Compare the results of two ranks for a block of shared work.

Normally one rank computes each block, so there is no second result to compare. In a
group with a ``check`` the engine lets a second rank compute one block of each round
(``transport/cpp/node_audit.cpp``). Both ranks report their result in an additional
vector of the sum. For each leaf they report the norm, and the sum of the leaf's numbers
with pseudo-random signs. An error in any number changes the sum with signs by the same
amount. Norm and sum are sent as multiples of a power of 2, so that they fit in float32.
The exponent of this power is sent with them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxcoded.collectives.marks import across
from jaxcoded.transport.kernels import accumulator

# What the engine tells a rank to do with a block's result.
_NONE, _ONLY_TOLD = 0, 2


@dataclasses.dataclass(frozen=True)
class Audit:
    ranks: int  # the group's number of ranks
    leaves: tuple[Any, ...]  # ``jax.ShapeDtypeStruct`` of a block's results

    @property
    def precision(self) -> tuple[float, ...]:
        """Return two numbers for each leaf: its dtype's machine epsilon, and its length."""
        return tuple(
            number
            for leaf in self.leaves
            for number in (float(jnp.finfo(leaf.dtype).eps), float(leaf.size))
        )

    def zeros(self) -> jax.Array:
        """Return a vector without any report."""
        return jnp.zeros(self.ranks + 2 * (1 + 3 * len(self.leaves)), jnp.float32)

    def report(
        self, kind: jax.Array, rank: int, leaves: Sequence[jax.Array]
    ) -> jax.Array:
        """Return what a rank adds to the additional vector for a block with these
        leaves. ``kind`` is what the engine told the rank to do with the block's result.
        """
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))
        sketches = jax.lax.cond(
            (kind != _NONE) & finite,
            lambda: jnp.stack(
                [jnp.float32(1), *(x for l in leaves for x in _sketch(l))]
            ),
            lambda: jnp.zeros(1 + 3 * len(leaves), jnp.float32),
        )
        second = kind == _ONLY_TOLD
        return jnp.concatenate(
            [
                ((jnp.arange(self.ranks) == rank) & ~finite).astype(jnp.float32),
                jnp.where(second, 0, sketches),
                jnp.where(second, sketches, 0),
            ]
        )


def added(kind: jax.Array) -> jax.Array:
    """Return whether the result of a block of this kind is added to the sum."""
    return kind != _ONLY_TOLD


def _sketch(leaf: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return an exponent of 2, the norm of a leaf, and the sum of the leaf's numbers
    with signs. Norm and sum are returned in units of 2 to this exponent.
    """
    x = leaf.reshape(-1).astype(accumulator(leaf.dtype))
    info = jnp.finfo(x.dtype)
    exponent = jnp.floor(jnp.log2(jnp.max(jnp.abs(x))))
    # limit the exponent, so that leaves of zeros work, too
    exponent = jnp.clip(exponent, info.minexp, info.maxexp - 2)
    x = (x * jnp.exp2(-exponent)).astype(jnp.float32)
    return exponent.astype(jnp.float32), jnp.sqrt(jnp.sum(x * x)), across(x)
