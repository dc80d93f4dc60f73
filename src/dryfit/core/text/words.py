"""Text for messages: short lists of names, and text that UTF-8 can encode."""

import difflib
from collections.abc import Iterable


def few(names: Iterable[str], most: int = 5) -> str:
    """Return the first names and a count of the rest; unprintable names are escaped."""
    every = [name if name.isprintable() else ascii(name) for name in names]
    return ", ".join(every[:most]) + (f", and {len(every) - most} more" if len(every) > most else "")


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", written: str = "{}") -> str:
    """Return ``did you mean KNOWN?`` of the name that is nearest.

    Args:
        name: What was given.
        known: What there is.
        otherwise: The hint where none is near.
        written: How the name is written in the hint.
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {written.replace('{}', near[0], 1)}?" if near else otherwise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def brief(value: object, most: int = 200) -> str:
    """Return a value as Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def sendable(text: str) -> str:
    """Return a text that UTF-8 can encode: file names may contain bytes that are no text."""
    return text.encode("utf-8", "backslashreplace").decode()


_OBEYED = (
    *range(0x20),  # C0: ESC, BEL, carriage return ...
    *range(0x7F, 0xA0),  # DEL, and C1: a control sequence in one character
    *(
        0x200E,
        0x200F,
        *range(0x2028, 0x202F),
        *range(0x2066, 0x206A),
    ),  # line ends, directions of text
    *range(0xD800, 0xE000),  # no characters: bytes of file names that are not UTF-8
)
_ESCAPES = {
    number: f"\\u{number:04x}" if number > 0x7E else f"\\x{number:02x}"  # in JSON only the former are left unescaped
    for number in _OBEYED
    if chr(number) not in "\n\t"
}


def printable(text: str) -> str:
    r"""Return a text that no terminal obeys: control characters but tab and line feed are escaped, ESC as ``\x1b``.

    JSON keeps its meaning.
    """
    return text.translate(_ESCAPES)
