import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxcoded import _jax_compat

_MOST = 4  # most cached programs of one function


class Eager:
    """A function that is traced in each call outside `jit`, and compiled if the trace
    differs from recent traces.

    So the function uses the current values of the variables that it closes over, like
    other JAX functions outside `jit`. A loop of equal calls compiles it once.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._programs: list[tuple[Any, Callable[..., Any]]] = []

    def __call__(self, *args: Any) -> Any:
        if _jax_compat.tracing():
            return self._function(*args)
        # Make a new function, since JAX would not trace the same function again.
        trace = jax.make_jaxpr(lambda *args: self._function(*args), return_shape=True)
        closed, shape = trace(*args)
        programs = [each for each in self._programs if same(each[0], closed.jaxpr)]
        if not programs:
            run = functools.partial(_jax_compat.eval_jaxpr, closed.jaxpr)
            programs = [(closed.jaxpr, jax.jit(run))]
            self._programs = [*programs, *self._programs[: _MOST - 1]]
        out = programs[0][1](closed.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)


def same(a: Any, b: Any) -> bool:
    """Return whether two traces, or parts of them, certainly give the same program."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Jaxpr):
        return _same_jaxprs(a, b)
    if isinstance(a, ClosedJaxpr):
        return same(a.jaxpr, b.jaxpr) and same(a.consts, b.consts)
    if isinstance(a, functools.partial):
        return same([a.func, a.args, a.keywords], [b.func, b.args, b.keywords])
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, np.ndarray | np.generic | jax.Array):
        a, b = np.asarray(a), np.asarray(b)
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    try:
        if a == b:
            return True
    except (TypeError, ValueError):
        return False
    fields = dataclasses.fields(a) if dataclasses.is_dataclass(a) else ()
    return bool(fields) and all(
        same(getattr(a, f.name), getattr(b, f.name)) for f in fields
    )


def _same_jaxprs(a: Jaxpr, b: Jaxpr) -> bool:
    names: dict[Any, Any] = {}

    def alike(x: Any, y: Any) -> bool:
        if x.aval != y.aval:
            return False
        if isinstance(x, Literal) or isinstance(y, Literal):
            return type(x) is type(y) and same(np.asarray(x.val), np.asarray(y.val))
        return names.setdefault(x, y) is y

    def all_alike(xs: list[Any], ys: list[Any]) -> bool:
        return len(xs) == len(ys) and all(map(alike, xs, ys))

    return (
        all_alike([*a.constvars, *a.invars], [*b.constvars, *b.invars])
        and len(a.eqns) == len(b.eqns)
        and all(
            equation.primitive is other.primitive
            and equation.effects == other.effects
            and all_alike(equation.invars, other.invars)
            and same(_computed(equation.params), _computed(other.params))
            and all_alike(equation.outvars, other.outvars)
            for equation, other in zip(a.eqns, b.eqns)
        )
        and all_alike(a.outvars, b.outvars)
    )


def _computed(params: dict[str, Any]) -> dict[str, Any]:
    """Return parameters without derivative rules, which the program does not run."""
    rules = {"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "bwd_thunk"}
    return {name: value for name, value in params.items() if name not in rules}
