"""How long is the root's engine busy with a round of many ranks?

    .venv/bin/python benchmarks/turns.py
    .venv/bin/python benchmarks/turns.py --ranks 15 129

All ranks are nodes of the engine in this process (tests/nodes): there is no MPI, and every rank is on a host of its
own. No rank is late. A *turn* is what the engine does under its lock: it takes all messages that wait, and then acts
once. The benchmark prints the processor time of the root's longest turn and of all its turns in a round, and what the
root and all ranks send. Sums are checked. It needs the engine built in place, as by `make setup`.
"""

import argparse
import csv
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "engine")]

import _nodes
import groups

from jaxcoded import Coded, Shared, make_plan

ROUNDS = 2
SHORT, LONG = 1 << 10, 1 << 16  # how many float32 numbers a sum has


def schemes(ranks):
    """Return each scheme's name, strategy, length of the sum, and whether it forms sections."""
    star = Coded(stragglers=1, fanout=ranks - 1, code="fractional_repetition")
    shared = Shared(replicas=1, blocks=4)
    return [
        ("a tree with fan-out 10", Coded(fanout=10), SHORT, False),
        ("a star, s = 1", star, SHORT, False),
        ("a star, s = 1, in sections", star, LONG, True),
        ("shared work", shared, SHORT, False),
        ("shared work in sections", shared, LONG, True),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--ranks", type=int, nargs="+", default=[129, 1001])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/benchmarks")
    given = parser.parse_args()
    rows = []
    print(
        "  ranks  scheme                        longest turn   all turns    root sends     all send"
    )
    for ranks in [15] if given.smoke else given.ranks:
        for name, strategy, numbers, sections in schemes(ranks):
            plan = make_plan(ranks, strategy)
            group = groups.group(plan, list(range(ranks)))
            costs = _nodes.count_costs(group, ROUNDS, numbers, sections=sections)
            longest, seconds, _, sent = costs[plan.root]
            row = {
                "ranks": ranks,
                "scheme": name,
                "longest_turn_ms": 1e3 * longest,
                "turns_ms": 1e3 * seconds / ROUNDS,
                "root_sends_bytes": sent // ROUNDS,
                "all_send_bytes": sum(cost[3] for cost in costs) // ROUNDS,
            }
            rows.append(row)
            print(
                f"{ranks:7}  {name:28} {row['longest_turn_ms']:10.2f} ms {row['turns_ms']:8.1f} ms "
                f"{row['root_sends_bytes'] / 1e6:10.2f} MB {row['all_send_bytes'] / 1e6:9.1f} MB",
                flush=True,
            )
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "turns.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
