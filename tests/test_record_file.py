"""Record files, which state which rank has computed which blocks."""

import json
import resource

import pytest

from jaxcoded import Options, Shared, make_plan
from jaxcoded.group.record import Record, Writer, read

PLAN = make_plan(2, Shared(blocks=2))
ROUNDS = [
    (1, "the blocks of a batch of 4", [[0, 3], [2, 1]]),
    (3, "the blocks of a batch of 4", [[], [2, 3, 1, 0]]),
    (4, "the blocks of a batch of 5", [[0, 1, 2], [3]]),
]


def written(path, rounds=ROUNDS):
    writer = Writer(path, PLAN)
    for dealt in rounds:
        writer.add(dealt)
    writer.close()
    return path


def test_a_written_record_is_read_back(tmp_path):
    assert read(written(tmp_path / "record"), PLAN) == ROUNDS


def test_a_job_that_was_killed(tmp_path):
    """If a job is killed in the middle of a line, this line is ignored."""
    path = written(tmp_path / "record")
    path.write_bytes(path.read_bytes()[:-3])
    assert read(path, PLAN) == ROUNDS[:-1]


def test_a_full_disk(tmp_path, caplog):
    """The log reports a full disk once, and earlier lines are valid."""
    path = written(tmp_path / "record", ROUNDS[:1])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))
    try:
        written(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (text,) = caplog.messages
    assert "ends with round 1" in text
    assert "the job continues without it" in text
    assert read(path, PLAN) == ROUNDS[:1]


def test_a_file_that_is_slower_than_the_rounds(tmp_path, caplog):
    """The file ends cleanly before the rounds that the engine could not keep for it."""

    rounds = iter(ROUNDS[:1])

    def following():
        for dealt in rounds:
            return dealt
        raise RuntimeError("7 rounds are lost")

    path = tmp_path / "record"
    writer = Writer(path, PLAN)
    for dealt in iter(writer.while_whole(following), None):
        writer.add(dealt)
    writer.close()
    (text,) = caplog.messages
    assert "ends with round 1: 7 rounds are lost; the job continues" in text
    assert read(path, PLAN) == ROUNDS[:1]


@pytest.mark.parametrize(
    "line, words",
    [
        ({"round": 1, "blocks": [[0, 1], [2]]}, "line 2 .* is not a line of a record"),
        ({"round": 1, "blocks": [[0, 1, 2, 3]]}, "line 2 .* is not a line of a record"),
        ({"format": "another"}, "was not written with record="),
    ],
)
def test_files_that_are_no_record(tmp_path, line, words):
    path = written(tmp_path / "record", [])
    with open(path, "ab" if "round" in line else "wb") as file:
        file.write(json.dumps(line).encode() + b"\n")
    with pytest.raises(ValueError, match=words):
        read(path, PLAN)


def test_another_plan(tmp_path):
    path = written(tmp_path / "record")
    with pytest.raises(ValueError, match="record of another plan"):
        read(path, make_plan(2, Shared(blocks=3)))


def test_the_record_that_is_followed_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "record")
    (tmp_path / "link").symlink_to("record")
    for other in ("./record", tmp_path / "record", "link"):
        with pytest.raises(ValueError, match="record and replay are the same file"):
            Record(other, "record").check(PLAN, Options().waits)
    Record("other", "record").check(PLAN, Options().waits)
