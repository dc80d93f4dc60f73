"""Redaction of secrets: values of environment variables, and passwords in URLs."""

import json
import re
from collections.abc import Mapping, MutableMapping
from typing import Any, cast
from urllib.parse import quote, urlsplit

HUB_TOKENS = frozenset({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
"""Variables that huggingface_hub reads a token from."""

_NAME = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET)$|PASSWORD|PASSWD|PASSPHRASE", re.IGNORECASE)
_LEAST_CHARS = 6
"""Shorter values (1, true, none) are no secrets, and occur in any text."""

_IN_URL = re.compile(r"(?<=://)([^\s/:@]*):[^\s/]+@")
_IN_QUERY = re.compile(r"([?&](?:[a-z_]*_)?(?:token|key|secret|[a-z]*password|passwd|pwd)=)[^\s&\"']+", re.IGNORECASE)


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hold secrets, by their names (``HF_TOKEN``, ``PGPASSWORD``), with their values."""
    return {name: value for name, value in environment.items() if _NAME.search(name)}


def url_secrets(name: str, url: str) -> dict[str, str]:
    """Return the secrets in a variable that holds a URL: the whole URL, and its password."""
    try:
        password = urlsplit(url).password
    except ValueError:  # not a URL: only the whole value is a secret
        password = None
    return {name: url} if password is None else {name: url, f"password in {name}": password}


def redacted(text: str, secrets: Mapping[str, str]) -> str:
    """Replace each secret in a text by its name, and passwords in URLs by ``<password>``.

    Args:
        text: Any text.
        secrets: Values by name.
    """
    # Longest first: one secret may be part of another.
    for name, value in sorted(secrets.items(), key=lambda item: len(item[1]), reverse=True):
        if len(value) >= _LEAST_CHARS:
            for form in dict.fromkeys((value, quote(value, safe=""))):
                text = text.replace(form, f"<{name}>")
    return _IN_QUERY.sub(r"\1<secret>", _IN_URL.sub(r"\1:<password>@", text))


def redacted_json(data: bytes, secrets: Mapping[str, str]) -> bytes:
    """Redact the strings of a JSON document; numbers and keys stay, even if a password has the same digits.

    Data that is not JSON is returned unchanged.
    """
    try:
        document = json.loads(data)
    except ValueError:
        return data
    clean = _clean(document, secrets)
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
    """Remove secrets from the environment of a process that needs none.

    Args:
        environment: ``os.environ``; changed.
        keep: Names that stay.
    """
    for name in secrets_of(environment).keys() - keep:
        del environment[name]
