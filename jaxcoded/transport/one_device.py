"""Collectives run on one device of their process."""

from typing import Any

from jaxcoded import _jax_compat

# Of a program on several devices each would have to take part on its own, while the rank
# has one contribution and one place in the order of the rounds.
REMEDY = """\
a collective of jaxcoded, like an operation of mpi4jax, runs on one device of its process. \
Compute on as many as you like, then either call the collective in a jit of its own on one of \
them, outside shard_map and pmap:
    reduce = jax.jit(lambda x: jaxcoded.coded_allreduce(x, group))
    total = reduce(jax.device_put(local, jax.local_devices()[0]))
or sum a numpy array, outside jit:
    total = jaxcoded.host.coded_allreduce(np.asarray(local), group)"""


def check(context: Any) -> None:
    """Refuse to lower a collective into a program on several devices.

    Args:
        context: ``jax.interpreters.mlir.LoweringRuleContext``.

    Raises:
        ValueError: the program is for more than one.
    """
    devices = _jax_compat.devices(context)
    if devices > 1:
        raise ValueError(f"this program runs on {devices} devices, but {REMEDY}")
