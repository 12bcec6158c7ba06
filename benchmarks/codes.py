"""How long does it take to make a code, and coefficients for a new set of children?

    .venv/bin/python benchmarks/codes.py

The benchmark makes every code once for 256 children, and decodes new sets of 64 children. No rank straggles, and
nothing is sent: a parent computes coefficients once for every set of children that answers. The benchmark prints a
table and stores it.
"""

import argparse
import csv
import dataclasses
import pathlib
import time

import numpy as np
from tqdm import tqdm

from jaxcoded import codes

# the code's text, stragglers and slices, for 64 and for 256 children
CODES = [
    ("uncoded", 0, 1),
    ("fractional_repetition", 3, 1),
    ("cyclic_repetition", 4, 1),
    ("random_generator", 2, 2),
    ("random_generator", 4, 4),
    ("polynomial", 1, 1),
    ("gaussian_mds", 4, 4),
    ("reed_solomon", 4, 4),
    ("single_parity_check", 1, 3),
    ("partial_stragglers(late=3, slowdown=4)", 0, 1),
    ("progressive", 3, 1),
    ("adaptive", 1, 1),
    ("adaptive", 2, 1),
    ("ignore_stragglers", 4, 1),
    ("bernoulli(load=6)", 4, 1),
    ("stochastic_block(load=6, blocks=8)", 4, 1),
    ("expander(degree=6)", 4, 1),
    ("grouped(load=6)", 4, 2),
]


def made(text, n, stragglers, slices):
    """Return the code and the seconds to make it, or why there is no such code."""
    start = time.perf_counter()
    try:
        code = codes.named(text, n, stragglers, slices)
    except ValueError as error:
        return str(error), time.perf_counter() - start
    return code, time.perf_counter() - start


def decoding(code, sets):
    """Return the median seconds for the coefficients of a set of children that is new."""
    code = dataclasses.replace(code)  # a copy with an empty cache
    rng = np.random.default_rng(0)
    lost = max(1, code.stragglers)
    answered = [np.ones((code.n, code.parts), bool) for _ in range(sets)]
    for each in answered:
        # a code that tolerates no missing child tolerates missing last parts
        first = 0 if code.stragglers else code.parts - 1
        each[rng.permutation(code.n)[:lost], first:] = False
    code.decode(answered[0])
    times = []
    for each in answered[1:]:
        start = time.perf_counter()
        code.decode(each)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    small, large, sets = (16, 32, 5) if args.smoke else (64, 256, 50)

    rows = []
    for text, stragglers, slices in tqdm(CODES, desc="codes"):
        _, seconds = large_code = made(text, large, stragglers, slices)
        code, _ = made(text, small, stragglers, slices)
        refused = isinstance(large_code[0], str)
        rows.append(
            {
                "code": text,
                "s": stragglers,
                "m": slices,
                f"make n={large}": "refused" if refused else f"{seconds:.3f} s",
                f"decode n={small}": "refused"
                if isinstance(code, str)
                else f"{decoding(code, sets) * 1e3:.3f} ms",
                "κ": "" if isinstance(code, str) else f"{code.amplification:.3g}",
            }
        )
    widths = {k: max(len(k), *(len(str(row[k])) for row in rows)) for k in rows[0]}
    for row in [dict(zip(rows[0], rows[0])), *rows]:
        print("  ".join(str(row[k]).ljust(width) for k, width in widths.items()))
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "codes.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
