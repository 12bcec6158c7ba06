import dataclasses
from fractions import Fraction

from jaxcoded.plan.code_tree import CodeTree


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Uncoded(CodeTree):
    """Each rank, including the root, computes ``1/N`` of the batch, and no rank may be
    missing, as with `mpi4jax.allreduce`.

    Attributes:
        speeds: relative speed of each rank; only ratios count, rounded to 1/1000 of
            the fastest. Every rank's load is proportional to its speed.
        fanout: the largest number of children of a rank in the tree of the sum; see `Coded`.
        root_computes: whether the root also holds data.

    Raises:
        ValueError, TypeError: an argument is invalid.

    Example:
        >>> import jaxcoded
        >>> jaxcoded.make_plan(4, jaxcoded.Uncoded()).load
        Fraction(1, 4)
    """

    speeds: tuple[Fraction, ...] | None = None
    fanout: int | None = None
    root_computes: bool = True
