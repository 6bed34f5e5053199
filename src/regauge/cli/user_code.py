"""Code that the user wrote, or named: whatever it raises is told in a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

from regauge.cli.options import UsageError


@contextmanager
def users_code(failure: str) -> Iterator[None]:
    """Code that the user wrote: whatever it raises is the user's to mend, so every error is told in a sentence."""
    try:
        yield
    except UsageError:
        raise
    except SystemExit as error:
        raise UsageError(f"{failure}: it ended the program with {error.code!r}") from error
    except Exception as error:
        raise UsageError(f"{failure}: {type(error).__name__}: {error}") from error
