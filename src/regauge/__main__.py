"""The `regauge` command, which is also available as `python -m regauge`.

If the user interrupts the import of the command line, the process ends without a traceback.
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
    """Exit on a KeyboardInterrupt that Python ignores, because a destructor or an import callback raised it.

    Other exceptions that Python ignores are reported as usual.
    """
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.__unraisablehook__(ignored)


if __name__ == "__main__":
    main()
