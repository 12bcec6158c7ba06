"""The JAX primitive for sums over the global batch. JAX can differentiate these sums any
number of times.

A sum adds up a function over the examples. The function has three inputs: the examples,
their weights, in which it is linear, and arguments that are equal on all ranks. The
sum's jvp is the sum of the function's jvp, and the sum's transpose is the sum of the
function's transpose. So jvp and transpose are sums again. Their arguments include
tangents or cotangents, which are also equal on all ranks. Each of these sums takes one
round.
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
from jaxcoded.collectives.eager import same
from jaxcoded.group.group import CodedGroup
from jaxcoded.group.weights import Weights
from jaxcoded.transport import tokens
from jaxcoded.transport.order import ORDER
from jaxcoded.transport.result import Result

_traced_once = functools.partial(jax.jit, inline=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Sum:
    """The description of a sum. Two descriptions are equal if their sums run the
    same program. So outside ``jit``, JAX compiles equal sums only once.
    """

    name: str
    group: CodedGroup
    # A number for each argument. Ranks compare all arguments with the same number
    # together. Parameters and other differentiated arguments have the number 1. The
    # tangents or cotangents of each derivative have a separate number, since their
    # scales differ. Ranks do not compare arguments with the number 0.
    alike: tuple[int, ...]
    # the types of the examples and of the weights in one call of ``of``
    unit: tuple[Any, Any]
    rest: Any  # the structure of the batch's data and weights
    wire_dtype: Any  # see `jaxcoded.coded_allreduce`
    tokened: bool  # whether the last operand orders the round
    # Whether this is the sum of a derivative. Tangents and cotangents may differ in
    # rounding between ranks, which may compute them with different programs.
    derived: bool = False
    # A function that takes a list of arguments, some examples, and their weights, and
    # returns a list of results. A round and each derivative evaluate it several times,
    # so `jax.jit` keeps its trace.
    of: Any = None
    traced: Any = None  # the trace of `of`

    def adding(self, of: Callable[..., list[Any]], args: Sequence[Any]) -> "Sum":
        """Return this description with the function ``of`` of such arguments."""
        of = _traced_once(of)
        args = [_jax_compat.like(x, jnp.shape(x)) for x in args]
        traced = of.trace(args, *self.unit).jaxpr
        return dataclasses.replace(self, of=of, traced=traced)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sum) and same(self._compared(), other._compared())

    def __hash__(self) -> int:
        return hash((self.name, self.alike, len(self.traced.eqns)))

    def _compared(self) -> list[Any]:
        fields = dataclasses.fields(self)
        return [getattr(self, each.name) for each in fields if each.name != "of"]

    def parts(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the arguments, the batch, and the token, if any."""
        args, end = len(self.alike), len(operands) - self.tokened
        return list(operands[:args]), list(operands[args:end]), list(operands[end:])

    def derivative(
        self,
        kind: str,
        of: Any,
        alike: Sequence[int],
        args: Sequence[Any],
        more: Sequence[Any],
    ) -> "Sum":
        """Return the description of a derivative of this sum: the sum of the function
        ``of``, which takes the arguments ``args`` and ``more``."""
        alike = *alike, *(self.scales() + 1 for _ in more)
        name = f"{kind} of {self.name}"
        derivative = dataclasses.replace(self, name=name, alike=alike, derived=True)
        return derivative.adding(of, [*args, *more])

    def scales(self) -> int:
        """Return the largest number in `alike`, at least 1."""
        return max((1, *self.alike))

    def named(self, number: int, args: Sequence[Any]) -> list[Any]:
        """Return the arguments with this number in `alike`."""
        return [x for x, a in zip(args, self.alike) if a == number]

    def round(self, *operands: Any) -> list[Any]:
        """Trace the round."""
        args, rest, token = self.parts(operands)
        data, weights = jax.tree.unflatten(self.rest, rest)

        @_traced_once
        def of(args: list[Any], examples: Any, weights: jax.Array) -> tuple[Any, None]:
            out = self.of(args, examples, weights)
            return {"sum": floats.of(out, self.group, "sum", self.wire_dtype)}, None

        out, *_ = over_batch.summed(
            functools.partial(gradient.unless_behind, of, args),
            self.named(1, args),
            *(data, weights, self.group),
            moving=[self.named(i, args) for i in range(2, self.scales() + 1)],
            eps=lambda: _jax_compat.coarsest_eps(self.of, args, *self.unit),
            same_bits=not self.derived,
            name=self.name,
            erasures=None,
            token=token[0] if token else None,
            residual=False,
            wire_dtype=self.wire_dtype,
        )
        leaves = floats.restored(out.value["sum"])
        return [*leaves, out.token] if token else leaves


sum_p = Primitive("coded_sum")
sum_p.multiple_results = True
_jax_compat.never_drop(sum_p)
_jax_compat.keep_results(sum_p)
_jax_compat.compile_alone(sum_p, lambda sum: sum.name)


def summed(
    sum: Sum,
    of: Callable[..., list[Any]],
    args: Sequence[Any],
    data: Any,
    weights: Any,
    token: Any,
) -> Result:
    """Return the sums of the results of a function such as `Sum.of`, as a `Result`."""
    rest = jax.tree.leaves((data, weights, token))
    sum = sum.adding(of, args)
    out = sum_p.bind(*args, *rest, sum=sum)
    return Result(out[:-1], token=out[-1]) if sum.tokened else Result(out)


def unit(group: CodedGroup, data: Any, weights: Weights) -> tuple[Any, Any]:
    """Return the types of the examples that a rank computes at a time, and of their weights."""
    shape, dtype = weights.values.shape, jax.dtypes.canonicalize_dtype(weights.dtype)
    if group.plan.strategy.by_blocks:
        shape, dtype = shared.shape(weights, group)[1:], jnp.float32
    elif group.plan.encoded:
        shape = shape[1:2]
    examples = jax.tree.map(
        lambda leaf: _jax_compat.like(leaf, (*shape, *leaf.shape[1:])), data
    )
    return examples, _jax_compat.like(jnp.asarray(weights.values), shape, dtype)


@sum_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, sum: Sum) -> Any:
    token = sum.parts(avals)[2]
    return [*sum.traced.out_avals, *token], set() if token else {ORDER}


def _lowering(ctx: Any, *operands: Any, sum: Sum) -> Any:
    return mlir.lower_fun(sum.round, multiple_results=True)(ctx, *operands)


mlir.register_lowering(sum_p, _lowering)


def _check(sum: Sum, what: str, moved: Sequence[bool]) -> None:
    """Raise an error if the examples or their weights are differentiated or batched."""
    if any(sum.parts(moved)[1]):
        if what == "differentiated":
            hint = (
                "JAX differentiates functions for jax.lax.custom_root, and functions with a custom rule, with respect "
                "to all that they close over or take: in such a function, sum over jax.lax.stop_gradient(batch)."
            )
        else:
            hint = (
                "jax.vmap of jax.lax.cond with a batched predicate batches all that the branches use, also the batch: "
                "sum outside of the cond, or take jnp.where of the sum."
            )
        raise NotImplementedError(
            f"{sum.name}: the batch cannot be {what}, as each rank holds only its own examples. Inside per_example, "
            "compute everything that depends on the parameters; the examples themselves must not depend on them. "
            f"{hint}"
        )


def _moving(
    of: Any, which: Sequence[int], args: list[Any], *rest: Any
) -> Callable[..., list[Any]]:
    """Return a function of some of the arguments, with the others fixed."""

    def function(*moving: Any) -> list[Any]:
        all_ = list(args)
        for i, x in zip(which, moving):
            all_[i] = x
        return of(all_, *rest)

    return function


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, sum: Sum) -> Any:
    """Return the sum, and its jvp: the sum of the function's jvp, in one more round."""
    moves = [not isinstance(t, ad.Zero) for t in tangents]
    _check(sum, "differentiated", moves)
    out = sum_p.bind(*primals, sum=sum)
    which = [i for i, move in enumerate(moves[: len(sum.alike)]) if move]
    token = sum.parts(tangents)[2]
    count, values = len(sum.alike), out[: len(out) - len(token)]
    inexact = [i for i, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def of(args: list[Any], *rest: Any) -> list[Any]:
        args, moving = args[:count], args[count:]
        function = _moving(sum.of, which, args, *rest)
        _, moved = jax.jvp(function, [args[i] for i in which], moving)
        return [moved[i] for i in inexact]

    out_moved = [
        ad.Zero(_jax_compat.like(x, x.shape).to_tangent_aval()) for x in values
    ]
    if inexact and which:  # integers have no tangents
        alike = [a or int(move) for a, move in zip(sum.alike, moves)]
        args, rest, _ = sum.parts(primals)
        moving = [tangents[i] for i in which]
        derivative = sum.derivative("jvp", of, alike, args, moving)
        if token:
            tokens.check_derivative(sum.name, *token)
            token = [tokens.after(token[0], out[-1])]
        moved = sum_p.bind(*args, *moving, *rest, *token, sum=derivative)
        if token:
            token = [tokens.after(moved.pop(), out[-1])]
            out[-1] = tokens.after(out[-1], token[0])
        for i, x in zip(inexact, moved):
            out_moved[i] = x
    return out, out_moved + token


ad.primitive_jvps[sum_p] = _jvp


def _transpose(cotangents: Sequence[Any], *operands: Any, sum: Sum) -> Any:
    """Return the sum's transpose: the sum of the function's transpose, in one round."""
    args, rest, token = sum.parts(operands)
    which = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    values = cotangents[: len(cotangents) - len(token)]
    nonzero = [i for i, ct in enumerate(values) if not isinstance(ct, ad.Zero)]
    back: list[Any] = [None] * len(operands)
    if token:
        back[-1] = cotangents[-1]
    if not nonzero:
        return back
    if token:
        tokens.check_derivative(sum.name, back[-1])
        token = [back[-1]]
    count = len(sum.alike) - len(which)
    types = [_jax_compat.like(args[i].aval, args[i].aval.shape) for i in which]

    def of(args: list[Any], *rest: Any) -> list[Any]:
        known, cts = iter(args[:count]), args[count:]
        all_ = [None if i in which else next(known) for i in range(len(sum.alike))]
        function = _moving(sum.of, which, all_, *rest)
        linear = lambda *moving: [function(*moving)[i] for i in nonzero]
        return list(jax.linear_transpose(linear, *types)(cts))

    alike = [a for i, a in enumerate(sum.alike) if i not in which]
    args = [x for i, x in enumerate(args) if i not in which]
    moving = [cotangents[i] for i in nonzero]
    derivative = sum.derivative("transpose", of, alike, args, moving)
    out = sum_p.bind(*args, *moving, *rest, *token, sum=derivative)
    if token:
        back[-1] = out.pop()
    for i, x in zip(which, out):
        back[i] = x
    return back


ad.primitive_transposes[sum_p] = _transpose


def _batch(operands: Sequence[Any], axes: Sequence[Any], *, sum: Sum) -> Any:
    """Return the batched sum, which sums the stacked values in one round."""
    _check(sum, "batched by vmap", [axis is not None for axis in axes])
    in_axes, _, token = sum.parts(axes)
    if any(axis is not None for axis in token):
        raise NotImplementedError(
            f"{sum.name}: a token cannot be batched by vmap, as it orders one round: pass it with in_axes=None"
        )

    def of(args: list[Any], *rest: Any) -> list[Any]:
        return jax.vmap(lambda args: sum.of(args, *rest), in_axes=(in_axes,))(args)

    out = sum_p.bind(*operands, sum=sum.adding(of, sum.parts(operands)[0]))
    return out, [0] * (len(out) - len(token)) + token


batching.primitive_batchers[sum_p] = _batch
