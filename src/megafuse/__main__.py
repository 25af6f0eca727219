"""`python -m megafuse` is the `megafuse` command."""

from megafuse.cli import main

if __name__ == "__main__":
    main()
