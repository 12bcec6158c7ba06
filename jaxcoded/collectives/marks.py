"""Whether ranks compute the same of a batch, where work is shared.

There each block is computed by one rank, but for those that are audited, so little can be
compared with what another one has made of it. But the examples are counted. To that count every
block adds its weight times a key:
the number of the batch and, in the debug mode, what the parameters add up to. The weights of all
blocks add up to 0, so the count comes out right where all of them have one key; of ranks that are
at another batch it does not.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded.plan.placement import Placement

_MOST = 64  # of a weight
_KEYS = 63


def weights(placement: Placement, batch_size: int) -> np.ndarray:
    """Of each block, float32 ``(blocks,)``. They add up to 0, but those of one owner do not, and
    all sums of them are exact, and short beside the number of examples."""
    owners = len(placement.ranks)
    own = np.random.default_rng(0).integers(1, _MOST, (owners, placement.blocks))
    if owners == 1:
        return np.zeros(placement.blocks, np.float32)
    own[1::2] = -own[: owners - 1 : 2]
    if owners % 2:  # the last three among themselves
        own[-2] = abs(own[-2])
        own[-1] = -own[-2] - own[-3]
    unit = 2.0 ** (math.floor(math.log2(batch_size)) - 15)
    return (own.reshape(-1) * unit).astype(np.float32)


def key(number: Any, params: Any = None) -> jax.Array:
    """A float32 from 0 to 62 of the number of a batch, an int32 or None, and of a pytree of
    parameters. Batches that follow each other have different ones."""
    its = jnp.uint32(0 if number is None else number)
    out = 9 * (its % 7) + mixed(its) % 9
    if params is not None:
        out += mixed(_checksum(params))
    return (out % _KEYS).astype(jnp.float32)


def mixed(x: jax.Array) -> jax.Array:
    """As MurmurHash3 ends."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _checksum(pytree: Any) -> jax.Array:
    """Of all bits of its arrays, uint32."""
    out = jnp.uint32(0)
    for leaf in map(jnp.asarray, jax.tree.leaves(pytree)):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            size = min(leaf.dtype.itemsize, 4)
            leaf = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * size}"))
        elif not jnp.issubdtype(leaf.dtype, jnp.integer):
            continue
        out = 31 * out + jnp.sum(leaf.astype(jnp.uint32), dtype=jnp.uint32)
    return out
