"""Fuzz the command lines of commands that start ranks or read files, and start nothing."""

import contextlib
import io
import types

import pytest
from commands import main
from documents import MOST_WORDS, fuzzed, in_memory, numbers
from hypothesis import event, example, given
from hypothesis import strategies as st

from jaxcoded.tools.cli import bench, report
from jaxcoded.tools.doctor import machine
from jaxcoded.tools.launch import ends, job, launcher

VERSIONS = [
    *("mpirun (Open MPI) 5.0.11", "mpirun (Open MPI) 4.1.4", "another 1.0", ""),
    "HYDRA build details:\n    Version:    4.3.0",
]
texts = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8
) | st.sampled_from(["-", "--", "\udcff", "a" * 300, "/", "/dev/null", "a..b", "é"])
counts = numbers.map(str) | st.sampled_from(
    ["1", "2", "4", "٣", "1_0", "9" * 5000, "²"]
)
names = st.sampled_from(["a", "b", "u@n-1.b_c", "10.0.0.7", "a..b", "a" * 70]) | texts
some = st.integers(1, 9).map(str)  # numbers of ranks that any job may have
hosts = st.lists(
    st.builds("{}{}{}".format, names, st.sampled_from([":", "", "::"]), counts)
    | names
    | st.sampled_from(["a:2", "b:2", "a:auto", "a:*"]),
    min_size=1,
    max_size=3,
).map(",".join) | st.sampled_from(["a", "a:9,b:9", "a,b:1"])
OPTIONS = {
    "-n": some | counts,
    "--hosts": hosts,
    "--hostfile": texts,
    "--mpirun": texts,
    "--timeout": some | counts,
    "--on-error": st.sampled_from(["abort", "go-on", "go", ""]),
    "--save": texts,
    "--out": texts,
}
FLAGS = ["--ft", "--all-gpus", "--plain", "--json", "-m"]
ODD = ["-x", "--", "-nn", "--nothing=1", "--n", "-n"]
OWN = {
    "run": ["-n", "--hosts", "--hostfile", "--mpirun", "--timeout", "--on-error"],
    "bench": ["-n", "--hosts", "--hostfile", "--mpirun", "--save", "--json"],
    "doctor": ["-n", "--hosts", "--hostfile", "--mpirun", "--json"],
    "report": ["--out", "--json"],
}
OWN["run"] += FLAGS


@st.composite
def lines(draw, name, first):
    """Draw a command line of existing options and, now and then, unknown ones."""
    words = [*draw(st.sampled_from([[], ["-n", "2"], ["-n", "2"], ["-n", "2"]]))]
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        option = draw(st.sampled_from(OWN[name] * 5 + [*OPTIONS, *FLAGS, *ODD]))
        if option not in OPTIONS:
            words.append(option)
        elif draw(st.booleans()):
            words.append(f"{option}={draw(OPTIONS[option])}")
        else:
            words += [option, draw(OPTIONS[option])]
    others = st.lists(first | texts, max_size=2)
    return [name, *words, *draw(others | st.tuples(first) | st.tuples(first))]


class Connecting:
    """A socket that looks up a host like a real socket, and finds no host."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def connect(self, address):
        address[0].encode("idna")
        raise OSError("no such host")


@contextlib.contextmanager
def nothing_started(version):
    """Record the jobs in this block instead of starting them."""
    played = []

    def play(command, environment, **_):
        played.append((command, environment))
        return job.End(0)

    def run(command, **options):
        assert command[1:] == ["--version"]
        text = version.encode() if isinstance(version, str) else version
        out = text.decode(errors=options.get("errors", "strict"))
        return types.SimpleNamespace(returncode=0, stdout=out, stderr="")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_NTASKS", "SLURM_JOB_NODELIST"):
            patch.delenv(name, raising=False)
        patch.setattr(job, "play", play)
        patch.setattr(launcher.subprocess, "run", run)
        patch.setattr(launcher.shutil, "which", lambda name: name)
        patch.setattr(launcher, "check_fits", lambda _: None)
        patch.setattr(ends, "_address", lambda hosts: "127.0.0.1")
        patch.setattr(machine, "examined", lambda *_: [])
        patch.setattr(bench, "_measured", lambda: None)
        patch.setattr(report, "_draw", lambda *_: [])
        yield played


def said(line, version=VERSIONS[0], **environment):
    """Return the exit status and the jobs that would be started."""
    out, err = io.StringIO(), io.StringIO()
    with (
        nothing_started(version) as played,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        in_memory(),
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in environment.items():
            patch.setenv(name, value)
        status = main(line)
    event(f"status {status}")
    if status == 2:
        assert not played
        words = err.getvalue()
        assert words.startswith(f"jaxcoded {line[0]}: ")
        assert len(words) < MOST_WORDS + 3 * len(" ".join(line))
    return status, played


@fuzzed
@given(
    lines("run", st.just(__file__)),
    st.sampled_from(VERSIONS),
)
@example(["run", "-n", "2", f"--hosts=a:{'9' * 5000}", __file__], VERSIONS[0])
@example(["run", "-n", "4294967297", __file__], VERSIONS[0])
def test_run(line, version):
    """The command starts mpirun with these options, and the program with its arguments."""
    status, played = said(line, version)
    assert status in (0, 1, 2)
    for command, environment in played:
        assert all(isinstance(word, str) and "\0" not in word for word in command)
        ranks = int(command[command.index("-n") + 1])
        assert 1 <= ranks < 2**31
        assert "JAXCODED_ENDS" in environment
        assert command[-1] == line[-1]


@fuzzed
@given(
    st.sampled_from(["bench", "doctor"]).flatmap(
        lambda name: lines(name, st.just("--json"))
    )
)
def test_bench_and_doctor(line):
    status, played = said(line)
    assert status in (0, 1, 2)
    for command, _ in played:
        assert 1 <= int(command[command.index("-n") + 1]) < 2**31


@fuzzed
@given(lines("report", st.sampled_from([__file__, "/dev/null", "/", "/none"])))
def test_report(line):
    """None of these paths is a telemetry file."""
    assert said(line)[0] in (1, 2)


@fuzzed
@given(st.lists(names, min_size=1, max_size=3))
def test_the_address_of_this_host(hosts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.socket", Connecting)
        patch.setattr("socket.gethostname", lambda: "here")
        assert ends._address(hosts) == "here"


@fuzzed
@given(
    st.binary(max_size=30)
    | st.builds(
        "{}{}.{}".format, st.sampled_from(["Open MPI ", "HYDRA ", ""]), counts, counts
    ).map(lambda value: value.encode(errors="replace"))
)
@example(b"mpirun \xff 1.0")
@example(b"9" * 5000 + b".1")
def test_the_version_text_of_mpirun(version):
    with nothing_started(version):
        found = launcher.located("mpirun")
    assert 0 <= found.major < 2**31 and found.path == "mpirun"
