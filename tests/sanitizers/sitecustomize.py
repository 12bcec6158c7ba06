"""With this folder on PYTHONPATH, Python loads the engine in ``JAXCODED_ENGINE_FILE``
instead of the one next to the sources. `scripts/sanitize` starts its processes this
way, and they start their ranks the same way.
"""

import importlib.abc
import importlib.util
import os
import sys


class Instead(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "jaxcoded.transport._engine":
            return None
        return importlib.util.spec_from_file_location(
            name, os.environ["JAXCODED_ENGINE_FILE"]
        )


sys.meta_path.insert(0, Instead())
