import inspect
from collections.abc import Callable
from typing import Any

from jaxcoded import _parse, codes
from jaxcoded.codes._gradient_code import GradientCode

# In these codes all children except one may be missing, whatever the number of slices.
APPROXIMATE = (
    "ignore_stragglers",
    "bernoulli",
    "stochastic_block",
    "expander",
    "block_design",
    "grouped",
)
NAMES = (
    "uncoded",
    "fractional_repetition",
    "cyclic_repetition",
    "random_generator",
    "polynomial",
    "linear",
    "gaussian_mds",
    "single_parity_check",
    "reed_solomon",
    "hamming",
    "partial_stragglers",
    "progressive",
    "adaptive",
    *APPROXIMATE,
)


def named(
    text: str, n: int, stragglers: int = 0, slices: int = 1, *, seed: int = 0
) -> GradientCode:
    """Return the code that a text names. The name is a constructor in `jaxcoded.codes`.
    The text gives only arguments of the constructor that this function does not have.

    Args:
        text: one of `NAMES`, with keyword arguments that are Python literals, such as
            ``"cyclic_repetition"`` or ``"bernoulli(load=4)"``.
        n: number of children.
        stragglers: ``s``, the number of children that may be missing.
        slices: ``m``, the number of slices.
        seed: the seed of random codes.

    Returns:
        A `GradientCode` with ``m`` slices; a code with several parts has ``m`` times as
        many slices as parts. It may tolerate more than ``s`` missing children.

    Raises:
        ValueError: the text has an unknown name or argument; the constructor rejects
            the arguments; or the code has a different ``m`` or tolerates fewer than
            ``s`` missing children.

    Example:
        >>> from jaxcoded import codes
        >>> codes.named("random_generator", 5, 1, 2).loads.tolist()
        [3, 3, 3, 3, 3]
    """
    name, given = parsed(text)
    constructor: Callable[..., GradientCode] = getattr(codes, name)
    common = {"n": n, "stragglers": stragglers, "slices": slices, "seed": seed}
    _parse.check_arguments("code", text, constructor, given, common)
    for name_ in common:
        if name_ in given:
            raise ValueError(
                f"code={text!r}: {name_} is the same for all codes of a plan; give it "
                "to the plan or the group"
            )
    taken = inspect.signature(constructor).parameters
    try:
        code = constructor(**{k: common[k] for k in common if k in taken} | given)
    except (TypeError, ArithmeticError, MemoryError) as error:
        raise ValueError(f"code={text!r}: {error}") from None
    if code.m not in (slices, slices * code.parts):
        raise ValueError(
            f"code={text!r} has {code.m} slice{'s' * (code.m > 1)}, not {slices}: pass "
            f"slices={code.m} or take another code, such as 'random_generator'"
        )
    if code.stragglers < stragglers:
        raise ValueError(
            f"code={text!r} tolerates {code.stragglers} missing of {n} children, not "
            f"{stragglers}: pass stragglers={code.stragglers} or take another code"
        )
    return code


def needed(text: str, stragglers: int, slices: int) -> int:
    """Return the number of children that a parent needs for the code that a text names."""
    approximate = parsed(text)[0] in APPROXIMATE
    return stragglers + (1 if approximate else slices)


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Return a code's name and arguments. Raise a ValueError if the text has no name."""
    return _parse.parsed("code", text, NAMES, besides=("auto",))
