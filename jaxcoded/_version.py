import importlib.metadata

try:
    __version__ = importlib.metadata.version("jaxcoded")
except importlib.metadata.PackageNotFoundError:  # the package runs from a checkout
    __version__ = "0+unknown"
