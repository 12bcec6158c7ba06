"""``jaxcoded doctor``: its findings on this machine, and on machines that lack
something.
"""

import importlib.metadata
import json
import os
import re
import socket

import pytest
from commands import main
from test_run import fake  # noqa: F401

from jaxcoded.tools.cli import doctor
from jaxcoded.tools.doctor import machine
from jaxcoded.tools.doctor.findings import BAD, GOOD, NOTE, Finding, show
from jaxcoded.tools.launch import launcher, places, reaching

RANK = {
    "host": "a",
    "library": "MPI",
    "engine": "",
    "mpi4jax": "",
    "backend": "cpu",
    "threads": "MPI_THREAD_MULTIPLE",
    "driver": False,
    "devices": ["cpu"],
    "cuda_aware": "",
    "took": [1e-3, 1e-2],
    "wrong": 0,
    "transport": "the engine",
    "reads": True,
}
REFUSED = "connect to host x port 22: Connection refused"  # the message of ssh


def states(findings):
    findings = list(findings)
    assert all(each.remedy for each in findings if each.state == BAD)
    return {each.about: each.state for each in findings}


@pytest.mark.mpi
def test_all_is_well_here(capfd, tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise RuntimeError('not that one')")
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "-n", "4", "--json"]) == 0
    found = {each["about"]: each for each in json.loads(capfd.readouterr().out)}
    assert found["ranks"]["found"].startswith("4 on ")
    assert found["sums"]["state"] == GOOD
    assert "threads for XLA" in found["threads"]["found"]
    assert found["MPI threads"]["found"] == "MPI_THREAD_MULTIPLE"
    assert found["MPI threads"]["state"] == GOOD
    assert "exact on all ranks, over the engine" in found["sums"]["found"]
    assert BAD not in {each["state"] for each in found.values()}


@pytest.mark.mpi
def test_a_job_that_fails_is_shown(capfd, monkeypatch):
    monkeypatch.setattr(doctor, "_PROGRAM", ["-c", "raise SystemExit('no such thing')"])
    assert main(["doctor", "-n", "1"]) == 1
    text = capfd.readouterr().out
    assert "failed with status 1" in text
    assert "no such thing" in text


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A replacement of ssh that reaches only the host `good`."""
    path = tmp_path / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" good "*) exit 0;; *" mute "*) exit 255;; esac\n'
        f'echo "a warning\nssh: {REFUSED}" >&2\n'
        "exit 255\n"
    )
    path.chmod(0o700)
    monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)
    for name in places.OTHERS:
        monkeypatch.delenv(name, raising=False)
    return path


@pytest.mark.mpi
def test_a_host_that_cannot_be_reached(ssh, capfd):
    assert main(["doctor", "--hosts", "x.invalid:2", "--json"]) == 1
    found = json.loads(capfd.readouterr().out)[-1]
    assert found["about"] == "ranks" and found["state"] == BAD
    assert found["found"] == (
        f"2 ranks were not started, as ssh does not reach x.invalid ({REFUSED})"
    )
    assert found["remedy"].startswith("`ssh x.invalid true` must succeed")
    assert main(["bench", "-n", "2", "--hosts", "x.invalid:2"]) == 1
    assert "→ `ssh x.invalid true` must succeed" in capfd.readouterr().err
    assert main(["run", "-n", "2", "--hosts", "x.invalid:2", __file__])
    (text,) = (
        line for line in capfd.readouterr().err.splitlines() if "the job failed" in line
    )
    assert (
        f"ssh does not reach x.invalid ({REFUSED}); `ssh x.invalid true` must" in text
    )


def test_hosts_that_ssh_does_not_get_to(ssh, monkeypatch):
    hosts = ["good:2", "mute slots=3", "x:auto", "localhost", socket.gethostname()]
    words, remedy = reaching.failure(hosts)
    assert words == f"ssh does not reach mute (status 255), x ({REFUSED})"
    assert remedy.startswith("`ssh mute true` must succeed")
    # if another program starts ranks, ssh is not needed
    for name in ("PRTE_MCA_plm_ssh_agent", "HYDRA_LAUNCHER", "SLURM_JOB_ID"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "rsh")
            assert reaching.failure(hosts) is None
    ssh.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(reaching, "_SECONDS", 0.1)
    assert "x (no answer within 0.3 s)" in reaching.failure(["x"])[0]
    monkeypatch.setenv("PATH", "/none")
    assert "x (the command ssh cannot be run: install it)" in reaching.failure(["x"])[0]


def test_nothing_is_started_where_something_is_bad(fake, capsys):  # noqa: F811
    other = fake("HYDRA build details:\n    Version:  4.3.0")
    if launcher.located(None).mpi == launcher.MPICH:
        other = fake("mpirun (Open MPI) 5.0.9")
    assert main(["doctor", "--mpirun", str(other)]) == 1
    out = capsys.readouterr().out
    text = " ".join(out.split())  # long paths wrap lines
    assert "but mpi4py uses" in text
    assert "were not started" in text
    assert out.count("→") == len(re.findall("^bad ", out, re.MULTILINE)) == 2
    assert main(["doctor", "--mpirun", "/none"]) == 1
    assert "/none does not run" in capsys.readouterr().out


def test_findings_of_ranks():
    usual = [RANK | {"rank": rank} for rank in range(3)]
    assert set(states(doctor._of_ranks(3, usual)).values()) == {GOOD}
    alone = list(doctor._of_ranks(3, usual[:1]))
    assert alone[0].found == "3 were started, but MPI sees 1"
    assert states(alone) == {"ranks": BAD}
    for key, value, about, state in (
        ("wrong", 1, "sums", BAD),
        ("reads", False, "reading", NOTE),
        ("engine", "is not built", "engine", NOTE),
        ("library", "another", "MPI", BAD),
        ("mpi4jax", "cannot be loaded", "mpi4jax", BAD),
        ("cuda_aware", "set it to 0", "cuda-aware", BAD),
        ("threads", "MPI_THREAD_SERIALIZED", "MPI threads", NOTE),
        ("driver", True, "GPUs", NOTE),
    ):
        found = states(doctor._of_ranks(3, [*usual[:2], usual[2] | {key: value}]))
        assert found.pop(about) == state
        assert set(found.values()) == {GOOD}


def test_a_driver_without_jax_on_its_gpus():
    idle = [RANK | {"rank": rank, "driver": True} for rank in range(2)]
    (found,) = (each for each in doctor._of_ranks(2, idle) if each.about == "GPUs")
    assert found.found.startswith("ranks [0, 1]: ") and "jax[cuda" in found.remedy
    used = [each | {"backend": "gpu"} for each in idle]
    assert "GPUs" not in states(doctor._of_ranks(2, used))


@pytest.mark.parametrize(
    ("says", "state"),
    [
        ("echo options:ft_mpi_support:yes", GOOD),
        ("echo options:ft_mpi_support:no", NOTE),
        ("echo nothing", NOTE),
        (None, NOTE),
    ],
)
def test_whether_deaths_are_reported(says, state, tmp_path, monkeypatch):
    """Doctor asks Open MPI itself whether it reports deaths, and does not use its
    version number.
    """
    monkeypatch.setattr(launcher, "check_fits", lambda _: None)
    if says:
        (tmp_path / "ompi_info").write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / "ompi_info").chmod(0o700)
    mpirun = launcher.Launcher(str(tmp_path / "mpirun"), launcher.OPEN_MPI, 5)
    found = {each.about: each for each in machine.examined(1, mpirun)}["deaths"]
    assert found.state == state
    unknown = says in ("echo nothing", None)
    assert ("is unknown" in found.found) == unknown


def test_threads_of_a_rank(monkeypatch):
    for name in ("PJRT_NPROC", "NPROC", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "cores", lambda: 9.0)
    found = {each.about: each.found for each in machine.examined(3, "no mpirun")}
    assert found["threads"].startswith(
        "jaxcoded run gives each rank 3 threads for XLA, and 3 for OpenMP"
    )


def test_an_mpi4py_without_its_mpi(monkeypatch):
    def fails(_):
        raise RuntimeError("cannot load MPI library")

    monkeypatch.setattr(launcher, "check_fits", fails)
    mpirun = launcher.Launcher("mpirun", launcher.OPEN_MPI, 5)
    assert states(machine.examined(1, mpirun))["mpirun"] == BAD


def test_packages_that_are_missing(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    found = states(machine.examined(1, "there is no mpirun"))
    assert found["jax"] == found["mpi4py"] == found["mpirun"] == BAD
    assert found["mpi4jax"] == GOOD  # the engine does not need mpi4jax


def test_limits_of_a_container(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_CONTROL", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    mpirun = launcher.Launcher("mpirun", "Open MPI", 4)
    monkeypatch.setattr(launcher, "check_fits", lambda _: None)
    assert machine.cores() == 8
    found = states(machine.examined(8, mpirun))
    assert found["cores"] == GOOD
    assert found["deaths"] == NOTE
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    (tmp_path / "memory.max").write_text(str(3 << 29))
    assert machine.cores() == 2.5
    found = {each.about: each for each in machine.examined(3, mpirun)}
    assert found["cores"].state == NOTE
    assert "2.5 for 3 ranks" in found["cores"].found
    assert "may use 1.5" in found["memory"].found
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cores() == 8
    monkeypatch.setattr(machine, "_ENOUGH_SHARED", 1 << 60)
    assert states(machine.examined(3, mpirun))["shared memory"] == NOTE


def test_findings_are_aligned(capsys):
    show([Finding("a", GOOD, "x"), Finding("long", BAD, "y " * 70, "do [z]")])
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first == "ok   a     x"
    assert second.startswith("bad  long  y y")
    assert third.startswith("           y")
    assert fourth == "           → do [z]"
