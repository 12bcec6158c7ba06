"""How close do encode and decode come to the speed of a copy?

    .venv/bin/python benchmarks/kernels.py

Bandwidth counts the bytes that must move: every message is read once and the result
written once. The ceiling is the speed of ``x + 1`` in place (donated) on as many bytes, in the same run on the same
device.
"""

import argparse
import csv
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxcoded import codes
from jaxcoded.transport.kernels import decode_vector, encode_vector

# Launching a kernel on a GPU and waiting for it takes about as long as running it:
# launch many at once.
IN_A_ROW = 20 if jax.default_backend() == "gpu" else 1


def median_seconds(call, *operands, repetitions):
    """Return the median wall-clock time of a call."""
    call(*operands).block_until_ready()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        for _ in range(IN_A_ROW):  # a GPU runs them one after the other
            out = call(*operands)
        out.block_until_ready()
        times.append(time.perf_counter() - start)
    return np.median(times) / IN_A_ROW


def seconds_in_place(elements, dtype, *, repetitions):
    """Return the median time to read ``elements / 2`` elements and write as many."""
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = increment(jnp.ones(elements // 2, dtype)).block_until_ready()
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            x = increment(x)
        x.block_until_ready()
        times.append(time.perf_counter() - start)
    return np.median(times) / IN_A_ROW


def measure(length, repetitions):
    """Return rows of kernel, dtype, code, GB/s and the fraction of the copy's bandwidth."""
    rows = []
    for dtype in (jnp.float32, jnp.bfloat16):
        for n, s, m in ((3, 1, 1), (4, 1, 2), (8, 2, 1)):
            code = codes.random_generator(n, s, m)
            A = jnp.asarray(code.decode(range(n - s)).coefficients, jnp.float32)
            messages = jnp.ones((n, length // m), dtype)
            partials = jnp.ones((code.k, length), dtype)
            row = jnp.asarray(code.B[0], jnp.float32)

            def decode(messages, A):
                return decode_vector(messages, A).astype(messages.dtype)

            def encode(partials, row):
                return encode_vector(partials, row, row.shape[1]).astype(partials.dtype)

            itemsize = jnp.dtype(dtype).itemsize
            for name, call, operands, elements in (
                ("decode", decode, (messages, A), messages.size + length),
                ("encode", encode, (partials, row), partials.size + length // m),
            ):
                took = median_seconds(jax.jit(call), *operands, repetitions=repetitions)
                copy = seconds_in_place(elements, dtype, repetitions=repetitions)
                rows.append(
                    (
                        name,
                        jnp.dtype(dtype).name,
                        f"{n},{s},{m}",
                        elements * itemsize / took / 1e9,
                        copy / took,
                    )
                )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small and short")
    parser.add_argument("--out", type=pathlib.Path, default="build/benchmarks")
    args = parser.parse_args()
    rows = measure(1 << (12 if args.smoke else 22), 3 if args.smoke else 21)
    print(f"{'kernel':8} {'dtype':10} {'n,s,m':8} {'GB/s':>8} {'÷ copy':>8}")
    for name, dtype, code, bandwidth, share in rows:
        print(f"{name:8} {dtype:10} {code:8} {bandwidth:8.1f} {share:8.2f}")
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"kernels-{jax.default_backend()}.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["kernel", "dtype", "n,s,m", "GB_per_second", "share_of_copy"])
        writer.writerows(rows)


if __name__ == "__main__":
    main()
