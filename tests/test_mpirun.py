"""Runs tests/mpi under mpirun."""

import os

import pytest
from launch import mpirun, slowness

LIMIT = 1500  # seconds for a job
TEST_LIMIT = 300  # seconds for a test in it; one that hangs says where

# What the tree has nothing to do with: on 4 ranks only.
ON_ANY_TREE = (
    "test_batch.py",
    "test_counted.py",
    "test_debug_nans.py",
    "test_examples.py",
    "test_gradients.py",
    "test_jax_settings.py",
    "test_leaves.py",
    "test_minibatches.py",
    "test_misuse.py",
    "test_nonblocking.py",
    "test_record.py",
    "test_sizes.py",
    "test_staging.py",
    "test_tokens.py",
    "test_training.py",
    "test_verify.py",
    "test_wire_dtype.py",
)
# On 2 ranks, which can do without nobody: messages, derivatives and devices.
NO_REDUNDANCY = (
    "test_baselines.py",
    "test_collectives.py",
    "test_devices.py",
    "test_erasures.py",
    "test_shared.py",
    "test_value_and_grad.py::test_exact",
    "test_value_and_grad.py::test_aux_is_local",
    "test_value_and_grad.py::test_scan_over_batches",
)
# On 2 ranks without what 4 ranks of four devices each say.
TOGETHER = (
    "test_devices.py::test_batches_of_an_epoch",
    "test_devices.py::test_beside_collectives",
    "test_devices.py::test_in_a_scan",
    "test_devices.py::test_started_rounds",
    "test_devices.py::test_sums_of_what_the_compiler",
)
# On 13 ranks, which take turns on a few cores, only the sums themselves: what a second layer
# of parents has a part in.
SUMS = (
    "test_collectives.py::test_mixed_pytree",
    "test_collectives.py::test_reduce",
    "test_collectives.py::test_large_message",
    "test_collectives.py::test_vmap_is_one_round",
    "test_collectives.py::test_calls_keep_their_order",
    "test_erasures.py",
    "test_schemes.py::test_exact",
)
# Programs of the other transport call Python, and every rank compiles them for itself: on 4 ranks
# fewer of them.
COSTLY = (
    "test_schemes.py::test_training_step[mpi4jax-",
    "test_sizes.py::test_more_elements_than_mpi_counts[7-",
    "test_sizes.py::test_more_elements_than_mpi_counts[30-",
)
# On 13 ranks without codes that are to a tree what `single_parity_check`, `polynomial` and `progressive`
# are.
ALIKE = tuple(
    f"test_schemes.py::test_exact[engine-{code}"
    for code in ("adaptive", "gaussian_mds", "linear", "reed_solomon")
)
# On 7 ranks, a star like that of 4 with twice as many children, what their number has a part in.
MANY_CHILDREN = (
    "test_erasures.py",
    "test_schemes.py::test_exact",
    "test_schemes.py::test_vmap_of_parts",
    "test_schemes.py::test_what_a_slow_rank_has_finished_counts",
    "test_sections.py",
    "test_shared.py::test_exact",
    "test_shared.py::test_rounds_of_all_kinds_in_one_program",
    "test_shared.py::test_slow_ranks",
    "test_debug.py::test_honest_training_passes",
    "test_debug.py::test_mistakes_are_found",
)
MORE_SUMS = ("test_collectives.py", "test_erasures.py", "test_schemes.py")
# Of them on the other transport, whose layers are the same code: every set of ranks left out.
SUMS_OF_MPI4JAX = (
    "engine or test_too_many or (test_every_tolerated_mask and not slices)"
)


def without(*names):
    return [f"--deselect=tests/mpi/{name}" for name in names]


def chosen(ranks, exhaustive):
    """Arguments of pytest: what is run on so many ranks."""
    if ranks == 4:
        return ["tests/mpi", *([] if exhaustive else without(*COSTLY))]
    if ranks == 13:
        if exhaustive:
            return [f"tests/mpi/{name}" for name in MORE_SUMS]
        sums = [f"tests/mpi/{name}" for name in SUMS]
        return [*sums, "-k", SUMS_OF_MPI4JAX, *without(*ALIKE)]
    if ranks == 2 and not exhaustive:
        return [f"tests/mpi/{name}" for name in NO_REDUNDANCY] + without(*TOGETHER)
    if ranks == 7 and not exhaustive:
        return [*(f"tests/mpi/{name}" for name in MANY_CHILDREN), "-k", "not mpi4jax"]
    places = ["tests/mpi", *(f"--ignore=tests/mpi/{name}" for name in ON_ANY_TREE)]
    if ranks == 7:  # the other transport is tried on the other trees
        places += ["-k", "not mpi4jax"]
    return places


@pytest.mark.mpi
@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize("ranks", [2, 4, 7, 13])
def test_under_mpirun(ranks, request):
    exhaustive = request.config.getoption("exhaustive")
    places = chosen(ranks, exhaustive)
    if exhaustive:
        places.append("--exhaustive")
    # of test_devices.py the rest is in a job of its own
    run(ranks, places, devices=2 if ranks == 2 else 1)


@pytest.mark.mpi
@pytest.mark.timeout(LIMIT + 30)
def test_several_devices(request):
    """4 ranks of 4 devices each, which call together."""
    places = ["tests/mpi/test_devices.py"]
    if request.config.getoption("exhaustive"):
        places += ["tests/mpi/test_examples.py::test_hsdp", "--exhaustive"]
    else:
        places += ["-k", "engine and not test_several and not test_any"]
    run(4, places, devices=4)


@pytest.mark.mpi
@pytest.mark.timeout(LIMIT + 30)
def test_two_devices_on_each_of_four_ranks():
    """Training, and a late rank, with a rank's message in two pieces."""
    names = "test_training", "test_a_late_rank_catches_up", "test_started_rounds"
    places = [f"tests/mpi/test_devices.py::{name}" for name in names]
    run(4, [*places, "-k", "engine"], devices=2)


def run(ranks, places, devices):
    """The tests at these places on so many ranks, of so many devices each."""
    environment = {}
    if devices > 1:
        flags = os.environ.get("XLA_FLAGS", "")
        count = f"--xla_force_host_platform_device_count={devices}"
        environment["XLA_FLAGS"] = f"{flags} {count}"
    job = mpirun(
        ranks,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"),
        *(
            f"--timeout={TEST_LIMIT * slowness():.0f}",
            "--timeout-method=thread",
            *places,
        ),
        limit=LIMIT,
        **environment,
    )
    assert job.stdout.count(" passed") == ranks, job.stdout[-4000:]
