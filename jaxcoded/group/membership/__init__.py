"""The ranks of a group: which of them live, and how ranks leave and join."""
