"""What goes wrong between ranks. Errors of one rank's arguments are ``ValueError`` and
``TypeError``."""


class CodedError(RuntimeError):
    """Base of the errors of a group. Inside ``jit`` they arrive as a
    ``JaxRuntimeError`` with the same text."""


class GroupClosed(CodedError):
    """A collective was called on a group after `CodedGroup.close`."""


class GroupMismatch(CodedError):
    """Ranks called different things in the same round, or made a group with different
    arguments."""


class TooManyErasures(CodedError):
    """A round was asked to leave out more ranks than the plan can do without."""
