"""The output of the tools, on a terminal or elsewhere."""
