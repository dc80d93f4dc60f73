"""How lines of code are counted."""

from code_lines import code_lines

SNIPPET = '''"""A module.

Of several lines.
"""

import os  # a comment beside code


LIMIT = 3
"""What stands below a name is a docstring too."""


def twice(text: str) -> str:
    """Return it twice."""
    # A comment.
    return """
    {0}{0}
    """.format(text)
'''


def test_only_lines_with_code_count() -> None:
    assert code_lines("") == 0
    assert code_lines(SNIPPET) == 6, "the import, the name, the definition, and the returned string's three lines"
