"""The collective functions of the library."""
