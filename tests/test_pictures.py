"""The documentation's pictures are what their script draws from the stored tables."""

import dataclasses
import importlib.util
import itertools
import pathlib

import draw_pictures
import numpy as np
import pytest
from pictures.chart import FIGURES, figures

TABLES = (FIGURES.parent / "README.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("draw", draw_pictures.PICTURES, ids=lambda draw: draw.__name__)
def test_a_picture_is_as_its_script_draws_it(draw, tmp_path):
    draw(tmp_path / "picture.svg")
    there = pathlib.Path(draw_pictures.FOLDER, f"{draw.__name__}.svg")
    assert (tmp_path / "picture.svg").read_text() == there.read_text()


def table(header, name):
    """Return the cells of a row of the first table with this header."""
    begin = next(n for n, line in enumerate(TABLES) if line.startswith(header))
    for line in TABLES[begin:]:
        cells = [cell.strip() for cell in line.replace("`", "").strip("|").split("|")]
        if cells[0] == name:
            return cells[1:]
    raise LookupError(f"{header} has no row {name}")


def test_faults_are_those_of_the_tables():
    kinds = ["none", "slow", "stuck", "stopped", "killed"]
    for row in figures("faults"):
        times = ", ".join(
            row[f"{which}_ms"] for which in ("before", "after", "longest")
        )
        if not row["longest_ms"]:
            continue
        if row["library"].startswith("torchft"):
            column = ["torchft, 60 s", "torchft, 2 s"].index(row["library"])
            cell = table("| fault | 60 s", row["fault"])[column].replace(" 271", "271")
            cell = cell.replace(" 095", "095").split(";")[0]
        else:
            column = kinds.index(row["fault"])
            cell = table("| | none | slow", row["library"])[column]
        assert cell == times, row


def test_steps_agree_with_the_table_of_faults():
    """jaxcoded's steps continue; the steps of others become rare, stop for the longest step, or end."""
    rows = figures("steps")
    assert len({(row["library"], row["fault"]) for row in rows}) == len(rows) == 24
    for row in rows:
        steps = np.array(row["steps"].split(), int)
        (known,) = figures("faults", library=row["library"], fault=row["fault"])
        gaps = np.diff(np.append(steps, 5000))
        assert min(gaps[:-1]) > 0 and steps[0] >= -500, row
        if row["library"] in ("shared", "coded, s=1"):
            assert max(gaps) < 100, row
        elif known["outcome"] or float(known["longest_ms"]) > 5000:
            assert max(steps) <= 0, row
        elif row["fault"] == "slow":
            assert min(np.diff(steps[steps > 0])) > 150, row
        else:
            assert max(gaps) == pytest.approx(float(known["longest_ms"]), rel=0.1), row


def test_sections_are_those_of_the_table():
    sizes = ["4000", "64000", "200000", "2000000", "20000000"]
    for row in figures("sections"):
        cell = table("| | 4 KB | 64 KB", row["collective"])[sizes.index(row["bytes"])]
        ratio = "" if row["collective"] == "ring" else f", {row['over_ring']}"
        assert cell == row["ms"] + ratio, row


def test_shared_work_is_that_of_the_table():
    header = "| | uncoded | by the step before | fractional"
    schemes = list(dict.fromkeys(row["scheme"] for row in figures("sharing")))
    begin = next(n for n, line in enumerate(TABLES) if line.startswith(header))
    rows, step = {}, None
    for line in TABLES[begin + 2 : begin + 16]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if " ms, " in name:
            step, name = name.split(" ms, ")
        rows |= {(step, name, scheme): cell for scheme, cell in zip(schemes, cells)}
    stored = {
        (row["step_ms"], row["stragglers"], row["scheme"]): row["step_over_ideal"]
        for row in figures("sharing")
    }
    assert stored == rows


def test_numbers_of_ranks_are_as_simulated():
    spec = importlib.util.spec_from_file_location(
        "scaling", FIGURES.parent / "scaling.py"
    )
    scaling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scaling)
    for model, scheme in itertools.product(scaling.MODELS, ("ring", "coded tree")):
        wanted = {"stragglers": model, "scheme": scheme, "ranks": "100"}
        (row,) = figures("scaling", gbit_per_s="10", **wanted)
        times = scaling.simulate(
            scaling.layouts(100)[scheme][row["which"]],
            dataclasses.replace(scaling.Network.of(10), sections_from=0),
            payload=scaling.PAYLOAD,
            work=scaling.WORK * 100,
            stragglers=scaling.MODELS[model],
            rounds=200,
        ).seconds[1:]
        assert np.median(times) == pytest.approx(float(row["seconds"]), rel=1e-3)
