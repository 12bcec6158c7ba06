"""Reports on a job's telemetry, from records written by hand and from a real job."""

import dataclasses
import json
import re

import numpy as np
import pytest
from commands import main
from launch import mpirun

import jaxcoded
from jaxcoded.group.telemetry import Telemetry
from jaxcoded.tools.report import analysis
from jaxcoded.tools.simulator import Layout, Ring

NAN = float("nan")
PLAN = jaxcoded.make_plan(
    4, jaxcoded.Coded(stragglers=1)
)  # a star of three children, any two of which suffice
ROUNDS = 6


def seen(plan=PLAN, **changes):
    """Return the root's telemetry in a star of three, in rounds of one second. Two
    children take 0.9 s for each. Rank 3 takes 0.7 s, but 1.9 s for the third round: it misses the third and the fourth
    round, and comes again in the fifth.
    """
    begun = np.arange(float(ROUNDS))
    arrived = begun[:, None] + [0.9, 0.9, 0.7]
    arrived[2:4, 2] = arrived[4, 2] = 4.6
    columns = {
        "round": range(1, ROUNDS + 1),
        "work": [NAN] + [0.1] * (ROUNDS - 1),
        "started": begun + 0.1,
        "decided": begun + 0.9,
        "ended": begun + 1.0,
        "decider": [1] * ROUNDS,
        "outcome": [1] * ROUNDS,
        "payload": [1000] * ROUNDS,
        "skipped": [False] * ROUNDS,
        "approximate": [False] * ROUNDS,
        "shared": [False] * ROUNDS,
        "loop": [False] * ROUNDS,
        "busy": [0.0] * ROUNDS,
        "blocks": [0] * ROUNDS,
        "computed": [],
        "children": [1, 2, 3],
        "arrived": arrived.ravel(),
        "used": arrived.ravel() <= np.repeat(begun + 0.9, 3),
        "told": [0, 1, 2, 3],
        "step_times": [0.1, 0.9, 0.9, 0.7],
        "silent": [0.0] * 4,
        "peers": [1, 2, 3],
        "link_bytes": [6000, 6000, 4000],
        "link_seconds": [6e-6, 6e-6, 4e-6],
    }
    return Telemetry.of(0, plan, columns | changes)


def missing(first, **changes):
    """Return telemetry in which rank 3 does not come from this round on."""
    arrived = seen().arrived.copy()
    arrived[first - 1 :, 2] = NAN
    return dataclasses.replace(seen(**changes), arrived=arrived)


def of_child(rank, **changes):
    """Return a child's telemetry: it has no children, and its work is known exactly."""
    columns = {
        "children": np.zeros(0, np.int64),
        "arrived": np.zeros((ROUNDS, 0)),
        "used": np.zeros((ROUNDS, 0), bool),
        "decided": np.full(ROUNDS, NAN),
    }
    return dataclasses.replace(
        seen(),
        rank=rank,
        **{name: np.array(value) for name, value in (columns | changes).items()},
    )


def test_spans():
    took = analysis.spans(seen())
    np.testing.assert_allclose(took[1:, :2], 0.9)
    assert np.isnan(took[0]).all()  # the beginning of the first work is unknown
    # in the fifth round rank 3 came 0.7 s after it was done with the third
    np.testing.assert_allclose(took[1:, 2], [0.7, 1.9, NAN, NAN, 0.7])


def test_spans_of_a_child_just_too_late():
    """The child's message came although it was no longer needed, so the span is exact."""
    arrived = seen().arrived.copy()
    arrived[3, 0] = 3.95
    took = analysis.spans(dataclasses.replace(seen(), arrived=arrived))
    np.testing.assert_allclose(took[1:, 0], [0.9, 0.9, 0.95, 0.9, 0.9])


def test_savings():
    saved = analysis.savings(seen())
    assert saved.rounds.tolist() == [2, 3, 4, 5, 6]
    np.testing.assert_allclose(saved.coded, 0.9)
    np.testing.assert_allclose(saved.uncoded, [0.9, 1.9, 0.9, 0.9, 0.9])
    assert saved.avoided == pytest.approx(1.0)
    assert saved.share == pytest.approx(1 / 5.5)
    assert saved.stuck is None
    assert not saved.inferred.any()


def test_savings_with_a_dead_child():
    for silent, pace in ((0.0, 0.7), (4.0, 0.7), (0.0, NAN)):
        saved = analysis.savings(
            missing(3, silent=[0, 0, 0, silent], step_times=[0.1, 0.9, 0.9, pace])
        )
        assert saved.stuck == 3
        assert np.isinf(saved.uncoded).tolist() == [False, True, True, True, True]
        assert saved.avoided == pytest.approx(0.0)
    # rank 3 never sent anything
    assert analysis.savings(missing(1, step_times=[0.1, 0.9, 0.9, NAN])).stuck == 2


def test_savings_with_a_child_that_is_always_late():
    """The child lives, reports its times, and takes all results from the history."""
    saved = analysis.savings(
        missing(1, step_times=[0.1, 0.9, 0.9, 3.0], silent=[0, 0, 0, 0.2])
    )
    np.testing.assert_allclose(saved.uncoded, 3.0)
    assert saved.avoided == pytest.approx(5 * 2.1)
    assert saved.inferred.all()
    # rank 3 has no step time, but it sent a message 2 s before the end
    saved = analysis.savings(
        missing(1, step_times=[0.1, 0.9, 0.9, NAN], silent=[0, 0, 0, 2.0])
    )
    np.testing.assert_allclose(saved.uncoded, 2.0)
    saved = analysis.savings(
        missing(1, step_times=[0.1, 0.9, 0.9, NAN], silent=[0, 0, 0, 3.0])
    )
    assert saved.stuck == 2
    # the step need not have begun with its first round
    later = missing(3, step_times=[0.1, 0.9, 0.9, 3.0])
    assert analysis.savings(later).stuck is None


def test_a_child_may_be_on_its_way_at_the_end():
    saved = analysis.savings(missing(6))
    assert saved.stuck is None
    np.testing.assert_allclose(saved.uncoded, [0.9, 1.9, 0.9, 0.9, 0.9])


def test_savings_with_the_files_of_children():
    """A rank's file has its times in rounds that its parent does not know."""
    own = of_child(
        3,
        work=[NAN, 0.7, 1.9, 2.5, NAN, 0.7],
        skipped=[False, False, False, False, True, False],
    )
    saved = analysis.savings(seen(), [seen(), own])
    np.testing.assert_allclose(saved.uncoded, [0.9, 1.9, 2.5, 0.9, 0.9])
    assert not saved.inferred.any()


def test_a_child_whose_file_continues_has_not_stopped():
    """The child's last work took long, but it ended."""
    own = of_child(
        3,
        work=[NAN, 0.7, 5.0, NAN, NAN, NAN],
        skipped=[False, False, False, True, True, True],
    )
    saved = analysis.savings(missing(3), [own])
    assert saved.stuck is None
    np.testing.assert_allclose(saved.uncoded, [0.9, 5.0, 0.9, 0.9, 0.9])
    took = analysis.work([missing(3), own])
    np.testing.assert_allclose(took.seconds[:, 3], [0.7, 5.0, 0.7, 0.7, 0.7])


def test_a_rank_that_was_late_in_all_rounds():
    """The rank computed nothing, but its file has its times."""
    own = of_child(3, work=[NAN, *[2.5] * 5], skipped=[True] * ROUNDS)
    root = missing(1, step_times=[0.1, 0.9, 0.9, NAN], silent=[0, 0, 0, 0.2])
    saved = analysis.savings(root, [root, own])
    np.testing.assert_allclose(saved.uncoded, 2.5)
    took = analysis.work([root, own])
    assert took.source[3] == "file"
    np.testing.assert_allclose(took.seconds[:, 3], 2.5)
    # without the file the rank's times are unknown
    assert analysis.unknown([root, own]) == []
    assert analysis.unknown([root]) == [3]


def test_too_late():
    shares = analysis.too_late([seen()])
    np.testing.assert_allclose(shares, [NAN, 0, 0, 2 / 6])
    assert np.isnan(analysis.too_late([of_child(3)])).all()


def test_work():
    took = analysis.work([seen()])
    assert took.source == ("file", "messages", "messages", "messages")
    assert took.rounds.tolist() == [2, 3, 4, 5, 6]
    np.testing.assert_allclose(took.seconds[:, 0], 0.1)
    np.testing.assert_allclose(took.seconds[:, 1:3], 0.9)
    np.testing.assert_allclose(took.seconds[:, 3], [0.7, 1.9, 0.7, 0.7, 0.7])
    dead = analysis.work([missing(3)]).seconds[:, 3]
    assert np.isinf(dead).tolist() == [False, True, True, True, True]
    own = of_child(2, work=[NAN, 1, 2, 3, 4, 5])
    took = analysis.work([seen(), own])
    assert took.source[2] == "file"
    np.testing.assert_allclose(took.seconds[:, 2], [1, 2, 3, 4, 5])


def test_work_of_ranks_further_down():
    """The work of deeper ranks is their step time, if known. A child with children
    waits for them, and reports its own work.
    """
    plan = jaxcoded.make_plan(7, jaxcoded.Coded(parents=[-1, 0, 0, 0, 1, 1, 1]))
    tree = seen(plan, told=[0, 1, 4], step_times=[0.1, 0.3, 0.5], silent=[0.0] * 3)
    took = analysis.work([tree])
    assert took.source == ("file", *["messages"] * 3, "step time", "others", "others")
    np.testing.assert_allclose(took.seconds[:, 1], 0.3)
    np.testing.assert_allclose(took.seconds[:, 4], 0.5)
    each = [took.seconds[:, rank] / tree.loads[rank] for rank in (1, 2, 3, 4)]
    np.testing.assert_allclose(
        took.seconds[:, 5], np.median(each, axis=0) * tree.loads[5]
    )


def test_compare():
    """Loads are 2/3 with s = 1 and 1/3 with s = 0."""
    plans = {plan.name: plan for plan in analysis.compare([seen()])}
    actual = plans["as it was: Coded(fanout=3)"]
    assert actual.actual and actual.load == pytest.approx(2 / 3)
    assert actual.seconds == pytest.approx(0.9, rel=2e-3)
    uncoded = plans["Coded(stragglers=0, fanout=3)"]
    assert uncoded.load == pytest.approx(1 / 3)
    assert uncoded.seconds == pytest.approx((4 * 0.45 + 0.95) / 5, rel=2e-3)
    assert plans["Coded(stragglers=2, fanout=3)"].seconds > actual.seconds
    assert plans["ring, uncoded"].load == 0.25


def test_compare_with_a_dead_rank():
    plans = {plan.name: plan for plan in analysis.compare([missing(3)])}
    assert plans["as it was: Coded(fanout=3)"].seconds == pytest.approx(0.9, rel=2e-3)
    for name in ("Coded(stragglers=0, fanout=3)", "ring, uncoded"):
        assert plans[name].seconds == np.inf
        assert plans[name].ended == 1


@pytest.mark.parametrize(
    "plan",
    [
        jaxcoded.make_plan(13, jaxcoded.Coded(fanout=3)),
        jaxcoded.make_plan(13, jaxcoded.Coded(fanout=4, stragglers=1, slices=2)),
        jaxcoded.make_plan(5, jaxcoded.Coded(stragglers=1, root_computes=True)),
        jaxcoded.make_plan(6, jaxcoded.Coded(speeds=[1, 1, 1, 1, 1, 0.3])),
        jaxcoded.make_plan(4, jaxcoded.Coded(parents=[3, 3, 3, -1])),
        jaxcoded.make_plan(7, jaxcoded.Coded(parents=[1, 6, 6, 1, 1, 6, -1])),
        jaxcoded.make_plan(2, jaxcoded.Coded(stragglers=0)),
        jaxcoded.make_plan(1, jaxcoded.Coded()),
    ],
)
def test_alternatives(plan):
    """All alternatives have the same ranks, root and slices, and none is repeated."""
    (name, first), *others = analysis.alternatives(plan, np.linspace(0.5, 1, plan.size))
    assert first is plan and name.startswith("as it was: ")
    plans = [each for _, each in others if not isinstance(each, Ring)]
    assert len({plan, *plans}) == 1 + len(plans)
    assert len({name for name, _ in others}) == len(others)
    for other in plans:
        assert other.size == Layout.of(other).size == plan.size
        assert other.root == plan.root
        assert other.strategy.slices == plan.strategy.slices
        assert other.strategy.root_computes == plan.strategy.root_computes
    if plan.size > 2:
        assert {0, plan.strategy.stragglers} <= {
            each.strategy.stragglers for each in plans
        }


def test_network():
    links, payload = analysis.network(seen(payload=[1000, 2000] * (ROUNDS // 2)))
    assert links.bandwidth == pytest.approx(1e9)
    assert payload == 1500


def kept(rows):
    """Return the root's telemetry with ``rows`` rounds."""
    per_round = [
        "rounds",
        "work",
        "started",
        "decided",
        "ended",
        "decided_by",
        "failed",
        "payload",
        "skipped",
        "approximate",
        "shared",
        "loop",
        "busy",
        "blocks",
        "computed",
        "arrived",
        "used",
    ]
    return dataclasses.replace(
        seen(), **{name: getattr(seen(), name)[:rows] for name in per_round}
    )


FILES = {
    "usual": [seen()],
    "shared": [
        seen(
            jaxcoded.make_plan(4, jaxcoded.Shared(replicas=2)),
            shared=[True] * ROUNDS,
            computed=[*(12, 2, 0), *(12, 3, 0), *(12, 3, 0), *(4, 0, 1)] * ROUNDS,
        )
    ],
    "shared, nothing called": [
        seen(jaxcoded.make_plan(4, jaxcoded.Shared(replicas=2)))
    ],
    "dead": [missing(3)],
    "never": [missing(1, step_times=[0.1, 0.9, 0.9, NAN])],
    "leaf": [of_child(3)],
    "all": [of_child(3), of_child(1), seen()],
    "no-rounds": [kept(0)],
    "one-round": [kept(1)],
    "two-rounds": [kept(2)],
    "failed": [seen(outcome=[2] * ROUNDS, decided=[NAN] * ROUNDS)],
    "approximate": [missing(3, approximate=[False, False, *[True] * 4])],
    "unmeasured": [seen(told=[], step_times=[], silent=[])],
    "no-links": [seen(peers=[], link_bytes=[], link_seconds=[])],
    "without the root": [of_child(1)],
    "alone": [
        dataclasses.replace(
            of_child(0),
            plan=jaxcoded.make_plan(1, jaxcoded.Coded()).to_json(),
            **{
                name: np.zeros(1) + value
                for name, value in (("loads", 1), ("step_times", 0.1), ("silent", 0))
            },
            parents=np.array([-1]),
            computed=np.zeros((ROUNDS, 1, 3), np.int64),
            peers=np.zeros(0, np.int64),
            link_bytes=np.zeros(0, np.int64),
            link_seconds=np.zeros(0),
            decided_by=np.zeros(ROUNDS, np.int64),
        )
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_command(name, tmp_path, capsys):
    paths = []
    for number, file in enumerate(FILES[name]):
        paths.append(str(tmp_path / f"{number}.npz"))
        file.save(paths[-1])
    out = tmp_path / "pictures"
    assert main(["report", *paths, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    written = [line.removeprefix("wrote ") for line in text.splitlines()]
    written = [line for line in written if line.endswith(".png")]
    assert sorted(written) == sorted(map(str, out.glob("*")))
    assert all((out / path).stat().st_size > 5000 for path in written)
    # no line shows NaN
    assert not re.search(r"\b(nan|inf)\b", text)
    if name == "usual":
        assert (
            "rank 0 waited 4.5 s for its sums in 5 rounds, and would have waited 5.5 s "
            "for all of its children: coding avoided 1 s (18%)\n" in text
        )
        assert "a round took 1 s; replayed with the same plan 900 ms (-10.0%)" in text
        names = "arrivals-0", "savings-0", "stragglers", "plans"
        assert {path.stem for path in out.glob("*.png")} == set(names)
    if name == "shared":
        assert "what sharing the work saved" in text and "coding" not in text
        assert "rank 3 computed 4 of its 12 blocks, and other ranks the rest" in text
        assert {path.stem for path in out.glob("*.png")} == {"blocks"}
    if name == "without the root":
        assert "to compare with other plans, also give the file of rank 0" in text
        assert not (out / "plans.png").exists()
    if name == "dead":
        assert "from round 3 on an uncoded sum would not have ended" in text
        assert re.search(
            r"Coded\(stragglers=0, fanout=3\) .* does not end in round 3\n", text
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_as_json(name, tmp_path, capsys):
    """The output is strict JSON, without NaN and infinity, and nothing else."""
    paths = []
    for number, file in enumerate(FILES[name]):
        paths.append(str(tmp_path / f"{number}.npz"))
        file.save(paths[-1])
    assert main(["report", *paths, "--out", str(tmp_path / "out"), "--json"]) == 0
    text = capsys.readouterr().out
    fields = json.loads(text, parse_constant=pytest.fail)
    assert fields.keys() == {
        *("ranks", "shared", "rounds", "files", "too_late", "speeds", "savings"),
        *("round", "replayed", "plans", "pictures"),
    }
    assert sorted(fields["pictures"]) == sorted(map(str, (tmp_path / "out").glob("*")))
    assert len(fields["files"]) == len(fields["rounds"]) == len(FILES[name])
    assert len(fields["speeds"]) == fields["ranks"]
    assert fields["shared"] == name.startswith("shared")
    if name == "usual":
        (saved,) = fields["savings"]
        assert saved["rank"] == 0 and saved["rounds"] == 5 and saved["stuck"] is None
        assert saved["avoided"] == pytest.approx(1)
        assert saved["share"] == pytest.approx(1 / 5.5)
        assert fields["round"] == pytest.approx(1)
        assert fields["replayed"] == pytest.approx(0.9, rel=1e-3)
        assert any(plan["actual"] for plan in fields["plans"])
        assert all(plan["name"] and plan["load"] > 0 for plan in fields["plans"])
    if name == "shared":
        assert fields["savings"] == [] and fields["plans"] == []
    if name == "without the root":
        assert fields["plans"] == [] and fields["replayed"] is None
    if name == "dead":
        assert [each["stuck"] for each in fields["savings"]] == [3]
        assert None in [plan["seconds"] for plan in fields["plans"]]


@pytest.mark.parametrize(
    ("stretched", "warned", "ranked"), [(1.0, 0, 1), (1.2, 1, 1), (1.8, 1, 0)]
)
def test_a_replay_that_is_off(stretched, warned, ranked, tmp_path, capsys):
    """Rounds took longer than work and messages explain."""
    record = seen()
    late = np.arange(ROUNDS) * (stretched - 1)
    times = {
        name: getattr(record, name) + late for name in ("started", "decided", "ended")
    }
    arrived = record.arrived + late[:, None]
    dataclasses.replace(record, arrived=arrived, **times).save(tmp_path / "0.npz")
    out = tmp_path / "pictures"
    assert main(["report", str(tmp_path / "0.npz"), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.count("processes that share their cores") == warned
    assert text.count("may be in the wrong order") == (warned and ranked)
    assert text.count("too inaccurate to compare other plans") == 1 - ranked
    assert text.count("as it was: Coded(fanout=3)") == ranked
    assert (out / "plans.png").exists() == bool(ranked)


def test_other_plans_where_a_rank_is_unknown(tmp_path, capsys):
    """Other plans are not ranked as if the unknown rank were as fast as the other
    ranks."""
    missing(1, step_times=[0.1, 0.9, 0.9, NAN], silent=[0, 0, 0, 0.2]).save(
        path := tmp_path / "0.npz"
    )
    assert main(["report", str(path), "--out", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "rank 3 came too late in most rounds, but these files do not tell how slow"
        in text
    )
    assert not (tmp_path / "plans.png").exists()


def test_disagreement():
    assert analysis.disagreement(2.0, 1.0) == analysis.disagreement(1.0, 2.0) == 2.0
    assert analysis.disagreement(NAN, 1.0) == 1.0
    assert analysis.disagreement(1.0, np.inf) == np.inf
    assert analysis.disagreement(1.0, 0.0) == np.inf


def test_command_on_other_files(tmp_path, capsys):
    (tmp_path / "text").write_text("rank 0")
    seen().save(tmp_path / "seen")
    seen().save(tmp_path / "again")
    seen(jaxcoded.make_plan(4, jaxcoded.Coded(stragglers=0))).save(tmp_path / "other")
    broken = dataclasses.replace(seen(), plan="no plan")
    broken.save(tmp_path / "broken")
    for names, words in (
        (["nothing"], "does not exist"),
        (["text"], "was not written by Telemetry.save"),
        (["seen", "again"], "belongs to rank 0, like a file before it"),
        (["seen", "other"], "belongs to another job, or to another plan, than"),
        (["broken"], "not a plan written by Plan.to_json"),
    ):
        paths = [str(tmp_path / name) for name in names]
        assert main(["report", *paths, "--out", str(tmp_path / "out")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("jaxcoded report: ")
        assert words in line


@pytest.mark.mpi
def test_report_of_a_job(tmp_path, capsys):
    """One of three children takes ten times as long, and no rank waits for it."""
    mpirun(4, "-m", "mpi4py", "tests/report/slow_rank.py", str(tmp_path), "100")
    paths = [str(tmp_path / f"rank-{rank}.npz") for rank in range(4)]
    for files in (paths[:1], paths):
        assert main(["report", *files, "--out", str(tmp_path / "out")]) == 0
        text = capsys.readouterr().out
        assert "child 3 was too late in" in text
        (avoided, share), *_ = re.findall(r"avoided (\S+) s \((\d+)%\)", text)
        saved = analysis.savings(
            Telemetry.load(files[0]), list(map(Telemetry.load, files))
        )
        assert float(avoided) == pytest.approx(saved.avoided, rel=0.01)
        assert float(share) == pytest.approx(100 * saved.share, abs=0.6)
        # for each round 0.3 s rather than 0.03
        assert saved.share > 0.5
        plans = {
            plan.name: plan.seconds
            for plan in analysis.compare(list(map(Telemetry.load, files)))
        }
        assert (
            plans["Coded(stragglers=0, fanout=3)"] > plans["as it was: Coded(fanout=3)"]
        )
        names = {"arrivals-0", "savings-0", "stragglers"}
        if "too inaccurate" not in text:  # as on a busy machine
            names.add("plans")
        written = {path.stem: path for path in (tmp_path / "out").glob("*.png")}
        assert written.keys() == names
        assert all(path.stat().st_size > 10_000 for path in written.values())
