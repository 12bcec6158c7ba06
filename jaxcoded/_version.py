import importlib.metadata

try:
    __version__ = importlib.metadata.version("jaxcoded")
except importlib.metadata.PackageNotFoundError:  # a checkout need not be installed
    __version__ = "0+unknown"
