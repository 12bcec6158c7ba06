"""Read the section ``Example:`` of docstrings as ``Examples:``, which Griffe shows as
code.
"""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", text, flags=re.MULTILINE
            )
