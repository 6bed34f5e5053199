"""The `regauge` command, also as `python -m regauge`.

Importing what it needs takes a moment, in which an interrupt ends the process without a traceback.
"""

import signal


def main() -> None:
    """Import the command line and run it."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from regauge.cli.main import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
