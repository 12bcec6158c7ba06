"""``jaxcoded run`` on a few ranks, and its arguments for the mpirun of each MPI."""

import contextlib
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from commands import main
from launch import ROOT, limited, slowness

from jaxcoded.tools.launch import ends, launcher, places, rank

pytestmark = pytest.mark.mpi

RANK = "from mpi4py import MPI\nimport os, sys, time\nrank = MPI.COMM_WORLD.rank\n"


def command(*arguments, seconds=60):
    limit = limited(seconds)
    return [
        *(sys.executable, "-m", "jaxcoded", "run"),
        *("--timeout", limit["JAXCODED_MPIRUN_TIMEOUT"], *map(str, arguments)),
    ]


def run(*arguments, **environment):
    return subprocess.run(
        command(*arguments),
        env=limited(60) | environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@pytest.fixture
def program(tmp_path):
    def write(body):
        path = tmp_path / "program.py"
        path.write_text(RANK + body)
        return path

    return write


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
    return state.split()[0] != "Z"


def open_mpi():
    from mpi4py import MPI

    return MPI.Get_library_version().startswith("Open MPI")


def test_ranks_are_named_and_get_the_arguments(program):
    path = program(
        "threads = os.environ['OMP_NUM_THREADS']\n"
        # one write for each line, which MPICH prefixes
        "print(' '.join(['size', str(MPI.COMM_WORLD.size), *sys.argv[1:], threads]) + '\\n', end='')"
    )
    done = run("-n", 2, path, "--steps", "3", "-n", OMP_NUM_THREADS="7")
    assert done.returncode == 0, done.stderr
    # Open MPI writes [0]<stdout>: and MPICH [0]
    lines = sorted(done.stdout.split("\n")[:2])
    for number, line in enumerate(lines):
        assert line.startswith(f"[{number}]")
        assert line.endswith(" size 2 --steps 3 -n 7")
    plain = run("--plain", "-n", 1, path)
    assert plain.stdout == f"size 1 {len(os.sched_getaffinity(0))}\n"


@pytest.mark.parametrize(
    ("ranks", "gpus", "options", "shares", "preallocates"),
    [
        (2, "0,1,2,3", [], ["0,1", "2,3"], True),
        (3, "0,1,2,3", [], ["0", "1", "2"], True),
        (2, "GPU-a1,GPU-b2", [], ["GPU-a1", "GPU-b2"], True),
        (2, "5", [], ["5", "5"], False),
        (2, "3, 3", [], ["3", "3"], False),
        (2, "3,-1,4", [], ["3", "3"], False),
        (2, "0,1", ["--all-gpus"], ["0,1", "0,1"], True),
        (2, "", [], ["", ""], True),
    ],
)
def test_gpus_are_divided_among_the_ranks(
    program, monkeypatch, ranks, gpus, options, shares, preallocates
):
    body = """
for name in "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_PREALLOCATE":
    print(f"{rank} {name}={os.environ.get(name)};")
"""
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    job = run("-n", ranks, *options, program(body), CUDA_VISIBLE_DEVICES=gpus)
    assert job.returncode == 0, job.stderr
    assert ("2 ranks share 1 GPU on " in job.stderr) == (not preallocates)
    for number, share in enumerate(shares):
        assert f"{number} CUDA_VISIBLE_DEVICES={share};" in job.stdout
        preallocate = None if preallocates else "false"
        assert f"{number} XLA_PYTHON_CLIENT_PREALLOCATE={preallocate};" in job.stdout


def test_gpus_are_those_that_cuda_counts(program, tmp_path, monkeypatch):
    """A simulated driver counts three. The user's settings stay."""
    if not (compiler := shutil.which("cc")):
        pytest.skip("there is no C compiler")
    source = tmp_path / "driver.c"
    source.write_text(
        "int cuInit(unsigned f) { return f; }\n"
        "int cuDeviceGetCount(int *count) { *count = 3; return 0; }\n"
    )
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    body = """
names = "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_PREALLOCATE"
print(rank, *map(os.environ.get, names), "JAXCODED_ALL_GPUS" in os.environ, ";")
"""
    job = run(
        *("-n", 4, program(body)),
        LD_LIBRARY_PATH=str(tmp_path),
        XLA_PYTHON_CLIENT_PREALLOCATE="true",
    )
    assert job.returncode == 0, job.stderr
    for number, gpu in enumerate("0012"):
        assert f"{number} {gpu} true False ;" in job.stdout
    assert "4 ranks share 3 GPUs on " in job.stderr


def test_of_five_ranks_on_two_gpus_two_have_one_and_three_the_other():
    shares = [rank.gpus_of(each, 5, ["a", "b"]) for each in range(5)]
    assert shares == [["a"], ["a"], ["a"], ["b"], ["b"]]


def test_an_uncaught_error_ends_the_job(program):
    # tests/test_faults.py has --on-error go-on, with README's program
    path = program(
        "if rank == 1: raise RuntimeError('injected')\nwhile True: time.sleep(0.1)\n"
    )
    done = run("-n", 2, path)
    assert done.returncode == 1, done.stderr
    assert "injected" in done.stderr
    assert "jaxcoded run: the job failed with status 1" in done.stderr
    # the launcher decides how the rank that called MPI_Abort ends
    assert re.search("^jaxcoded run: ranks? [01]", done.stderr, re.MULTILINE)


def test_the_output_of_a_job_that_a_rank_aborts_is_lines(program):
    if not open_mpi():
        pytest.skip("MPICH names no such lines")
    body = """
print("begins", end="", flush=True)
MPI.COMM_WORLD.Barrier()
if rank == 1:
    MPI.COMM_WORLD.Abort(3)
time.sleep(600)
"""
    job = run("-n", 3, program(body))
    assert job.returncode == 3
    assert sorted(job.stdout.splitlines()) == [
        f"[{number}]<stdout>: begins" for number in range(3)
    ]
    assert "MPI_ABORT was invoked on rank 1" in job.stderr and "\0" not in job.stderr
    assert "\njaxcoded run: the job failed with status 3: " in job.stderr


def test_a_killed_rank_ends_the_job(program):
    path = program(
        "if rank == 1: os.kill(os.getpid(), 9)\nwhile True: time.sleep(0.1)\n"
    )
    done = run("-n", 2, path)
    assert "a rank was killed" in done.stderr
    # the report names the killed rank first
    ends = re.findall("^jaxcoded run: (ranks? .*)", done.stderr, re.MULTILINE)
    assert ends[0].startswith("rank 1: killed by SIGKILL, after ")
    assert done.returncode in (137, 9), done.stderr  # Open MPI's, MPICH's


def test_ranks_that_end_in_different_ways(program):
    """Each signal reaches the program once."""
    path = program(
        "import signal\n"
        "came = []\n"
        "signal.signal(signal.SIGUSR2, lambda *_: came.append(1))\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "if rank == 0: os.killpg(0, signal.SIGUSR2)\n"
        "time.sleep(0.5)\n"
        "assert len(came) == (rank == 0)\n"
        "MPI.Finalize()\n"
        "os._exit(7 if rank == 2 else 0)"
    )
    done = run("--on-error", "go-on", "-np", 3, path)
    assert done.returncode == 7, done.stderr
    ends = re.findall(
        "^jaxcoded run: (ranks? .*), (?:the first )?after", done.stderr, re.MULTILINE
    )
    assert "rank 2: status 7" in ends


def mpirun_of(process):
    """Return the last child of a process; the first one is the guardian."""
    place = pathlib.Path(f"/proc/{process}/task/{process}/children")
    return int(place.read_text().split()[-1])


@pytest.mark.parametrize("how", ["limit", "signal", "killed launcher"])
def test_nothing_of_the_job_is_left(program, tmp_path, how):
    """Nothing is left: no stopped rank that ignores signals, and no file of shared
    memory.
    """
    file = tmp_path / "said"
    file.mkdir()
    path = program(
        "import signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "shared = '/dev/shm/', os.environ['TMPDIR'] + '/'\n"
        "maps = [line.split(maxsplit=5)[5:] for line in open('/proc/self/maps')]\n"
        "files = [file for line in maps for file in line if file.startswith(shared)]\n"
        f"name = {str(file)!r} + f'/{{os.getpid()}}'\n"
        "open(name + '.new', 'w').writelines(files)\n"
        "os.rename(name + '.new', name)\n"
        "if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while True: time.sleep(0.1)\n"
    )
    limit = ["--timeout", f"{3 * slowness():.0f}"] if how == "limit" else []
    words = tmp_path / "words"
    with words.open("wb") as errors:
        job = subprocess.Popen(
            command("--timeout", 300, *limit, "-n", 2, path), cwd=ROOT, stderr=errors
        )

    def started():
        return [int(each.name) for each in file.iterdir() if each.name.isdigit()]

    try:
        end = time.monotonic() + 60 * slowness()
        while len(started()) < 2 and job.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        ranks = started()
        assert len(ranks) == 2
        if how == "signal":
            job.send_signal(signal.SIGTERM)
        if how == "killed launcher":
            os.kill(mpirun_of(job.pid), signal.SIGKILL)
        status = job.wait(60 * slowness())
    finally:
        job.kill()
        job.wait()
    assert status == {"limit": 124, "signal": 128 + 15, "killed launcher": 128 + 9}[how]
    stopped = "; stopped, as by SIGSTOP: rank 1\n" in words.read_text()
    assert stopped == (how == "limit")
    files = {line for each in file.iterdir() for line in each.read_text().splitlines()}
    if open_mpi():  # MPICH has no setting for the place of its files
        assert files
        assert not list(filter(os.path.exists, files))
    # a killed process takes a moment to disappear
    end = time.monotonic() + 30 * slowness()
    while any(map(alive, ranks)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, ranks))


@pytest.mark.parametrize(
    ("users", "there", "found"),
    [(None, True, "job's"), (None, False, None), ("user's", True, "user's")],
)
def test_memory_is_shared_in_a_directory_that_the_host_has(
    tmp_path, monkeypatch, users, there, found
):
    monkeypatch.chdir(tmp_path)
    names = [f"OMPI_MCA_btl_{which}_backing_directory" for which in ("vader", "sm")]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    if users:
        monkeypatch.setenv(names[0], users)
    if there:
        os.mkdir("job's")
    monkeypatch.setenv("JAXCODED_SHARED_MEMORY", "job's")
    program = (
        "import os\n"
        f"print(*map(os.environ.get, {names}), 'JAXCODED_SHARED_MEMORY' in os.environ)"
    )
    with ends.listening(0) as heard:
        done = subprocess.run(
            [*ends.WRAPPER, sys.executable, "-c", program],
            env=os.environ | heard.variables,
            capture_output=True,
            text=True,
            timeout=60 * slowness(),
            check=True,
        )
    assert done.stdout == f"{found} {None if users else found} False\n"


@pytest.mark.parametrize(
    ("name", "launchers", "status"),
    [
        ("TERM", 3, 128 + signal.SIGTERM),
        ("HUP", 3, 128 + signal.SIGHUP),
        ("TERM", 0, 0),  # the job has ended in order
    ],
)
def test_the_status_tells_of_the_signal_whatever_the_launcher_makes_of_it(
    name, launchers, status
):
    # repeat the signal until it is passed on, as nothing shows when this is possible
    launcher = (
        f"trap 'exit {launchers}' {name}; "
        f"while :; do kill -{name} $PPID; sleep 0.05; done"
    )
    program = (
        "import os, signal, sys\n"
        "from jaxcoded.tools.launch import job\n"
        f"signal.signal(signal.SIG{name}, lambda *_: None)\n"
        f"sys.exit(job.play(['sh', '-c', {launcher!r}], os.environ).status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, timeout=60 * slowness()
    )
    assert done.returncode == status


def played(program, **options):
    """Run a program with a variable ``job`` in a separate process."""
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import os, signal, sys\nfrom jaxcoded.tools.launch import job\n{program}",
        ],
        cwd=ROOT,
        **options,
    )


def test_a_signal_that_is_ignored_stays_so():
    """A signal ignored by nohup stays ignored."""
    program = (
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "job._GRACE = 0.1\n"
        "command = ['sh', '-c', 'kill -HUP $PPID; sleep 1; exit 5']\n"
        "sys.exit(job.play(command, os.environ).status)"
    )
    assert played(program).wait(60 * slowness()) == 5


def test_mpirun_for_work_on_the_project_needs_no_package():
    """Any Python runs scripts/mpirun, also with a time limit."""
    job = subprocess.run(
        [sys.executable, "-I", "-S", ROOT / "scripts" / "mpirun", "--version"],
        env=limited(60),
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search("MPI|HYDRA", job.stdout)


def test_a_late_reader_gets_all():
    program = (
        "job._GRACE = 0.1\n"
        "command = [sys.executable, '-c', 'for i in range(4000): print(i, 100 * chr(120))']\n"
        "sys.exit(job.play(command, os.environ, marked=True).status)"
    )
    job = played(program, stdout=subprocess.PIPE, text=True)
    # no process reads until its ranks have ended, and longer
    assert job.stdout.readline().startswith("0 x")
    time.sleep(2)
    lines = job.communicate()[0].splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(1, 4000))
    assert job.wait(60 * slowness()) == 0


def test_nothing_is_left_of_a_job_that_a_rank_has_started(tmp_path):
    inner = (
        "import os\n"
        "from jaxcoded.tools.launch import job\n"
        "job.play(['sh', '-c', 'echo $$ > pid; exec sleep 600'], os.environ)\n"
    )
    program = (
        f"os.chdir({str(tmp_path)!r})\n"
        f"command, limit = [sys.executable, '-c', {inner!r}], {5 * slowness()}\n"
        "sys.exit(job.play(command, os.environ, seconds=limit).status)"
    )
    assert played(program).wait(60 * slowness()) == 124
    process = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 30 * slowness()
    while alive(process) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(process)


def test_a_rank_may_end_as_if_by_a_time_limit(program):
    job = run("--timeout", 300, "-n", 1, program("sys.exit(124)"))
    assert job.returncode == 124
    assert "the job failed with status 124: see what its ranks say" in job.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("-n", 2, "none.py"), "there is no file none.py"),
        (("-n", 0, "setup.cfg"), "--ranks must be an integer from 1 to"),
        (("-n", 2, "--mpirun", "/none", __file__), "/none does not run"),
        (("-n", 2, "--mpirun", "/bin/false", __file__), "does not run: status 1"),
        (("-x", "=3", "-n", 2, __file__), "-x =3: must be NAME or NAME=VALUE"),
        (("-x", "NO.SUCH", "-n", 2, __file__), "no such variable: give NO.SUCH=VALUE"),
        ((__file__,), "how many ranks? Give -n 4"),
    ],
)
def test_what_cannot_be_started(arguments, words, monkeypatch):
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def fake(tmp_path):
    def make(version, status=0):
        path = tmp_path / "mpirun"
        does = f"[ $1 = --version ] || exit {status}\necho '{version}'"
        path.write_text(f"#!/bin/sh\n{does}\n")
        path.chmod(0o700)
        return path

    return make


def test_the_mpirun_of_another_mpi_is_an_error(fake):
    other = "HYDRA build details:\n    Version:  4.3.0"
    if not open_mpi():
        other = "mpirun (Open MPI) 5.0.9"
    done = run("-n", 2, "--mpirun", fake(other), __file__)
    assert done.returncode == 2
    assert "but mpi4py uses" in done.stderr


def test_the_arguments_of_each_mpirun(fake):
    def options(version, **more):
        mpirun = launcher.located(str(fake(version)))
        return launcher.command(mpirun, 2, [], **more)[0][1:-1]

    five = "mpirun (Open MPI) 5.0.11"
    crowded = ["--oversubscribe", "--bind-to", "none", "-n", "2"]
    assert options(five) == [*crowded, "--output", "tag,xml:raw"]
    assert options(five, fault_tolerant=True, named=False) == [
        *crowded,
        *("--with-ft", "ulfm"),
    ]
    assert options("mpirun (Open MPI) 4.1.4") == [*crowded, "--tag-output"]
    words = options(five, named=False, hosts="a:1,b:1", variables={"A": "", "B": ""})
    assert words[:5] == crowded
    assert words[-6:] == ["-x", "A", "-x", "B", "--host", "a:1,b:1"]
    mpich = "HYDRA build details:\n    Version:    4.3.0"
    by_file = options(mpich, hostfile=os.devnull)
    assert by_file == ["-n", "2", "-prepend-rank", "-f", os.devnull]
    assert options("another 1.0") == ["-n", "2"]
    for version in ("mpirun (Open MPI) 4.1.4", mpich):
        with pytest.raises(ValueError, match="--ft needs Open MPI 5"):
            options(version, fault_tolerant=True)


def test_the_ends_as_json(program):
    """The JSON is the last line on standard error; the program's output does not
    change.
    """
    path = program(
        """
print("prints")
sys.stdout.flush()
MPI.COMM_WORLD.Barrier()
if rank == 1:
    os._exit(7)
time.sleep(1000)
"""
    )
    job = run("-n", 2, "--json", path)
    assert job.stdout.count("prints") == 2
    fields = json.loads(job.stderr.splitlines()[-1])
    assert fields["status"] == job.returncode == 7
    assert fields["said"].startswith("the job failed with status 7")
    first, second = fields["ranks"]
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["begun"] and second["begun"]
    assert first["status"] is None  # whether or not mpirun had already killed it
    assert (second["status"], second["signal"]) == (7, None)
    assert 0 < second["seconds"] < 60 * slowness()
    job = run("-n", 2, "--json", program("raise SystemExit"))
    fields = json.loads(job.stderr.splitlines()[-1])
    assert (fields["status"], fields["said"]) == (0, "")
    assert [each["status"] for each in fields["ranks"]] == [0, 0]


@pytest.mark.parametrize(
    ("cores", "ranks", "hosts", "threads"),
    [
        (4, 2, None, "2"),
        (12, 2, None, "6"),
        (4, 4, None, "2"),
        (1, 4, None, "2"),
        (8, 4, "a:2,b:2", "4"),
        (8, 5, "a:4,b:1", "2"),
        (8, 3, "a,b", "4"),
        (1, 4, "a:2,b:2", "2"),
        (8, 5, ["a slots=4  # the big one", "", "b slots=1"], "2"),
        (8, 5, ["a:4", "b:1"], "2"),
        (8, 3, ["a", "b max_slots=4"], "4"),
    ],
)
def test_each_rank_has_its_share_of_the_threads(
    fake, monkeypatch, tmp_path, cores, ranks, hosts, threads
):
    """Each rank has at least two threads, one of which may wait for a round; on one core a single thread computes."""
    yields = "OMPI_MCA_mpi_yield_when_idle"
    for name in ("PJRT_NPROC", "NPROC", "OMP_NUM_THREADS", "XLA_FLAGS", yields):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    five = launcher.located(str(fake("mpirun (Open MPI) 5.0.11")))

    places = {"hosts": hosts}
    if isinstance(hosts, list):
        (tmp_path / "hosts").write_text("\n".join(hosts))
        places = {"hostfile": str(tmp_path / "hosts")}

    def told():
        return launcher.command(five, ranks, [], **places)[1]

    words, environment = launcher.command(five, ranks, [], **places)
    # waiting threads do not spin
    assert environment.get(yields) == ("1" if cores < ranks else None)
    assert environment["PJRT_NPROC"] == threads
    assert ("-x PJRT_NPROC" in " ".join(words)) == bool(hosts)
    monkeypatch.setenv("JAX_DEBUG_NANS", "1")  # the user's setting
    words, environment = launcher.command(five, ranks, [], **places)
    assert ("-x JAX_DEBUG_NANS" in " ".join(words)) == bool(hosts)
    one = "--xla_cpu_multi_thread_eigen=false"
    flags = one if environment["OMP_NUM_THREADS"] == "1" else None
    assert environment.get("XLA_FLAGS") == flags
    monkeypatch.setenv(yields, "0")
    assert told()[yields] == "0"
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=a")  # the user's flags stay
    assert told()["XLA_FLAGS"] == " ".join(filter(None, ("--xla_dump_to=a", flags)))
    assert told()["PJRT_NPROC"] == threads
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true")
    assert told()["XLA_FLAGS"] == "--xla_cpu_multi_thread_eigen=true"
    monkeypatch.setenv("NPROC", "7")
    assert "PJRT_NPROC" not in told()
    monkeypatch.setenv("PJRT_NPROC", "3")
    assert told()["PJRT_NPROC"] == "3"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("", "glibc.malloc.hugetlb=1"),
        (
            "glibc.malloc.tcache_count=3",
            "glibc.malloc.tcache_count=3:glibc.malloc.hugetlb=1",
        ),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_tunables_are_added_to(monkeypatch, own, expected):
    if own is None:
        monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    else:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    assert launcher.environment(2)["GLIBC_TUNABLES"] == expected


@pytest.mark.parametrize("own", [None, "glibc.malloc.hugetlb=0"])
def test_arrays_may_be_in_huge_pages(program, monkeypatch, own):
    """The kernel reports huge pages for the memory of XLA's arrays, unless the user
    disables them.
    """
    kernel = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("the C library is not glibc")
    if not kernel.exists() or "[madvise]" not in kernel.read_text():
        pytest.skip("this kernel does not leave it to programs")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    path = program(
        "import re, jax\n"
        "x = jax.numpy.ones(1 << 22).block_until_ready()\n"
        "for area in re.split('(?m)^(?=[0-9a-f]+-[0-9a-f]+ )', open('/proc/self/smaps').read())[1:]:\n"
        "    first, last = (int(it, 16) for it in area.split(maxsplit=1)[0].split('-'))\n"
        "    if first <= x.unsafe_buffer_pointer() < last:\n"
        "        print('advised' if ' hg' in area else 'not advised', flush=True)\n"
    )
    settings = {} if own is None else {"GLIBC_TUNABLES": own}
    job = run("-n", 2, path, JAX_PLATFORMS="cpu", **settings)
    assert job.returncode == 0, job.stderr
    found = [line.split(maxsplit=1)[1] for line in job.stdout.splitlines()]
    assert found == ["not advised" if own else "advised"] * 2, job.stdout


@pytest.mark.parametrize(
    ("settings", "threads", "devices"),
    [
        ({}, max(2, len(os.sched_getaffinity(0)) // 2), 1),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, 3, 3),
        ({"PJRT_NPROC": "5", "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}, 5, 1),
    ],
    ids=["default", "devices", "own"],
)
def test_xla_has_as_many_threads(program, monkeypatch, settings, threads, devices):
    """Threads are counted in a rank: each XLA pool has at least one for each device."""
    for name in ("PJRT_NPROC", "NPROC", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    path = program(
        "import glob, jax\n"
        "jax.jit(lambda a: a @ a)(jax.numpy.ones((600, 600))).block_until_ready()\n"
        "names = [open(each).read() for each in glob.glob('/proc/self/task/*/comm')]\n"
        "pool = sum('XLAEigen' in each for each in names)\n"
        "print(f'pool of {pool}, {jax.device_count()} devices;\\n', end='')"
    )
    job = run("-n", 2, path, JAX_PLATFORMS="cpu", **settings)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count(f"pool of {threads}, {devices} devices;") == 2, job.stdout


def test_where_a_host_may_be_lost_the_others_are_not_ended(fake, monkeypatch):
    five = launcher.located(str(fake("mpirun (Open MPI) 5.0.11")))
    names = "SLURM_NO_KILL", "PRTE_MCA_oob_tcp_keepalive_time"

    def told(fault_tolerant):
        _, environment = launcher.command(
            five, 2, [], hosts="a:1,b:1", fault_tolerant=fault_tolerant
        )
        return [environment.get(name) for name in names]

    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert told(False) == [None, None]
    assert told(True) == ["set", "0"]
    monkeypatch.setenv(names[1], "60")
    assert told(True) == ["set", "60"]


@pytest.mark.parametrize(
    "names, tasks, hosts",
    [
        ("a b c", "2(x2),1", "a:2,b:2,c:1"),
        ("a b", "3,1", "a:3,b:1"),
        ("a", "2", "a:2"),
        ("here", "2", None),
        ("a b", "", "a,b"),
        ("a b", "2(x3)", "a,b"),
        ("", "2", None),
    ],
)
def test_the_hosts_of_a_job_of_slurm(names, tasks, hosts, tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f'#!/bin/sh\n[ "$*" = "show hostnames n[1-9]" ] && printf "%s\\n" {names}\n'
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURMD_NODENAME", "here")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", tasks)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert places.of_slurm() is None
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-9]")
    scontrol.chmod(0o755)
    assert places.of_slurm() == hosts
    monkeypatch.setenv("SLURM_JOB_NODELIST", "others")
    assert places.of_slurm() is None  # scontrol fails
    monkeypatch.setenv("PATH", "/none")
    assert places.of_slurm() is None


@pytest.mark.parametrize(
    "hosts",
    [
        *(
            "a:2,b:2",
            "a:5",
            "a:1,b",
            "a,b",
            "a:auto",
            "u@n-1.b_c:4",
            "10.0.0.7:4",
            "+n1:4",
        )
    ],
)
def test_hosts_with_a_place_for_every_rank(hosts):
    assert places.chosen(4, hosts, None).hosts == hosts


@pytest.mark.parametrize(
    "wrong", ["a:b", ":2", "-x:2", "-oProxyCommand=x", "", "a b", "a:", "a:-1", "a:1:2"]
)
def test_invalid_hosts(program, wrong, capsys):
    for hosts in (f"{wrong}", f"a:2,{wrong},b"):
        assert main(["run", "-n", "2", f"--hosts={hosts}", str(program(""))]) == 2
        err = capsys.readouterr().err
        assert f"--hosts {hosts}: {wrong!r} must be a host" in err
        assert err.count("\n") == 1


def test_hosts_with_too_few_places(program):
    done = run("-n", 4, "--hosts", "a:2,b:1", program(""))
    assert done.returncode == 2
    assert "--hosts a:2,b:1 has room for 3 of 4 ranks: give more hosts" in done.stderr


# How a rank ended, without an MPI.

NOT_HEARD = "no report of the end: mpirun ended the job first"


def ended(heard, number, program, **variables):
    """Start the wrapper of a rank; return its status."""
    variables |= heard.variables | {"PMIX_RANK": str(number)}
    return subprocess.Popen(
        [*ends.WRAPPER, sys.executable, "-c", program],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
    )


@pytest.mark.parametrize("hosts", [(), None, ["127.0.0.1", "no such host"]])
def test_texts_of_ranks_ends(hosts, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "127.0.0.1")
    with ends.listening(7, hosts) as heard:
        for number, (program, status) in enumerate(
            [
                ("", 0),
                ("import sys; sys.exit(sys.stdin.read() != 'a')", 0),
                ("import os; os.kill(os.getpid(), 9)", -9),
                ("import sys; sys.exit(300)", 300 & 255),
                ("import os; os.kill(os.getpid(), 40)", -40),
            ]
        ):
            process = ended(heard, number, program)
            process.communicate(b"a", timeout=60 * slowness())
            assert process.returncode == status
        assert {rank: code for rank, (code, _) in heard.ended.items()} == {
            0: 0,
            1: 0,
            2: -9,
            3: 44,
            4: -40,
        }
    assert heard.failure == 44
    not_heard = NOT_HEARD + (", or a host does not answer" if hosts != () else "")
    words = [re.sub("after .*", "after", line) for line in heard.words()]
    assert words == [
        "ranks 0-1: status 0, the first of them after",
        "rank 2: killed by SIGKILL, after",
        "rank 3: status 44, after",
        "rank 4: killed by signal 40, after",
        f"ranks 5-6: {not_heard.replace('of the end', 'at all')}",
    ]
    del heard.ended[2], heard.ended[3], heard.ended[4]
    heard.begun -= {2, 3, 4}
    heard.ranks = 2
    assert heard.words() == []
    assert heard.failure == 0
    heard.ranks = 3
    assert heard.words()[-1] == f"rank 2: {not_heard.replace('of the end', 'at all')}"
    heard.begun.add(2)
    assert heard.words()[-1] == f"rank 2: {not_heard}"


def test_ends_of_ranks_that_have_joined():
    """The ends of joined ranks are reported, even if two groups have started ranks
    independently.
    """
    with ends.listening(2) as heard:
        for start, number, status in [("", 0, 0), ("", 1, 0), ("a", 0, 0), ("b", 0, 3)]:
            program = f"import sys; sys.exit({status})"
            joins = {"JAXCODED_JOINS": f"{start}:60"} if start else {}
            process = ended(heard, number, program, **joins)
            process.communicate(timeout=60 * slowness())
        assert heard.failure == 3
        lasting = ended(heard, 1, "import sys; sys.stdin.read()", JAXCODED_JOINS="b:60")
        until = time.monotonic() + 60 * slowness()
        while 4 not in heard.begun:
            assert time.monotonic() < until
            time.sleep(0.01)
    words = [re.sub("after .*", "after", line) for line in heard.words()]
    assert words == [
        "ranks 0-2: status 0, the first of them after",
        "rank 3: status 3, after",
        f"rank 4: {NOT_HEARD.replace('mpirun', 'the ranks that had started them ended them, or mpirun')}",
    ]
    lasting.communicate(timeout=60 * slowness())


def test_a_job_in_which_no_rank_ended_properly_has_failed():
    """The job has failed whatever the launcher reports, for example after it has lost its daemons."""
    with ends.listening(0, sure=True) as heard:
        assert heard.failure == 1  # no rank has begun
    with ends.listening(0) as heard:
        assert heard.failure == 0  # unknown, as no rank can report
        process = ended(heard, 0, "import sys; print(1, flush=True); sys.stdin.read()")
        while not heard.begun:
            time.sleep(0.01)
        assert heard.failure == 1
        process.kill()
        process.communicate(timeout=60 * slowness())
        assert heard.failure == 1
        ended(heard, 1, "").communicate(timeout=60 * slowness())
        assert heard.failure == 0


@pytest.mark.parametrize(
    ("launchers", "options", "batch", "status", "words"),
    [
        (0, [], False, 1, "no rank has begun"),
        (
            0,
            [],
            True,
            0,
            "no rank is known to have begun",
        ),  # other hosts cannot report
        (0, ["--hosts", "none:2"], False, 0, "no rank is known to have begun"),
        (255, ["--hosts", "none:2"], False, 255, "no rank is known to have begun"),
        (137, [], False, 137, "no rank has begun"),
    ],
)
def test_a_launcher_that_starts_no_rank(
    fake, program, tmp_path, monkeypatch, launchers, options, batch, status, words
):
    for name in places.OTHERS:
        monkeypatch.delenv(name, raising=False)
    if batch:
        monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    mpirun = fake("another 1.0", launchers)
    done = run("--mpirun", mpirun, "-n", 2, *options, program(""))
    assert done.returncode == status
    assert f"jaxcoded run: {words}" in done.stderr
    assert "a rank was killed" not in done.stderr
    assert "see what its ranks say" not in done.stderr


def test_others_are_not_believed():
    with ends.listening(0) as heard:
        host, port, token = heard.variables["JAXCODED_ENDS"].split(":")
        for text in ("", "x\n", "é 0 1\n", f"{token} x 1\n", "x" * 1000, "0 0 0\n"):
            with (
                contextlib.suppress(ConnectionError),
                socket.create_connection((host, int(port)), 60) as line,
            ):
                line.sendall(text.encode())
                line.shutdown(socket.SHUT_WR)
                line.recv(1)
        assert not heard.ended
        heard.variables["JAXCODED_ENDS"] += "0"
        process = ended(heard, 0, "")
        process.communicate(timeout=60 * slowness())
        assert process.returncode == 0  # the job continues nevertheless
        # no process listens on this port
        heard.variables["JAXCODED_ENDS"] = "127.0.0.1:1:0"
        process = ended(heard, 0, "")
        process.communicate(timeout=60 * slowness())
        assert process.returncode == 0
        assert not heard.ended


def test_a_rank_dies_with_its_starter(tmp_path):
    """If the wrapper gets SIGKILL, which launchers use at the end, its rank ends. SIGTERM to the whole process group
    ends neither of them.
    """
    file = tmp_path / "said"
    program = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(file)!r}, 'w').write(str(os.getpid()))\n"
        "while True: time.sleep(0.1)\n"
    )
    with ends.listening(0) as heard:
        process = ended(heard, 0, program)
        try:
            end = time.monotonic() + 60 * slowness()
            while not (file.exists() and file.read_text()):
                assert time.monotonic() < end
                time.sleep(0.05)
            rank = int(file.read_text())
            assert rank != process.pid
            process.terminate()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            assert alive(rank)
        finally:
            process.kill()
            process.communicate()
    while alive(rank) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(rank)
