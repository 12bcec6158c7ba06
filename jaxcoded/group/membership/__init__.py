"""The ranks of a group: which of them live, and how a group continues with fewer or more."""
