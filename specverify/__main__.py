"""The command line as `python -m specverify`, without an installed script."""

from specverify.cli import main

if __name__ == "__main__":
    main()
