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


class GroupMismatch(CodedError):
    """Ranks called different things in the same round, or made a group with different
    arguments."""


class TooManyErasures(CodedError):
    """A round was asked to leave out more ranks than the plan can do without."""
