import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal

from jaxcoded import _jax_compat, _require
from jaxcoded.collectives import composed, floats
from jaxcoded.collectives.arguments import check_no_batch, checked_data
from jaxcoded.collectives.counting import over_devices
from jaxcoded.collectives.eager import Eager
from jaxcoded.collectives.gradient import check_alone, check_axis
from jaxcoded.group.batch import Batch
from jaxcoded.group.group import CodedGroup, check_open
from jaxcoded.transport import tokens
from jaxcoded.transport.kernels import accumulator
from jaxcoded.transport.leaves import array, check_no_key, converted, named
from jaxcoded.transport.packing import checked_wire_dtype

_NAME = "coded_sum"
_VALUES = "per_example(params, data)"
_OTHERWISE = "or their weighted sum with weighted=True"


def coded_sum(
    per_example: Callable[..., Any],
    group: CodedGroup,
    *,
    weighted: bool = False,
    wire_dtype: Any = None,
) -> Callable[..., Any]:
    """Return a function that computes a value for each example and sums the values over the global batch. The
    sum is exact, equal on all ranks, and differentiable.

    So a loss may be any function of sums over examples, ``f(Σ_j g_j(θ))``. JAX's ``grad``, ``jvp``,
    ``linearize``, ``vmap``, ``jacrev``, ``hessian``, ``scan``, ``cond`` and ``checkpoint`` treat it like a
    local function. The result equals the result of one process with the whole batch. The sum takes one round,
    and each derivative takes one more round, so the gradient of ``f`` takes two rounds. A rank that is late
    for a round computes nothing for this round, and gets the total. See ``docs/composing.md``.

    Args:
        per_example: ``(params, data) -> values``: a pytree of arrays with a leading axis of examples.
            Complex numbers and integers are summed as in `coded_allreduce`, so integers keep their dtype and wrap
            around. Derivatives follow JAX's conventions.
        group: an open group.
        weighted: whether ``per_example`` is ``(params, data, weights) -> sums``. It
            then returns the weighted sum over its examples, so the values of single
            examples need no memory. ``weights`` has shape ``(length,)``. The sum must
            be linear in ``weights``. If a result does not depend on ``weights``, the
            call raises a ``ValueError``.
        wire_dtype: ``"bfloat16"`` or ``"float16"``, the dtype in which float32 arrays
            are sent; see `coded_allreduce`.

    Returns:
        A function ``(params, batch, *, token=None) -> sums``. It returns a pytree like ``values``, without the
        leading axis. With a ``token`` it returns a `Result` with this pytree. To differentiate it then, use a
        float32 token, and differentiate with respect to the token, too (``docs/composing.md``). ``params`` is a
        pytree of arrays that are equal on all ranks. ``batch`` is a `Batch` of ``group.epoch`` or ``group.batch``,
        the same batch on all ranks. Values that ``per_example`` closes over count as parameters if they are
        differentiated.

        The function raises the errors of `coded_allreduce`, and ``InconsistentMessages`` also if parameters,
        tangents or cotangents differ between ranks. It raises ``TypeError`` if ``batch`` is not a `Batch`, or
        if the code would round integers. It raises ``ValueError`` if the batch belongs to another plan or rank,
        or if values lack the leading axis. It raises ``NotImplementedError`` if the examples are
        differentiated.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcoded
        >>> from mpi4py import MPI
        >>> group = jaxcoded.CodedGroup(MPI.COMM_SELF)
        >>> moments = jaxcoded.coded_sum(lambda w, x: {"x": w * x, "xx": (w * x) ** 2}, group)
        >>> def variance(w, batch):
        ...     sums = moments(w, batch)
        ...     return sums["xx"] / 4 - (sums["x"] / 4) ** 2
        >>> value, slope = jax.value_and_grad(variance)(3.0, group.batch(jnp.arange(4.0)))
        >>> float(value), float(slope)
        (11.25, 7.5)
        >>> group.close()
    """
    check_open(group)
    with group._session.failing(_NAME):
        _require.function("per_example", per_example)
        wire_dtype = checked_wire_dtype(wire_dtype)
    checked: set[Any] = set()

    def reduce(params: Any, data: Any, weights: Any, token: Any) -> Any:
        with group._session.failing(_NAME):
            unit = composed.unit(group, data, weights)
            sums = functools.partial(_sums, per_example, weighted, group, wire_dtype)
            # Trace `per_example` once, to find the values that it closes over.
            of, shape = jax.make_jaxpr(sums, return_shape=True)(params, *unit)
            check_alone("per_example", of)
            if weighted:
                _check_weighted(of.jaxpr, shape)
            else:
                check_axis(_VALUES, _OTHERWISE, per_example, params, unit[0], checked)
            if axes := _jax_compat.axes_of_vmap(of):
                raise NotImplementedError(
                    f"per_example uses the axes {axes} of a vmap around {_NAME}, but one round sums for the whole "
                    "vmap: compute what depends on these axes before, and pass it to per_example in params"
                )
        known = jax.tree.leaves(params)
        rest = jax.tree.structure((data, weights))
        evaluated = functools.partial(_evaluated, of.jaxpr, len(of.consts))
        out = composed.summed(
            composed.Sum(
                name=f"{_NAME}({_require.named(per_example)})",
                group=group,
                alike=(0,) * len(of.consts) + (1,) * len(known),
                unit=unit,
                rest=rest,
                wire_dtype=wire_dtype,
                tokened=token is not None,
            ),
            evaluated,
            *([*of.consts, *known], data, weights, token),
        )
        tree = jax.tree.structure(shape)
        return out._replace(value=jax.tree.unflatten(tree, out.value)).plain()

    # compare functions by identity: equal functions may compute different things
    asked = (
        *(_NAME, group._session.index, _require.identity(per_example)),
        *(weighted, wire_dtype),
    )
    kept = group._session.kept(asked, lambda: Eager(reduce))

    def of_batch(params: Any, batch: Batch, *, token: jax.Array | None = None) -> Any:
        check_open(group)
        group._session.check_alike()
        with group._session.failing(_NAME):
            check_no_batch(params)
            params = converted(params, "params")
            data = checked_data(batch, group)
            token = tokens.checked(token)
        return kept(params, data, batch.weights, token)

    return of_batch


def _check_weighted(jaxpr: Jaxpr, shape: Any) -> None:
    """Raise a ValueError unless all results depend on the weights, which are the last
    argument, and no value that depends on the weights is a divisor.
    """
    reached = _reached(jaxpr, {jaxpr.invars[-1]})
    paths = jax.tree_util.tree_leaves_with_path(shape)
    for (path, leaf), out in zip(paths, jaxpr.outvars):
        if leaf.size and (isinstance(out, Literal) or out not in reached):
            raise ValueError(
                f"{named('per_example(params, data, weights)', path)} does not depend on its weights. Then padding "
                "would count, and examples that several ranks hold would count several times: multiply the values of "
                "examples by their weights before you add them up"
            )


def _reached(jaxpr: Jaxpr, reached: set[Any]) -> set[Any]:
    """Return the variables that depend on these variables, and these variables. Raise
    a ValueError if one of them is a divisor."""
    for equation in jaxpr.eqns:
        depends = [not isinstance(x, Literal) and x in reached for x in equation.invars]
        if not any(depends):
            continue
        reached.update(equation.outvars)
        if _divides(equation, depends):
            raise ValueError(
                "per_example(params, data, weights) divides by its weights, as an average does: return the weighted "
                "sum, and divide the total by batch.weights.examples"
            )
        inner = equation.params.get("jaxpr")
        inner = getattr(inner, "jaxpr", inner)  # the jaxpr of a closed jaxpr
        if inner is not None and len(inner.invars) == len(depends):
            _reached(inner, {x for x, reaches in zip(inner.invars, depends) if reaches})
    return reached


def _divides(equation: Any, by: Sequence[bool]) -> bool:
    """Return whether this operation divides by an operand that is marked in ``by``."""
    name, operands = equation.primitive.name, equation.invars
    if name == "pow":
        power = operands[1]
        return by[0] and isinstance(power, Literal) and bool(np.all(power.val < 0))
    return (
        (name == "div" and by[1])
        or (name == "integer_pow" and equation.params["y"] < 0)
        or name == "rsqrt"
    )


def _evaluated(
    jaxpr: Any, consts: int, args: list[Any], data: Any, weights: jax.Array
) -> list[Any]:
    operands = [*args[consts:], *jax.tree.leaves(data), weights]
    return _jax_compat.eval_jaxpr(jaxpr, args[:consts], *operands)


def _sums(
    per_example: Callable[..., Any],
    weighted: bool,
    group: CodedGroup,
    wire_dtype: Any,
    params: Any,
    data: Any,
    weights: jax.Array,
) -> Any:
    """Return ``Σ_j w_j g_j`` for these examples."""
    split = _jax_compat.varying(weights)

    def weigh(leaf: Any, name: str) -> jax.Array:
        leaf = array(leaf, name)
        check_no_key(leaf.dtype, name)
        if leaf.shape[:1] != weights.shape:
            raise ValueError(
                f"{name} has shape {leaf.shape}, but needs a leading axis of {len(weights)} examples: return one value "
                f"for each example, {_OTHERWISE}"
            )
        w = weights.reshape(-1, *(1 for _ in leaf.shape[1:]))
        # Padding has weight 0, and must not count even if its value is NaN.
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            dtype = None if leaf.dtype == bool else leaf.dtype
            return jnp.where(w != 0, leaf, 0).sum(0, dtype=dtype)
        each = leaf.astype(accumulator(leaf.dtype))
        weighed = w.astype(each.real.dtype) * each
        return jnp.where(w != 0, weighed, 0).sum(0).astype(leaf.dtype)

    if weighted:
        out = per_example(params, data, weights)
    else:
        out = converted(per_example(params, data), _VALUES, weigh)
    # raise errors for unsuitable leaves here, where the leaves have names
    floats.of(out, group, "the sum", wire_dtype)
    return jax.tree.map(lambda leaf: over_devices(jnp.asarray(leaf), split), out)
