"""`python -m mpkit` is the command `mpkit`."""

import sys

from mpkit.command import main

if __name__ == "__main__":
    sys.exit(main())
