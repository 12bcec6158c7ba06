"""For all tests: their processes share what they compile."""

import compiled

compiled.share()
