"""Errors between ranks.

Errors in one rank's arguments are ``ValueError`` and ``TypeError``.
"""

import contextlib
import re
from collections.abc import Iterator


class CodedError(RuntimeError):
    """The base class of the errors of a group.

    It is raised directly when a group is made, and by a collective before its round
    begins. An error during a round, inside or outside ``jit``, arrives as a
    ``jax.errors.JaxRuntimeError`` whose text contains the name and the message;
    `translated` converts it to one of these.
    """


class GroupClosed(CodedError):
    """A collective was called on a group after `CodedGroup.close`."""


class GroupMismatch(CodedError):
    """Ranks called different things in the same round, or made a group with different
    arguments. With the engine it is raised in that round, or in the next one if that
    round is already decided.
    """


class DeadlineExceeded(CodedError):
    """More children of a parent were late than a round tolerates, or the root did not
    answer, for longer than the group's deadline.
    """


class InconsistentMessages(CodedError):
    """In a group with a ``check``: the messages of a parent's children are not coded
    sums of the same gradients, or have NaN or infinities. In any group with the engine:
    `coded_value_and_grad` has not counted the examples of the batch.
    """


class Desynchronized(CodedError):
    """This rank is so late that no rank keeps the results that it lacks. Or a round
    failed on it while the root did not answer, or because of too little memory, and
    others may have its result.

    Its calls fail until it continues from a snapshot, see `CodedGroup.resync`.
    """


class TooManyErasures(CodedError):
    """A call erased more ranks than the plan tolerates, or more are dead."""


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise errors of rounds in this block as one of the classes above.

    JAX runs a compiled step while Python continues, and raises errors when its results
    are used: wait for them in the block.

    Raises:
        CodedError: or a subclass, from the ``JaxRuntimeError`` that names it, or the
            ``ValueError`` that JAX raises instead if a compiled call with a token fails
            before it returns (`jax#34083
            <https://github.com/jax-ml/jax/issues/34083>`_). Any other error passes as
            it is.

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
    from jax.errors import JaxRuntimeError  # plans need no JAX

    try:
        yield
    except (JaxRuntimeError, ValueError) as error:
        classes: list[type[CodedError]] = [CodedError, *CodedError.__subclasses__()]
        kinds = {kind.__name__: kind for kind in classes}
        found = re.search(rf"\b({'|'.join(kinds)}): (.*)", str(error), re.DOTALL)
        # JAX's text begins with the class of the error
        if found is None or not re.match("[A-Z_]+: ", str(error)):
            raise
        raise kinds[found[1]](found[2].strip()) from error
