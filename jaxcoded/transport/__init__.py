"""Rounds of a group: from arrays to messages and back."""
