"""Other libraries' errors in words of ours."""

from __future__ import annotations

LONGEST = 300
"""Characters of them."""


def in_a_line(error: object) -> str:
    """Shortened; with the name of an exception whose text is a mere key, or nothing."""
    text, name = " ".join(str(error).split()), type(error).__name__
    said = f"{name} {text}".strip() if isinstance(error, LookupError) or not text else text
    return said if len(said) <= LONGEST else f"{said[:LONGEST]} ..."
