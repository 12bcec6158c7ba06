"""Tokens: numbers that order rounds instead of JAX's effect.

The derivatives of a token are tokens, too: its tangent and its cotangent order the
rounds of derivatives. The sum of several tokens is a token that follows all these
tokens. The cotangent given to JAX must be the last token of the forward pass. Each round
of the backward pass passes this token to the next round, so backward rounds follow all
forward rounds.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jaxcoded import _jax_compat
from jaxcoded._jax_compat import ad, mlir

_NO_DERIVATIVE = (
    "{}: the round of its derivative needs a separate token. Make the token a float32 number, such as "
    "jnp.float32(0), return the last token from the function, and pass it to the derivative:\n"
    "    (value, token), back = jax.vjp(loss, params, token)\n"
    "    grads, token = back((jnp.ones_like(value), token))\n"
    "or, in forward mode, jax.jvp(loss, (params, token), (direction, token))"
)


def checked(token: Any) -> jax.Array | None:
    """Return the token, if any, as an array. Raise a TypeError if it is neither an int32
    nor a float32 number."""
    if token is None:
        return None
    token = jnp.asarray(token)
    if token.shape or token.dtype not in (np.int32, np.float32):
        raise TypeError(
            "token must be an int32 number such as jnp.int32(0), a float32 number for derivatives, or the token that the "
            f"last call returned, got {token.dtype}{list(token.shape)}"
        )
    return token


def check_derivative(name: str, token: Any) -> None:
    """Raise a NotImplementedError if the program has not given JAX a tangent or
    cotangent of the token."""
    if isinstance(token, ad.Zero):
        raise NotImplementedError(_NO_DERIVATIVE.format(name))


def after(token: Any, other: Any) -> Any:
    """Return a token that follows both tokens. If JAX computes ``other`` only later,
    with derivatives, it takes ``token`` as the known result.
    """
    return after_p.bind(token, other)


def _transpose(cotangent: Any, _: Any, other: Any) -> Any:
    """Return a cotangent that also follows the other token."""
    zero = isinstance(cotangent, ad.Zero)
    return [cotangent if zero else after(cotangent, other), None]


after_p = Primitive("coded_after")
after_p.def_impl(jnp.add)
after_p.def_abstract_eval(lambda token, _: token)
_jax_compat.keep_results(after_p, known_by_first=True)
mlir.register_lowering(after_p, mlir.lower_fun(jnp.add, multiple_results=False))
ad.primitive_transposes[after_p] = _transpose
ad.primitive_jvps[after_p] = lambda tokens, derivatives: (
    after_p.bind(*tokens),
    ad.add_tangents(*derivatives),
)
