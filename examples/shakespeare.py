"""Train a small character-level transformer with accumulated gradients.

    jaxcoded run -n 4 examples/shakespeare.py

A batch is cut into blocks. A rank computes the gradients of the blocks that it is
granted, its own and blocks of late ranks, and adds them up. It reads only the text of
these blocks. One round adds up the ranks' sums. The program reads
``../shared/data/tinyshakespeare/input.txt`` (1 MB, from
https://github.com/karpathy/char-rnn) if this file exists, otherwise the project's
documentation. ``--text`` names another file.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

import jaxcoded

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLAYS = ROOT.parent / "shared/data/tinyshakespeare/input.txt"
LENGTH, WIDTH, HEADS, LAYERS = 64, 64, 4, 2


def read(path=None):
    """Return the text as numbers, uint8 ``(characters,)``: 127 for characters beyond
    ASCII.
    """
    if path is None and PLAYS.exists():
        path = PLAYS
    paths = sorted((ROOT / "docs").glob("*.md")) if path is None else [path]
    text = "\n".join(pathlib.Path(each).read_text("utf-8") for each in paths)
    if not text:
        raise SystemExit("no text found: give --text FILE")
    return np.minimum(np.frombuffer(text.encode("utf-8"), np.uint8), 127)


def initial(key):
    def matrix(key, inputs, outputs):
        return jax.random.normal(key, (inputs, outputs)) / inputs**0.5

    def layer(key):
        keys = jax.random.split(key, 4)
        return {
            "attend": matrix(keys[0], WIDTH, 3 * WIDTH),
            "mix": matrix(keys[1], WIDTH, WIDTH),
            "up": matrix(keys[2], WIDTH, 4 * WIDTH),
            "down": matrix(keys[3], 4 * WIDTH, WIDTH),
        }

    keys = jax.random.split(key, LAYERS + 2)
    return {
        "characters": jax.random.normal(keys[0], (128, WIDTH)) / 8,
        "places": jax.random.normal(keys[1], (LENGTH, WIDTH)) / 8,
        "layers": [layer(key) for key in keys[2:]],
    }


def logits(params, text):
    """Return the logits of the next character: ``(sequences, LENGTH)`` to ``(…, 128)``."""
    x = params["characters"][text] + params["places"][: text.shape[1]]
    for layer in params["layers"]:
        q, k, v = jnp.split(normed(x) @ layer["attend"], 3, axis=-1)
        shape = (*text.shape, HEADS, WIDTH // HEADS)
        q, k, v = (each.reshape(shape) for each in (q, k, v))
        heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + heads.reshape(x.shape) @ layer["mix"]
        x = x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"]
    return normed(x) @ params["characters"].T


def normed(x):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def loss(params, text):
    """Return the sum, over sequences, of the mean loss per character. ``text`` is int
    ``(sequences, LENGTH + 1)``.
    """
    predicted = logits(params, text[:, :-1])
    each = optax.softmax_cross_entropy_with_integer_labels(predicted, text[:, 1:])
    return each.mean(axis=1).sum()


@functools.partial(jax.jit, donate_argnums=0)
def accumulate(total, params, text):
    return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, text))


def sequences(text, starts):
    return text[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)


def train(comm, text, steps=100, batch_size=32):
    """Return the parameters, and the loss of each batch."""
    starts = np.arange(0, len(text) - LENGTH - 1, LENGTH)
    params, losses = initial(jax.random.key(0)), []
    tx = optax.adam(1e-2)
    state = tx.init(params)

    @jax.jit
    def update(params, state, grads):
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state

    with jaxcoded.CodedGroup(comm, jaxcoded.Shared(blocks=4)) as group:
        per_epoch = len(group.epoch(len(starts), batch_size, seed=0, drop_last=True))
        for step in range(steps):
            number, place = divmod(step, per_epoch)
            if place == 0:
                epoch = group.epoch(
                    *(len(starts), batch_size), seed=0, epoch=number, drop_last=True
                )
            batch = starts[epoch.indices(place)]
            total = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
            with group.blocks(batch_size) as blocks:
                for block in blocks:
                    own = sequences(text, batch[block.indices])
                    total = accumulate(total, params, own)
            mean, grads = jaxcoded.coded_allreduce(total, group, divisor=batch_size)
            params, state = update(params, state, grads)
            losses.append(float(mean))
            if group.rank == 0 and step % 10 == 0:
                print(f"step {step}: loss {mean:.3f}")
    return params, losses


def write(params, begin, length=200):
    """Return the text ``begin``, continued by the model."""
    written = [ord(character) for character in begin]
    following = jax.jit(lambda text: logits(params, text)[0])
    for key in jax.random.split(jax.random.key(1), length):
        seen = written[-LENGTH:]
        padded = np.array([seen + [0] * (LENGTH - len(seen))])
        written.append(
            int(jax.random.categorical(key, following(padded)[len(seen) - 1]))
        )
    return "".join(map(chr, written))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--text", help="the text file to train on")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    params, _ = train(MPI.COMM_WORLD, read(args.text), args.steps)
    if MPI.COMM_WORLD.rank == 0:
        print(write(params, "\n"))
