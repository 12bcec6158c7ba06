"""Nothing of a job is left after its launcher has ended in a way that the launcher cannot handle."""

import contextlib
import fcntl
import os
import pathlib
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time

import launch
import pytest
import terminal
from cases import more
from launch import ROOT, slowness

from jaxcoded.tools.launch import guardian
from jaxcoded.tools.launch import job as launching

pytestmark = pytest.mark.mpi

MARK = "JAXCODED_TEST"  # environment variable in all processes that a test starts


@pytest.fixture
def marked(monkeypatch):
    """Mark all processes of the test, and end those that are left."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    yield mark
    for process in living(mark):
        os.kill(process, signal.SIGKILL)


def living(mark):
    """Return the processes that the test has started, except this one."""
    out = []
    for place in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() in words and int(place.name) != os.getpid():
                out.append(int(place.name))
    return out


def until(true, seconds=60):
    """Wait until ``true`` holds, and return whether it did."""
    end = time.monotonic() + seconds * slowness()
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


# Ranks that print where they have files. Then the last one is stopped, and only SIGKILL
# ends the first one.
PROGRAM = """
from mpi4py import MPI
import os, pathlib, signal, sys, time

rank, there = MPI.COMM_WORLD.rank, pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
names = "TMPDIR", "OMPI_MCA_btl_sm_backing_directory"
(there / f"{rank}.new").write_text("\\n".join(filter(None, map(os.environ.get, names))))
(there / f"{rank}.new").rename(there / f"{rank}")
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
while not (there / "go on").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def job(tmp_path, marked):
    """A job on two ranks: functions to start it, and to wait for its start."""

    class Job:
        there = tmp_path / "there"
        program = tmp_path / "program.py"

        def command(self, *options):
            words = ["-n", "2", *options, self.program, self.there]
            return [sys.executable, "-m", "jaxcoded", "run", *map(str, words)]

        def folders(self):
            """Return the folders of the job, once all ranks have begun."""
            texts = [self.there / "0", self.there / "1"]
            assert until(lambda: all(file.exists() for file in texts))
            found = {line for file in texts for line in file.read_text().splitlines()}
            assert found and all(map(os.path.isdir, found))
            return found

        def is_gone(self, folders):
            assert until(lambda: not living(marked)), living(marked)
            assert not list(filter(os.path.exists, folders))

    job = Job()
    job.there.mkdir()
    job.program.write_text(PROGRAM)
    return job


@pytest.fixture(params=[(), ("--ft",)], ids=["plain", "ft"])
def options(request):
    if request.param:
        launch.needs_fault_tolerance()
    return request.param


@contextlib.contextmanager
def no_core():
    """Let crashes leave no core file."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)


@pytest.mark.parametrize(
    ("whom", "number"),
    [
        (os.kill, signal.SIGKILL),
        more(os.kill, signal.SIGSEGV),
        more(os.kill, signal.SIGQUIT),
        (os.killpg, signal.SIGKILL),  # like `timeout -s KILL`
    ],
    ids=["kill", "crash", "quit", "group"],
)
def test_a_launcher_that_is_killed(job, options, whom, number):
    with no_core(), open(os.devnull, "wb") as nowhere:
        process = subprocess.Popen(
            job.command(*options),
            cwd=ROOT,
            stdout=nowhere,
            stderr=nowhere,
            start_new_session=True,
        )
    try:
        folders = job.folders()
        whom(process.pid, number)
        assert process.wait(60 * slowness()) == -number
    finally:
        process.kill()
        process.wait()
    job.is_gone(folders)


@pytest.mark.parametrize("how", ["Ctrl-\\", "closed"])
def test_a_launcher_whose_terminal_ends_it(job, options, how):
    with no_core(), terminal.started(job.command(*options), cwd=ROOT) as (_, keyboard):
        folders = job.folders()
        if how == "closed":
            os.close(keyboard)
        else:
            os.write(keyboard, b"\x1c")
        job.is_gone(folders)


def test_a_guardian_that_is_killed(job):
    """The job continues, and leaves nothing."""
    job.program.write_text(PROGRAM.replace("rank == 1", "False"))
    process = subprocess.Popen(job.command(), cwd=ROOT)
    try:
        folders = job.folders()
        (watcher,) = [
            child
            for child in children(process.pid)
            if "guardian.py" in pathlib.Path(f"/proc/{child}/cmdline").read_text()
        ]
        os.kill(watcher, signal.SIGKILL)
        (job.there / "go on").touch()
        assert process.wait(60 * slowness()) == 0
    finally:
        process.kill()
        process.wait()
    job.is_gone(folders)


def left(place, name, age=1000.0):
    """Make a folder like that of a job that began ``age`` seconds ago."""
    folder = place / f"jaxcoded.{name}"
    folder.mkdir()
    (folder / "file").touch()
    os.utime(folder, (time.time() - age,) * 2)
    return folder


def test_the_next_job_deletes_what_jobs_have_left(tmp_path, monkeypatch, marked):
    """The next job deletes files of jobs whose guardians were killed, too. Files stay
    while a process may use them, or if they belong to no job.
    """
    places = tmp_path / "shared", tmp_path / "temporary"
    monkeypatch.setattr(launching, "_SHARED_MEMORY", str(places[0]))
    monkeypatch.setattr(tempfile, "tempdir", str(places[1]))
    used = "1.0000000a"
    with contextlib.ExitStack() as stack:
        stay = set()
        for place in places:
            place.mkdir()
            left(place, "1.00000000")
            young, locked = left(place, "1.00000001", 0), left(place, "1.00000002")
            descriptor = os.open(locked, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            stay |= {young, locked, left(place, used), left(place, "of.another")}
        process = subprocess.Popen(
            ["sleep", "1000"], env=os.environ | {guardian.MARK: f"2.0/{used}"}
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        assert launching.play(["true"], os.environ).status == 0
        assert {path for place in places for path in place.iterdir()} == stay


def test_a_process_that_starts_one_program_after_another_is_found(tmp_path, marked):
    """While a process starts a program, the system shows no environment of it."""
    again = tmp_path / "again"
    again.write_text(f"exec sh {again}")
    process = subprocess.Popen(
        ["sh", again], env=os.environ | {guardian.MARK: "1.0000000b"}
    )
    try:
        for _ in range(100):
            found = guardian.processes("1.0000000b")
            assert [place.name for place in found] == [str(process.pid)]
    finally:
        process.kill()
        process.wait()


def test_a_job_whose_launcher_and_guardian_are_killed_at_once(job):
    """The ranks' files stay as long as mpirun lives."""
    process = subprocess.Popen(
        job.command(), cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        folders = job.folders()
        pids = children(process.pid)
        watcher, *others = pids
        for each in (process.pid, watcher):
            os.kill(each, signal.SIGKILL)
        process.wait()
        for each in others:
            os.kill(each, signal.SIGSTOP)
        for folder in folders:
            os.utime(folder, (0, 0))
        for pid in set(living(os.environ[MARK])) - set(others):
            os.kill(pid, signal.SIGKILL)
        assert launching.play(["true"], os.environ).status == 0
        assert all(map(os.path.isdir, folders))
        for each in others:
            os.kill(each, signal.SIGKILL)
        assert until(lambda: not living(os.environ[MARK]))
        assert launching.play(["true"], os.environ).status == 0
    finally:
        process.kill()
        process.wait()
    job.is_gone(folders)


def children(process):
    """Return the child processes of a process, the oldest first."""
    place = pathlib.Path(f"/proc/{process}/task/{process}/children")
    return list(map(int, place.read_text().split()))


def played(program):
    words = "import os, signal, sys\nfrom jaxcoded.tools.launch import guardian, job\n"
    return subprocess.Popen([sys.executable, "-c", words + program], cwd=ROOT)


def test_a_launcher_that_ends_before_it_has_started_anything(tmp_path, marked):
    folder = tmp_path / "folder"
    program = (
        f"os.mkdir({str(folder)!r})\n"
        f"guardian.Guardian('name', [{str(folder)!r}])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert played(program).wait(60 * slowness()) == -signal.SIGKILL
    assert until(lambda: not living(marked))
    assert not folder.exists()


def test_an_mpirun_that_does_not_end_the_job(tmp_path, marked):
    """Nothing of the job is left, even if a rank has started another mpirun."""
    pids = tmp_path / "pids"
    start = "job.play(['sh', '-c', {!r}], os.environ)\n"
    deaf = "trap '' TERM; "
    inner = start.format(f"{deaf} echo $$ > {pids}; while :; do sleep 1; done")
    inner = f"import os\nfrom jaxcoded.tools.launch import job\n{inner}"
    outer = start.format(f'{deaf} "{sys.executable}" -c "$INNER"; sleep 1000')
    process = played(f"os.environ['INNER'] = {inner!r}\n{outer}")
    try:
        assert until(lambda: pids.exists() and pids.read_text())
    finally:
        process.kill()
        process.wait()
    assert until(lambda: not living(marked)), living(marked)
