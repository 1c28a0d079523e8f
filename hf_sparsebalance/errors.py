"""The one exception a user is meant to read."""


class UserError(ValueError):
    """A mistake a user can mend; the command line prints it as one line and exits with status 2."""
