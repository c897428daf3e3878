"""A MkDocs hook. It replaces Sphinx roles in docstrings, such as ``:class:`Name```, by the name as code."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    return re.sub(r":(?:class|meth|func|mod|attr):<code>~?", "<code>", html)
