"""Docstrings name things in Sphinx's roles, ``:class:`Name```; the pages show the names alone."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    return re.sub(r":(?:class|meth|func|mod|attr):<code>~?", "<code>", html)
