"""How many schedules a test draws. Each run draws the same schedules; `fuzz.py` draws new ones."""

from hypothesis import settings
from hypothesis import strategies as st

USUAL, EXHAUSTIVE = 12, 50

_exhaustive = settings.get_current_profile_name() == "exhaustive"
many = settings(derandomize=True, max_examples=EXHAUSTIVE if _exhaustive else USUAL)
seeds = st.integers(0, 2**32 - 1)
