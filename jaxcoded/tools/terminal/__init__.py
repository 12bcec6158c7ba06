"""The output of the tools, on a terminal, a pipe or a file."""
