"""`python -m specverify`: the command line without an installed script."""

from specverify.cli import main

if __name__ == "__main__":
    main()
