"""The demo, the examples' jobs and the benchmarks run, and do what they claim."""

import csv
import itertools
import json
import os
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from cases import more
from launch import (
    LIMIT,
    ROOT,
    limited,
    mpirun,
    needs_fault_tolerance,
    slowness,
)

pytestmark = pytest.mark.mpi


STEPS = 8  # steps of the demo


@pytest.mark.parametrize("ranks", [7, more(13)])
def test_demo(ranks, tmp_path):
    job = mpirun(
        ranks,
        *("-m", "mpi4py", "examples/digits.py"),
        *("--steps", str(STEPS), "--work", "5e-4", "--out", str(tmp_path)),
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    runs = [
        summary[scheme + when]
        for scheme in ("uncoded", "coded", "shared")
        for when in ("", "_ideal")
    ]
    for run in runs:
        # the same global batches, summed exactly every time
        assert run["between_ranks"] == 0
        assert run["final_loss"] == pytest.approx(runs[0]["final_loss"], rel=1e-4)
        assert run["final_loss"] < 2.0  # an untrained network has log 10 = 2.3
        assert f"{run['final_loss']:.5f}" in job.stdout
    assert 0 < summary["between_runs"] < 1e-4
    # without a code every step waits for all gradients; with a code the slow worker
    # skips its gradient, or other workers compute it
    uncoded, coded, shared = (run["slow_worker_examples"] for run in runs[::2])
    assert uncoded == STEPS * summary["examples_uncoded"]
    assert coded < STEPS * summary["examples_coded"]
    assert shared < uncoded
    for ratio, one, other in (
        ("uncoded_over_coded", 0, 2),
        ("uncoded_over_shared", 0, 4),
        ("uncoded_over_ideal", 0, 1),
        ("coded_over_ideal", 2, 3),
        ("shared_over_ideal", 4, 5),
        ("price", 3, 1),
        ("price_of_sharing", 5, 1),
    ):
        steps = [runs[i]["step_seconds_median"] for i in (one, other)]
        assert summary[ratio] == pytest.approx(steps[0] / steps[1])
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_slurm_job(tmp_path):
    """The script uses Slurm's variables of a job, here for two ranks on this host."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames here" ] && echo localhost\n'
    )
    run = tmp_path / "jaxcoded"
    run.write_text(f'#!/bin/sh\nexec {sys.executable} -m jaxcoded "$@" --steps 2\n')
    for program in (scontrol, run):
        program.chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "here",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "1",
    }
    script = ["bash", str(ROOT / "examples/job.slurm")]
    job = subprocess.run(
        [*script, str(ROOT / "examples/natural_gradient.py")],
        check=False,
        cwd=tmp_path,
        timeout=LIMIT * slowness(),
        capture_output=True,
        text=True,
        env=limited(LIMIT) | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert job.returncode == 0, f"{job.stdout[-4000:]}\n{job.stderr[-8000:]}"
    for rank in range(2):
        assert re.search(rf"rank {rank}: 9\d\.\d% of the digits", job.stdout)


def survived(ranks, *command):
    """Return the output of a job in which ranks may die."""
    job = subprocess.run(
        [
            *(sys.executable, "-m", "jaxcoded", "run", "-n", str(ranks), "--ft"),
            *command,
        ],
        check=False,
        cwd=ROOT,
        timeout=LIMIT * slowness(),
        capture_output=True,
        text=True,
        env=limited(LIMIT),
    )
    if "--ft needs Open MPI 5" in job.stderr:
        pytest.skip("this MPI ends a job in which a rank dies")
    assert job.returncode == 0, job.stderr[-8000:]
    return job.stdout


@pytest.mark.exhaustive  # tests/test_faults.py kills ranks, too
def test_evaluation_without_a_killed_rank():
    texts = [
        re.findall(r"\d+ of 1797 right", survived(4, "examples/evaluation.py", *kill))
        for kill in ([], ["--kill", "2"])
    ]
    assert len(texts[0]) == 1
    assert texts[0] == texts[1]


def test_training_that_continues_without_the_dead():
    """A worker dies, then the root, and then the new root right after its start: the losses equal the losses of a run
    without faults.
    """
    losses = [
        re.findall(
            r"step (\d+) of 150, (loss \S+), (\d) ranks",
            survived(5, "examples/recovered.py", *kill),
        )
        for kill in ([], ["--kill", "40:2", "--kill", "90:0", "--kill", "91:1"])
    ]
    quiet, others = [[line[:2] for line in of_run] for of_run in losses]
    assert [int(number) for number, _ in quiet] == list(range(25, 151, 25))
    assert others == quiet
    assert {size for _, _, size in losses[0]} == {"5"}
    assert losses[1][-1][-1] == "2"


@pytest.mark.exhaustive  # tests/test_faults.py lets ranks join, too
def test_training_in_which_others_take_the_place_of_the_dead():
    """The losses equal the losses of a run without faults in which all ranks take part."""
    kill = "--kill", "40:2", "--kill", "90:0", "--replace"
    quiet, others = [
        re.findall(
            r"step (\d+) of 150, (loss \S+), (\d) ranks",
            survived(5, "examples/recovered.py", *words),
        )
        for words in ([], kill)
    ]
    assert [int(number) for number, _, _ in quiet] == list(range(25, 151, 25))
    assert others == quiet


@pytest.mark.exhaustive  # a benchmark of many seconds
def test_allreduce_benchmark(tmp_path):
    script = ("-m", "mpi4py", "benchmarks/allreduce.py", "--smoke", "--out")
    uncoded = {
        *("mpi4py Allreduce", "mpi4jax.allreduce", "psum over gloo"),
        *("2 x, alone", "2 x, alone, not donated", "ring", "master-worker"),
    }
    few = {
        *("engine, s=0", "engine, s=0, token", "engine, s=0, token, not donated"),
        *("engine, s=0, numpy", "mpi4jax transport, s=0"),
    }
    more = {
        *("engine, s=0", "engine, s=0, token", "engine, s=1", "engine, s=1, token"),
        *("engine, s=1, token, not donated", "engine, s=1, numpy"),
        *("engine, s=2, token", "engine, s=0, m=2, token", "engine, s=1, m=2, token"),
        "mpi4jax transport, s=1",
    }
    for ranks, coded in ((2, few), (4, more)):
        job = mpirun(ranks, *script, str(tmp_path))
        assert "times as long as mpi4jax.allreduce" in job.stdout
        with (tmp_path / f"allreduce-{ranks}.csv").open() as file:
            rows = list(csv.DictReader(file))
        measured = [(row["collective"], int(row["bytes"])) for row in rows]
        expected = itertools.product(uncoded | coded, [4096, 16384])
        assert sorted(measured) == sorted(expected)
        for row in rows:
            p50, p95, p99 = (float(row[each]) for each in ("p50", "p95", "p99"))
            assert 0 < p50 <= p95 <= p99
            bandwidth = float(row["bytes"]) / float(row["seconds"])
            assert float(row["algorithm_bandwidth"]) == pytest.approx(bandwidth)
            bus = bandwidth * 2 * (ranks - 1) / ranks
            assert float(row["bus_bandwidth"]) == pytest.approx(bus)
            assert (row["code"] != "") == (row["collective"] in coded)
    pictures = {
        *("allreduce-2-latency", "allreduce-2-bandwidth"),
        *("allreduce-4-latency", "allreduce-4-bandwidth", "allreduce-ranks"),
    }
    assert pictures == {path.stem for path in tmp_path.glob("*.png")}


def test_wire_benchmark(tmp_path):
    mpirun(4, "-m", "mpi4py", "benchmarks/wire.py", "--smoke", "--out", str(tmp_path))
    with (tmp_path / "wire-4.csv").open() as file:
        rows = list(csv.DictReader(file))
    measured = [(row["wire"], int(row["bytes"])) for row in rows]
    wires = ["float32", "bfloat16", "float16"]
    assert sorted(measured) == sorted(itertools.product(wires, [4_000, 16_000]))


def test_turns_benchmark(tmp_path):
    pytest.importorskip("_nodes", reason="built without the engine")
    job = [sys.executable, ROOT / "benchmarks/turns.py", "--smoke", "--out", tmp_path]
    subprocess.run(job, check=True, timeout=200, cwd=ROOT)
    with (tmp_path / "turns.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    assert all(float(row["longest_turn_ms"]) > 0 for row in rows)


@pytest.mark.exhaustive
def test_composing_benchmark(tmp_path):
    program = "-m", "mpi4py", "benchmarks/composing.py", "--smoke"
    mpirun(4, *program, "--out", str(tmp_path))
    with (tmp_path / "composing-4.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2
    assert all(float(row["ratio"]) > 0 for row in rows)
    with (tmp_path / "composing-memory-4.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3
    assert all(float(row["mib"]) > 0 for row in rows)


@pytest.mark.exhaustive
def test_verify_benchmark(tmp_path):
    mpirun(4, "-m", "mpi4py", "benchmarks/verify.py", "--smoke", "--out", str(tmp_path))
    with (tmp_path / "verify-4.csv").open() as file:
        rows = list(csv.DictReader(file))
    # a row of each kind and size
    assert len(rows) == 3 * 2 * 2
    # groups that wait for all ranks compare every round, and groups without verification compare no round
    compared = {row["options"]: set() for row in rows}
    for row in rows:
        compared[row["options"]].add(float(row["compared"]))
    assert (compared["without"], compared["check, wait"]) == ({0}, {1})


def test_sections_benchmark(tmp_path):
    job = ("benchmarks/sections.py", "--smoke", "--out", str(tmp_path))
    mpirun(4, "-m", "mpi4py", *job)
    with (tmp_path / "sections-4.csv").open() as file:
        rows = list(csv.DictReader(file))
    for bytes_ in ("800000", "1600000"):
        late = [row["late"] for row in rows if row["bytes"] == bytes_]
        assert sorted(late) == ["False"] * 5 + ["True"] * 2
    moved = {
        row["collective"]: row["traffic"] for row in rows if row["late"] == "False"
    }
    # at the root: two messages of three; a third of them, and the sections of other
    # ranks
    assert float(moved["by the root"]) == pytest.approx(2, abs=0.01)
    assert float(moved["in sections"]) < 1.6


@pytest.mark.exhaustive  # a benchmark of many seconds
def test_stragglers_benchmark(tmp_path):
    mpirun(
        13,
        *("-m", "mpi4py", "benchmarks/stragglers.py", "--smoke"),
        *("--out", str(tmp_path)),
    )
    with (tmp_path / "stragglers-13.csv").open() as file:
        rows = {row["what"]: float(row["value"]) for row in csv.DictReader(file)}
    assert len(rows) == 8
    assert all(np.isfinite(list(rows.values())))
    # the counted memory exists
    assert 0 < rows["4,000 B, memory while nobody is late"]


def test_sharing_benchmark_of_a_killed_worker():
    job = ("-m", "mpi4py", "benchmarks/sharing.py", "--smoke", "--killed")
    options = needs_fault_tolerance()
    text = mpirun(4, *job, "--work", "8", "--blocks", "2", options=options).stdout
    (line,) = re.findall(r"^shared, data on 2 others +(.*)$", text, re.MULTILINE)
    assert len(line.split()) == 4 and min(map(float, line.split())) > 0


def test_waits_for_shared_blocks():
    out = mpirun(3, "-m", "mpi4py", "benchmarks/sharing_waits.py", "--smoke")
    assert re.search(r"a step: [\d.]+ ms; waits between blocks: [\d.]+ ms", out.stdout)


def test_sharing_benchmark(tmp_path):
    mpirun(
        5,
        *("-m", "mpi4py", "benchmarks/sharing.py", "--smoke"),
        *("--work", "8", "--blocks", "2", "--models", "fixed", "--jit"),
        *("--out", str(tmp_path)),
    )
    report = json.loads((tmp_path / "sharing-8ms-fixed.json").read_text())
    # three workers of speed 1 and one of 1/10
    ideal = 4 * 0.008 / 3.1
    np.testing.assert_allclose(report["ideal_seconds"], [ideal] * 3)
    assert report["schemes"].keys() == {
        *("uncoded", "uncoded, by the step before"),
        *("fractional repetition", "cyclic repetition"),
        *("shared, data on 3 others", "shared, data on 3 others, in jit"),
        "shared, data on 3 others, in jit, verified",
    }
    for line in report["schemes"].values():
        seconds = np.array(line["seconds"])
        assert len(seconds) == 3
        assert line["median_of_ideal"] == pytest.approx(np.median(seconds) / ideal)


def test_telemetry_benchmark(tmp_path):
    script = ("-m", "mpi4py", "benchmarks/telemetry.py", "--smoke", "--out")
    mpirun(4, *script, str(tmp_path))
    with (tmp_path / "telemetry-4.csv").open() as file:
        rows = {row["what"]: float(row["ratio"]) for row in csv.DictReader(file)}
    assert rows.keys() == {"wall clock", "CPU time"}
    assert all(ratio > 0 for ratio in rows.values())


@pytest.mark.exhaustive  # a benchmark of many seconds
def test_replan_benchmark(tmp_path):
    script = ("-m", "mpi4py", "benchmarks/replan.py", "--smoke", "--out")
    job = mpirun(7, *script, str(tmp_path))
    with (tmp_path / "replan-7.csv").open() as file:
        loads = [float(row["load"]) for row in csv.DictReader(file)]
    assert sum(loads) == pytest.approx(2)  # s + 1
    assert max(loads[5:]) < min(loads[1:5])  # the ranks that are three times slower
    assert "times faster" in job.stdout


@pytest.mark.exhaustive  # a benchmark of many seconds
@pytest.mark.timeout(900)
def test_one_faulty_rank_benchmark(tmp_path):
    """The benchmark itself checks every sum."""
    command = [sys.executable, "benchmarks/one_faulty_rank.py", "--smoke"]
    theirs = ("mpi4jax.allreduce", "psum over gloo", "live_devices")
    which = [word for each in ("shared", *theirs) for word in ("--only", each)]
    which += ["--faults", "none", "slow", "stuck"]
    which += ["--start", str(40 * slowness())]
    subprocess.run([*command, *which, "--out", tmp_path], cwd=ROOT, check=True)
    with (tmp_path / "one_faulty_rank.csv").open() as file:
        found = {(row["scheme"], row["fault"]): row for row in csv.DictReader(file)}
    for fault in ("none", "slow", "stuck"):
        assert found["shared", fault]["outcome"] == "goes on"
    for scheme in theirs:
        assert found[scheme, "none"]["outcome"] == "goes on"
        assert "no step any more" in found[scheme, "stuck"]["outcome"]


@pytest.mark.parametrize("fault", [more("killed"), "root", "stuck", more("replaced")])
def test_recovered_benchmark(fault, tmp_path):
    needs_fault_tolerance()
    start = [sys.executable, "-m", "jaxcoded", "run", "-n", "5", "--ft", "--timeout"]
    job = ["60", "benchmarks/recovered.py", "--fault", fault, "--out", str(tmp_path)]
    subprocess.run([*start, *job], cwd=ROOT, check=True)
    with (tmp_path / f"recovered-{fault}-5.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert all(float(seconds) > 0 for seconds in row.values())


@pytest.mark.exhaustive  # a benchmark of many seconds
@pytest.mark.parametrize(("options", "kind"), [((), ""), (("--sleep",), "-asleep")])
def test_overlap_benchmark(options, kind, tmp_path):
    smoke = "benchmarks/overlap.py", "--smoke", "--out", str(tmp_path), *options
    mpirun(4, "-m", "mpi4py", *smoke)
    with (tmp_path / f"overlap-4-on-1{kind}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9
    for row in rows:
        assert float(row["seconds"]) > 0
        assert (float(row["gain"]) == 1) == (row["step"] == "one round at the end")


@pytest.mark.timeout(400)
def test_simulate_benchmark(tmp_path):
    """The benchmark runs some settings, and simulates them."""
    command = [sys.executable, "benchmarks/simulate.py", "--smoke", "--out", tmp_path]
    subprocess.run(
        command, check=True, cwd=ROOT, timeout=390 * slowness(), capture_output=True
    )
    with (tmp_path / "simulate.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    for row in rows:
        # the time slept; the benchmark measures the difference, no test checks it
        assert float(row["seconds"]) > 0.015
        assert float(row["simulated"]) >= 0.015
    assert (tmp_path / "simulate.png").stat().st_size > 10_000


def test_scaling_benchmark(tmp_path):
    command = [sys.executable, "benchmarks/scaling.py", "--smoke", "--out", tmp_path]
    done = subprocess.run(
        command,
        check=True,
        cwd=ROOT,
        timeout=120 * slowness(),
        capture_output=True,
        text=True,
    )
    with (tmp_path / "scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    measured = [(r["model"], r["Gb/s"], r["ranks"], r["scheme"]) for r in rows]
    models = ["light tail", "heavy tail", "one slow rank"]
    shapes = ["star", "coded star", "tree", "coded tree"]
    schemes = ["ring", *shapes, *(f"{shape} in sections" for shape in shapes)]
    expected = itertools.product(models, ["1", "10", "100"], ["10", "100"], schemes)
    assert sorted(measured) == sorted(expected)
    lines = [line for line in done.stdout.splitlines() if "Gb/s: " in line]
    assert len(lines) == 9
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


@pytest.mark.exhaustive  # a benchmark of many seconds
def test_codes_benchmark(tmp_path):
    command = [sys.executable, "benchmarks/codes.py", "--smoke", "--out", tmp_path]
    subprocess.run(
        command, check=True, cwd=ROOT, timeout=120 * slowness(), capture_output=True
    )
    with (tmp_path / "codes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 18
    for row in rows:
        assert row["decode n=16"].endswith((" ms", "refused"))


def test_kernels_benchmark(tmp_path):
    command = [sys.executable, "benchmarks/kernels.py", "--smoke", "--out", tmp_path]
    subprocess.run(
        command, check=True, cwd=ROOT, timeout=120 * slowness(), capture_output=True
    )
    (table,) = tmp_path.glob("kernels-*.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    measured = [(row["kernel"], row["dtype"], row["n,s,m"]) for row in rows]
    codes = ["3,1,1", "4,1,2", "8,2,1"]
    expected = itertools.product(["decode", "encode"], ["float32", "bfloat16"], codes)
    assert sorted(measured) == sorted(expected)


def test_gpu_benchmark(tmp_path):
    """Without a GPU the benchmark measures on the CPU what it can."""
    mpirun(2, "-m", "mpi4py", "benchmarks/gpu.py", "--smoke", "--out", str(tmp_path))
    stored = json.loads((tmp_path / "gpu-2.json").read_text())
    assert stored["machine"]["ranks"] == 2
    assert {"processor", "device", "jax", "backend"} <= stored["machine"].keys()
    measured = [(name.split(",")[0], size) for name, size, _ in stored["allreduce"]]
    compared = ["coded_allreduce", "mpi4jax.allreduce"]
    if stored["machine"]["backend"] == "cpu":
        assert sorted(measured) == sorted(itertools.product(compared, [4_000, 64_000]))
        assert stored["copies"] == [] and stored["verdicts"] == {}
    assert len(stored["kernels"]) == 12


def test_sequential_benchmark(tmp_path):
    """The benchmark reads the delays that the authors published: a pickle with NumPy
    objects, from which nothing is called.
    """

    class Calls:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "called"),)

    seconds = np.random.default_rng(0).exponential(0.5, (7, 8)) + 1
    rounds = [
        {
            "round": number,
            "results": [
                {
                    "worker_id": np.int32(worker),
                    "started": 3.0,
                    "finished": 3.0 + float(took),
                    "response": Calls(),
                }
                for worker, took in enumerate(row)
            ],
        }
        for number, row in enumerate(seconds)
    ]
    profile = tmp_path / "profile.pkl"
    profile.write_bytes(pickle.dumps(rounds))
    command = [sys.executable, "benchmarks/sequential.py", "--smoke", "--work", "0.8"]
    subprocess.run(
        [*command, "--profile", profile, "--out", tmp_path],
        check=True,
        cwd=ROOT,
        timeout=120 * slowness(),
        capture_output=True,
    )
    assert not (tmp_path / "called").exists()
    with (tmp_path / "sequential.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    times = {row["scheme"]: float(row["seconds"]) for row in rows}
    shared = [float(row["seconds"]) for row in rows if row["scheme"] == "shared"]
    assert times["uncoded"] == pytest.approx((seconds[:4].max(axis=1) + 0.1).sum())
    any_of = [
        (np.sort(seconds[:4], axis=1)[:, 7 - s] + 0.1 * (s + 1)).sum()
        for s in (1, 2, 3)
    ]
    assert times["GC by any n - s"] == pytest.approx(min(any_of))
    # all 8 workers hold all data: the first ones that run compute it
    assert times["ideal"] <= shared[-1] <= shared[0] <= times["uncoded"]
    for scheme in ("GC", "SR-SGC", "M-SGC"):
        assert times["ideal"] < times[f"{scheme}, waits one by one, mu = 1"]


def test_coded_reduce_benchmark(tmp_path):
    """The loads match the paper's table, and plain gradient coding."""
    script = "benchmarks/coded_reduce.py"
    command = [sys.executable, script, "--smoke", "--out", tmp_path]
    subprocess.run(
        command, check=True, cwd=ROOT, timeout=120 * slowness(), capture_output=True
    )
    with (tmp_path / "coded-reduce.csv").open() as file:
        rows = list(csv.DictReader(file))
    loads = {(row["setting"], row["scheme"]): float(row["load"]) for row in rows}
    small, large = "N = 84 (4, 3)", "N = 156 (12, 2)"
    expected = {
        (small, "CodedReduce, s = 1"): 1 / 14,
        (small, "CodedReduce, s = 2"): 27 / 148,
        (small, "CodedReduce, s = 3"): 1 / 3,
        (small, "gradient coding, S = 21"): 22 / 84,
        (large, "CodedReduce, s = 1"): 1 / 42,
        (large, "CodedReduce, s = 2"): 1 / 20,
        (large, "CodedReduce, s = 3"): 1 / 12,
        (large, "gradient coding, S = 13"): 14 / 156,
    }
    for key, load in expected.items():
        assert loads[key] == pytest.approx(load)
    assert len(rows) == 2 * 5 * 9
    assert (tmp_path / "coded-reduce.png").stat().st_size > 10_000


def training(folder, *arguments):
    """Return the rows of the table that benchmarks/training.py writes, by model and
    scheme, and its output.
    """
    command = ["benchmarks/training.py", "--smoke", *arguments, "--out", folder]
    job = subprocess.run(
        [sys.executable, *command],
        check=False,
        cwd=ROOT,
        timeout=LIMIT * slowness(),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert job.returncode == 0, f"{job.stdout[-4000:]}\n{job.stderr[-8000:]}"
    rows = []
    for table in folder.glob("training*.csv"):
        with table.open() as file:
            rows += csv.DictReader(file)
    for row in rows:
        if row["ends"] == "yes":
            assert float(row["step_mean_s"]) > 0
            exact = float(row["max_relative_error"]) < 1e-4
            assert exact == (row["scheme"] != "ignore")
    return {(row["model"], row["scheme"]): row for row in rows}, job.stdout


@pytest.mark.exhaustive  # a benchmark of many seconds
def test_training_benchmark(tmp_path):
    models = ["fixed", "trace", "stopped"]
    schemes = ["naive", "allreduce", "ring", "ignore", "frc", "partial", "kadhe"]
    rows, printed = training(
        *(tmp_path, "--only", "models", "--models", ",".join(models)),
        *("--schemes", ",".join(schemes)),
    )
    assert sorted(rows) == sorted(itertools.product(models, schemes))
    for scheme in ("naive", "allreduce", "ring"):
        assert float(rows["fixed", scheme]["slowest_rank_used"]) == 1
    assert float(rows["fixed", "frc"]["slowest_rank_used"]) < 1
    for row in rows.values():
        assert 0.5 < float(row["final_test_auc"]) <= 1
        assert 0 < float(row["final_loss"]) < np.log(2)
    assert "fixed: the fastest exact code is" in printed
    for name in ("iterations", "losses", "areas"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.exhaustive  # a benchmark of many seconds
def test_training_benchmark_with_a_killed_rank(tmp_path):
    rows, printed = training(
        *(tmp_path, "--only", "killed,tandon", "--models", "none,killed"),
        *("--schemes", "naive,frc"),
    )
    if "killed: left out" in printed:
        pytest.skip("this MPI ends a job in which a rank dies")
    assert rows["killed", "naive"]["ends"] == "does not end"
    assert rows["killed", "frc"]["ends"] == "yes"
    assert float(rows["killed", "frc"]["slowest_rank_used"]) < 1
    with (tmp_path / "tandon.csv").open() as file:
        assert [row["scheme"] for row in csv.DictReader(file)] == ["naive", "frc"]


@pytest.mark.exhaustive  # a benchmark of many seconds
def test_training_benchmark_on_many_ranks(tmp_path):
    rows, _ = training(tmp_path, "--ranks", "13", "--fanout", "3", "--models", "bursty")
    assert len(rows) == 5
    # α = 1/3: the star loses S = 3 of 12, the largest below 4 that repetition can have
    assert float(rows["bursty", "frc"]["load"]) == pytest.approx(4 / 12, abs=1e-4)
    assert float(rows["bursty", "coded_reduce"]["load"]) == pytest.approx(
        4 / 15, abs=1e-4
    )
