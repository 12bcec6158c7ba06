"""Messages beyond 2³¹ bytes and elements. They take minutes and gigabytes, and run only
with ``JAXCODED_LARGE=1``.
"""

import os
import pathlib

import pytest
from launch import ROOT, mpirun

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(630),
    pytest.mark.skipif(
        "JAXCODED_LARGE" not in os.environ, reason="JAXCODED_LARGE=1 asks for it"
    ),
]


def available():
    """Return the free memory in GiB."""
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return 0.0


@pytest.mark.parametrize(
    ("case", "ranks", "memory"),
    [
        ("numpy_in_place", 2, 16),
        ("jitted", 2, 14),
        ("jitted_in_bfloat16", 2, 14),
        ("offsets", 2, 20),
        ("mpi4jax_offsets", 2, 20),
        ("gradient", 1, 14),
        ("snapshot", 2, 18),
        ("leaves", 2, 4),
    ],
)
def test_beyond_2_to_the_31(case, ranks, memory):
    if available() < memory:
        pytest.skip(f"needs {memory} GiB of free memory, there are {available():.0f}")
    print(mpirun(ranks, ROOT / "tests/large/sizes.py", case, limit=600).stdout)
