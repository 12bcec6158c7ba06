"""The effect by which rounds keep their order in compiled programs."""

import importlib.util
import logging

import jax
from mpi4py import MPI

from jaxcoded import _jax_compat
from jaxcoded.transport import devices

# mpi4jax orders its operations by an effect. If mpi4jax is installed, rounds use the
# same effect. So JAX does not swap, merge or drop rounds and the program's own mpi4jax
# calls.
_Effect: type = _jax_compat.ordered_effect("Order")
if importlib.util.find_spec("mpi4jax"):
    try:
        import mpi4jax
    except Exception as error:  # noqa: BLE001  # rounds do not need an mpi4jax that is broken
        logging.getLogger("jaxcoded").warning("mpi4jax cannot be imported: %s", error)
    else:
        (_mpi4jax_effect,) = jax.make_jaxpr(
            lambda: mpi4jax.barrier(comm=MPI.COMM_SELF)
        )().effects
        _Effect = type(_mpi4jax_effect)
# With any policy, `jax.checkpoint` keeps the results of operations with effects, so JAX
# never repeats a round.
_jax_compat.kept_effects.add_type(_Effect)


class _Order(_Effect):  # type: ignore[misc]  # a class that mpi4jax does not export
    """The effect that orders rounds. JAX shows its `repr` in the error for programs on
    several devices."""

    __hash__ = _Effect.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Effect)

    def __repr__(self) -> str:
        return (
            f"the order of messages between ranks. On several devices: {devices.REMEDY}"
        )


ORDER = _Order()
