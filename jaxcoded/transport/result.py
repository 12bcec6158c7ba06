from typing import Any, NamedTuple

import jax


class Result(NamedTuple):
    """The result of a call with a residual or a token. Without them a call returns only the `value`.

    Attributes:
        value: the result of the same call without residual and token, such as ``(loss, grads)``.
        residual: how far a sum is from the exact sum, float32 or float64. ``None`` without
            ``residual=True``.
        token: the token for the next call, int32 or float32. ``None`` if no token
            orders the calls.

    Example:
        >>> import jax.numpy as jnp, jaxcoded
        >>> from mpi4py import MPI
        >>> with jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Uncoded()) as group:
        ...     out = jaxcoded.coded_allreduce(jnp.arange(3.0), group, residual=True)
        >>> out.value.tolist(), float(out.residual), out.token
        ([0.0, 1.0, 2.0], 0.0, None)
    """

    value: Any
    residual: jax.Array | None = None
    token: jax.Array | None = None

    def plain(self) -> Any:
        """Return this result, or only its value if it has neither residual nor token."""
        more = self.residual is not None or self.token is not None
        return self if more else self.value
