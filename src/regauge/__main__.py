"""The `regauge` command, also as `python -m regauge`.

Importing the command line takes a moment. An interrupt during the import ends the process without a traceback.
"""

import os
import signal
import sys


def main() -> None:
    """Import the command line and run it."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.unraisablehook = _end_if_interrupted
    from regauge.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    run()


def _end_if_interrupted(ignored: "sys.UnraisableHookArgs") -> None:
    """Exit on a KeyboardInterrupt that Python ignores because it is raised in a deletion or in a callback of imports.

    Other ignored exceptions are reported as usual.
    """
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.__unraisablehook__(ignored)


if __name__ == "__main__":
    main()
