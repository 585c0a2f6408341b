"""For the site: examples of docstrings (`>>>` lines and their results) become blocks of code; hidden blocks go.

mkdocstrings knows them in a section named "Examples" alone; elsewhere Markdown would read `>>>` as a quotation and
`[[0, 1], [2, 3]]` as a link.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# From a line with >>> to the next empty line or the end; with the indent of the first one.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n *\S.*)*", re.MULTILINE)


def fenced(match: re.Match[str]) -> str:
    text, indent = re.sub(r"  # doctest: \+SKIP", "", match[0]), match[1]
    return f"{indent}```pycon\n{text}\n{indent}```"


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """A page without the blocks that only `tests/test_docs.py` runs."""
    return re.sub(r"^<!-- run.*?^-->\n", "", markdown, flags=re.DOTALL | re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences the examples of every docstring."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(fenced, obj.docstring.value)
