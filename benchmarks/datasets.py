"""The data of `benchmarks/training.py`: real data, the papers' mixture of two
Gaussians, and gradients without data.

All gradients are sums over examples, and each rank computes a weighted part:
``gradient(theta, rows, weights) = Σ_i weights[i] ∇ℓ_rows[i](theta)``.
"""

import gzip
import os
import pathlib

import numpy as np
import scipy.sparse

DEFAULT = pathlib.Path(__file__).parent.parent.parent / "shared" / "data"
MOMENTUM = 0.9


class Logistic:
    """L2-regularised logistic regression by Nesterov's accelerated gradient method, as in
    Tandon et al. 2017, on the whole training set in every round. float32.

    Args:
        name: the name of the problem.
        train, test: a matrix ``(examples, features)``, dense or sparse, and labels 0, 1.
        l2: the factor of ``‖theta‖² / 2``; the loss is a mean over examples.
    """

    def __init__(self, name, train, test, l2=1e-4):
        self.name, self.l2 = name, l2
        self._x, self._y = train[0].astype(np.float32), train[1].astype(np.float32)
        self._test = test
        self.examples, self.features = train[0].shape
        self.rate = 1 / (largest_eigenvalue(self._x) / 4 / self.examples + l2)
        self._shares = {}

    def gradient(self, theta, rows, weights):
        """Return the gradient of the sum of these examples' losses, without the
        regulariser.
        """
        key = rows.tobytes()
        if key not in self._shares:  # a rank has the same rows in every round
            self._shares[key] = self._x[rows], self._y[rows]
        x, y = self._shares[key]
        return x.T @ (weights * (sigmoid(x @ theta) - y))

    def start(self):
        """Return the first parameters, and the state of the optimizer."""
        return np.zeros(self.features, np.float32), np.zeros(self.features, np.float32)

    def step(self, state, total):
        """Return the next parameters and state, from the gradient summed over all
        examples.
        """
        theta, before = state
        gradient = total / np.float32(self.examples) + np.float32(self.l2) * theta
        after = theta - np.float32(self.rate) * gradient
        return after + np.float32(MOMENTUM) * (after - before), after

    def exact(self, thetas):
        """Return the gradients at parameters ``(rounds, features)``, summed over all
        examples in float64.
        """
        x, thetas = self._x.astype(np.float64), np.asarray(thetas, np.float64)
        return (x.T @ (sigmoid(x @ thetas.T) - self._y[:, None])).T

    def scores(self, thetas):
        """Return the mean training loss with the regulariser, and the area under the
        ROC curve on the test set, for parameters ``(rounds, features)``.
        """
        thetas = np.asarray(thetas, np.float64)
        z = self._x.astype(np.float64) @ thetas.T
        y = self._y[:, None]
        losses = (np.logaddexp(0, z) - y * z).mean(axis=0)
        x, labels = self._test
        regular = self.l2 * (thetas**2).sum(axis=1) / 2
        return losses + regular, area_under_curve(x @ thetas.T, labels == 1)


class Vectors:
    """A problem without data: for any parameters example ``e`` has the gradient ``a_e u
    + b_e v``, for two fixed random vectors of any length.

    Its sum needs the same communication as any sum, but no computation. So it suits many ranks on few cores, and long
    messages.
    """

    def __init__(self, features, examples):
        self.name = f"{features:,} numbers"
        self.features, self.examples = features, examples
        random = np.random.default_rng(0)
        self._scales = random.standard_normal((examples, 2))
        self._base = random.standard_normal((2, features), np.float32)

    def gradient(self, theta, rows, weights):
        a, b = (weights @ self._scales[rows]).astype(np.float32)
        return a * self._base[0] + b * self._base[1]

    def start(self):
        return (np.zeros(0, np.float32),)

    def step(self, state, total):
        return state

    def exact(self, thetas):
        total = self._scales.sum(axis=0) @ self._base.astype(np.float64)
        return np.broadcast_to(total, (len(thetas), self.features))


def sigmoid(z):
    return 0.5 * (1 + np.tanh(0.5 * z))


def largest_eigenvalue(x, steps=30):
    """Return the largest eigenvalue of ``xᵀx``, by power iteration."""
    v = np.random.default_rng(0).standard_normal(x.shape[1])
    for _ in range(steps):
        v = x.T @ (x @ (v / np.linalg.norm(v)))
    return float(np.linalg.norm(v))


def area_under_curve(scores, positive):
    """Return for every column the probability that a positive example scores higher
    than a negative one; ties count half.
    """
    import scipy.stats

    ranks = scipy.stats.rankdata(scores, axis=0)[positive].sum(axis=0)
    p, n = positive.sum(), (~positive).sum()
    return (ranks - p * (p + 1) / 2) / (p * n)


def folder(given=None):
    """Return the folder of real data: the given one, the variable JAXCODED_DATA, or a
    default place.
    """
    return pathlib.Path(given or os.environ.get("JAXCODED_DATA") or DEFAULT)


def load(kind, given=None, examples=6552, features=5000):
    """Return a problem.

    Args:
        kind: ``"mixture"``, or ``"real"`` for the Adult data (a9a) if the folder has them, and otherwise for
            scikit-learn's digits.
        given: the folder.
        examples: most examples of the training set; 6,552 as in the CodedReduce
            scripts.
        features: most features.
    """
    if kind == "mixture":
        return mixture(examples // 5, features // 5)
    path = folder(given) / "a9a"
    if (path / "a9a.gz").is_file() and (path / "a9a.t.gz").is_file():
        return adult(path, examples, features)
    return digits(examples, features)


def adult(path, examples, features):
    """Return the data on incomes above 50,000 $. Features are one-hot attributes and their most frequent pairs, as
    Tandon et al. 2017 chose for another data set.
    """
    x, y = read_binary(path / "a9a.gz", examples)
    x_test, y_test = read_binary(path / "a9a.t.gz", examples)
    together = np.triu(x.T.astype(np.int64) @ x, k=1)
    pairs = np.argsort(-together, axis=None, kind="stable")[: features - x.shape[1]]
    first, second = np.unravel_index(pairs, together.shape)

    def with_pairs(x):
        return scipy.sparse.csr_array(np.hstack([x, x[:, first] & x[:, second]]))

    name = f"Adult, {features:,} one-hot pairs"
    return Logistic(name, (with_pairs(x), y), (with_pairs(x_test), y_test))


def read_binary(path, count, features=123):
    """Read ``count`` lines of LIBSVM's format whose values are all 1: uint8 matrix,
    labels.
    """
    x, y = np.zeros((count, features), np.uint8), np.zeros(count)
    with gzip.open(path, "rt") as file:
        for i, line in zip(range(count), file):
            label, *entries = line.split()
            y[i] = float(label) > 0
            x[i, [int(entry.partition(":")[0]) - 1 for entry in entries]] = 1
    return x[: i + 1], y[: i + 1]


def digits(examples, features):
    """Return handwritten digits, labelled by whether they are below 5, with products of
    two pixels as features.
    """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order] / 16, y[order] >= 5
    first, second = np.triu_indices(64)
    used = np.random.default_rng(0).permutation(len(first))[:features]
    x = x[:, first[used]] * x[:, second[used]]
    split = min(examples, len(x) * 3 // 4)
    name = f"digits, {x.shape[1]:,} products of pixels"
    return Logistic(name, (x[:split], y[:split]), (x[split:], y[split:]))


def mixture(examples, features):
    """Return a mixture of two Gaussians as in the CodedReduce scripts, with other sizes
    and constants: around ``±1.5 θ*/p`` with unit variance, ``θ*`` of ±1, and labels of
    the logistic model with ``θ*``.
    """
    random = np.random.default_rng(0)
    true = random.choice([-1.0, 1.0], features)
    side = random.choice([-1.0, 1.0], (2 * examples, 1))
    x = random.standard_normal((2 * examples, features)) + side * 1.5 / features * true
    y = random.random(2 * examples) < sigmoid(x @ true)
    name = f"two Gaussians, {features:,} features"
    return Logistic(
        name, (x[:examples], y[:examples]), (x[examples:], y[examples:]), l2=1e-2
    )
