"""Call the command line in this process."""

import pytest

from jaxcoded.tools.cli.main import main as group


def main(arguments):
    """Return the exit status of ``jaxcoded *arguments``."""
    with pytest.raises(SystemExit) as ended:
        group(arguments)
    return ended.value.code
