"""If a launcher starts tasks together, but MPI makes a separate job of each, `CodedGroup` and `doctor` say so."""

import os
import subprocess
import sys

import pytest
from launch import ROOT, limited

from jaxcoded.group import alone
from jaxcoded.tools.doctor import machine
from jaxcoded.tools.doctor.findings import BAD, GOOD, NOTE
from jaxcoded.tools.launch import launcher

NAMES = (
    *("SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE"),
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
)
PROGRAM = """
import jaxcoded
from mpi4py import MPI
jaxcoded.CodedGroup(MPI.COMM_WORLD, jaxcoded.Uncoded())
part = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank)
jaxcoded.CodedGroup(part, jaxcoded.Uncoded())
"""


def clean(environment=os.environ):
    return {name: environment[name] for name in environment if name not in NAMES}


@pytest.mark.parametrize(
    ("ranks", "variables", "remedy"),
    [
        (1, {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, "srun --mpi=pmix"),
        (1, {"SLURM_STEP_NUM_TASKS": "4", "PMI_SIZE": "4"}, "srun --mpi=pmix"),
        (1, {"FLUX_JOB_SIZE": "4"}, "flux run -o pmi=pmix"),
        (1, {"JSM_NAMESPACE_SIZE": "4"}, "jsrun"),
        (1, {"PMI_SIZE": "4"}, "the mpirun of the MPI that mpi4py uses"),
        (1, {"OMPI_COMM_WORLD_SIZE": "4"}, "the mpirun of the MPI that mpi4py uses"),
        (2, {"SLURM_STEP_NUM_TASKS": "4"}, "srun --mpi=pmix"),
    ],
)
def test_fewer_ranks_than_tasks(ranks, variables, remedy):
    texts = alone.words(ranks, variables)
    assert f"MPI has {ranks} rank" in texts and "=4: " in texts
    assert remedy in texts and "`jaxcoded run -n 4`" in texts


@pytest.mark.parametrize(
    ("ranks", "variables"),
    [
        (1, {}),
        (4, {"SLURM_STEP_NUM_TASKS": "4"}),
        # a batch script, and salloc's shell, in an allocation of 16
        (1, {"SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_JOB_ID": "3"}),
        (1, {"SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "1"}),
        (1, {"PBS_NODEFILE": "f", "PBS_NP": "16", "LSB_DJOB_NUMPROC": "16"}),
        # mpirun, whose daemons form a step of 16, and inside a step of PMI
        (2, {"SLURM_STEP_NUM_TASKS": "16", "OMPI_COMM_WORLD_SIZE": "2"}),
        (1, {"SLURM_STEP_NUM_TASKS": "16", "OMPI_COMM_WORLD_SIZE": "1"}),
        (2, {"SLURM_STEP_NUM_TASKS": "16", "PMI_SIZE": "2"}),
        # two parts of a heterogeneous job
        (4, {"SLURM_STEP_NUM_TASKS": "2"}),
        *((1, {"PMI_SIZE": size}) for size in ("", "x", "-4", "\u0663", "9" * 400)),
    ],
)
def test_no_false_alarm(ranks, variables):
    assert alone.words(ranks, variables) == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_user_at_a_terminal_starts_one_process(terminal, monkeypatch):
    monkeypatch.setattr("os.isatty", lambda _: terminal)
    assert bool(alone.words(1, {"SLURM_STEP_NUM_TASKS": "2"})) != terminal


def test_a_group_warns(tmp_path):
    """A group warns once, and not if warnings are disabled."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    for tasks, count in ((4, 1), (1, 0)):
        job = subprocess.run(
            [sys.executable, path],
            env=clean() | {"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_PROCID": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert job.returncode == 0, job.stderr
        words = "RuntimeWarning: MPI has 1 rank, but SLURM_STEP_NUM_TASKS=4: each task"
        assert job.stderr.count(words) == 2 * count  # each warning has two lines
        assert job.stderr.count("RuntimeWarning") == 2 * count


@pytest.mark.mpi
def test_a_job_in_an_allocation_is_quiet(tmp_path):
    """A job in an allocation prints no warning, even if some ranks have a communicator
    of one rank.
    """
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    words = [sys.executable, "-W", "error", "-m", "jaxcoded", "run", "-n", "2", path]
    job = subprocess.run(
        words,
        env=clean(limited(120))
        | {"SLURM_STEP_NUM_TASKS": "16", "PYTHONWARNINGS": "error::RuntimeWarning"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=ROOT,
    )
    assert job.returncode == 0, job.stderr


@pytest.mark.parametrize(
    ("prints", "state"), [("1", BAD), ("", BAD), ("2", BAD), ("4", GOOD)]
)
def test_doctor_as_one_of_several_tasks(prints, state, monkeypatch):
    """Doctor asks MPI in a separate process."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert not list(machine._started())
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setattr(machine, "_printed", lambda *_: f"{prints}\n")
    (found,) = machine._started()
    assert found.state == state and bool(found.remedy) == (state == BAD)


def test_doctor_asks_mpi(monkeypatch):
    """Doctor asks MPI, here in a separate process with one rank."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")
    (found,) = machine._started()
    assert found.state == BAD and "MPI has 1 rank, but" in found.found
    assert found.remedy.startswith("Start the program by `srun --mpi=pmix`")


@pytest.mark.parametrize(("kinds", "warns"), [("none pmi2", 1), ("none pmix_v4", 0)])
def test_an_srun_without_pmix(kinds, warns, monkeypatch, tmp_path):
    (tmp_path / "srun").write_text(
        f"#!/bin/sh\necho MPI plugin types are {kinds} >&2\n"
    )
    (tmp_path / "srun").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    mpirun = launcher.Launcher("mpirun", launcher.OPEN_MPI, 5)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert not list(machine._srun(mpirun))
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    assert [finding.state for finding in machine._srun(mpirun)] == [NOTE] * warns
