"""The error of the command line itself: what the user typed cannot be used."""


class UsageError(Exception):
    """A sentence for the user; `main` prints it and exits."""
