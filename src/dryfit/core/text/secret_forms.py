"""Patterns that find a secret in a text as it is, quoted, escaped or in base64.

One pattern stands for all ways in which ``repr``, JSON, shells, URLs and forms write a value, also one inside another:
each character may be there as it is or escaped, after any number of backslashes.
"""

import functools
import re
from base64 import b64encode
from dataclasses import dataclass
from itertools import groupby

LEAST_CHARS = 6
"""Shorter values (1, true, none) are no secrets, and occur in any text."""

LEAST_LINE_CHARS = 8
"""Shorter lines of a value of several lines are no secrets by themselves."""

_LETTERS = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f", "\v": "v", "\a": "a", "\x1b": "[eE]", "\0": "0"}
"""The letters that stand for control characters after a backslash."""

_BASE64_SIGNS = {"+": "(?:[+-]|%2[bB])", "/": r"(?:\\*+[/_]|%2[fF])"}
"""The two characters of base64 that are no letters or digits, also as URLs and JSON write them."""

_ESCAPED = r"\\*+"
"""Backslashes before a character, all of them: without a way back, text full of backslashes costs nothing."""


@dataclass(frozen=True)
class SecretForm:
    """One form of a secret.

    Attributes:
        plain: Letters and digits that a text with this form has in any case; looking for these is quick.
        expression: The regular expression of the form.
    """

    plain: str
    expression: str

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(self.expression)

    def replaced(self, text: str, mark: str) -> str:
        """Return a text with a mark in the place of this form."""
        return self._pattern.sub(lambda _: mark, text) if self.plain in text else text


def secret_forms(value: str) -> list[SecretForm]:
    """Return the forms of a secret and of each of its lines, the whole first.

    Args:
        value: The secret. Space around it does not count; one below :data:`LEAST_CHARS` characters has no form.
    """
    whole = value.strip()
    lines = [line.strip() for line in whole.splitlines()]
    parts = [whole] * (len(whole) >= LEAST_CHARS) + [line for line in lines if len(line) >= LEAST_LINE_CHARS]
    return [form for part in dict.fromkeys(parts) for form in (_spelled(part), *_in_base64(part))]


def _longest_plain(text: str) -> str:
    return max(re.findall("[A-Za-z0-9]+", text), key=len, default="")


def _spelled(text: str) -> SecretForm:
    """Return the form of a text whose characters may each be escaped."""
    runs = [(char, len(list(group))) for char, group in groupby(text)]
    pieces = [_run(char, count, first=number == 0) for number, (char, count) in enumerate(runs)]
    return SecretForm(_longest_plain(text), "".join(pieces))


def _run(char: str, count: int, *, first: bool) -> str:
    """Return the pattern of one character, so many times."""
    if char.isascii() and char.isalnum():
        return char * count  # no way of writing changes these
    codes = _codes(char)
    if char == "\\":
        start = r"(?<!\\)" if first else ""  # all of them at once, or none: see ``_ESCAPED``
        return rf"(?:(?:\\++(?:{codes})){{{count}}}|(?i:%5c){{{count}}}|{start}\\{{{count},}}+)"
    raw = re.escape(char)
    choices = [raw, _percents(char), rf"(?<=\\)(?:{codes})"]
    if char in _LETTERS:
        choices.append(rf"(?<=\\){_LETTERS[char]}")
    if char == " ":
        choices.append(r"\+")
    if char == "'":  # within the quotes of a shell: they end, it comes in others or escaped, they begin again
        choices.insert(0, r"""'(?:"'"|\\++')'""")
    if ord(char) > 0xFFFF:  # JSON writes it as two halves
        high, low = divmod(ord(char) - 0x10000, 0x400)
        choices.append(rf"(?<=\\)(?i:u{0xD800 + high:04x})\\++(?i:u{0xDC00 + low:04x})")
    one = f"(?:{'|'.join(choices)})"
    escaped = "" if first else _ESCAPED
    return f"{escaped}{one}" + f"(?:{_ESCAPED}{one}){{{count - 1}}}" * (count > 1)


def _codes(char: str) -> str:
    """Return the pattern of what stands for a character after a backslash: its code, or those of its bytes."""
    code = ord(char)
    choices = [f"u{code:04x}", rf"u\{{0*{code:x}\}}", f"U{code:08x}"]
    if code <= 0xFF:
        choices += [f"x{code:02x}", f"{code:03o}"]
    first, *others = _bytes(char)
    if first > 0x7F:
        choices.append(f"x{first:02x}" + "".join(rf"\\++x{byte:02x}" for byte in others))
        choices.append(f"{first:03o}" + "".join(rf"\\++{byte:03o}" for byte in others))
    return f"(?i:{'|'.join(choices)})"


def _percents(char: str) -> str:
    return f"(?i:{''.join(f'%{byte:02x}' for byte in _bytes(char))})"


def _bytes(text: str) -> bytes:
    """Return the bytes of a text; those of the environment that are no UTF-8 are what they were."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _in_base64(text: str) -> list[SecretForm]:
    """Return the forms of a text in base64, also where it is a part of what was encoded (``user:password``).

    Three bytes are four characters, so it depends on the place of the first byte which characters are the text's alone.
    """
    data = _bytes(text)
    forms: list[SecretForm] = []
    for before, shared in ((0, 0), (1, 2), (2, 3)):  # bytes before it in its group of three, and their characters
        whole = (before + len(data)) * 8 // 6
        part = b64encode(bytes(before) + data).decode()[shared:whole]
        forms.append(SecretForm(_longest_plain(part), "".join(_BASE64_SIGNS.get(char, char) for char in part)))
    return forms
