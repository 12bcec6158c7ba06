"""Write the outcome of each test of a job, one line of JSON each, to a file that survives the job."""

import json
import time

import pytest

TEST = "test"  # property of the report of a test in a job: its name


class Reported:
    """A pytest plugin that counts and names tests in jobs like all other tests."""

    def pytest_sessionstart(self, session):
        self.session = session

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        if name := dict(report.user_properties).get(TEST):
            report.nodeid = name
            self.session.testscollected += 1


def report(item, name, outcome, text, seconds):
    """Report the outcome of a test in the job of this item."""
    details = (name.partition("::")[0], None, text) if outcome == "skipped" else text
    its = pytest.TestReport(
        *(item.nodeid, item.location, {}, outcome, details or None, "call"),
        duration=seconds,
        user_properties=[(TEST, name)],
    )
    item.ihook.pytest_runtest_logreport(report=its)


class Outcomes:
    """A pytest plugin. All ranks record failures; the first rank also records tests that begin, pass and are skipped."""

    def __init__(self, path, rank):
        self.path, self.rank = path, rank

    def pytest_runtest_logstart(self, nodeid):
        self.start = time.monotonic()
        self.first_notes(nodeid, "begun")

    def pytest_runtest_logreport(self, report):
        if report.failed:
            text = f"on rank {self.rank}:\n{report.longreprtext}\n"
            self.note(report.nodeid, "failed", text)
        elif report.skipped:
            self.first_notes(report.nodeid, "skipped", str(report.longrepr[-1]))
        elif report.when == "call":
            self.first_notes(report.nodeid, "passed")

    def first_notes(self, *what):
        if self.rank == 0:
            self.note(*what)

    def note(self, test, outcome, text=""):
        line = {"test": test, "outcome": outcome, "text": text}
        line["seconds"] = time.monotonic() - self.start
        # several ranks write, so each line is a single write
        with open(self.path, "ab", buffering=0) as file:
            file.write(f"{json.dumps(line)}\n".encode())


def read(path):
    """Return the outcome, the text and the seconds of each test, in the order of their
    beginnings. If the job ended in a test, its outcome is "begun".
    """
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        test, outcome, text, seconds = json.loads(line).values()
        before, words, _ = found.get(test, ("begun", "", 0))
        if "failed" in (before, outcome):
            outcome, text = "failed", words + text
        found[test] = outcome, text, seconds
    return found
