"""All commands: help, errors, and output with and without a terminal."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys

import click
import numpy as np
import pytest
from click.testing import CliRunner
from commands import main
from launch import ROOT

from jaxcoded import _format, codes
from jaxcoded.tools.cli import cluster
from jaxcoded.tools.cli.main import COMMANDS
from jaxcoded.tools.cli.main import main as group
from jaxcoded.tools.planner.measurement import Link, Measurement
from jaxcoded.tools.simulator import Network, ideal_seconds
from jaxcoded.tools.simulator.stragglers import MODELS, Measured, Stragglers
from jaxcoded.tools.terminal.progress import progress

ESCAPE = "\x1b"
JOB = ["--ranks=7", "--payload=4MB", "--compute=0.7"]


def python(program):
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_help_imports_no_command():
    done = python(
        "import sys\n"
        "from jaxcoded.tools.cli.main import COMMANDS, main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "commands = {f'jaxcoded.tools.cli.{name}' for name in COMMANDS}\n"
        "assert not commands & set(sys.modules), commands & set(sys.modules)\n"
        "assert 'numpy' not in sys.modules and 'rich' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\w", done.stdout, re.MULTILINE)


def test_the_library_imports_neither_click_nor_rich():
    done = python(
        "import sys\n"
        "sys.modules['click'] = sys.modules['rich'] = None\n"
        "import jaxcoded\n"
        "for name in jaxcoded.__all__: getattr(jaxcoded, name)\n"
        "from jaxcoded.tools.launch import job, launcher  # for scripts/mpirun\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name):
    result = CliRunner().invoke(group, [name, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: jaxcoded {name} ")
    assert max(map(len, result.output.splitlines())) <= 80
    command = group.get_command(None, name)
    assert result.output.splitlines()[2].strip().startswith(command.help.split()[0])
    assert all(
        option.help for option in command.params if isinstance(option, click.Option)
    )


def test_help_lists_models_and_codes():
    text = " ".join(CliRunner().invoke(group, ["plan", "--help"]).output.split())
    for name in (*MODELS, *codes.NAMES):
        what = MODELS[name] if name in MODELS else getattr(codes, name)
        words = cluster._sentence(what)
        assert words and "`" not in words
        assert f" {cluster._call(name, what)} {words}" in text
    assert "pareto(shape=1.5, scale=0.2) Heavy tails: work w takes w (1 + x)" in text
    assert "bernoulli(load, decoding='least_squares') Bernoulli code" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none"], "jaxcoded: No such command 'none' (jaxcoded --help tells more)"),
        (["--none"], "jaxcoded: No such option '--none'"),
        (["plan", "--nine"], "jaxcoded plan: No such option '--nine'"),
        (["plan", "--ranks=x"], "'x' is not a valid integer (jaxcoded plan --help"),
        (["plan", "-n", "4"], "jaxcoded plan: Missing option '--compute'"),
        (["plan", *JOB[1:]], "jaxcoded plan: how many ranks? Give --ranks"),
        (
            ["plan", "-n50000000", *JOB[1:]],
            "an integer from 2 to 2000000, got 50000000",
        ),
        (
            ["simulate", f"-n{10**12}", *JOB[1:]],
            "an integer from 2 to 2000000, got 1000",
        ),
        (["plan", "-n", "4", "--compute=1"], "how much is summed? Give --payload"),
        (["plan", *JOB, "--parameters=1M"], "--parameters cannot go with --payload"),
        (["plan", *JOB, "--batch-size=3"], "--batch-size=3 goes with --costs"),
        (["plan", *JOB, f"--costs={__file__}"], "--costs needs --batch-size"),
        (
            ["plan", *JOB, f"--costs={__file__}", "--batch-size=3"],
            "test_command_line.py has no table of numbers",
        ),
        (["simulate", *JOB, "--rounds=0"], "--rounds must be an integer >= 1, got 0"),
        (
            ["simulate", *JOB, "--strategy=none"],
            "simulate: --strategy must be one of Coded",
        ),
        (["simulate", *JOB, "--picture=a.b"], "--picture a.b: must end with .png or"),
        (["run", "-n", "0", __file__], "an integer from 1 to 2000000, got 0"),
        (["run", f"-n{2**32 + 1}", __file__], "from 1 to 2000000, got 4294967297"),
        (["run", "--ft"], "jaxcoded run: Missing "),
        (["bench", "-n", "1"], "an integer from 2 to 2000000, got 1"),
        (["bench", "--hosts=a"], "give their number with -n"),
        (["bench", "--save=/none/file"], "--save /none/file: there is no such folder"),
        (["report"], "jaxcoded report: Missing argument"),
    ],
)
def test_wrong_use_is_one_line_and_status_2(
    arguments, words, capsys, monkeypatch, tmp_path
):
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert words in err
    assert err.count("\n") == 1


def test_failures_have_status_1(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    asked = ["simulate", *JOB, "--rounds=2", f"--picture={tmp_path}/a.png"]
    assert main(asked) == 1
    assert "pictures need matplotlib: pip install" in capsys.readouterr().err


def test_no_arguments_is_help(capsys):
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().err


def shown(program, columns):
    """Return the output of a program on a terminal of ``columns`` columns."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(columns), "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    done = subprocess.Popen(
        [sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            if not (more := os.read(ours, 1 << 16)):
                break
        except OSError:  # the end of a terminal
            break
        text += more
    os.close(ours)
    assert done.wait(60) == 0
    return text.decode().replace("\r\n", "\n")


TABLE = """
from jaxcoded.tools.terminal import output
output.table(
    ["a", "code", "more", "most"],
    [["1", "one two", "three four", "five"], ["2", "x", "y [z]", "" ]],
    wraps=["code"], extra=["more", "most"], best=0,
)
output.say("word " * 30)
output.code("x" * 130)
"""


@pytest.mark.parametrize("columns", [30, 20, 12])
def test_on_a_terminal(columns):
    """Columns that do not fit are left out; only lines that users copy may be wider."""
    text = shown(TABLE, columns)
    assert ESCAPE in text
    plain = re.sub(ESCAPE + r"\[[0-9;]*m", "", text)
    assert ("more" in plain) == (columns > 25)
    assert ("most" in plain) == (columns > 15)
    assert "code" in plain and "x" * 130 in plain
    *lines, _ = plain.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in plain


def test_without_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    exec(TABLE)  # noqa: S102
    out, _ = capsys.readouterr()
    assert ESCAPE not in out
    header, rule, first, second, words, line = out.splitlines()
    assert header == "a  code     more        most"
    assert set(rule) == {"─"}
    assert first == "1  one two  three four  five"
    assert second == "2  x        y [z]"
    assert words.split() == ["word"] * 30
    assert line == "x" * 130


def test_progress_is_for_terminals():
    program = (
        "from jaxcoded.tools.terminal.progress import progress\n"
        "with progress('planning') as tell:\n"
        "    for part in (0, 0.5, 2): tell(part)\n"
    )
    assert "planning" in shown(program, 80)
    done = python(program)
    assert done.stderr == done.stdout == ""
    with progress("nothing", quiet=True) as tell:
        tell(0.5)


def test_texts_of_ranks():
    assert _format.ranks([0]) == "rank 0"
    assert _format.ranks([4, 0, 2, 1]) == "ranks 0-2, 4"
    assert _format.ranks([5, 4]) == "ranks 4-5"
    assert _format.ranks([1, 3]) == "ranks 1, 3"


# Simulations.


def simulated(capsys, *arguments):
    assert main(["simulate", *JOB, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_simulated_steps(capsys):
    """Simulated steps of a star with infinitely fast links match closed forms."""
    asked = [
        "--payload=4KB",
        "--gigabits=1e9",
        "--latency=0",
        "--strategy=Coded(fanout=6)",
        "--rounds=20",
    ]
    text = simulated(capsys, *asked, "--model=fixed(factor=10)")
    steps = text["steps"]
    assert text["load"] == pytest.approx(1 / 3)
    # two of six partitions; all of seven, and one ten times as long; 6 + 1/10 speeds
    expected = {
        "this plan": 0.7 / 3,
        "uncoded tree": 1.0,
        "uncoded, balanced": (1.0 + 19 * 0.7 / 6.1) / 20,
        "ring all-reduce": 1.0,
        "ideal": 0.7 / 6.1,
    }
    for name, seconds in expected.items():
        keys = ("mean", "median", "p95", "p99")
        for key in keys[:1] if name == "uncoded, balanced" else keys:
            assert steps[name][key] == pytest.approx(seconds, rel=0.01), (
                name,
                key,
            )
    dead = simulated(capsys, *asked, "--model=killed(round=5)")["steps"]
    assert dead["uncoded tree"]["mean"] is None
    assert dead["this plan"]["p99"] == pytest.approx(0.7 / 3, abs=3e-3)


def test_examples_of_unequal_cost(capsys, tmp_path):
    """Each rank has one of seven examples that cost 3 to 9. The last rank to end has the example of cost 9, which takes
    0.7 · 9 / 42 s. This is ideal, as no example is divided.
    """
    path = tmp_path / "costs.csv"
    path.write_text(",".join(map(str, range(3, 10))))
    asked = ["--payload=4KB", "--gigabits=1e9", "--latency=0", "--rounds=3"]
    asked += ["--strategy=Uncoded()", f"--costs={path}", "--batch-size=7"]
    steps = simulated(capsys, *asked)["steps"]
    for name in ("this plan", "uncoded tree", "uncoded, costs ignored"):
        assert steps[name]["mean"] == pytest.approx(0.7 * 9 / 42, rel=0.01), name
    assert steps["ideal"]["mean"] == pytest.approx(0.7 * 9 / 42)
    path.write_text("1,2\n3,4\n")
    assert main(["simulate", *JOB, f"--costs={path}", "--batch-size=2"]) == 2
    assert "in a line or a column, got (2, 2)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_for_unequal_costs(capsys, tmp_path):
    path = tmp_path / "costs.npy"
    np.save(path, np.random.default_rng(0).gamma(2.0, size=2000))
    asked = ["plan", *JOB, f"--costs={path}", "--batch-size=500"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert "batches of 500 of 2000 examples, whose most expensive example costs" in text
    assert "costs ignored: batches divided by the number of examples" in text
    ranking = json.loads((main([*asked, "--json"]), capsys.readouterr().out)[1])[
        "ranking"
    ]
    assert {each["by_cost"] for each in ranking} == {True, False}


def test_an_approximate_parent_continues_with_any(capsys):
    """An approximate parent continues with any two of six children, even copies with
    half of the batch each.
    """
    asked = [
        "--payload=4KB",
        "--gigabits=1e9",
        "--latency=0",
        "--strategy=Coded(stragglers=4, fanout=6, code='grouped(load=3)')",
        "--rounds=4",
    ]
    text = simulated(capsys, *asked, "--model=fixed(ranks=(4, 5, 6), factor=100)")
    assert text["steps"]["this plan"]["mean"] == pytest.approx(0.7 / 2, rel=0.02)


def test_uncoded_is_the_same_tree(capsys):
    asked = ["simulate", "-n13", "--payload=1MB", "--compute=1", "--rounds=2", "--json"]
    assert main([*asked, "--strategy=Coded(stragglers=3)"]) == 0
    four = json.loads(capsys.readouterr().out)["steps"]["uncoded tree"]
    assert main([*asked, "--strategy=Uncoded(fanout=4)"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"]["this plan"] == four


def test_simulation_as_text_and_a_picture(capsys, tmp_path):
    path = tmp_path / "steps.png"
    asked = ["simulate", *JOB, "--model=killed(round=3)", "--rounds=9"]
    assert main([*asked, "--strategy=Shared(replicas=2)", f"--picture={path}"]) == 0
    text = capsys.readouterr().out
    assert "which share the work: any 2 ranks but the root may be missing" in text
    assert re.search(r"^uncoded tree +never +never", text, re.MULTILINE)
    assert re.search(r"^ideal .* 1$", text, re.MULTILINE)
    assert path.stat().st_size > 5000


class Given(Stragglers):
    def __init__(self, *rounds):
        self.given = rounds

    def rounds(self, size, seed=0):
        from jaxcoded.tools.simulator.stragglers import Delays

        for factor, seconds in self.given:
            stopped = np.isinf(seconds)
            yield Delays(np.array(factor), np.array(seconds), stopped)


def test_ideal():
    """The ideal matches a search for the time in which the ranks can do all work."""
    rng = np.random.default_rng(0)
    rounds = [(1 + rng.pareto(1.5, 5), rng.exponential(0.3, 5)) for _ in range(20)]
    rounds.append((np.ones(5), np.array([np.inf, 0.0, np.inf, 0.0, 1e9])))
    rounds.append((np.ones(5), np.full(5, np.inf)))
    got = ideal_seconds(5, work=1.0, stragglers=Given(*rounds), rounds=len(rounds))
    for (factor, seconds), time in zip(rounds[:-1], got):
        done = np.maximum(0.0, (time - seconds) / factor).sum()
        assert done == pytest.approx(1.0)
    assert np.isinf(got[-1])


# Measurements.

SEEN = Measurement(
    Network(latency=1e-3, bandwidth=2e8, trips=1),
    0.005,
    Measured(np.array([[1.0, 1.0, 4.0], [1.0, 2.0, 4.0], [1.0, 1.5, 4.0]])),
    (Link(0, 1, 1e-3, 2e8),),
    ("a", "a", "b"),
)


def test_a_measurement_is_saved(tmp_path):
    SEEN.save(tmp_path / "seen")
    again = Measurement.load(tmp_path / "seen")
    assert again.to_fields() == SEEN.to_fields()
    assert again.speeds.tolist() == pytest.approx([1.0, 1 / 1.5, 0.25])
    assert again.links == SEEN.links and again.network == SEEN.network


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"work": -1},
        {"factors": [[1.0]]},
        {"factors": "x"},
        {"network": {"speed": 1}},
        {"network": 3},
        {"links": [{"rank": 0}]},
        {"hosts": None},
    ],
)
def test_no_measurement(change, tmp_path, capsys):
    path = tmp_path / "seen"
    path.write_text(json.dumps(SEEN.to_fields() | change))
    assert main(["plan", f"--measured={path}", *JOB[1:]]) == 2
    err = capsys.readouterr().err
    assert f"{path} was not written by jaxcoded bench --save: " in err
    for text in ("", "[]", "{}", "\x80"):
        path.write_text(text, encoding="latin-1")
        assert main(["plan", f"--measured={path}", *JOB[1:]]) == 2
        assert "was not written by jaxcoded bench" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "links", "late"),
    [
        ([], "10 Gb/s, latency 50 us", "none, as no --model, --trace or --measured"),
        (
            ["--gigabits=2", "--send-gigabits=0.5", "--model=pareto"],
            "2 Gb/s to receive and 0.5 Gb/s to send, latency 50 us",
            "pareto",
        ),
    ],
)
def test_the_output_repeats_the_request(options, links, late, capsys, monkeypatch):
    """The output repeats the request, so that a user notices a payload in bytes that was meant in MB."""
    monkeypatch.setenv("COLUMNS", "200")
    asked = ["simulate", "-n3", "--payload=4", "--compute=0.7", "--rounds=1", *options]
    assert main(asked) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    job = (
        "3 ranks sum 4 B in every step, and the whole batch would take one rank 700 ms"
    )
    assert first.startswith(f"{job}; links: {links}; stragglers: {late}")


def test_a_plan_for_a_measurement(tmp_path, capsys, monkeypatch):
    path = tmp_path / "seen"
    SEEN.save(path)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["simulate", "--payload=1kB", "--compute=3", f"--measured={path}"]) == 0
    assert f"; stragglers: from {path}\n" in capsys.readouterr().out
    asked = ["--payload=1kB", "--compute=3", f"--measured={path}", "--json"]
    assert main(["simulate", *asked, "--rounds=3"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["ranks"] == 3
    # rank 2 takes four times as long for its third of the work, up to about a millisecond for messages
    assert fields["steps"]["uncoded tree"]["mean"] == pytest.approx(4.0, rel=0.01)
    assert main(["simulate", *asked, "--rounds=3", "--model=none", "-n5"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["ranks"] == 5
    assert 0.6 < fields["steps"]["uncoded tree"]["mean"] < 0.61
    assert main(["plan", *asked, "-n", "5"]) == 2
    assert "has 3 columns, but --ranks is 5" in capsys.readouterr().err


@pytest.mark.mpi
def test_bench(tmp_path, capsys):
    path = tmp_path / "seen"
    assert main(["bench", "-n", "3", "--save", str(path)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^0 – 1 ", text, re.MULTILINE)
    assert f"jaxcoded plan --measured {path}" in text
    seen = Measurement.load(path)
    assert seen.speeds.shape == (3,)
    assert seen.speeds.max() == 1.0 and seen.speeds.min() > 0
    assert [link[:2] for link in seen.links] == [(0, 1)]


@pytest.mark.mpi
def test_bench_as_json(capsys):
    assert main(["bench", "-n", "2", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields.keys() == {
        *("ranks", "hosts", "speeds", "usual", "worst", "rounds"),
        *("latency", "bandwidth", "links"),
    }
    assert fields["ranks"] == 2 and fields["rounds"] > 0
    (link,) = fields["links"]
    assert (link["rank"], link["partner"]) == (0, 1)
    assert link["latency"] > 0 and link["bandwidth"] > 0
    assert fields["latency"] > 0 and fields["bandwidth"] > 0
    assert len(fields["hosts"]) == 2 and all(fields["hosts"])
    assert len(fields["speeds"]) == 2 and max(fields["speeds"]) == 1
    for usual, worst in zip(fields["usual"], fields["worst"], strict=True):
        assert 0 < usual <= worst


def test_bench_of_one_rank():
    done = python("from jaxcoded.tools.cli.main import main; main(['bench'])")
    assert done.returncode == 2
    assert "a link needs two ranks, but this job has one" in done.stderr


def shown_commands():
    """Return the commands of docs/planning.md, with their output there."""
    page = (ROOT / "docs/planning.md").read_text()
    for block in re.findall(r"(?s)```\n\$ jaxcoded ((?:plan|simulate) .*?)\n```", page):
        command, printed = re.match(r"(?s)(.*?[^\\])\n(.*)", block).groups()
        words = shlex.split(command.replace("\\\n", " "))
        if not {"--measured", "--trace"} & set(words):
            yield words, printed


@pytest.mark.slow
@pytest.mark.parametrize(("words", "printed"), list(shown_commands()))
def test_what_the_page_on_planning_shows_is_printed(
    capsys, monkeypatch, words, printed
):
    """The commands print what the page shows, up to the last digits: other versions of
    libraries may round differently.
    """
    monkeypatch.setenv("COLUMNS", "200")
    assert main(words) == 0

    def parts(text):
        number = r"[\d.]+"
        numbers = np.array(
            [float(each.rstrip(".")) for each in re.findall(r"\d[\d.]*", text)]
        )
        return re.sub(number, "#", re.sub(r"\s+|─+", " ", text)).strip(), numbers

    (text, numbers), (shown, digits) = parts(capsys.readouterr().out), parts(printed)
    assert text == shown
    np.testing.assert_allclose(numbers, digits, rtol=0.05)
