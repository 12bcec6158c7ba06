"""What the tools print, and how it looks on a terminal or without one."""
