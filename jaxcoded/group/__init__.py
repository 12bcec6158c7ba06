"""A plan on the ranks of a communicator, and what it has seen of its rounds."""
