"""Check whether jobs work on this machine and between hosts."""
