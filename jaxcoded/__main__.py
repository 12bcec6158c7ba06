"""``python -m jaxcoded``: the command line."""

from jaxcoded.cli.main import main

if __name__ == "__main__":
    main()
