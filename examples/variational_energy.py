"""Find the ground state of a spin chain, with the metric as a derivative of a sum.

    jaxcoded run -n 4 examples/variational_energy.py

Stochastic reconfiguration solves ``S Δ = F``: ``S`` is the covariance of the
derivatives of ``log ψ``, and ``F`` is their covariance with the local energy. If
``⟨ψ|`` and ``|ψ⟩`` are two arguments, JAX derives ``S`` and ``F`` from sums over
configurations. ``F`` is the derivative of ``⟨ψ|H|ψ⟩ / ⟨ψ|ψ⟩`` with respect to ``⟨ψ|``.
``S`` is the derivative of ``log ⟨ψ|ψ⟩`` with respect to both arguments. Conjugate
gradients use ``S`` as a function, without forming the matrix.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.sparse.linalg import cg
from mpi4py import MPI

import jaxcoded

SPINS, FIELD = 10, 1.0  # at the critical point
SHIFT = 0.01  # added to the metric's diagonal


def configurations():
    """Return all configurations of the chain, float32 ``(1024, 10)`` of 1 and -1."""
    up = np.arange(2**SPINS)[:, None] >> np.arange(SPINS) & 1
    return (1 - 2 * up).astype(np.float32)


def start():
    """Return the weights of a restricted Boltzmann machine with two hidden spins per
    site.
    """
    parts = 0.1 * np.random.default_rng(0).normal(size=(2, SPINS, 2))
    return jnp.asarray(parts[0] + 1j * parts[1])


def log_psi(w, spins):
    """Return ``log ψ``, holomorphic in ``w`` and real for real ``w``: ``⟨ψ|`` has the
    parameters ``w.conj()``.
    """
    shifted = jnp.stack([jnp.roll(spins, i, -1) for i in range(SPINS)], -2)
    return jnp.log(jnp.cosh(shifted @ w)).sum((-1, -2))


def norm(braket, spins):
    """Return ``⟨ψ|s⟩⟨s|ψ⟩``."""
    bra, ket = braket
    return jnp.exp(log_psi(bra, spins) + log_psi(ket, spins))


def energy_and_norm(braket, spins):
    """Return ``⟨ψ|s⟩⟨s|H|ψ⟩`` and the norm, where ``H = - Σ Z Z - FIELD Σ X`` around a
    ring.
    """
    flipped = spins[:, None] * (1 - 2 * jnp.eye(SPINS))  # one row for each flipped spin
    log_ratios = log_psi(braket[1], flipped) - log_psi(braket[1], spins)[:, None]
    bonds = (spins * jnp.roll(spins, 1, -1)).sum(-1)
    local = -bonds - FIELD * jnp.exp(log_ratios).sum(-1)
    weight = norm(braket, spins)
    return weight * local, weight


def minimise(comm, steps=20):
    """Return the energy before each step."""
    with jaxcoded.CodedGroup(comm) as group:
        batch = group.batch(configurations())
        total = lambda f, *braket: jaxcoded.coded_sum(f, group)(braket, batch)

        @jax.jit
        def step(w):
            bra = w.conj()
            mean = lambda bra: jnp.divide(*total(energy_and_norm, bra, w))
            energy, force = jax.value_and_grad(mean, holomorphic=True)(bra)
            log_norm = lambda bra, ket: jnp.log(total(norm, bra, ket))
            derivative = jax.grad(log_norm, holomorphic=True)
            _, metric = jax.linearize(lambda ket: derivative(bra, ket), w)
            # a fixed number of products instead of a tolerance, so that all ranks call
            # the same rounds
            delta, _ = cg(lambda v: metric(v) + SHIFT * v, force, tol=0, maxiter=5)
            return w - 0.2 * delta, energy.real

        w, seen = start(), []
        for number in range(steps):
            w, energy = step(w)
            seen.append(float(energy))
            if group.rank == 0:
                print(f"step {number}: energy {energy:.4f}")
    return seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    minimise(MPI.COMM_WORLD, parser.parse_args().steps)
