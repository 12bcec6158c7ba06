"""Plans, codes and models of delays that come as texts."""

import inspect
import itertools
import json
import math
import warnings

import pytest
from documents import calls, fuzzed, in_json, outcome
from hypothesis import given
from hypothesis import strategies as st

from jaxcoded import Plan, codes, make_plan
from jaxcoded.plan.placement import MOST_BLOCKS
from jaxcoded.simulator import stragglers

PLANS = [
    make_plan(7, fanout=3),
    make_plan(4, speeds=[1, 2, 3, 4]),
    make_plan(
        6, code={0: "cyclic_repetition"}, stragglers=1, parents=[-1, 0, 0, 0, 1, 1]
    ),
    make_plan(3, code="shared(replicas=1, blocks=2)"),
]
pytestmark = pytest.mark.filterwarnings("ignore")  # of codes that amplify


@fuzzed
@given(st.sampled_from(PLANS).flatmap(lambda plan: in_json(json.loads(plan.to_json()))))
def test_plans(text):
    plan = outcome(Plan.from_json, text)
    if plan is not None:
        assert isinstance(plan, Plan)
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.describe()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speeds": ["1/0"]}, "speeds must be a list of texts"),
        ({"speeds": ["1e999999999"]}, "speeds must be a list of texts"),
        ({"speeds": 5}, "speeds must be a list of texts"),
        ({"code": {"auto": 1}}, "code must be a text"),
        ({"code": None}, "code must be a text"),
        ({"root_computes": 1}, "root_computes must be true or false"),
        ({"parents": [True, 0, 0, 0]}, "parents must be a list of integers"),
        ({"format": "jaxcoded.Plan/2"}, "of this version of jaxcoded"),
    ],
)
def test_fields_of_a_plan(change, words):
    fields = json.loads(make_plan(4).to_json()) | change
    with pytest.raises(ValueError, match=words):
        Plan.from_json(json.dumps(fields))


def test_json_that_is_not():
    text = make_plan(4).to_json()
    for wrong, words in (
        (text.replace("{", '{"seed": 1, ', 1), "'seed' is there twice"),
        (text.replace('"seed": 0', '"seed": NaN'), "NaN is no number"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff" + text.encode(), "not a plan written by"),
        (None, "no text, but None"),
    ):
        with pytest.raises(ValueError, match=words):
            Plan.from_json(wrong)


def test_a_code_that_fits_into_no_memory():
    for arguments, words in (
        ({"parents": [-1] + [0] * 50_000}, "take a smaller fan-out"),
        (
            {"code": "progressive", "parents": [-1] + [0] * 2000, "stragglers": 1999},
            "fan-out",
        ),
        (
            {"code": f"shared(blocks={MOST_BLOCKS})", "parents": [-1, 0, 0]},
            "blocks must be",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            make_plan(len(arguments["parents"]), **arguments)


ARGUMENTS = sorted(
    {
        name
        for each in codes.NAMES
        for name in inspect.signature(getattr(codes, each)).parameters
    }
)


@fuzzed
@given(
    calls(
        [*codes.NAMES, "auto", "shared", "shared"], [*ARGUMENTS, "replicas", "blocks"]
    ),
    st.integers(1, 8),
    st.integers(0, 2),
    st.integers(1, 2),
)
def test_codes(text, size, tolerance, slices):
    plan = outcome(make_plan, size, code=text, stragglers=tolerance, slices=slices)
    if plan is not None:
        assert Plan.from_json(plan.to_json()) == plan


FIELDS = sorted(
    {
        name
        for each in stragglers.MODELS.values()
        for name in inspect.signature(each).parameters
    }
)
models = calls(stragglers.MODELS, FIELDS)


@fuzzed
@given(
    st.lists(models, min_size=1, max_size=3).map("+".join),
    st.integers(1, 5),
)
def test_models(text, size):
    def seconds():
        rounds = stragglers.named(text).rounds(size)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return [each.time(0.5) for each in itertools.islice(rounds, 3)]

    times = outcome(seconds, errors=(ValueError, OSError))
    for each in times or ():
        assert each.shape == (size,) and not any(map(math.isnan, each.tolist()))
