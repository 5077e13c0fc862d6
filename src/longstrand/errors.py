"""What can go wrong in a way a user can act on; each class carries the exit code of the command that meets it."""


class LongstrandError(Exception):
    """One line that names the file or setting, the value, the rule and the remedy.

    Attributes:
        said_by_another: of a run on several ranks, whether another one shows it to the user.
    """

    exit_code = 1
    said_by_another = False


class RunFailed(LongstrandError):
    """The run could not go on (exit code 1)."""

    exit_code = 1


class UserError(LongstrandError):
    """A command, config or input is wrong (exit code 2)."""

    exit_code = 2


class CheckFailed(LongstrandError):
    """A check failed: parity, certificate, audit, a non-finite loss (exit code 3)."""

    exit_code = 3
