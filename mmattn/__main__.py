"""`python -m mmattn`: the command line, where the console script is not on the path."""

from mmattn.cli.app import main

if __name__ == "__main__":
    main()
