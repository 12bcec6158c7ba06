"""Errors of communication between ranks.

A wrong argument on one rank raises ``ValueError`` or ``TypeError`` instead.
"""

import contextlib
import re
from collections.abc import Iterator


class CodedError(RuntimeError):
    """The base class of the errors of a group.

    Errors that occur when a group is made, or before a collective's round begins, are
    raised directly as these classes. An error during a round, inside or outside
    ``jit``, is raised as a ``jax.errors.JaxRuntimeError``. Its text contains the name
    of a class in this module and the message; `translated` converts it to that class.
    """


class GroupClosed(CodedError):
    """A collective was called on a group after `CodedGroup.close`."""


class GroupMismatch(CodedError):
    """Ranks made different calls in the same round, or made a group with different
    arguments. With the engine, different calls raise this error in the round in which
    they differ, or in the next round if that round is already decided.
    """


class DeadlineExceeded(CodedError):
    """More children of a parent were late than a round tolerates, or the root did not
    answer, for longer than the group's deadline.
    """


class InconsistentMessages(CodedError):
    """Messages do not fit together. In a group with a ``check``, the messages of a
    parent's children are not coded sums of the same gradients, or have NaN or
    infinities. In any group with the engine, the examples that `coded_value_and_grad`
    counted are not the examples of the batch.
    """


class Desynchronized(CodedError):
    """This rank lacks results that it cannot get.

    Either the rank is so late that no other rank keeps these results any more. Or a
    round failed on this rank, because the root did not answer or because the rank ran
    out of memory, and other ranks may have the result of this round.

    The rank's calls fail until it continues from a snapshot; see `CodedGroup.resync`.
    """


class TooManyErasures(CodedError):
    """A call erased more ranks than the plan tolerates, or more ranks are dead than the
    plan tolerates."""


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Convert errors of rounds in this ``with`` block to the classes of this module.

    JAX runs a compiled step while Python continues, and raises the step's errors when
    its results are used. So wait for the results inside the block.

    Raises:
        CodedError: raised (or a subclass) in place of a ``JaxRuntimeError`` that names
            the class. If a compiled call with a token fails before it returns, JAX
            raises a ``ValueError`` instead of a ``JaxRuntimeError``; it is converted,
            too (`jax#34083 <https://github.com/jax-ml/jax/issues/34083>`_). Any other
            error passes unchanged.

    Example:
        >>> import jax, jax.numpy as jnp, jaxcoded
        >>> from mpi4py import MPI
        >>> group = jaxcoded.CodedGroup(MPI.COMM_SELF)
        >>> step = jax.jit(lambda x: jaxcoded.coded_allreduce(x, group))
        >>> _ = step(jnp.ones(3))
        >>> group.close()
        >>> try:
        ...     with jaxcoded.errors.translated():
        ...         jax.block_until_ready(step(jnp.ones(3)))
        ... except jaxcoded.GroupClosed as error:
        ...     print(str(error)[:15])
        use after close
        >>> jaxcoded.effects_barrier()
    """
    # Import JAX only here, since plans do not need it.
    from jax.errors import JaxRuntimeError

    try:
        yield
    except (JaxRuntimeError, ValueError) as error:
        classes: list[type[CodedError]] = [CodedError, *CodedError.__subclasses__()]
        kinds = {kind.__name__: kind for kind in classes}
        match = re.search(rf"\b({'|'.join(kinds)}): (.*)", str(error), re.DOTALL)
        # JAX's text begins with the class of the error
        if match is None or not re.match("[A-Z_]+: ", str(error)):
            raise
        raise kinds[match[1]](match[2].strip()) from error
