"""Reading of JSON that anybody may have written: no key twice, bounded in depth, only text that UTF-8 can encode."""

import json
from typing import Any, Final, cast

MOST_DEPTH: Final = 64
"""Lists and objects inside one another, at most: what handles values one level a call has room for so many."""


def parse_json(text: str) -> Any:
    """Parse JSON of an untrusted file.

    Args:
        text: One JSON value.

    Raises:
        ValueError: It is not JSON (:class:`json.JSONDecodeError`), has a key twice, a number of thousands of digits or
            half a surrogate pair, or is nested deeper than ``MOST_DEPTH``; the message says which.
    """
    too_deep = f"it is nested deeper than {MOST_DEPTH} levels"
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    if text.count("[") + text.count("{") > MOST_DEPTH and is_too_deep(value):
        raise ValueError(too_deep)
    if "\\ud" in text or "\\uD" in text:
        _check_pairs(value)
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object of its pairs; the standard library would silently take the last of equal keys.

    Raises:
        ValueError: A key is there twice.
    """
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {ascii(twice)[:80]} is there twice")
    return content


def is_too_deep(value: object) -> bool:
    """Whether more than ``MOST_DEPTH`` lists and objects stand inside one another, found out without recursion."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        inner = [items for item in level if (items := _items(item)) is not None]
        if not inner:
            return False
        level = [item for items in inner for item in items]
    return True


def _items(value: object) -> list[object] | None:
    """Return what a list or an object has in it; None of anything else."""
    if isinstance(value, dict):
        return list(cast("dict[str, object]", value).values())
    return cast("list[object]", value) if isinstance(value, list) else None


def _check_pairs(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(f"{half} is half a surrogate pair, which is no character") from error
