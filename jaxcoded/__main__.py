"""``python -m jaxcoded``: the command line."""

from jaxcoded.tools.cli.main import main

if __name__ == "__main__":
    main()
