"""A process reports a failed round at its end."""

import subprocess
import sys

import pytest

pytest.importorskip("jaxcoded.transport._engine", reason="built without the engine")

from launch import limited

PROGRAM = """
import sys
import jax, jax.numpy as jnp, jaxcoded
from jaxcoded.errors import translated
from mpi4py import MPI

way = sys.argv[1]
group = jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Coded(), transport="engine")

@jax.jit
def step(x, work):
    for _ in range(6):  # so that JAX runs it while Python goes on
        work = jnp.tanh(work @ work)
    return jaxcoded.coded_allreduce(x + work[0, 0], group)

operands = jnp.ones(5), jnp.ones((500, 500))
jax.block_until_ready(step(*operands))
group.close()
try:
    result = step(*operands)
    if way == "translated":
        with translated():
            jax.block_until_ready(result)
    if way == "of what follows":
        result = result + 1
    jax.block_until_ready(result)
except jax.errors.JaxRuntimeError:
    if way != "caught":
        raise
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["uncaught", "translated", "of what follows", "caught"])
def test_an_error_is_reported_once(way):
    job = subprocess.run(
        [sys.executable, "-c", PROGRAM, way],
        env=limited(60),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert "Exception ignored" not in job.stderr, job.stderr
    lines = [
        line for line in job.stderr.splitlines() if "use after close: group" in line
    ]
    # a traceback includes its cause
    assert len(lines) == 1 + (way == "translated"), job.stderr
    assert bool(job.returncode) == (way != "caught")
