"""Sums over the global batch that JAX differentiates, as often as it likes: the primitive.

A sum is of what a function gives for some examples and their weights, in which it is linear, and of arguments that
all ranks have. Its jvp is the sum of the function's jvp, and its transpose that of the function's transpose, so each
is a sum again: of the arguments and of their tangents, or of cotangents, which all ranks have, too. Each is one round.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jaxcoded import _jax_compat
from jaxcoded._jax_compat import ad, batching, mlir
from jaxcoded.collectives import floats, gradient, over_batch, shared
from jaxcoded.group.group import CodedGroup
from jaxcoded.group.weights import Weights
from jaxcoded.transport.order import ORDER
from jaxcoded.transport.result import Result


@dataclasses.dataclass(frozen=True, eq=False)
class Sum:
    """What is summed.

    Attributes:
        name: in words.
        group: that sums.
        of: a function of a list of arguments, of some examples, and of their weights. The list of its results.
        alike: of each argument, whether ranks may be told apart by it: what is differentiated, and the parameters.
        unit: the types of the examples and of the weights that it gets at once.
        rest: the structure of the batch's data, and of its weights.
        wire_dtype: see `jaxcoded.coded_allreduce`.
        tokened: whether the last operand orders the round.
        derived: whether it is of a derivative. Each rank computes tangents and cotangents itself, by a program of its
            own, so that they may differ in rounding.
    """

    name: str
    group: CodedGroup
    of: Callable[[list[Any], Any, jax.Array], list[Any]]
    alike: tuple[bool, ...]
    unit: tuple[Any, jax.ShapeDtypeStruct]
    rest: Any
    wire_dtype: Any
    tokened: bool
    derived: bool = False

    def parts(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The arguments, and the other operands."""
        count = len(self.alike)
        return list(operands[:count]), list(operands[count:])

    def derivative(
        self, kind: str, of: Any, alike: Sequence[bool], more: Sequence[Any]
    ) -> "Sum":
        """The sum of this function instead, which takes these arguments and so many ``more``, tangents or cotangents."""
        alike = *alike, *(True for _ in more)
        name = f"{kind} of {self.name}"
        return dataclasses.replace(self, name=name, of=of, alike=alike, derived=True)

    def round(self, *operands: Any) -> list[Any]:
        """Trace the round."""
        args, rest = self.parts(operands)
        token = rest.pop() if self.tokened else None
        data, weights = jax.tree.unflatten(self.rest, rest)
        plan = self.group.plan
        like = jax.eval_shape(self.of, args, *self.unit)

        def of(args: list[Any], examples: Any, weights: jax.Array) -> tuple[Any, None]:
            out = self.of(args, examples, weights)
            return {"sum": floats.of(out, plan, "sum", self.wire_dtype)}, None

        out, *_ = over_batch.summed(
            functools.partial(gradient.unless_behind, of, args),
            [x for x, alike in zip(args, self.alike) if alike],
            *(data, weights, self.group),
            eps=lambda: _jax_compat.coarsest_eps(self.of, args, *self.unit),
            same_bits=not self.derived,
            name=self.name,
            erasures=None,
            token=token,
            residual=False,
            wire_dtype=self.wire_dtype,
        )
        leaves = floats.restored(out.value["sum"], like)
        return [*leaves, out.token] if self.tokened else leaves


sum_p = Primitive("coded_sum")
sum_p.multiple_results = True
_jax_compat.never_drop(sum_p)
_jax_compat.compile_alone(sum_p, lambda sum: sum.name)


def summed(
    sum: Sum, args: Sequence[Any], data: Any, weights: Any, token: Any
) -> Result:
    """The list of what is summed, as a `Result`."""
    rest = [*jax.tree.leaves((data, weights)), *([token] if sum.tokened else [])]
    out = sum_p.bind(*args, *rest, sum=sum)
    return Result(out[:-1], token=out[-1]) if sum.tokened else Result(out)


def unit(
    group: CodedGroup, data: Any, weights: Weights
) -> tuple[Any, jax.ShapeDtypeStruct]:
    """The types of the examples and of the weights that a rank computes at once."""
    shape, dtype = weights.values.shape, jax.dtypes.canonicalize_dtype(weights.dtype)
    if group.plan.strategy.by_blocks:
        shape, dtype = shared.shape(weights, group)[1:], jnp.float32
    elif group.plan.encoded:
        shape = shape[1:2]
    examples = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*shape, *leaf.shape[1:]), leaf.dtype), data
    )
    return examples, jax.ShapeDtypeStruct(shape, dtype)


@sum_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, sum: Sum) -> Any:
    args, rest = sum.parts(avals)
    token = [rest.pop()] if sum.tokened else []
    out = jax.eval_shape(sum.of, _described(args), *sum.unit)
    leaves = [_jax_compat.ShapedArray(leaf.shape, leaf.dtype) for leaf in out]
    return [*leaves, *token], set() if sum.tokened else {ORDER}


def _described(avals: Any) -> Any:
    return jax.tree.map(
        lambda aval: jax.ShapeDtypeStruct(aval.shape, aval.dtype), avals
    )


def _lowering(ctx: Any, *operands: Any, sum: Sum) -> Any:
    return mlir.lower_fun(sum.round, multiple_results=True)(ctx, *operands)


mlir.register_lowering(sum_p, _lowering)


def _check(sum: Sum, what: str, moved: Sequence[bool]) -> None:
    """Raise unless it is arguments alone that are differentiated, or batched."""
    if any(sum.parts(moved)[1]):
        raise NotImplementedError(
            f"{sum.name}: the batch is {what}, but its examples are this rank's own. Compute what depends on "
            "parameters inside of per_example, from params and from examples that do not depend on them"
        )
    if sum.tokened:
        raise NotImplementedError(
            f"{sum.name}: a call with a token cannot be {what}; leave the token out"
        )


def _moving(
    of: Any, which: Sequence[int], args: list[Any], *rest: Any
) -> Callable[..., list[Any]]:
    """The function of some of its arguments alone."""

    def function(*moving: Any) -> list[Any]:
        all_ = list(args)
        for i, x in zip(which, moving):
            all_[i] = x
        return of(all_, *rest)

    return function


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, sum: Sum) -> Any:
    """One more round, of the function's jvp."""
    moves = [not isinstance(t, ad.Zero) for t in tangents]
    _check(sum, "differentiated", moves)
    out = sum_p.bind(*primals, sum=sum)
    which = [i for i, move in enumerate(moves) if move]
    inexact = [i for i, x in enumerate(out) if jnp.issubdtype(x.dtype, jnp.inexact)]
    count = len(sum.alike)

    def of(args: list[Any], *rest: Any) -> list[Any]:
        args, its = args[:count], args[count:]
        function = _moving(sum.of, which, args, *rest)
        _, moved = jax.jvp(function, [args[i] for i in which], its)
        return [moved[i] for i in inexact]

    alike = [a or move for a, move in zip(sum.alike, moves)]
    its = sum.derivative("jvp", of, alike, which)
    args, rest = sum.parts(primals)
    moved = []
    if inexact:  # integers do not move
        moved = sum_p.bind(*args, *(tangents[i] for i in which), *rest, sum=its)
    out_moved = [
        ad.Zero(_jax_compat.ShapedArray(x.shape, jax.dtypes.float0)) for x in out
    ]
    for i, x in zip(inexact, moved):
        out_moved[i] = x
    return out, out_moved


ad.primitive_jvps[sum_p] = _jvp


def _transpose(cotangents: Sequence[Any], *operands: Any, sum: Sum) -> Any:
    """One round, of the function's transpose."""
    which = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    there = [i for i, ct in enumerate(cotangents) if not isinstance(ct, ad.Zero)]
    back: list[Any] = [None] * len(operands)
    if not there:
        return back
    count = len(sum.alike) - len(which)
    avals = [operands[i].aval for i in which]

    def of(args: list[Any], *rest: Any) -> list[Any]:
        known, its = iter(args[:count]), args[count:]
        all_ = [None if i in which else next(known) for i in range(len(sum.alike))]
        function = _moving(sum.of, which, all_, *rest)
        linear = lambda *moving: [function(*moving)[i] for i in there]
        return list(jax.linear_transpose(linear, *_described(avals))(its))

    alike = [a for i, a in enumerate(sum.alike) if i not in which]
    its = sum.derivative("transpose", of, alike, there)
    args, rest = sum.parts(operands)
    args = [x for i, x in enumerate(args) if i not in which]
    out = sum_p.bind(*args, *(cotangents[i] for i in there), *rest, sum=its)
    for i, x in zip(which, out):
        back[i] = x
    return back


ad.primitive_transposes[sum_p] = _transpose


def _batch(operands: Sequence[Any], axes: Sequence[Any], *, sum: Sum) -> Any:
    """One round with the stacked sums."""
    _check(sum, "batched by vmap", [axis is not None for axis in axes])
    its, _ = sum.parts(axes)

    def of(args: list[Any], *rest: Any) -> list[Any]:
        return jax.vmap(lambda args: sum.of(args, *rest), in_axes=(its,))(args)

    out = sum_p.bind(*operands, sum=dataclasses.replace(sum, of=of))
    return out, [0] * len(out)


batching.primitive_batchers[sum_p] = _batch
