"""Groups of one process, each in a separate process: features that need no other ranks."""

import subprocess
import sys

import pytest
from launch import slowness

SHARED = "group = jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Shared(replicas=2, blocks=3))\n"
ALONE = (
    "group = jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Coded(), transport='engine')\n"
)
PARTS = """
from jaxcoded.transport.packing import Kind
from jaxcoded.transport.primitive import run
from jaxcoded.transport.round import Operands, Round
token, kind = jnp.int32(0), Kind(*[np.dtype(np.float32)] * 2)
whole = Round(group._session.index, "sum of f4[9]", vectors=(kind,), leading=("token",))
other = Round(group._session.index, "sum of f4[8]", vectors=(kind,), leading=("token",), last_part=True)
part = whole.step("part", results=())
begin = jax.jit(lambda x, token: run(part, Operands([x], token=token))[1])
end = jax.jit(lambda x, token: run(other, Operands([x], token=token)))
begin(jnp.full(9, 3.0), token).block_until_ready()
jax.block_until_ready(end(jnp.arange(8.0), token))
"""
LITTLE_MEMORY = """
import resource
big = jnp.ones(64 << 20, jnp.float32)
def started(x):
    return jaxcoded.coded_allreduce_done(jaxcoded.coded_allreduce_start(x, group))
step = jax.jit(SUM)
compiled = step.lower(big).compile()
print(step(jnp.ones(2)))
size = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
# for XLA's result, and not for what the engine needs
limit = 1024 * int(size.split()[1]) + 300_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, -1))
try:
    jax.block_until_ready(compiled(big))
except jax.errors.JaxRuntimeError as error:
    print(str(error).partition(": ")[2])
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print(step(jnp.ones(2)))
"""
LOSSES = """
def losses(w, x):
    return (x @ w) ** 2
x = jnp.arange(12.0).reshape(4, 3)
w, v = jnp.ones(3), jnp.array([1.0, -1.0, 2.0])
batch = group.batch(x)
value_and_grad = jaxcoded.coded_value_and_grad(losses, group)
"""
TANGENTS = (
    LOSSES
    + """
(loss, grad), (dloss, dgrad) = jax.jit(
    lambda: jax.jvp(lambda w: value_and_grad(w, batch), (w,), (v,))
)()
exact = lambda w: jax.value_and_grad(lambda w: losses(w, x).mean())(w)
for found, wanted in zip((loss, grad, dloss, dgrad), jax.tree.leaves(jax.jvp(exact, (w,), (v,)))):
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
print("the same")
"""
)
WITHOUT_JAX = """
import array
from jaxcoded import _jax_compat
class Tensor:  # of another library
    def __init__(self, its):
        self.its = its
    def __dlpack__(self, **how):
        return self.its.__dlpack__(**how)
    def __dlpack_device__(self):
        return self.its.__dlpack_device__()
group = jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Shared(blocks=3))
rows = np.arange(7.0)
for kind in (np.asarray, lambda x: array.array("d", x), memoryview, Tensor):
    total = np.zeros(2)
    with group.blocks(7, costs=kind(rows)) as blocks:
        for block in blocks:
            total += rows[block.indices].sum(), len(block.indices)
            block.done(total)
    own, out = kind(total.copy()), np.zeros(2)
    assert jaxcoded.host.allreduce(own, group, out=kind(out)).tolist() == [21.0, 7.0]
    with group.blocks(7) as blocks:
        for block in blocks:
            pass
    assert jaxcoded.host.allreduce(own, group, out=own).tolist() == [21.0, 7.0]
group.close()
print("JAX has started:", _jax_compat.started())
"""
CLOSED = LOSSES + "group.close()\nvalue_and_grad(w, batch)\n"
BIG_STEP = "print(jaxcoded.tree_bcast({'step': 3_000_000_000}, group))\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "text"),
    [
        (
            ALONE + PARTS,
            "a collective of the group was called before another one was over",
        ),
        (
            ALONE
            + LITTLE_MEMORY.replace(
                "SUM", "lambda x: jaxcoded.coded_allreduce(x, group)"
            ),
            "[1. 1.]\nCodedError: rank 0 has too little memory for this call\n[1. 1.]\n",
        ),
        (
            ALONE + LITTLE_MEMORY.replace("SUM", "started"),
            "[1. 1.]\nCodedError: rank 0 has too little memory for this call\n[1. 1.]\n",
        ),
        (ALONE + TANGENTS, "the same\n"),
        (ALONE + CLOSED, "jaxcoded.errors.GroupClosed: use after close"),
        (SHARED + CLOSED, "jaxcoded.errors.GroupClosed: use after close"),
        (
            SHARED + "group.batch(6, multiple=9)\n",
            "multiple=9 cannot be given, as with Shared(",
        ),
        (WITHOUT_JAX, "JAX has started: False\n"),
        (ALONE + BIG_STEP, "{'step': np.int64(3000000000)}"),
        (
            SHARED + "print(len(group.epoch(1000, np.uint32(4), seed=0)))\n",
            "250\n",
        ),
    ],
    ids=[
        *("parts of another call", "little memory", "little memory, started"),
        *("tangents", "closed"),
        *(
            "closed, shared",
            "padded blocks",
            "JAX does not start",
            "a big step",
            "an unsigned batch size",
        ),
    ],
)
def test_errors_and_warnings_of_one_process(program, text):
    imports = (
        "import jax, jax.numpy as jnp, jaxcoded, numpy as np\nfrom mpi4py import MPI\n"
    )
    job = subprocess.run(
        [sys.executable, "-c", imports + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100 * slowness(),
        check=False,
    )
    assert text in job.stdout
    assert job.returncode in (0, 1)


@pytest.mark.slow
def test_a_state_is_described_by_its_names():
    """A state is described by its names, not by the addresses of its functions."""
    program = """
import dataclasses, functools, jax, numpy as np
from jaxcoded.group import snapshots
static = functools.partial(dataclasses.field, metadata={"static": True})
@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: np.ndarray
    apply: object = static()
print(snapshots.to_bytes(State(np.ones(3), lambda x: x)).tobytes().hex())
print(snapshots.to_bytes(State(np.ones(4), lambda x: x)).tobytes().hex())
"""
    jobs = [
        subprocess.run(
            [sys.executable, "-c", filler + program],
            capture_output=True,
            text=True,
            timeout=100 * slowness(),
            check=True,
        )
        for filler in ("", "kept = [object() for _ in range(10_000)]\n")
    ]
    (three, four), others = (job.stdout.split() for job in jobs)
    assert [three, four] == others and three[:64] != four[:64]
