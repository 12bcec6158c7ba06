"""Programs on several devices of one process. Inside `shard_map` all devices make a call together.

A rank is one process with one contribution and one place in the order of the rounds. So
its devices make one call together. Each device passes its shards, and one device passes
the replicated arrays.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxcoded import _jax_compat

# How many seconds the devices of a process wait for each other before they give up.
PATIENCE = 300.0

REMEDY = """\
a collective of jaxcoded runs on one device of its process, or, inside shard_map, on all devices of a \
mesh, in the order of a token:
    def reduce(x, token):
        out = jaxcoded.coded_allreduce(x, group, batch.weights, token=token)
        return out.value, out.token
    reduce = jax.shard_map(reduce, mesh=mesh, in_specs=(P(), P()), out_specs=P())
P() for replicated arrays, P("axis") for shards. Or, on a single device, in a separate jit:
    reduce = jax.jit(lambda x: jaxcoded.coded_allreduce(x, group, batch.weights))
    total = reduce(jax.device_put(local, jax.local_devices()[0]))
or sum a numpy array, outside jit:
    total = jaxcoded.host.allreduce(np.asarray(local), group, batch.weights)"""


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a program, as `shard_map` has arranged them."""

    axes: tuple[tuple[str, int], ...]  # names and sizes of the mesh's axes

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)

    @property
    def number(self) -> int:
        return math.prod(size for _, size in self.axes)

    def place(self) -> jax.Array:
        """Return the number of the computing device: int32, in the order of the mesh."""
        return jax.lax.axis_index(tuple(name for name, _ in self.axes))

    def owners(self, split: Sequence[str]) -> list[int]:
        """Return for each place the first place that has the same data, for a value
        that is split over these axes and equal along all other axes.

        Example:
            >>> from jaxcoded.transport.devices import Devices
            >>> mesh = Devices((("x", 2), ("y", 2)))
            >>> mesh.owners(["x", "y"]), mesh.owners(["x"]), mesh.owners([])
            ([0, 1, 2, 3], [0, 0, 2, 2], [0, 0, 0, 0])
        """
        sizes = [size for _, size in self.axes]
        places = np.arange(self.number).reshape(sizes)
        for axis, (name, _) in enumerate(self.axes):
            if name not in split:
                places = np.broadcast_to(places.take([0], axis), sizes)
        return places.reshape(-1).tolist()


def of_program() -> Devices | None:
    """Return the devices of the traced program if they make calls together, as inside
    `shard_map` over several devices. Raise a ValueError if they cannot.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes or mesh.size == 1:
        return None
    axes = tuple(zip(mesh.axis_names, mesh.axis_sizes))
    others = [n for n, size in axes if size > 1 and n not in mesh.manual_axes]
    if others:
        raise ValueError(
            f"this shard_map leaves the axes {', '.join(others)} to the compiler: a collective of "
            "jaxcoded needs all axes of the mesh, leave out axis_names"
        )
    if mesh.size > jax.local_device_count():
        raise ValueError(
            f"this shard_map is over {mesh.size} devices, but the process has "
            f"{jax.local_device_count()}: the devices of a mesh must belong to one rank, and the group "
            "sums over the ranks"
        )
    program_devices = Devices(axes)
    if not _jax_compat.varying(program_devices.place()):
        raise ValueError(
            "inside pmap or shard_map(check_vma=False), JAX does not show which arrays are split over the "
            f"devices: use shard_map without check_vma=False; {REMEDY}"
        )
    return program_devices


def check(context: Any, together: Devices | None, platform: str) -> None:
    """Raise a ValueError in a program on devices that do not make the call together."""
    devices = _jax_compat.devices(context)
    if devices > 1 and together is None:
        raise ValueError(f"this program runs on {devices} devices, but {REMEDY}")
    if together is not None and platform != "cpu":
        raise ValueError(
            "so far, several devices of a process can make a call together only on CPUs: start one rank for each GPU"
        )
