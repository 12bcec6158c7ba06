"""``python -m jaxcoded``: the command line."""

import sys

from jaxcoded.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
