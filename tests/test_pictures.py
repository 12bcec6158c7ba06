"""The pictures of the documentation are those that their script draws."""

import pathlib

import draw_pictures
import pytest


@pytest.mark.parametrize("draw", draw_pictures.PICTURES, ids=lambda draw: draw.__name__)
def test_a_picture_is_as_its_script_draws_it(draw, tmp_path):
    draw(tmp_path / "picture.svg")
    there = pathlib.Path(draw_pictures.FOLDER, f"{draw.__name__}.svg")
    assert (tmp_path / "picture.svg").read_text() == there.read_text()
