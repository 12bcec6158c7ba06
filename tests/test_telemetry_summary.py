"""Summaries of a rank's records, from records written by hand."""

import dataclasses
import resource

import numpy as np
import pytest

import jaxcoded
from jaxcoded.group.telemetry import SLOWEST, Telemetry

NAN = float("nan")


def seen(**changes):
    """Return the root's telemetry in a star of three, in four rounds of one second.
    Rank 3 is 0.4 s late in the third, and misses the last, which does not wait for it.
    """
    columns = {
        "round": [7, 8, 9, 10],
        "work": [NAN, 0.1, 0.1, 0.3],
        "started": [0.0, 1.0, 2.0, 3.0],
        "decided": [0.5, 1.5, 2.5, 3.5],
        "ended": [0.6, 1.6, 2.6, 3.6],
        "decider": [1, 2, 2, 0],
        "outcome": [1, 1, 2, 1],
        "payload": [1_000_000] * 4,
        "skipped": [False] * 4,
        "approximate": [False, False, False, True],
        "shared": [False] * 4,
        "loop": [False] * 4,
        "busy": [0.0] * 4,
        "blocks": [0] * 4,
        "computed": [],
        "children": [1, 2, 3],
        "arrived": [0.5, 0.1, 0.2, 1.1, 1.5, 1.2, 2.1, 2.5, 2.9, 2.9, 2.9, NAN],
        "used": [True, True, False] * 4,
        "told": [0, 1, 2, 3],
        "step_times": [0.05, 0.1, 0.1, 0.4],
        "silent": [0.0, 0.0, 0.0, 0.7],
        "peers": [1, 2],
        "link_bytes": [4_000_000, 1000],
        "link_seconds": [0.002, 0.0],
    }
    plan = jaxcoded.make_plan(4, jaxcoded.Coded())
    return Telemetry.of(0, plan, columns | changes)


def test_lateness():
    late = seen().lateness
    np.testing.assert_allclose(late[:, 0], [0.0, -0.4, -0.4, -0.6])
    np.testing.assert_allclose(late[:3, 2], [-0.3, -0.3, 0.4])
    assert late[3, 2] == np.inf
    # without a sum there is no lateness
    assert np.isnan(seen(decided=[NAN] * 4).lateness).all()


def test_speeds():
    """A speed is the load over the time between calls, or over the silence; a root
    without data does not count.
    """
    speeds = seen().speeds
    # rank 3 was alive 0.7 s before
    np.testing.assert_allclose(speeds, [1.0, 1.0, 1.0, 0.25])
    long = seen(silent=[0.0, 0.0, 0.0, 1.6]).speeds
    np.testing.assert_allclose(long, [1.0, 1.0, 1.0, 1 / 16])
    alone = seen(step_times=[0.05, 0.1, 0.1, NAN]).speeds  # no other data
    np.testing.assert_allclose(alone, [1.0, 1.0, 1.0, 1 / 7])
    unknown = seen(step_times=[0.05, 0.1, 0.2, NAN], silent=[0.0] * 4)
    np.testing.assert_allclose(unknown.speeds, [0.75, 1.0, 0.5, 0.75])
    assert seen(silent=[0, 0, 0, 1e9]).speeds[3] == SLOWEST
    nothing = seen(step_times=[NAN] * 4, silent=[0.0] * 4)
    assert nothing.speeds.tolist() == [1.0] * 4


def test_only_measured_ranks_are_slow():
    """A root without data, and ranks that never sent anything, count as the median."""
    most_slow = seen(step_times=[0.01, 0.1, 0.4, NAN], silent=[0.0] * 4)
    np.testing.assert_allclose(most_slow.speeds, [0.625, 1.0, 0.25, 0.625])
    most_slow = dataclasses.replace(most_slow, loads=np.array([0, 0.5, 0.25, 0.5]))
    np.testing.assert_allclose(most_slow.speeds, [0.5625, 1.0, 0.125, 0.5625])
    columns = {"step_times": [0.01, 0.1, 0.1, 0.4, NAN], "silent": [0.0] * 5}
    slow = dataclasses.replace(
        seen(),
        loads=np.array([0, 0.5, 0.5, 0.5, 0.5]),
        parents=np.array([-1, 0, 0, 0, 0]),
        **{name: np.array(values) for name, values in columns.items()},
    )
    np.testing.assert_allclose(slow.speeds, [1.0, 1.0, 1.0, 0.25, 1.0])
    lines = [line for line in slow.summary().splitlines() if "is slow" in line]
    assert [line.split(" is slow")[0] for line in lines] == ["rank 3"]


def test_ranks_that_take_turns_are_not_slow():
    """A real record of four ranks on two cores: rounds differ, one rank was lucky, one
    was not, and one had just been silent.
    """

    def slow(ended, **changes):
        other = dataclasses.replace(seen(**changes), ended=np.array(ended))
        return [line for line in other.summary().splitlines() if "is slow" in line]

    turns = [0.0, 0.0176, 0.0391, 0.0646]  # rounds of 17.6, 21.5 and 25.5 ms
    assert (
        slow(turns, step_times=[0.0021, 0.0038, 0.0113, 0.0048], silent=[0.0] * 4) == []
    )
    assert (
        slow(turns, step_times=[0.001, 0.004, 0.005, 0.004], silent=[0, 0, 0, 0.064])
        == []
    )
    (line,) = slow(turns, step_times=[0.001, 0.004, 0.02, 0.004], silent=[0.0] * 4)
    assert line == (
        "rank 2 is slow: it takes 5 times as long for its data as the median rank, 20 ms "
        "a round"
    )
    # on separate cores, twice is enough
    even = [0.0, 0.02, 0.04, 0.06]
    assert (
        len(slow(even, step_times=[0.001, 0.004, 0.0113, 0.0048], silent=[0.0] * 4))
        == 1
    )


def test_summary():
    lines = seen().summary().splitlines()
    assert lines[0] == (
        "rank 0, rounds 7 to 10, medians: 600 ms from call to result, 100 ms of work "
        "before the call"
    )
    assert lines[1] == "failed: 1 of 4 rounds"
    assert lines[2] == "approximate: 1 of 4 rounds"
    assert lines[3] == (
        "child 3 was too late in 50% of 4 rounds by 400 ms (median)"  # still alive
        "; if all children were equally fast, each would be late in 33%"
    )
    assert lines[4] == (
        "rank 3 is slow: it takes 4 times as long for its data as the median rank, 400 ms "
        "a round"
    )
    assert lines[5:] == ["from rank 1: 4 MB, 2 GB/s", "from rank 2: 1 kB"]
    assert (
        "(median) and has been missing since; its last sign of life was 3 s old"
        in seen(silent=[0.0, 0.0, 0.0, 3.0]).summary()
    )


def test_a_silent_rank_is_not_slow():
    """A silent rank reports no time for its data, so its speed is unknown."""
    for silent in 1.6, 60.0:
        (line,) = (
            line
            for line in seen(silent=[0.0, 0.0, 0.0, silent]).summary().splitlines()
            if line.startswith("rank 3")
        )
        words = {1.6: "1.6 s", 60.0: "60 s"}[silent]
        assert line == (
            f"rank 3 was last active {words} before the newest result: it is slow, stopped, dead, or was late only once"
        )


def shared(**changes):
    """Return the telemetry of `seen` with shared work: rank 3 computes a quarter of its own blocks, and one round does
    not use them.
    """
    plan = jaxcoded.make_plan(4, jaxcoded.Shared(replicas=3)).to_json()
    each = [[12, 3, 0], [12, 3, 0], [12, 3, 0], [3, 0, 0]]
    last = [[12, 4, 0], [12, 4, 0], [12, 4, 0], [0, 0, 2]]
    record = seen(
        shared=[True] * 4,
        busy=[0.15, 0.15, 0.15, 0.16],
        blocks=[15, 15, 15, 16],
        computed=np.array([each, each, each, last]).ravel(),
        **changes,
    )
    return dataclasses.replace(record, plan=plan)


def test_shared_work():
    """The summary shows which rank computed which blocks, and which rank is slow
    although no round waited for it.
    """
    record = shared()
    assert record.divided.all()
    assert record.computed[3, 3].tolist() == [0, 0, 2]
    lines = record.summary().splitlines()
    assert "this rank computed 15.2 blocks a round, 10 ms each" in lines
    assert (
        "9.75 of 48 blocks a round were computed by ranks other than their owners, "
        "and 0.5 more were not used"
    ) in lines
    assert (
        "rank 3 computed 2.25 of its 12 blocks, and other ranks the rest; 0.5 more were not used"
    ) in lines
    assert (
        "rank 3 is slow: it takes 4 times as long for its data as the median rank, 400 ms a round"
    ) in lines
    assert not any("child" in line for line in lines)


def test_short_blocks():
    """The summary advises fewer blocks, or none."""

    def said(busy, blocks=12):
        plan = jaxcoded.make_plan(4, jaxcoded.Shared(replicas=3, blocks=blocks))
        other = dataclasses.replace(shared(), busy=np.array(busy), plan=plan.to_json())
        return [line for line in other.summary().splitlines() if "short" in line]

    assert said([0.15] * 4) == []
    # the first round compiles; 15 and 16 blocks in 6 ms
    assert said([0.15, 0.006, 0.006, 0.006]) == [
        "these blocks are short: fewer blocks (now blocks=12), or a code would suit better"
    ]
    (line,) = said([0.006] * 4, blocks=1)
    assert line.endswith("short: a code would suit better")


def test_shared_work_as_a_worker_sees_it():
    other = dataclasses.replace(shared(), computed=np.zeros((4, 4, 3), int))
    assert not other.divided.any()
    assert "this rank computed 15.2 blocks a round" in other.summary()


def test_loops_and_their_sums():
    """A step is two rounds, whose times are kept separate."""
    text = seen(
        loop=[True, False, True, False],
        work=[NAN, 0.001, 0.1, 0.001],
        ended=[0.6, 1.1, 2.6, 3.1],
        outcome=[1] * 4,
        approximate=[False] * 4,
    ).summary()
    assert text.splitlines()[:2] == [
        (
            "rank 0, rounds 7 to 10, medians: 100 ms from call to result, 600 ms for a loop over "
            "group.blocks, 100 ms of work before the call"
        ),
        "2 of 4 rounds are loops over group.blocks; the sum of each loop is one more round",
    ]


def test_files(tmp_path):
    path = tmp_path / "seen.npz"
    seen().save(path)
    with np.load(path, allow_pickle=False) as file:
        assert file["rounds"].tolist() == [7, 8, 9, 10]
    back = Telemetry.load(path)
    for field in dataclasses.fields(Telemetry):
        np.testing.assert_array_equal(
            getattr(back, field.name), getattr(seen(), field.name)
        )


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "seen.npz"
    seen().save(path)
    link = tmp_path / "link.npz"
    link.symlink_to(path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        for each in (path, link):
            with pytest.raises(OSError, match="File too large"):
                seen().save(each)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert set(tmp_path.iterdir()) == {path, link}
    seen(round=[8, 9, 10, 11]).save(link)
    assert link.is_symlink() and Telemetry.load(path).rounds[0] == 8
    with pytest.raises(OSError, match="No space left on device"):
        seen().save("/dev/full")


def test_other_files(tmp_path):
    np.savez(tmp_path / "arrays", rounds=[1])
    np.save(tmp_path / "array", np.ones(3))
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("rank 0")
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 and no more")
    seen().save(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    (tmp_path / "whole").unlink()
    (tmp_path / "cut").write_bytes(whole[: len(whole) // 2])
    entry = whole.index(b"PK\x01\x02")
    for at in (6, 8, 10):  # zip version, encryption, compression
        damaged = bytearray(whole)
        damaged[entry + at] = 99
        (tmp_path / f"damaged-{at}").write_bytes(damaged)
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=f"{path.name} was not written by"):
            Telemetry.load(path)
    with pytest.raises(FileNotFoundError):
        Telemetry.load(tmp_path / "nothing")
