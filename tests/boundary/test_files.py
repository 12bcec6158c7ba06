"""Fuzz files: telemetry, records, traces and snapshots."""

import dataclasses
import io
import itertools
import json
import pickle
import sys
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from documents import changed, damaged, fuzzed, in_json, in_memory, outcome
from hypothesis import given
from hypothesis import strategies as st
from test_report import PLAN, seen

from jaxcoded import Shared, _files, make_plan
from jaxcoded.group import record, snapshots
from jaxcoded.group.telemetry import Telemetry
from jaxcoded.tools.planner.measurement import Link, Measurement
from jaxcoded.tools.report import analysis
from jaxcoded.tools.simulator import Network, stragglers

NAN = float("nan")
SEEN = {name: np.asarray(value) for name, value in dataclasses.asdict(seen()).items()}


class Unpickled:
    """An object that reports when it is unpickled."""

    count = 0

    def __reduce__(self):
        return setattr, (Unpickled, "count", 1)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def claiming(shape, descr="<f8", data=b"\0" * 64):
    """Return an array file whose header claims this shape."""
    file = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + data


ODD = st.sampled_from(
    [
        claiming((2**60,)),
        claiming((2**40, 2**40)),
        claiming((-1,)),
        claiming((True,)),
        claiming((0, 2**62)),
        claiming((8,), "|O"),
        claiming((), "|V0", b""),
        claiming((8,), [("a", "<f4"), ("b", "<f4")]),
        claiming((8,), "(1,)<f8"),
        npy(np.array([Unpickled()], object)),
        pickle.dumps(Unpickled()),
        b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535,
        b"\x93NUMPY\x09\x09",
        b"",
    ]
)


@st.composite
def other_arrays(draw, array):
    """Draw an array that differs from this one in type, shape or values."""
    how = draw(st.sampled_from(["number", "number", "dtype", "shape", "text"]))
    array = array.copy()
    if how == "number" and array.size and array.dtype.kind in "if":
        numbers = [0, -1, 2**40, 2**62, 3] + [NAN, 1e300, -1e9, np.inf] * (
            array.dtype.kind == "f"
        )
        array.flat[draw(st.integers(0, array.size - 1))] = draw(
            st.sampled_from(numbers)
        )
    elif how == "dtype" and array.dtype.kind != "U":
        array = array.astype(
            draw(st.sampled_from(["f4", "i1", ">f8", "c16", "U5", "?"]))
        )
    elif how == "shape":
        array = draw(
            st.sampled_from(
                [array[None], array.ravel()[:1], array.ravel()[:0], array.ravel()]
            )
        )
    elif how == "text":
        array = np.array(draw(st.text(max_size=5)))
    return npy(array)


@st.composite
def archives(draw):
    """Draw the bytes of a telemetry file with one entry replaced."""
    members = [(name, npy(value)) for name, value in SEEN.items()]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(members) - 1))
        name, data = members[at]
        how = draw(
            st.sampled_from(
                ["array", "array", "odd", "gone", "twice", "name", "damaged"]
            )
        )
        if how == "array":
            members[at] = name, draw(other_arrays(SEEN[name])) if name in SEEN else data
        elif how == "odd":
            members[at] = name, draw(ODD)
        elif how == "gone":
            del members[at]
        elif how == "twice":
            members.append((name, data))
        elif how == "name":
            members[at] = draw(st.text(max_size=4)), data
        else:
            members[at] = name, draw(damaged(data))
    file = io.BytesIO()
    pressed = draw(st.sampled_from([zipfile.ZIP_STORED] * 4 + [zipfile.ZIP_DEFLATED]))
    with zipfile.ZipFile(file, "w", pressed) as archive:
        for name, data in members:
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


# zipfile warns about duplicate names, and NumPy about numbers that overflow
@pytest.mark.filterwarnings("ignore")
@fuzzed
@given(data=archives() | damaged(archives()) | ODD)
def test_telemetry(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "seen.npz"
    path.write_bytes(data)
    telemetry = outcome(Telemetry.load, path)
    assert not Unpickled.count
    if telemetry is None:
        return
    with in_memory():
        assert telemetry.summary()
        assert telemetry.speeds.shape == (PLAN.size,)
        assert not np.isnan(telemetry.speeds).any()
        analysis.savings(telemetry)
        analysis.too_late([telemetry])
        analysis.compare([telemetry])
    telemetry.save(path)
    again = Telemetry.load(path)
    for name in SEEN:
        np.testing.assert_array_equal(getattr(again, name), getattr(telemetry, name))


def test_compressed_telemetry(tmp_path):
    """A compressed file could expand beyond any memory."""
    path = tmp_path / "seen.npz"
    np.savez_compressed(path, **SEEN)
    with pytest.raises(ValueError, match="was not written by Telemetry.save"):
        Telemetry.load(path)


@fuzzed
@given(
    data=ODD
    | damaged(npy(np.ones((3, 2))))
    | damaged(npy(np.asfortranarray(np.eye(3))))
)
def test_arrays(data):
    array = outcome(_files.array, data)
    assert not Unpickled.count
    if array is not None:
        # NumPy reads the same array
        expected = np.load(io.BytesIO(data), allow_pickle=False)
        assert array.dtype == expected.dtype
        assert array.shape == expected.shape
        assert array.tobytes("A") == expected.tobytes("A")


TABLES = ["1,2\n3,4\n", "1.5,inf\n0,2e3\n", "# of a job\n1,1\n", "\ufeff1,2\n"]
LINES = [
    "nan,1\n",
    "1\n",
    "-1,2\n",
    "1,2,3\n",
    "1e999,2\n",
    "0x10,2\n",
    "a,b\n",
    "1;2\n",
    "\0\n",
]


@pytest.mark.filterwarnings("ignore")  # warnings about damaged headers
@fuzzed
@given(
    data=st.one_of(
        damaged(
            st.builds(
                lambda head, more: (head + "".join(more)).encode(),
                st.sampled_from(TABLES),
                st.lists(st.sampled_from(LINES), max_size=2),
            )
        ),
        damaged(npy(np.ones((3, 2)))),
        ODD,
    ),
    ending=st.sampled_from([".csv", ".npy", ".gz", ""]),
)
def test_traces(tmp_path_factory, data, ending):
    path = tmp_path_factory.getbasetemp() / f"trace{ending}"
    path.write_bytes(data)
    table = outcome(lambda: stragglers.Trace(path).table)
    assert not Unpickled.count
    if table is not None:
        assert table.dtype == np.float64 and table.ndim == 2 and table.size
        assert (table >= 0).all()


def test_a_trace_is_a_file(tmp_path):
    """NumPy would download a URL and store it in this folder."""
    for path in ("http://localhost:1/trace.csv", tmp_path):
        with pytest.raises(OSError):
            _ = stragglers.Trace(path).table


def test_a_file_without_end(monkeypatch):
    monkeypatch.setattr(_files, "LONGEST", 1 << 20)
    with pytest.raises(ValueError, match="/dev/zero is longer than 1048576 bytes"):
        _ = stragglers.Trace("/dev/zero").table


SHARED = make_plan(2, Shared(blocks=2))
ROUND = {"round": 2, "call": "the blocks of a batch of 4", "blocks": [[0, 3], [2, 1]]}


@fuzzed
@given(
    data=damaged(
        st.lists(changed(ROUND) | st.just(ROUND), max_size=3).map(
            lambda lines: "".join(json.dumps(line) + "\n" for line in lines).encode()
        )
    ),
    head=st.one_of(
        st.just({"format": record.FORMAT, "plan": json.loads(SHARED.to_json())}),
        changed({"format": record.FORMAT, "plan": json.loads(SHARED.to_json())}),
    ),
)
def test_records(tmp_path_factory, data, head):
    path = tmp_path_factory.getbasetemp() / "record"
    path.write_bytes(json.dumps(head).encode() + b"\n" + data)
    rounds = outcome(record.read, path, SHARED)
    last = 0
    for number, call, division in rounds or ():
        assert type(number) is int and number > last and type(call) is str
        assert sorted(itertools.chain(*division)) == [0, 1, 2, 3]
        assert all(type(block) is int for blocks in division for block in blocks)
        last = number


def test_a_record_that_is_nearly_one(tmp_path):
    path = tmp_path / "record"
    head = json.dumps({"format": record.FORMAT, "plan": json.loads(SHARED.to_json())})
    for change in (
        {"round": None},
        {"round": 2**70},
        {"round": 1.0},
        {"call": 5},
        {"blocks": 5},
        {"blocks": [[0, "a"], [2, 1]]},
        {"blocks": [[False, True], [2, 3.0]]},
        {"more": 1},
    ):
        path.write_text(f"{head}\n{json.dumps(ROUND | change)}\n")
        with pytest.raises(ValueError, match="line 2 of .* is not a line of a record"):
            record.read(path, SHARED)
    path.write_text(f"{head}\n{json.dumps(ROUND)}\n{json.dumps(ROUND)}\n")
    with pytest.raises(ValueError, match="line 3 of .* is not a line of a record"):
        record.read(path, SHARED)
    path.write_text(f"{head}\n{'[' * 100_000}\n")
    with pytest.raises(ValueError, match="line 2 of .* is not a line of a record"):
        record.read(path, SHARED)


MEASURED = Measurement(
    Network(),
    0.1,
    stragglers.Measured([[1.0, 2.0], [1.5, 2.5]]),
    (Link(0, 1, 1e-5, 1e9),),
    ("a", "b"),
)


@fuzzed
@given(text=in_json(MEASURED.to_fields()))
def test_measurements(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "measured.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    measured = outcome(Measurement.load, path)
    if measured is not None:
        assert measured.network.bandwidth > 0 and measured.work > 0
        assert len(measured.speeds) == len(measured.hosts)
        assert ((measured.speeds > 0) & (measured.speeds <= 1)).all()
        measured.save(path)
        assert Measurement.load(path).to_fields() == measured.to_fields()


STATE = {"w": jnp.arange(3.0), "n": 5, "b": np.ones((2, 2), np.int8)}


@fuzzed
@given(data=damaged(snapshots.to_bytes(STATE).tobytes()))
def test_snapshots(data):
    """Values may differ, but their number and dtypes are the same."""
    state = outcome(snapshots.from_bytes, data, STATE)
    if state is not None:
        assert len(data) == snapshots.to_bytes(STATE).nbytes
        assert state.keys() == STATE.keys()
        assert state["w"].shape == (3,) and state["b"].dtype == np.int8
        assert type(state["n"]) is int


assert sys.byteorder == "little"  # the headers above say so
