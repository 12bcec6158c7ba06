"""Detect ranks that compute with different parameters, or at a different batch, from
the other ranks.

A sum also counts its examples. Every atom of the batch (`jaxcoded.plan.atoms`; with shared work,
every block) has a number, its mark. The atom adds its mark times a key to the count. The key is a
number that depends on the batch, the data and the parameters. The marks of all atoms add up to 0.
So the count is right if all ranks in the sum have the same key. If their keys differ, the count
is wrong by more than rounding explains.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded.plan import Plan, atoms
from jaxcoded.plan.placement import Placement
from jaxcoded.transport.kernels import accumulator
from jaxcoded.transport.leaves import is_key

_MOST = 64  # the largest mark of a block, as a multiple of the smallest mark
_KEYS = 63
# lower and upper bound of the largest mark of an atom, as fractions of the batch size
_LEAST, _LARGEST = 2.0**-12, 2.0**-6
_OF_EACH = 256  # how many numbers of a leaf are compared
# log2 of numbers so small that they may consist of rounding errors only
_SMALL, _SMALLER = math.log2(0.01), -20
_SWING = 16  # the largest change of the key by one leaf's numbers
_DRAWS = 32  # draws of marks, of which one is chosen
_MOST_SEARCHED = 64  # ranks; with more ranks the search would take too long


def of_rank(plan: Plan, rank: int, batch_size: int, rounding: float) -> np.ndarray:
    """Return what a rank's marks add to its count if the key is 1: one number for each of the ``P`` parts of
    its message, float64 ``(P,)``. The marks of all atoms add up to 0.

    Args:
        rounding: the fraction of the count that rounding explains. The largest mark
            must be a larger fraction, but so small that marks increase rounding only a
            little.
    """
    largest = min(max(_LEAST, 2 * rounding), _LARGEST)
    return (
        largest * batch_size * _of_atoms(plan) @ atoms.coefficients(plan, rank)[:, :, 0]
    )


@functools.lru_cache(maxsize=64)
def _of_atoms(plan: Plan) -> np.ndarray:
    """Return the mark of each atom, float64 ``(atoms,)``, at most 1. The marks add up to 0.

    The hardest to notice is a rank whose marks add up to nearly 0. So of several draws, return the draw in which the
    smallest of the ranks' sums is largest.
    """
    ranks = range(plan.size if plan.size <= _MOST_SEARCHED else 1)
    weighed = [
        each
        for rank in ranks
        if (each := atoms.coefficients(plan, rank)[:, :, 0]).any()
    ]
    length = len(atoms.coefficients(plan, 0))
    best, out = -1.0, np.zeros(length)
    for seed in range(_DRAWS if length > 1 else 0):
        random = np.random.default_rng(seed)
        marks = random.choice([-1, 1], length) * random.uniform(0.5, 1, length)
        marks -= marks.mean()
        marks /= abs(marks).max()
        # rounded, as another processor may round the sums in another way
        least = round(
            min((abs(marks @ each).max() for each in weighed), default=0.0), 9
        )
        if least > best:
            best, out = least, marks
    return out


def of_blocks(placement: Placement, batch_size: int) -> np.ndarray:
    """Return the mark of each block, float32 ``(blocks,)``. The marks of all blocks add
    up to 0, but the marks of one owner's blocks do not. Adding marks times an integer
    key to the number of examples causes no rounding error.
    """
    owners = len(placement.ranks)
    own = np.random.default_rng(0).integers(1, _MOST, (owners, placement.blocks))
    if owners == 1:
        return np.zeros(placement.blocks, np.float32)
    own[1::2] = -own[: owners - 1 : 2]
    if owners % 2:  # the marks of the last three owners add up to 0 together
        own[-2] = abs(own[-2])
        own[-1] = -own[-2] - own[-3]
    unit = 2.0 ** (math.floor(math.log2(batch_size)) - 15)
    return (own.reshape(-1) * unit).astype(np.float32)


def key(
    number: Any, params: Any, moving: Sequence[Any] = (), *, to_the_bit: bool
) -> jax.Array:
    """Return the key for a batch's number, an int32, and a pytree of parameters.
    ``moving`` has pytrees of tangents or cotangents; numbers of different pytrees may
    differ in scale.

    The key is a float32, mostly from −16 to 78. Each pytree in ``moving`` extends this
    range by 16 at both ends. Consecutive batches have different keys. Parameters that
    differ only in rounding have nearly the same key. With ``to_the_bit`` their
    keys differ in most cases. So do the keys of different integers, even without ``to_the_bit``.
    """
    params, moving = jax.lax.stop_gradient((params, moving))
    out = of_batch(jnp.uint32(number)) + mixed(_checksum(params, to_the_bit=to_the_bit))
    scaled = sum((_resemblance(each, scaled=True) for each in moving), jnp.float32(0))
    return (out % _KEYS).astype(jnp.float32) + _resemblance(params) + scaled


def of_batch(number: Any) -> Any:
    """Return the key for a batch's number without parameters: uint32 from 0 to 62."""
    return 9 * (number % 7) + mixed(number) % 9


def mixed(x: Any) -> Any:
    """Mix the bits, like the end of MurmurHash3."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _checksum(pytree: Any, *, to_the_bit: bool) -> jax.Array:
    """Return a uint32 checksum of all bits of the arrays. Unless ``to_the_bit``, leave
    out arrays whose numbers may be rounded."""
    out = jnp.uint32(0)
    for leaf in map(_plain, jax.tree.leaves(pytree)):
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not to_the_bit:
            continue
        if jnp.iscomplexobj(leaf):
            leaf = jnp.stack([leaf.real, leaf.imag])
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            size = min(leaf.dtype.itemsize, 4)
            leaf = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * size}"))
        out = 31 * out + jnp.sum(leaf.astype(jnp.uint32), dtype=jnp.uint32)
    return out


def _plain(leaf: Any) -> jax.Array:
    """Return the bits of typed random keys; return other arrays unchanged."""
    leaf = jnp.asarray(leaf)
    return jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf


def _resemblance(pytree: Any, *, scaled: bool = False) -> jax.Array:
    """Return a float32, mostly from −16 to 16, that depends on the finite numbers of
    each floating-point array: on a few of these numbers, or with ``scaled`` on all.

    If an array's numbers change by a small relative amount, the result changes by
    little more than 16 times this amount. Arrays of small numbers count less: below
    0.01, or with ``scaled`` below a millionth of the largest number.
    """
    leaves = map(_plain, jax.tree.leaves(pytree))
    parts = [
        _finite(leaf if scaled else _corner(leaf))
        for leaf in leaves
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size
    ]
    if not parts:
        return jnp.float32(0)
    # Treat one leaf after the other, so that arrays on several devices are not gathered.
    largest = [jnp.log2(jnp.max(jnp.abs(x))).astype(jnp.float32) for x in parts]
    least = jnp.float32(_SMALL)
    if scaled:
        least = functools.reduce(jnp.maximum, largest) + _SMALLER
        # `least` is infinite if all numbers are 0
        least = jnp.where(jnp.isfinite(least), least, 0)
    out = jnp.float32(0)
    for number, (x, log) in enumerate(zip(parts, largest)):
        log = jnp.maximum(log, least)
        # the square of this root may be beyond the range of the dtype
        root = jnp.exp2((-log / 2).astype(x.dtype))
        x = (x * root * root).astype(jnp.float32)  # the numbers are at most about 1
        size = jnp.sqrt(jnp.sum(x * x) + jnp.exp2(2 * (least - log)))
        out += jnp.sin(jnp.log2(size) + log + 2 * across(x, number) / size)
    return _SWING / math.sqrt(len(parts)) * out


def across(x: jax.Array, number: int = 0) -> jax.Array:
    """Return the sum of an array's numbers, each with a sign that depends on its place."""
    place = jnp.full(x.shape, number, jnp.uint32)
    for axis in range(x.ndim):
        place = 31 * place + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(jnp.where(mixed(place) & 1 == 1, -x, x))


def _finite(leaf: jax.Array) -> jax.Array:
    """Return real numbers, float32 or wider, with 0 in place of NaN and infinities."""
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    leaf = leaf.astype(accumulator(leaf.dtype))
    return jnp.where(jnp.isfinite(leaf), leaf, 0)


def _corner(leaf: jax.Array) -> jax.Array:
    """Return only the numbers in one corner of a leaf, as there may be many."""
    last = min(leaf.ndim, 2)  # the axes of which several places are taken
    places = round(_OF_EACH ** (1 / max(last, 1)))
    ends = [1] * (leaf.ndim - last) + [places] * last
    return leaf[tuple(slice(end) for end in ends)]
