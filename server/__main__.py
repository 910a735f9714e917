"""`python -m server`: the same as the console script `slipstream`."""

from server.cli import main

if __name__ == "__main__":
    main()
