"""Who the ranks of a group are: which of them live, and how a group goes on without some, or with more."""
