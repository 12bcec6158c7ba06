"""Write the outcome of each test of a job, a line of JSON each, to a file that survives
the job.
"""

import json


class Outcomes:
    """A plugin of pytest. All ranks record failures; the first one also records tests
    that begin, pass and are skipped.
    """

    def __init__(self, path, rank):
        self.path, self.rank = path, rank

    def pytest_runtest_logstart(self, nodeid):
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
        line = json.dumps({"test": test, "outcome": outcome, "text": text}) + "\n"
        # several ranks write, so each line is a single write
        with open(self.path, "ab", buffering=0) as file:
            file.write(line.encode())


def read(path):
    """Return the outcome and the text of each test, in the order of their beginnings.
    If the job ended in a test, its outcome is "begun".
    """
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        test, outcome, text = json.loads(line).values()
        before, said = found.get(test, ("begun", ""))
        if "failed" in (before, outcome):
            outcome, text = "failed", said + text
        found[test] = outcome, text
    return found
