"""Redaction of secrets: values of environment variables, and passwords in URLs."""

import functools
import json
import re
from collections.abc import Mapping, MutableMapping
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from dryfit.core.text.secret_forms import SecretForm, secret_forms

HUB_TOKENS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
"""Variables that huggingface_hub reads a token from."""

_NAME = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET)$|_(?:PASS|PWD)$|PASSWORD|PASSWD|PASSPHRASE", re.IGNORECASE)
_IN_URL = re.compile(r"(?<=://)([^\s/:@]*):[^\s/]+@")
_IN_QUERY = re.compile(
    r"((?:[?&;]|%3B)(?:[a-z_]*_)?(?:token|key|secret|[a-z]*password|passwd|passphrase|pwd)(?:=|%3D))((?!%3B)[^\s&;\"'])+",
    re.IGNORECASE,
)


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets in an environment by the names that stand for them in messages.

    A variable is one by its name (``HF_TOKEN``, ``PGPASSWORD``), or by a password in its value, a URL.
    """
    found: dict[str, str] = {}
    for name, value in environment.items():
        if _NAME.search(name):
            found[name] = value
        elif has_password(value):
            found |= url_secrets(name, value)
    return found


def url_secrets(name: str, url: str) -> dict[str, str]:
    """Return the secrets in a variable that holds a URL: the whole URL, and its passwords."""
    try:
        password = unquote(urlsplit(url).password or "")
    except ValueError:  # not a URL: only the whole value is a secret
        password = ""
    found = [password, *(unquote(match[2]) for match in _IN_QUERY.finditer(url))]
    return {name: url} | {f"password in {name}": value for value in found if value}


def has_password(text: str) -> bool:
    """Whether a text has a URL with a password, a key or a token in it."""
    return "://" in text and redacted(text, {}) != text


def redacted(text: str, secrets: Mapping[str, str]) -> str:
    """Replace each secret in a text by its name, and passwords in URLs by ``<password>``.

    A secret is found as it is and in the forms that ``repr``, JSON, shells, URLs, forms and base64 give it. Of a secret
    of several lines, each line counts too.

    Args:
        text: Any text.
        secrets: Values by name; those of fewer than six characters stay.
    """
    for form, mark in _forms(tuple(secrets.items())):
        text = form.replaced(text, mark)
    return _IN_QUERY.sub(r"\1<secret>", _IN_URL.sub(r"\1:<password>@", text))


@functools.lru_cache(maxsize=8)
def _forms(secrets: tuple[tuple[str, str], ...]) -> list[tuple[SecretForm, str]]:
    """Return what is looked for in each text and what takes its place; made once for the secrets of a process."""
    # Longest first: one secret may be part of another.
    longest_first = sorted(secrets, key=lambda item: len(item[1]), reverse=True)
    return [(form, f"<{name}>") for name, value in longest_first for form in secret_forms(value)]


def redacted_json(data: bytes, secrets: Mapping[str, str]) -> bytes:
    """Redact the strings of a JSON document; numbers and keys stay, even if a password has the same digits.

    Data that is not JSON, or too deep to be any message of ours, is returned unchanged.
    """
    try:
        document = json.loads(data)
        clean = _clean(document, secrets)
    except (ValueError, RecursionError):
        return data
    return data if clean == document else json.dumps(clean, separators=(",", ":")).encode()


def _clean(value: Any, secrets: Mapping[str, str]) -> Any:
    match value:
        case str():
            return redacted(value, secrets)
        case list():
            return [_clean(item, secrets) for item in cast("list[Any]", value)]
        case dict():
            return {key: _clean(item, secrets) for key, item in cast("dict[str, Any]", value).items()}
        case _:
            return value


def forget_secrets(environment: MutableMapping[str, str], *, keep: frozenset[str] = frozenset()) -> None:
    """Remove variables with secrets from the environment of a process that needs none.

    Proxies stay, even with a password: without them nothing is reached.

    Args:
        environment: ``os.environ``, or a copy for a process; changed.
        keep: Names that stay.
    """
    held = environment.keys() & secrets_of(environment).keys()
    for name in held - keep:
        if not name.lower().endswith("proxy"):
            del environment[name]


def public_environment(environment: Mapping[str, str], *, keep: frozenset[str] = frozenset()) -> dict[str, str]:
    """Return an environment without its secrets, for a process that needs none but ``keep``."""
    public = dict(environment)
    forget_secrets(public, keep=keep)
    return public
