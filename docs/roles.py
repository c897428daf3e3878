"""MkDocs hook: docstrings contain Sphinx roles such as ``:class:`Name```; show only the name, as code."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    return re.sub(r":(?:class|meth|func|mod|attr):<code>~?", "<code>", html)
