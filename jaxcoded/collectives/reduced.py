"""Record which arrays are already reduced, so that no call reduces them again."""

import functools
import weakref
from typing import Any

import jax

# Maps the `id` of an array or tracer to a weak reference to it, and to the index of the
# group that reduced it. A value computed from it is a new object, which is not in this
# dictionary.
_known: dict[int, tuple[weakref.ref[Any], int]] = {}


def note(pytree: Any, group: int) -> None:
    """Record that these leaves are reduced over the group with this index."""
    for leaf in jax.tree.leaves(pytree):
        # The callback receives the dead reference, which `pop` then takes as its
        # default.
        forget = functools.partial(_known.pop, id(leaf))
        _known[id(leaf)] = weakref.ref(leaf, forget), group


def check(pytree: Any, group: int) -> None:
    """Raise a ValueError that names the leaf if a leaf is known to be reduced over the
    group with this index."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(pytree):
        known = _known.get(id(leaf))
        if known is not None and known[0]() is leaf and known[1] == group:
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} is a gradient that coded_value_and_grad or "
                "another jaxcoded.optax.sum_gradients has summed: a second sum would make it wrong. Leave "
                "this jaxcoded.optax.sum_gradients out of the chain"
            )
