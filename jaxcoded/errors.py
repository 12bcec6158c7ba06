"""What goes wrong between ranks.

Errors in one rank's arguments are ``ValueError`` and ``TypeError``.
"""


class CodedError(RuntimeError):
    """Base of the errors of a group.

    Raised as such when a group is made, and by a collective before its round begins.
    What is found during a round, inside or outside ``jit``, arrives as a
    ``jax.errors.JaxRuntimeError`` whose text contains the name and the message.
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
    arguments."""


class DeadlineExceeded(CodedError):
    """More children of a parent were late than a round can do without, or the root did
    not answer, for longer than the group's deadline."""


class InconsistentMessages(CodedError):
    """In a group with ``debug=True``: what the children of a parent have sent are not
    coded sums of the same gradients. In any group with the engine: the examples that
    ``mean=True`` has counted are not those of the batch."""


class Desynchronized(CodedError):
    """This rank is so late that the results it lacks are no longer kept anywhere. Or a
    round failed here while the root did not answer, and others may have its result.

    Its calls fail until it continues from a snapshot, see `CodedGroup.resync`. Inside
    ``jit`` the text of the ``JaxRuntimeError`` contains ``jaxcoded.Desynchronized:``.
    """


class TooManyErasures(CodedError):
    """A round was asked to leave out more ranks than the plan can do without."""
