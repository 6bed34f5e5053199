"""`python -m regauge`: the same as the `regauge` command."""

from regauge.cli.main import main

if __name__ == "__main__":
    main()
