"""The gradient of the weighted losses of some examples."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxcoded import _jax_compat, _require
from jaxcoded.collectives import floats
from jaxcoded.collectives.counting import over_devices
from jaxcoded.group.group import CodedGroup
from jaxcoded.transport.kernels import accumulator
from jaxcoded.transport.leaves import converted, named
from jaxcoded.transport.order import ORDER


def of_part(
    losses: Callable[[Any, Any], Any],
    has_aux: bool,
    group: CodedGroup,
    known: set[Any],
    params: Any,
    batch: Any,
    weights: jax.Array,
) -> tuple[Any, Any]:
    """Return ``Σ w ℓ`` and ``∇ Σ w ℓ`` of examples, both converted by `floats.of`, and
    the auxiliary data. `check_axis` explains ``known``.
    """
    split = _jax_compat.varying(weights)

    def weighted_loss(params: Any) -> tuple[jax.Array, Any]:
        each, aux = _losses_of_examples(losses, has_aux, known, params, batch)
        if each.shape != weights.shape:
            raise ValueError(
                "losses must return one loss for each example, "
                f"shape {weights.shape}, or their mean, shape (), got {each.shape}"
            )
        if not jnp.issubdtype(each.dtype, jnp.floating):
            raise TypeError(
                "losses must be in floating point, got "
                f"{each.dtype}: cast what they are computed from"
            )
        if alone := set(_jax_compat.varying(each)).difference(split):
            raise ValueError(
                f"the losses differ along the axes {sorted(alone)} of the devices, over which the "
                "weights are not split: if several devices compute one example, return the sum of their losses "
                "(jax.lax.psum)"
            )
        w = weights.astype(accumulator(each.dtype))
        # Padding has weight 0, and must not count even if its loss is NaN. Its gradient
        # is finite, since padding repeats a real example.
        loss = jnp.sum(jnp.where(w != 0, w * each.astype(w.dtype), 0))
        return loss, aux

    value_and_grad = jax.value_and_grad(weighted_loss, has_aux=True)
    (loss, aux), grads = value_and_grad(params)
    grads = floats.of(grads, group, "params")
    return {"loss": over_devices(loss, split), "grads": grads}, aux


def _losses_of_examples(
    losses: Callable[[Any, Any], Any],
    has_aux: bool,
    known: set[Any],
    params: Any,
    batch: Any,
) -> tuple[jax.Array, Any]:
    """Return the loss of each example, and the auxiliary data. A scalar loss is the
    mean over the examples of a batch. So the loss of an example is the scalar loss of a
    batch with only this example.
    """

    # `jit` traces `losses` only once, although the shapes of the results are needed before
    # the results.
    @functools.partial(jax.jit, inline=True)
    def pair(params: Any, batch: Any) -> tuple[Any, Any]:
        out = losses(params, batch)
        if isinstance(out, tuple) != has_aux or (has_aux and len(out) != 2):
            wanted = "the pair (losses, aux)" if has_aux else "the losses alone"
            raise ValueError(
                f"with has_aux={has_aux} losses must return {wanted}, "
                f"got {jax.tree.structure(out)}"
            )
        values, aux = out if has_aux else (out, None)
        if values is None:
            raise TypeError("losses returned None: its `return` is missing")
        try:
            values = jnp.asarray(values)
        except (TypeError, ValueError):
            raise TypeError(
                f"losses returned {_require.kind(values)}: return one array, the loss of each example or their mean, and "
                "anything else as aux, with has_aux=True"
            ) from None
        return values, converted(aux, "aux")

    def of_one(example: Any) -> tuple[Any, Any]:
        return pair(params, jax.tree.map(lambda leaf: leaf[None], example))

    traced, (values, _) = jax.make_jaxpr(pair, return_shape=True)(params, batch)
    check_alone("losses", traced)
    if not values.shape:
        return jax.vmap(of_one)(batch)
    if values.shape in [leaf.shape[:1] for leaf in jax.tree.leaves(batch)]:
        each = lambda *args: pair(*args)[0]
        check_axis("losses", "or their mean", each, params, batch, known)
    return pair(params, batch)


def check_alone(name: str, traced: ClosedJaxpr) -> None:
    """Raise a TypeError if a rank cannot compute the function alone."""
    if ORDER in traced.effects:
        raise TypeError(
            f"{name} calls a collective, but a late rank skips {name}, and the other ranks would wait for it: call "
            f"the collective before {name}, and pass its result to {name} as a parameter"
        )


def check_axis(
    name: str,
    otherwise: str,
    function: Callable[[Any, Any], Any],
    params: Any,
    examples: Any,
    known: set[Any],
) -> None:
    """Raise a ValueError if the first axis of a result is not the axis of the examples,
    even if it has the same length by chance. ``known`` has the shapes of examples that
    have already passed this check.
    """
    shapes = tuple(leaf.shape for leaf in jax.tree.leaves(examples))
    if shapes in known or not shapes:
        return
    twice = jax.tree.map(
        lambda leaf: _jax_compat.like(leaf, (2 * leaf.shape[0], *leaf.shape[1:])),
        examples,
    )
    try:
        results = jax.eval_shape(function, params, twice)
    except Exception:  # noqa: BLE001  # the function may accept only the given number of examples
        results = None
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        if leaf.shape[:1] != (2 * shapes[0][0],):
            raise ValueError(
                f"{named(name, path)} has shape {leaf.shape} even for {2 * shapes[0][0]} examples: return one value "
                f"for each example, {otherwise}"
            )
    known.add(shapes)


def unless_behind(
    gradient: Callable[..., tuple[Any, Any]],
    params: Any,
    batch: Any,
    weights: jax.Array,
    behind: jax.Array | None = None,
) -> tuple[Any, Any]:
    """Return the gradient of a batch, or zeros if all weights are 0 or this rank is
    ``behind``. All devices of a split batch decide alike, since they may need each other.
    """

    def compute() -> tuple[Any, Any]:
        return gradient(params, batch, weights)

    def skip() -> tuple[Any, Any]:
        return jax.tree.map(_zeros, jax.eval_shape(gradient, params, batch, weights))

    split = _jax_compat.varying(weights)
    some = jnp.any(weights != 0).astype(jnp.int32)
    needed = over_devices(some, split) > 0
    if behind is not None:
        needed &= behind == 0
    return jax.lax.cond(needed, compute, skip)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return _jax_compat.vary(
        jnp.zeros(like.shape, like.dtype), _jax_compat.varying(like)
    )
