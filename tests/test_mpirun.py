"""Run tests/mpi under mpirun, each test on the numbers of ranks that its marks name."""

import os

import pytest
from launch import mpirun, slowness
from outcomes import read, report

LIMIT = 3600  # seconds for a job, which no load of the machine reaches
TEST_LIMIT = 300  # seconds for a test in it; a test that hangs shows where
FAILURES = 5  # after this number of failed jobs the other tests are skipped


@pytest.mark.mpi
@pytest.mark.timeout(LIMIT + 30)
@pytest.mark.parametrize(
    # the longest first, as other workers take from the end
    ("ranks", "devices"),
    [(4, 1), (2, 2), (13, 1), (7, 1), (4, 2), (4, 4)],
)
def test_under_mpirun(ranks, devices, request, tmp_path):
    """Run the tests on ``ranks`` ranks with ``devices`` devices each.

    A failure ends a job, as the other ranks would wait for the failed rank for ever.
    Another job runs the rest.
    """
    options = ["--of-the-suite", "tests/mpi"]
    if request.config.getoption("exhaustive"):
        options.append("--exhaustive")
    if devices > 1:
        flags = os.environ.get("XLA_FLAGS", "")
        count = f"--xla_force_host_platform_device_count={devices}"
        environment = {"XLA_FLAGS": f"{flags} {count}"}
    else:
        environment = {}
    name = f"on {ranks} ranks" + f" of {devices} devices" * (devices > 1)
    done = {}
    for attempt in range(FAILURES):
        outcomes, without = tmp_path / f"outcomes-{attempt}", tmp_path / "done"
        without.write_text("\n".join(done))
        job = mpirun(
            ranks,
            *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no"),
            f"--timeout={TEST_LIMIT * slowness():.0f}",
            "--timeout-method=thread",
            *(f"--outcomes={outcomes}", f"--done={without}", *options),
            limit=LIMIT,
            check=False,
            **environment,
        )
        if job.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
            break  # the failed test was the last test
        found = read(outcomes)
        if job.returncode and "failed" not in (what for what, *_ in found.values()):
            # the job hangs or has crashed in the test that began last
            last = list(found)[-1:] or ["before the first test"]
            words = f"exit status {job.returncode}\n{job.stdout[-4000:]}\n{job.stderr[-8000:]}"
            found[last[0]] = "failed", words, 0
        ended = {test: each for test, each in found.items() if each[0] != "begun"}
        for test, outcome in ended.items():
            report(request.node, f"{test} {name}", *outcome)
        done |= ended
        if not job.returncode:
            break
    else:
        pytest.fail(f"of {FAILURES} jobs none has come to its end")
    assert done, "no test was run"
