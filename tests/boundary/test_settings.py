"""Fuzz the settings of calls, command lines and the environment."""

import math

import pytest
from documents import fuzzed, literals, numbers, outcome, scalars, values
from hypothesis import given
from hypothesis import strategies as st

from jaxcoded import DEBUG, Check, Options, _parse
from jaxcoded.tools.cli import cluster
from jaxcoded.tools.simulator import stragglers
from jaxcoded.transport.check import VARIABLE
from jaxcoded.transport.deadline import ACTIONS, Deadline

quantities = st.one_of(
    st.builds(
        "{}{}{}{}".format,
        st.sampled_from(["", " ", " " * 100_000]),
        st.sampled_from(
            ["4", "1.5", "1e6", "1e999", "9" * 400, "", ".", "-1", "1e", "٣", "1_0"]
        ),
        st.sampled_from(["", " ", "\n", " " * 100_000]),
        st.sampled_from(
            ["", "k", "K", "M", "MB", "MiB", "B", "T", "s", "ms", "µs", "x", "KiBB"]
        ),
    ),
    st.text(max_size=8),
)


@fuzzed
@given(quantities, st.sampled_from(["count", "number_of_bytes", "number_of_seconds"]))
def test_quantities(text, name):
    number = outcome(getattr(_parse, name), "--it", text)
    if number is not None:
        assert type(number) is float and 0 < number < math.inf


deadlines = st.one_of(
    values,
    st.builds("{}{}".format, numbers, st.sampled_from(["x", " x", "X", ""])),
    st.sampled_from(["3x", "1.5 x", "9" * 400 + "x", "٣x", "1" * 100_000, 10.0, None]),
)


@fuzzed
@given(deadlines, st.sampled_from(ACTIONS) | values)
def test_deadlines(deadline, action):
    found = outcome(Deadline.parsed, deadline, action)
    if found is not None:
        assert 0 <= found.seconds < math.inf and 0 <= found.rounds < math.inf
        assert found.action in ACTIONS


@fuzzed
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "deadline": deadlines,
            "on_deadline": st.sampled_from(ACTIONS) | scalars,
            "piece_bytes": values,
            "sections_from": values,
            "history_bytes": values,
            "telemetry_rounds": values,
            "check": st.sampled_from([DEBUG, Check("drop"), Check("warn", wait=True)])
            | values,
        },
    )
)
def test_options(given_):
    options = Options(**given_).complete()
    if outcome(lambda: options.validate() or True):
        most = max(
            options.piece_bytes or 0, options.sections_from or 0, options.history_bytes
        )
        assert 0 <= options.telemetry_rounds <= 2**24 and most <= 2**62
        assert options.waits.action in ACTIONS


@fuzzed
@given(
    st.sampled_from(["", "0", "1", "true"])
    | st.text(st.characters(codec="ascii", min_codepoint=1))
)
def test_the_environment(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, text)
        found = outcome(lambda: Options().complete().validate() or True)
    assert (found is True) == (text in ("", "0", "1"))


LINE = {
    "ranks": 4,
    "payload": "4MB",
    "parameters": None,
    "dtype": None,
    "compute": "1.2",
    "model": None,
    "trace": None,
    "measured": None,
    "costs": None,
    "batch_size": None,
    "gigabits": None,
    "send_gigabits": None,
    "latency": None,
    "seed": 0,
}
CHANGES = {
    "ranks": st.integers(-2, 5) | st.sampled_from([None, 2**40]),
    "payload": st.none() | quantities,
    "parameters": quantities,
    "dtype": st.just("float32"),
    "compute": quantities,
    "model": literals | st.sampled_from(sorted(stragglers.MODELS)),
    "trace": st.sampled_from(["/", "/nothing", "\0", "/dev/null"]),
    "measured": st.sampled_from(["/", "/nothing", "/dev/null"]),
    "costs": st.sampled_from(["/", "/nothing", "/dev/null", __file__]),
    "batch_size": st.one_of(st.none(), st.integers()),
    "gigabits": numbers,
    "send_gigabits": numbers,
    "latency": numbers,
    "seed": st.integers(-1, 2) | numbers,
}


@st.composite
def lines(draw):
    """Draw a command line with some options changed."""
    names = draw(st.lists(st.sampled_from(sorted(CHANGES)), max_size=3))
    return LINE | {name: draw(CHANGES[name]) for name in names}


@pytest.mark.filterwarnings("ignore")  # warnings about a trace without numbers
@fuzzed
@given(lines())
def test_a_command_line(given_):
    """The numbers that plan and simulate print are in their ranges."""
    found = outcome(cluster._cluster, **given_, errors=(ValueError, OSError))
    if found is not None:
        assert 0 < found.payload < math.inf and 0 < found.work < math.inf
        assert found.ranks >= 2 and found.seed >= 0
        assert found.network.bandwidth > 0 and 0 <= found.network.latency < math.inf


@pytest.mark.parametrize("name", ["JAXCODED_STATUS_SIGNAL", "JAXCODED_PTRACER"])
def test_switches_of_the_environment(monkeypatch, name):
    for value in ("ON", "OFF", ""):
        monkeypatch.setenv(name, value)
        Options().complete().validate()
    monkeypatch.setenv(name, "maybe")
    with pytest.raises(ValueError, match=f"{name} must be ON or OFF, got 'maybe'"):
        Options().complete().validate()
