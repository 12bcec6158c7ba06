"""Snapshots of training state, as bytes. A rank that is too late for the history
continues from a snapshot."""

import hashlib
import json
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded.errors import CodedError, Desynchronized
from jaxcoded.transport.base import Transport
from jaxcoded.transport.engine import Engine
from jaxcoded.transport.leaves import (
    held,
    is_key,
    is_python_number,
    named,
    numbers,
    restored,
    stored,
)
from jaxcoded.transport.packing import Packing

_DIGEST = 32  # bytes of a digest
_IN_FLIGHT = (
    "resync needs that no round of this rank is in flight: first let other threads end their calls, and call "
    "coded_allreduce_done for rounds that coded_allreduce_start has started"
)


def keep(transport: Transport, words: str, state: Any) -> None:
    """Keep a snapshot of a rank's state, see `CodedGroup.snapshot`. ``words``: see `newest`."""
    copy = np.concatenate([_digest_of_plan(transport, words), to_bytes(state)])
    if isinstance(transport, Engine):  # with other transports no rank can be late
        if undone := transport.undone():
            raise CodedError(
                f"a snapshot would lack the sums of {undone} rounds that coded_allreduce_start has started: call "
                "coded_allreduce_done for them first"
            )
        transport.keep_state(copy)


def newest(transport: Transport, words: str, like: Any, timeout: float) -> Any:
    """Return the newest snapshot of the nearest rank above that has a usable snapshot;
    see `CodedGroup.resync`. ``words``: the words on the plan in the session's calls, which
    differ after each `replan`."""
    above = Engine.of(transport, "resync needs")
    if not above.drained(timeout):
        raise CodedError(_IN_FLIGHT)
    round_, data = above.fetch_state(timeout)
    if not round_:
        raise Desynchronized(
            f"no rank above rank {transport.rank} has a usable snapshot that fits into its memory, or "
            f"none has answered within {timeout} s: call group.snapshot on all ranks after each step, with an every= "
            "so small that the rounds since a snapshot are kept. Only a rank whose calls raise Desynchronized needs to "
            "resync"
        )
    plan = _digest_of_plan(transport, words)
    if data[: len(plan)] != plan.tobytes():
        raise Desynchronized(
            f"the group has replanned since rank {transport.rank} fell out of its history: "
            "call replan only while no rank is that late, "
            "or keep a longer history (history_bytes)"
        )
    state = from_bytes(data[len(plan) :], like)
    if not above.resume():
        raise CodedError(_IN_FLIGHT)
    return state


def _digest_of_plan(transport: Transport, words: str) -> np.ndarray:
    text = (transport.plan.fingerprint + words).encode()
    return np.frombuffer(hashlib.sha256(text).digest(), np.uint8)


def to_bytes(state: Any) -> np.ndarray:
    """Return a pytree as bytes, uint8 ``(bytes,)``: a digest of its structure, shapes
    and dtypes, then its leaves one after the other. Wait until the leaves are computed.
    Raise a TypeError if a leaf is not an array of numbers or random keys.
    """
    leaves = [
        _bytes_of(leaf, path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]
    return np.concatenate([_digest(state), *leaves])


def from_bytes(data: bytes, like: Any) -> Any:
    """Return the pytree that `to_bytes` converted to ``data``.

    ``like`` is a pytree of the same structure, shapes and dtypes. Each leaf of the
    result has the type of the same leaf of ``like``: a Python number, a NumPy array,
    random keys, or otherwise a JAX array. (A 64-bit leaf becomes a NumPy array if JAX
    is limited to 32 bits.) Raise a ValueError if structure, shapes or dtypes differ, or
    the data are damaged.
    """
    if data[:_DIGEST] != _digest(like).tobytes():
        state = Packing.of(jax.tree.map(_aval, like))
        raise ValueError(f"the snapshot does not fit this state: {state}")
    leaves, structure = jax.tree.flatten(like)
    avals = list(map(_aval, leaves))
    length = _DIGEST + sum(aval.size * aval.dtype.itemsize for aval in avals)
    if len(data) != length:
        raise ValueError(
            f"the snapshot has {len(data)} bytes, but this state needs {length}: it is damaged"
        )
    start, out = _DIGEST, []
    for leaf, aval in zip(leaves, avals):
        if is_key(aval.dtype):
            dtype, each = stored(aval.dtype)
            values = np.frombuffer(data, dtype, aval.size * each, start)
            out.append(restored(jnp.asarray(values), aval.shape, aval.dtype))
        else:
            values = np.frombuffer(data, aval.dtype, aval.size, start)
            out.append(_as(leaf, values.reshape(aval.shape)))
        start += values.nbytes
    return jax.tree.unflatten(structure, out)


def _bytes_of(leaf: Any, path: Any) -> np.ndarray:
    array = held(leaf, named("leaf", path))
    if is_key(array.dtype):
        array = numbers(array)
    elif isinstance(leaf, np.ndarray | np.generic):
        array = np.asarray(leaf)  # keeps the leaf's byte order
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _as(leaf: Any, values: np.ndarray) -> Any:
    """Return the values as the type of a leaf."""
    if is_python_number(leaf):
        return values.item()
    if not isinstance(leaf, np.ndarray | np.generic):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns if it truncates to 32 bits
            array = jnp.array(values)
        if array.dtype == values.dtype:
            return array
    return values[()] if isinstance(leaf, np.generic) else values.copy()


def _digest(pytree: Any) -> np.ndarray:
    table = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(pytree):
        aval = _aval(leaf)
        # The digest uses paths instead of the text of the pytree's structure, which may contain
        # addresses of functions.
        name = jax.tree_util.keystr(path)
        # dtypes of keys have no byte order
        order = getattr(aval.dtype, "byteorder", "")
        table.append((name, aval.shape, aval.dtype.name, order))
    digest = hashlib.sha256(json.dumps(table).encode()).digest()
    return np.frombuffer(digest, np.uint8)


def _aval(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
