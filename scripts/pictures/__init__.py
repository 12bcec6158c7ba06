"""The pictures of README and the documentation, see ``draw_pictures.py``."""
