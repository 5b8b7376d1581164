"""The exception for what a person did, as opposed to what this package got wrong."""


class UserError(ValueError):
    """Input that a person has to fix: an argument, a file, a plug-in's return value.

    The command line prints the message and exits with status 2, without a traceback. A message says what is wrong,
    what is allowed, what came, and how to fix it.
    """


class RankError(UserError):
    """A `UserError` that this process alone has met, in the middle of a step that the others are still in."""
