"""README's statements about its program, its costs and its examples are true."""

import difflib
import fractions
import re

import pytest
from launch import ROOT

import jaxcoded

README = (ROOT / "README.md").read_text()
EXAMPLES = ROOT / "examples"


def program(name):
    """Return a program's lines after the docstring."""
    return (EXAMPLES / name).read_text().split('"""\n\n', 1)[1].splitlines()


def test_the_difference_is_that_of_the_two_programs():
    (shown,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    before, after = program("train_mpi4jax.py"), program("train.py")
    everything = max(len(before), len(after))
    difference = difflib.unified_diff(before, after, n=everything, lineterm="")
    assert shown.splitlines() == list(difference)[3:]


def missing(plan):
    """Return how many children of a parent may be missing, in the plan's words."""
    text = plan.describe()
    if "none of a parent's children may be missing" in text:
        return "none"
    number = re.search(r"any (\d )?.*may be missing", text)[1] or "1"
    return f"any {number.strip()}"


def test_prices():
    """The prices match the plans, and the measured steps match the benchmark."""
    rows = re.findall(
        r"^\| `(\w+\(.*?\))`.* \| (\d/\d) of the batch.* \| (\S+) × \| (.*) \| (\S+) \| (\S+) \|$",
        README,
        re.MULTILINE,
    )
    assert [row[0] for row in rows] == ["Uncoded()", "Shared()", "Coded(stragglers=1)"]
    measured = (ROOT / "benchmarks" / "README.md").read_text()
    for (arguments, load, work, late, *steps), column in zip(rows, (0, 4, 2)):
        plan = jaxcoded.make_plan(4, jaxcoded.Strategy.parse(arguments))
        assert plan.load == fractions.Fraction(load)
        assert float(work) == round(float(plan.load) * 4, 1)
        assert late == {"none": "nobody"}.get(
            missing(plan), f"{missing(plan)} but the root"
        )
        for step, what in zip(steps, ("120 ms, nobody slow", "one 10 × slower")):
            (row,) = re.findall(rf"^\| {what} \|(.*)\|$", measured, re.MULTILINE)[:1]
            assert row.split(" | ")[column].strip() == step
    root = jaxcoded.Coded(stragglers=1, root_computes=True)
    assert (
        f"of 4 ranks computes {jaxcoded.make_plan(4, root).load} of the batch" in README
    )


SCHEME = re.compile(
    r"^\| [^|`]+ \| `([^`]+)` \| (\S+) \| (.+) \| (\S+) \| \[`(\w+)`\]\((\S+)\) \|$",
    re.MULTILINE,
)


@pytest.mark.parametrize("row", SCHEME.findall(README), ids=lambda row: row[0])
def test_schemes_of_the_papers(row):
    strategy, load, late, message, test, file = row
    plan = jaxcoded.make_plan(13, jaxcoded.Strategy.parse(strategy))
    assert plan.load == fractions.Fraction(load)
    sent = fractions.Fraction(plan.codings[0].code.parts, plan.codings[0].code.m)
    assert sent == fractions.Fraction(message)
    assert re.split(r" of|;| \(", late)[0] == missing(plan)
    assert ("approximate" in late) == ("then approximate" in plan.describe())
    assert f"\ndef {test}(" in (ROOT / file).read_text()


def test_the_table_of_schemes_is_whole():
    section = README.partition("## The papers' schemes")[2].partition("\n### ")[0]
    assert len(SCHEME.findall(section)) == section.count("\n| ") - 2 > 6


def test_every_page_is_linked():
    pages = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert pages <= set(re.findall(r"\]\(([^)#:]+)", README))


def test_every_example_is_in_the_index():
    index = (EXAMPLES / "README.md").read_text()
    there = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert set(re.findall(r"\]\(([\w.]+)\)", index)) == there
    for name, command in re.findall(
        r"^\| \[`([\w.]+)`\].* \| `(.*)` \|$", index, re.MULTILINE
    ):
        if name != "digits.py":
            for start in command.split("`, then `"):
                assert f"examples/{name}" in start
                # the example itself also says how to start it
                assert start in (EXAMPLES / name).read_text() or name == "job.slurm"


@pytest.mark.parametrize(
    "page", ["README.md", "examples/README.md", "docs/training.md"]
)
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#:]+)(?:#([\w-]+))?\)", (ROOT / page).read_text())
    assert len(links) > 5
    for path, heading in links:
        assert (folder / path).exists(), path
        if heading:
            text = (folder / path).read_text()
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            names = [
                re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings
            ]
            assert heading in names, f"{path}#{heading}"
