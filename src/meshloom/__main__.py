"""`python -m meshloom`: the command line."""

import sys

from meshloom.cli import main

if __name__ == "__main__":
    sys.exit(main())
