"""How the ranks of a group make a round: from arrays to messages and back."""
