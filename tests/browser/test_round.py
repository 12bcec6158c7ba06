"""The interactive page shows what Python computes for the same round."""

import itertools
import pathlib

import numpy as np
import pytest
from selenium.webdriver.common.by import By

import jaxcoded
from jaxcoded import codes
from jaxcoded.tools.simulator import Layout, Network
from jaxcoded.tools.simulator.sharing import Sharing
from jaxcoded.tools.simulator.stragglers import Delays

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "round.html"
RANKS, BLOCKS, PART = 6, 6, 120.0  # the same as on the page
SPEEDS = {"well": 1.0, "slow": 0.25, "frozen": 0.0, "dead": 0.0}
LAST = 600  # ms that the page shows
INSTANT = Network(latency=0, overhead=0, call=0, bandwidth=1e30, combine=1e30)
SCHEMES = [
    ("uncoded", 0),
    ("fractional", 1),
    ("fractional", 2),
    ("cyclic", 1),
    ("cyclic", 2),
    ("shared", 1),
    ("shared", 2),
]


@pytest.fixture
def page(browser):
    browser.get(PAGE.as_uri())
    yield browser
    texts = [line for line in browser.get_log("browser") if line["level"] == "SEVERE"]
    assert not texts


def code(scheme, s):
    if scheme == "uncoded":
        return codes.uncoded(RANKS)
    make = codes.fractional_repetition if scheme == "fractional" else None
    return (make or codes.cyclic_repetition)(RANKS, s)


def placement(replicas):
    work = jaxcoded.Shared(replicas=replicas, blocks=BLOCKS, root_computes=False)
    return jaxcoded.make_plan(RANKS + 1, work)


def shared_end(replicas, speeds):
    """Return when the simulated root has the sum, in ms; a rank with speed 0 is frozen."""
    job = Sharing(Layout.of(placement(replicas)), INSTANT, RANKS * PART / 1000)
    frozen = np.array([False, *(np.array(speeds) == 0)])
    factors = [1.0, *(1 / speed if speed else 1.0 for speed in speeds)]
    delays = Delays(np.array(factors), np.where(frozen, np.inf, 0.0), frozen)
    called, _ = job.round(np.zeros(RANKS + 1), delays)
    return called[0] * 1000


def computed(schedule, rank, time):
    """Return what a rank could compute by a time, in ms of a usual rank."""
    total, now, speed = 0.0, 0.0, 1.0
    for change in [*schedule, {"time": time, "rank": rank, "state": "well"}]:
        if change["rank"] == rank and change["time"] <= time:
            total += speed * (change["time"] - now)
            now, speed = change["time"], SPEEDS[change["state"]]
    return total


def reached(schedule, rank, work):
    """Return when a rank has computed this much work; infinite if never."""
    times = [change["time"] for change in schedule if change["rank"] == rank]
    for begin, end in itertools.pairwise([0.0, *times, 1e6]):
        done = computed(schedule, rank, end)
        if done >= work - 1e-9:
            before = computed(schedule, rank, begin)
            return begin + (end - begin) * (work - before) / (done - before)
    return np.inf


def coded_end(scheme, s, schedule):
    """Return the first time at which the ranks that have answered are decodable."""
    own_code = code(scheme, s)
    each = PART * (1 + (s if scheme != "uncoded" else 0))
    times = np.array([reached(schedule, rank, each) for rank in range(RANKS)])
    for time in sorted(times[np.isfinite(times)]):
        if own_code.decodable(times <= time):
            return time
    return np.inf


def ideal(schedule):
    total = lambda time: sum(computed(schedule, r, time) for r in range(RANKS))
    low, high = 0.0, 1e5
    if total(high) < RANKS * PART:
        return np.inf
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) < RANKS * PART else (low, middle)
    return high


def simulate(page, scheme, s, schedule):
    return page.execute_script(
        "const r = Rules.simulate(arguments[0]); r.end = String(r.end); return r",
        {"scheme": scheme, "s": s, "schedule": schedule},
    )


def choose(page, scheme, s=1):
    page.find_element(By.CSS_SELECTOR, f"#scheme option[value={scheme}]").click()
    if scheme != "uncoded":
        page.find_element(By.XPATH, f"//select[@id='s']/option[.='{s}']").click()


def click(page, rank, state):
    page.find_element(By.CSS_SELECTOR, f"input[value={state}]").click()
    page.find_element(By.CSS_SELECTOR, f"[data-rank='{rank + 1}']").click()


def at(page, time):
    page.execute_script(
        "const it = document.getElementById('time'); it.value = arguments[0];"
        "it.dispatchEvent(new Event('input'))",
        time,
    )


def value(page, name):
    shown = page.find_element(By.ID, name).get_attribute("data-value")
    return float(shown.replace("Infinity", "inf"))


def text(page, name):
    return page.find_element(By.ID, name).text


@pytest.mark.parametrize("scheme, s", SCHEMES[:5])
def test_the_same_sets_are_decodable(page, scheme, s):
    sets = list(itertools.product([False, True], repeat=RANKS))
    shown = page.execute_script(
        "return arguments[2].map((there) => Rules.decodable(arguments[0], arguments[1], there))",
        scheme,
        s,
        sets,
    )
    own_code = code(scheme, s)
    assert shown == [bool(own_code.decodable(np.array(there))) for there in sets]


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_same_ranks_hold_a_block(page, replicas):
    shown = page.execute_script(
        "return [...Array(36).keys()].map((block) => Rules.holders(arguments[0], block))",
        replicas,
    )
    holders = placement(replicas).placement.holders
    assert shown == [[rank - 1 for rank in ranks] for ranks in holders]


@pytest.mark.parametrize("replicas", [1, 2])
def test_shared_work_takes_as_long_as_simulated(page, replicas):
    """Speeds are random, so that no two ranks finish at the same time."""
    rng = np.random.default_rng(replicas)
    never = 0
    for _ in range(150):
        speeds = rng.uniform(0.8, 1.25, RANKS)
        faulty = rng.permutation(RANKS)[:2]
        speeds[faulty[0]] = rng.choice([0.0, 0.1, 0.25, 0.5, 1.0])
        speeds[faulty[1]] *= rng.choice([0.0, 0.3, 1.0])
        schedule = [
            {"time": 0, "rank": rank, "state": float(speed)}
            for rank, speed in enumerate(speeds)
        ]
        end = float(simulate(page, "shared", replicas, schedule)["end"])
        expected = shared_end(replicas, speeds)
        assert end == pytest.approx(expected, rel=1e-6), speeds
        never += np.isinf(expected)
    assert never < 75


@pytest.mark.parametrize("scheme, s", SCHEMES)
@pytest.mark.parametrize(
    "states", ["", "slow", "frozen", "slow frozen", "frozen frozen", "dead dead"]
)
def test_clicks_before_the_round(page, scheme, s, states):
    """The page states the round's outcome after these clicks."""
    choose(page, scheme, s)
    schedule = []
    for rank, state in zip((4, 1), states.split()):
        click(page, rank, state)
        schedule.append({"time": 0, "rank": rank, "state": state})
    # a death is noticed sooner than the simulator assumes
    if scheme == "shared" and "dead" in states:
        expected = value(page, "step")
        outcome = simulate(page, scheme, s, schedule)
        assert check_division(outcome, s, schedule) == (s == 2)
    elif scheme == "shared":
        speeds = np.ones(RANKS)
        for change in schedule:
            speeds[change["rank"]] = SPEEDS[change["state"]]
        expected = shared_end(s, speeds)
    else:
        expected = coded_end(scheme, s, schedule)
    assert value(page, "step") == pytest.approx(expected)
    assert value(page, "ideal") == pytest.approx(ideal(schedule))
    if np.isfinite(expected):
        assert value(page, "ratio") == pytest.approx(expected / ideal(schedule))
        assert text(page, "step") == f"{round(expected)} ms"
        at(page, min(LAST, expected + 1))
        if expected < LAST:
            assert text(page, "waits").startswith("Nobody waits")
            assert "the sum is there" in text(page, "log")
    else:
        at(page, LAST)
        assert text(page, "step") in ("never", "fails")
        assert "the sum is there" not in text(page, "log")


@pytest.mark.parametrize("scheme, s", SCHEMES)
def test_clicks_while_it_runs(page, scheme, s):
    """A rank becomes slow, one freezes and continues, one dies: every sum contains the whole batch."""
    choose(page, scheme, s)
    schedule = []
    for time, rank, state in [
        (30, 2, "slow"),
        (50, 0, "frozen"),
        (90, 5, "dead" if s else "slow"),
        (130, 0, "well"),
        (140, 2, "well"),
    ]:
        at(page, time)
        click(page, rank, state)
        schedule.append({"time": time, "rank": rank, "state": state})
    shown = page.execute_script("return schedule")
    assert shown == schedule
    assert value(page, "ideal") == pytest.approx(ideal(schedule))
    end = value(page, "step")
    if scheme != "shared":
        assert end == pytest.approx(coded_end(scheme, s, schedule))
        return
    outcome = simulate(page, scheme, s, schedule)
    check_division(outcome, s, schedule)
    assert ideal(schedule) <= end < np.inf or s == 1


def test_every_division_is_a_sum_of_the_whole_batch(page):
    """With any faults at any time, there is no sum, or the sum has each block once. The block comes from a live rank
    that holds it and had time to compute it.
    """
    rng = np.random.default_rng(7)
    sums = 0
    for _ in range(150):
        schedule, dead = [], set()
        for time in sorted(rng.uniform(0, 250, rng.integers(0, 7)).round(1)):
            rank = int(rng.integers(RANKS))
            if rank not in dead:
                state = str(rng.choice(list(SPEEDS), p=[0.4, 0.3, 0.2, 0.1]))
                dead |= {rank} if state == "dead" else set()
                schedule.append({"time": time, "rank": rank, "state": state})
        replicas = int(rng.integers(1, 3))
        outcome = simulate(page, "shared", replicas, schedule)
        sums += check_division(outcome, replicas, schedule)
    assert 75 < sums < 150


def check_division(outcome, replicas, schedule):
    end, holders = float(outcome["end"]), placement(replicas).placement.holders
    runs = outcome["work"]
    for run in runs:  # ranks compute only blocks that they hold, and none while frozen
        assert run["rank"] + 1 in holders[run["block"]]
        moved = [computed(schedule, run["rank"], run[x]) for x in ("begin", "end")]
        assert moved[1] - moved[0] <= PART / BLOCKS + 1e-6
    for a, b in itertools.combinations(runs, 2):
        if a["rank"] == b["rank"]:
            assert a["end"] <= b["begin"] + 1e-9 or b["end"] <= a["begin"] + 1e-9
    if np.isinf(end):
        return False
    assert end >= ideal(schedule) - 1e-6
    counted = [block for blocks in outcome["division"] for block in blocks]
    assert sorted(counted) == list(range(RANKS * BLOCKS))
    for rank, blocks in enumerate(outcome["division"]):
        its_runs = [r for r in runs if r["rank"] == rank and r["unused"] is None]
        for block in blocks:
            spent = sum(
                computed(schedule, rank, r["end"])
                - computed(schedule, rank, r["begin"])
                for r in its_runs
                if r["block"] == block
            )
            assert spent == pytest.approx(PART / BLOCKS)
    return True


def test_time_runs_and_the_keyboard_works(page):
    choose(page, "uncoded")
    rank = page.find_element(By.CSS_SELECTOR, "[data-rank='3']")
    rank.send_keys(" ")
    assert "4 × slower" in text(page, "picture")
    page.find_element(By.ID, "play").click()
    page.set_script_timeout(60)
    page.execute_async_script(
        "const done = arguments[0];"
        "const look = () => (now >= 150 ? done() : setTimeout(look, 20)); look()"
    )
    assert text(page, "play") == "Pause"
    page.find_element(By.ID, "play").click()
    assert text(page, "waits") == "The root and ranks 1, 2, 4, 5 and 6 wait for rank 3."
    page.find_element(By.ID, "again").click()
    assert page.execute_script("return [now, schedule.length]") == [0, 1]
    page.find_element(By.ID, "heal").click()
    assert page.execute_script("return [now, schedule.length]") == [0, 0]


def test_the_page_asks_for_nothing_else(page):
    page.refresh()
    entries = page.execute_script(
        "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    )
    assert entries == []
