"""`run` and `doctor` name the variables of other MPIs and other jobs that keep MPI from starting."""

import json
import subprocess
import sys

import pytest
from commands import main
from launch import ROOT, limited, slowness

from jaxcoded.tools.launch import job, launcher, misfits

MPIRUN = launcher.Launcher("mpirun", launcher.OPEN_MPI, 5)


@pytest.fixture
def nothing_set(monkeypatch):
    for names in misfits.suspects().values():
        for name in names:
            monkeypatch.delenv(name)


@pytest.fixture
def starts(nothing_set, monkeypatch):
    """Let MPI start unless all variables of one of these sets are present; return the list of attempts."""
    wrong, tried = [], []

    def start(mpirun, without, seconds):
        assert seconds > 0
        tried.append(without)
        there = {name for names in misfits.suspects().values() for name in names}
        return not any(names <= there - {*without} for names in wrong)

    monkeypatch.setattr(misfits, "_starts", start)
    return wrong, tried


def test_nothing_is_tried_where_nothing_is_set(starts, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert misfits.blame(MPIRUN) is None and not starts[1]
    monkeypatch.setenv("SLURM_JOB_ID", "3")  # running ranks do not read it
    assert misfits.blame(MPIRUN, begun=True) is None and not starts[1]


def test_nothing_is_blamed_where_mpi_starts_or_starts_with_none(starts, monkeypatch):
    monkeypatch.setenv("OMPI_MCA_pml", "ucx")
    assert misfits.blame(MPIRUN) is None
    starts[0].append(set())
    assert misfits.blame(MPIRUN) is None


def test_a_launcher_that_fails_once_is_tried_again(nothing_set, monkeypatch):
    """Only the start with the setting fails both times."""
    monkeypatch.setenv("OMPI_MCA_pml", "ucx")
    monkeypatch.setenv("UCX_TLS", "rc")
    failed = set()

    def play(command, environment, **_):
        names = frozenset({"OMPI_MCA_pml", "UCX_TLS"} & environment.keys())
        wrong = "OMPI_MCA_pml" in names or names not in failed
        failed.add(names)
        return job.End(int(wrong))

    monkeypatch.setattr(misfits.job, "play", play)
    found, remedy = misfits.blame(MPIRUN)
    assert "OMPI_MCA_pml=ucx" in found and remedy == "unset OMPI_MCA_pml"


def test_a_start_that_was_slow_once_gets_more_time(nothing_set, monkeypatch):
    """A loaded machine needs 12 s with variables that fit. Only the start with the wrong one hangs."""
    monkeypatch.setenv("OMPI_MCA_pml", "ucx")
    monkeypatch.setenv("UCX_TLS", "rc")

    def play(command, environment, *, seconds, output):
        needed = {"OMPI_MCA_pml": 1e9, "UCX_TLS": 12.0}
        return job.End(int(seconds < max([needed.get(n, 0) for n in environment])))

    monkeypatch.setattr(misfits.job, "play", play)
    found, remedy = misfits.blame(MPIRUN)
    assert "OMPI_MCA_pml=ucx" in found and remedy == "unset OMPI_MCA_pml"


@pytest.mark.parametrize(
    ("wrong", "found", "unset"),
    [
        ([{"OMPI_MCA_pml"}], "OMPI_MCA_pml=ucx", "OMPI_MCA_pml"),
        (
            [{"UCX_TLS"}, {"OPAL_PREFIX"}],
            "OPAL_PREFIX=/o, UCX_TLS=rc",
            "OPAL_PREFIX UCX_TLS",
        ),
        (
            [{"PBS_JOBID", "PBS_NODEFILE"}],
            "PBS_JOBID=3, PBS_NODEFILE=/none",
            "${!PBS_*}, if this command is not part of the scheduler's job",
        ),
        (
            [{"OMPI_MCA_pml", "UCX_TLS"}],  # wrong only together
            "OMPI_MCA_pml=ucx, OPAL_PREFIX=/o, PBS_JOBID=3, PBS_NODEFILE=/none, UCX_TLS=rc",
            "OMPI_MCA_pml OPAL_PREFIX ${!PBS_*} UCX_TLS, if this command is not part of the scheduler's job",
        ),
    ],
)
def test_wrong_variables_are_named(wrong, found, unset, starts, monkeypatch):
    given = {"OMPI_MCA_pml": "ucx", "UCX_TLS": "rc", "OPAL_PREFIX": "/o"}
    given |= {"PBS_JOBID": "3", "PBS_NODEFILE": "/none", "HOME": "/x"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    starts[0].extend(wrong)
    text = f"MPI does not start with {found} in the environment, but starts without"
    assert misfits.blame(MPIRUN) == (text, f"unset {unset}")


def test_a_scheduler_has_many(nothing_set, monkeypatch):
    for number in range(6):
        monkeypatch.setenv(f"SLURM_{number}", "x")
    shown = misfits.listed(misfits.suspects().values())
    assert shown == "SLURM_0=x, SLURM_1=x, SLURM_2=x, SLURM_3=x, 2 more of SLURM"


@pytest.fixture
def open_mpi(nothing_set):
    if launcher.located(limited(10).get("JAXCODED_MPIRUN")).mpi != launcher.OPEN_MPI:
        pytest.skip("the variables are those of Open MPI")


def run(program, limit, **variables):
    limit = f"--timeout={limit:.0f}"
    return subprocess.run(
        [sys.executable, "-m", "jaxcoded", "run", "-n", "2", limit, program],
        env=limited(60) | variables,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@pytest.mark.mpi
@pytest.mark.parametrize("setting", ["btl=openib", "pml=none"])
@pytest.mark.timeout(900)
def test_run_names_a_setting_of_another_build(setting, open_mpi, tmp_path):
    """`run` names this setting and no others, such as settings that this MPI ignores."""
    path = tmp_path / "program.py"
    path.write_text("from mpi4py import MPI\n")
    name, _, value = setting.partition("=")
    wrong = {f"OMPI_MCA_{name}": value, "OMPI_MCA_btl_openib_allow_ib": "1"}
    # mpirun does not always end after a rank that has failed in MPI's start. The output after the time limit is the
    # same, so a slow machine need not wait longer.
    job = run(path, 10, **wrong)
    assert job.returncode
    words = f"MPI does not start with OMPI_MCA_{setting} in the environment, but starts"
    assert f"{words} without: unset OMPI_MCA_{name}\n" in job.stderr


@pytest.mark.mpi
def test_run_blames_no_variable_for_an_error_of_the_program(open_mpi, tmp_path):
    path = tmp_path / "program.py"
    path.write_text("from mpi4py import MPI\nraise SystemExit(3)\n")
    job = run(path, 20 * slowness(), OMPI_MCA_btl_openib_allow_ib="1")
    assert job.returncode == 3 and "does not start" not in job.stderr


@pytest.mark.mpi
def test_doctor_names_the_job_that_is_over(open_mpi, capfd, monkeypatch):
    """Doctor also lists the other variables that are set."""
    old = {"PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": "3", "PBS_NODEFILE": "/none"}
    for name, value in {**old, "OMPI_MCA_btl_openib_allow_ib": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "-n", "2", "--json"]) == 1
    found = {
        finding["about"]: finding for finding in json.loads(capfd.readouterr().out)
    }
    listed = "PBS_ENVIRONMENT=PBS_BATCH, PBS_JOBID=3, PBS_NODEFILE=/none"
    assert f"MPI does not start with {listed} in" in found["ranks"]["found"]
    assert found["ranks"]["remedy"].startswith("unset ${!PBS_*}")
    assert f"OMPI_MCA_btl_openib_allow_ib=1, {listed}" in found["variables"]["found"]
