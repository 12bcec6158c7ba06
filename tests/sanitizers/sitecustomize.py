"""With this folder on PYTHONPATH, Python loads the engine, and the nodes of its tests, from
the folder ``JAXCODED_ENGINE_FOLDER`` instead of those next to the sources. `scripts/sanitize`
starts its processes this way, and they start their ranks the same way.
"""

import importlib.abc
import importlib.util
import os
import pathlib
import sys


class Instead(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in ("jaxcoded.transport._engine", "_nodes"):
            return None
        folder = pathlib.Path(os.environ["JAXCODED_ENGINE_FOLDER"])
        (file,) = folder.glob(name.rpartition(".")[2] + ".*.so")
        return importlib.util.spec_from_file_location(name, file)


sys.meta_path.insert(0, Instead())
