"""Fuzz plans, codes and delay models given as text."""

import inspect
import itertools
import json
import math
import warnings
from dataclasses import fields

import pytest
from documents import calls, fuzzed, in_json, outcome
from hypothesis import given
from hypothesis import strategies as st

from jaxcoded import Coded, Plan, Shared, codes, make_plan
from jaxcoded.plan import Strategy, Uncoded
from jaxcoded.plan.placement import MOST_BLOCKS
from jaxcoded.tools.simulator import stragglers

PLANS = [
    make_plan(7, Coded(fanout=3)),
    make_plan(4, Coded(speeds=[1, 2, 3, 4])),
    make_plan(
        6,
        Coded(code={0: "cyclic_repetition"}, stragglers=1, parents=[-1, 0, 0, 0, 1, 1]),
    ),
    make_plan(3, Shared(blocks=2)),
]
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings about codes that amplify


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
        ({"speeds": ["1/0"]}, "speeds must be positive"),
        ({"speeds": ["1e999999999"]}, "speeds must be positive"),
        ({"speeds": 5}, "speeds must have one number for each rank"),
        ({"code": {"auto": 1}}, "code must be an integer"),
        ({"code": {"1": 1}}, "code must be a text"),
        ({"code": None}, "code must be a text"),
        ({"root_computes": 1}, "root_computes must be True or False"),
        ({"parents": [True, 0, 0, 0]}, "the parent of rank 0 must be"),
        ({"strategy": "Strategy"}, "is one of Coded, Shared, Uncoded"),
        ({"color": 1}, "Coded has no argument 'color'"),
    ],
)
def test_fields_of_a_plan(change, words):
    made = json.loads(make_plan(4, Coded()).to_json())
    made["strategy"] |= change
    with pytest.raises(ValueError, match=words):
        Plan.from_json(json.dumps(made))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parents": [True, 0, 0, 0]}, "parents must be a list of integers"),
        ({"format": "jaxcoded.Plan/1"}, "of this version of jaxcoded"),
        ({"strategy": []}, "strategy of a plan must be of type dict"),
    ],
)
def test_a_plan_around_its_strategy(change, words):
    made = json.loads(make_plan(4, Coded()).to_json()) | change
    with pytest.raises(ValueError, match=words):
        Plan.from_json(json.dumps(made))


def test_json_that_is_not():
    text = make_plan(4, Coded(seed=1)).to_json()
    for wrong, words in (
        (text.replace('"seed": 1', '"seed": 1, "seed": 1'), "'seed' is given twice"),
        (text.replace('"seed": 1', '"seed": NaN'), "NaN is not a number"),
        ("[" * 100_000, "nested too deeply"),
        (b"\xff" + text.encode(), "not a plan written by"),
        (None, "it is not a text, but None"),
    ):
        with pytest.raises(ValueError, match=words):
            Plan.from_json(wrong)


def test_a_code_larger_than_memory():
    for size, strategy, words in (
        (50_001, Coded(fanout=50_000), "take a smaller fan-out"),
        (2001, Coded(code="progressive", fanout=2000, stragglers=1999), "fan-out"),
        (3, Shared(blocks=MOST_BLOCKS), "give blocks="),
    ):
        with pytest.raises(ValueError, match=words):
            make_plan(size, strategy)


ARGUMENTS = sorted(
    {
        name
        for each in codes.NAMES
        for name in inspect.signature(getattr(codes, each)).parameters
    }
)


@fuzzed
@given(
    calls([*codes.NAMES, "auto"], ARGUMENTS),
    st.integers(1, 8),
    st.integers(0, 2),
    st.integers(1, 2),
)
def test_codes(text, size, tolerance, slices):
    plan = outcome(
        lambda: make_plan(size, Coded(code=text, stragglers=tolerance, slices=slices))
    )
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


@fuzzed
@given(
    calls(
        ["Shared", "Coded", "Uncoded"],
        sorted({f.name for s in (Shared, Coded, Uncoded) for f in fields(s)}),
    ),
    st.integers(1, 8),
)
def test_strategies(text, size):
    strategy = outcome(Strategy.parse, text)
    if strategy is None:
        return
    assert Strategy.parse(repr(strategy)) == strategy
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert hash(Strategy.from_json(strategy.to_json())) == hash(strategy)
    plan = outcome(make_plan, size, strategy)
    if plan is not None:
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "strategy must be one of Coded, Shared, Uncoded; got ''"),
        ("shared(replicas=2)", "did you mean 'Shared'"),
        ("Shared(replicas=2", "a closing parenthesis is missing"),
        ("Shared(2)", r"arguments need their names, as in Shared\(name=value\)"),
        ("Shared(replica=2)", "Shared has no argument 'replica': did you mean"),
        ("Shared(replicas=__import__('os'))", "replicas is not a Python literal"),
        ("Coded(stragglers=-1)", "stragglers must be an integer >= 0, got -1"),
        ("Coded(code='raptor')", "code must be 'auto' or one of"),
        ("Uncoded(stragglers=0)", "Uncoded has no argument 'stragglers'"),
        ("CodeTree()", "must be one of Coded, Shared, Uncoded"),
    ],
)
def test_texts_of_no_strategy(text, words):
    with pytest.raises(ValueError, match=words):
        Strategy.parse(text)
