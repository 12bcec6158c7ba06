"""Errors between ranks.

Errors in one rank's arguments are ``ValueError`` and ``TypeError``.
"""

import contextlib
import re
from collections.abc import Iterator


class CodedError(RuntimeError):
    """Base of the errors of a group.

    Raised as such when a group is made, and by a collective before its round begins.
    What is found during a round, inside or outside ``jit``, arrives as a
    ``jax.errors.JaxRuntimeError`` whose text contains the name and the message;
    `translated` makes it one of these.
    """


class GroupClosed(CodedError):
    """A collective was called on a group after `CodedGroup.close`."""


def use_after_close(index: int) -> GroupClosed:
    """The error for a call on the group with this index."""
    return GroupClosed(
        f"use after close: group {index} was closed; make a new CodedGroup, and "
        "compile with it what used the old one"
    )


class GroupMismatch(CodedError):
    """Ranks called different things in the same round, or made a group with different
    arguments. With the engine it is raised in that round, or in the next one if that is
    decided already."""


class DeadlineExceeded(CodedError):
    """More children of a parent were late than a round can do without, or the root did
    not answer, for longer than the group's deadline."""


class InconsistentMessages(CodedError):
    """In a group with a ``check``: what the children of a parent have
    sent are not coded sums of the same gradients, or NaN or infinities. In any group with the engine: the examples that
    `coded_value_and_grad` has counted are not those of the batch."""


class Desynchronized(CodedError):
    """This rank is so late that the results it lacks are no longer kept anywhere. Or a
    round failed here while the root did not answer, or for want of memory, and others may have its result.

    Its calls fail until it continues from a snapshot, see `CodedGroup.resync`.
    """


class TooManyErasures(CodedError):
    """A round was asked to leave out more ranks than the plan can do without, or more are dead."""


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """In this block, what a round has found is raised as one of the errors above.

    JAX runs a compiled step while Python goes on, and raises where its results are
    asked for: wait for them in the block.

    Raises:
        CodedError: or a subclass, from the ``JaxRuntimeError`` that names it, or the ``ValueError``
            that JAX raises in its place where a compiled call with a token fails before it returns
            (`jax#34083 <https://github.com/jax-ml/jax/issues/34083>`_). Any other error passes as it is.

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
    from jax.errors import JaxRuntimeError  # plans are made without JAX

    try:
        yield
    except (JaxRuntimeError, ValueError) as error:
        classes: list[type[CodedError]] = [CodedError, *CodedError.__subclasses__()]
        kinds = {kind.__name__: kind for kind in classes}
        found = re.search(rf"\b({'|'.join(kinds)}): (.*)", str(error), re.DOTALL)
        # JAX's own begins with the kind of error
        if found is None or not re.match("[A-Z_]+: ", str(error)):
            raise
        raise kinds[found[1]](found[2].strip()) from error
