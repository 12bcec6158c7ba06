"""The functions with which users sum."""
