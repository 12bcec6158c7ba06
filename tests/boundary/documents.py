"""Inputs for the fuzzers: documents that are nearly valid, and invalid texts and bytes.

Each test asserts that an input gives a valid object or an error with a message. ``make
fuzz`` sets ``JAXCODED_EXAMPLES=1000``: each test then draws 1000 new inputs.
"""

import contextlib
import copy
import json
import os
import resource

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st

FEW = 25
EXAMPLES = int(os.environ.get("JAXCODED_EXAMPLES", FEW))
fuzzed = settings(
    deadline=None,
    max_examples=EXAMPLES,
    derandomize=EXAMPLES == FEW,
    suppress_health_check=list(HealthCheck),
)
MOST_WORDS = 6000  # characters of an error text

# Values of a wrong type, and values of the right type outside its range.
numbers = st.one_of(
    st.sampled_from([0, 1, -1, 2, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**400]),
    st.integers(-5, 20),
    st.sampled_from([0.0, 0.5, 1.0, -1.5, 1e308, 5e-324, -1e308]),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
)
letters = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.one_of(st.none(), st.booleans(), numbers, letters)
values = st.recursive(
    scalars,
    lambda each: (
        st.lists(each, max_size=4) | st.dictionaries(letters, each, max_size=3)
    ),
    max_leaves=6,
)


def _paths(document, here=()):
    yield here
    items = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    for key, value in items:
        yield from _paths(value, (*here, key))


def _nested(draw, value):
    for _ in range(draw(st.sampled_from([1, 3, 60]))):
        value = [value]
    return value


@st.composite
def changed(draw, valid):
    """Draw the valid document with up to three changes."""
    document = [copy.deepcopy(valid)]
    for _ in range(draw(st.integers(0, 3))):
        paths = [path for path in _paths(document) if path]
        *above, key = draw(st.sampled_from(paths))
        place = document
        for step in above:
            place = place[step]
        how = draw(
            st.sampled_from(["other", "gone", "more", "twice", "nested", "name"])
        )
        if how == "gone" and above:
            del place[key]
        elif how == "nested":
            place[key] = _nested(draw, place[key])
        elif how == "twice" and isinstance(place, list) and above:
            place.insert(key, copy.deepcopy(place[key]))
        elif how == "more" and isinstance(place, dict):
            place[draw(letters)] = draw(values)
        elif how == "name" and isinstance(place, dict):
            place[draw(letters)] = place.pop(key)
        else:
            place[key] = draw(values)
        if not document:
            break
    return document[0] if document else None


@st.composite
def damaged(draw, valid):
    """Draw the valid bytes with some of them removed, changed or added."""
    data = bytearray(draw(valid) if isinstance(valid, st.SearchStrategy) else valid)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        how = draw(st.sampled_from(["cut", "gone", "flip", "more", "again", "numbers"]))
        if how == "cut":
            del data[at:]
        elif how == "gone":
            del data[at : at + draw(st.integers(1, 40))]
        elif how == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "again":
            data[at:at] = data[at : at + draw(st.integers(1, 200))]
        elif how == "numbers":
            data[at : at + 8] = draw(
                st.sampled_from([b"\xff" * 8, bytes(8), b"\x7f" * 8])
            )
        else:
            data[at:at] = draw(st.binary(max_size=20))
    return bytes(data)


def in_json(valid):
    """Draw texts and bytes of JSON that is nearly a valid document."""
    texts = changed(valid).map(json.dumps)
    plain = json.dumps(valid)
    field = next(iter(valid))
    odd = st.sampled_from(
        [
            plain.replace("{", f'{{"{field}": 0, ', 1),  # the same field twice
            plain.replace("0", "NaN"),
            plain.replace("0", "-Infinity"),
            plain.replace("0", "1e999"),
            plain.replace("0", "9" * 5000),
            plain.replace("/1", "/2"),
            "[" * 200_000,
            '{"a":' * 100_000,
            plain.encode("utf-16"),
            "\ufeff" + plain,
            plain[:-1],
        ]
    )
    return st.one_of(texts, odd, damaged(texts.map(str.encode)))


LITERALS = [
    *("0", "1", "2", "-1", "1.5", "1e400", "nan", "True", "None", "'a'", "b'a'", "()"),
    *(
        "(1, 2)",
        "[[1, 2], [3, 4]]",
        "[[1], [2, 3]]",
        "{}",
        "{1: 2}",
        "1j",
        "...",
        "9" * 400,
    ),
    *(
        "-" * 300 + "1",
        "(" * 150 + ")" * 150,
        "'1/0'",
        "'1e999999999'",
        "10**9",
        "1 if 1 else 2",
    ),
    *(
        "__import__('os')",
        "'\\d'",
        "[10**18, 1]",
        "1000000000",
        "[1000000000, 1, 1, 1]",
        "2**70",
    ),
]
literals = st.one_of(
    st.sampled_from(LITERALS), st.integers(-3, 20).map(str), values.map(repr)
)


@st.composite
def calls(draw, names, arguments):
    """Draw texts such as ``name(argument=1)``, valid or nearly valid."""
    name = draw(st.sampled_from([*names, "nothing", "", "os.system"]))
    given = draw(
        st.lists(
            st.tuples(st.sampled_from([*arguments, "x", ""]), literals), max_size=3
        )
    )
    words = ", ".join(f"{key}={value}" if key else value for key, value in given)
    text = draw(st.sampled_from(["{}({})", "{}", " {} ( {} ) ", "{}({}", "{}({}))"]))
    text = text.format(name, words)
    odd = [text] * 6 + [text * 500, text + "\0", text + "+" * 50, text + "'" * 3]
    return draw(st.one_of(st.sampled_from(odd), st.text(max_size=20)))


@contextlib.contextmanager
def in_memory(mebibytes=1024):
    """Limit the process in this block to this much memory above what it uses now."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    now, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + (mebibytes << 20)
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (now, most))


def outcome(read, *arguments, errors=(ValueError,), **more):
    """Return the result of ``read``, or ``None`` if it raises an error with a message."""
    with in_memory():
        try:
            found = read(*arguments, **more)
            event("valid")  # for --hypothesis-show-statistics
            return found
        except errors as error:
            event("an error in words")
            assert 10 < len(str(error)) < MOST_WORDS, str(error)[:200]
    return None
