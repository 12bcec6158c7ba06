"""The processes of a test session share compiled programs."""

import os
import pathlib
import threading

import compiled
import jax
import numpy as np
import pytest


@pytest.fixture
def programs(tmp_path):
    return compiled._InTurns(tmp_path)


def elsewhere(action):
    """Run ``action`` in a thread, which acts as another process, with a separate turn."""
    out = []
    thread = threading.Thread(target=lambda: out.append(action()), daemon=True)
    thread.start()
    return thread, out


def test_what_is_compiled_is_found():
    hits = []

    def listen(event, **_):
        if event == "/jax/compilation_cache/cache_hits":
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        for _ in range(2):
            total = jax.jit(lambda x: 3 * x + 17)(np.ones(23))
            np.testing.assert_array_equal(total, 20)
            jax.clear_caches()
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert hits
    assert list(pathlib.Path(os.environ[compiled.PLACE]).glob("*.lock"))  # turns


def test_one_compiles_and_the_others_wait(programs):
    assert programs.get("a") is None
    thread, out = elsewhere(lambda: programs.get("a"))
    thread.join(0.1)
    assert thread.is_alive()
    programs.put("a", b"program")
    thread.join(5)
    assert out == [b"program"]
    assert programs.get("a") == b"program"


def test_no_process_waits_for_a_program_that_is_not_stored(programs):
    assert programs.get("a") is None
    thread, out = elsewhere(lambda: programs.get("a"))
    assert programs.get("b") is None
    thread.join(5)
    assert out == [None]


def test_a_turn_ends_with_the_compilation():
    """A turn ends with the compilation of a program that JAX does not store: one with a
    callback.
    """
    turns = []

    def listen(event, duration, **_):
        if event == compiled.COMPILED:
            turns.append(getattr(compiled._turn, "lock", None))

    doubled = jax.jit(
        lambda x: jax.pure_callback(
            lambda x: 2 * np.asarray(x), jax.ShapeDtypeStruct((29,), "float32"), x
        )
    )
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        doubled(np.ones(29, np.float32)).block_until_ready()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert turns and not any(turns)
