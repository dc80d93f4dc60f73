"""Whatever way a secret is written, its redacted text holds neither the secret nor that way of writing it."""

import base64
import json
import shlex
from collections.abc import Callable
from urllib.parse import quote, quote_plus, urlencode

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dryfit.settings.secrets import redacted, redacted_json

NAME = "PLANTED_KEY"
MARK = f"<{NAME}>"

FORMS: dict[str, Callable[[str], str]] = {
    "raw": str,
    "repr": repr,
    "repr beside a quote": lambda secret: repr(f"it's {secret}"),
    "repr beside both quotes": lambda secret: repr(f"""it's "{secret}" """),
    "repr in a repr": lambda secret: repr(repr(f"'{secret}'")),
    "ascii": ascii,
    "repr of bytes": lambda secret: repr(secret.encode()),
    "JSON": json.dumps,
    "JSON with its own letters": lambda secret: json.dumps(secret, ensure_ascii=False),
    "JSON with escaped slashes": lambda secret: json.dumps(secret).replace("/", "\\/"),
    "JSON in JSON": lambda secret: json.dumps(json.dumps({"key": secret})),
    "JSON in a repr": lambda secret: repr(json.dumps({"key": secret})),
    "URL": lambda secret: quote(secret, safe=""),
    "URL with slashes": quote,
    "form": lambda secret: quote_plus(secret),
    "form with a name": lambda secret: urlencode({"it": secret}),
    "URL in lower case": lambda secret: quote(secret, safe="").lower() if secret.islower() else quote(secret),
    "shell": shlex.quote,
    "command of a shell": lambda secret: shlex.join(["sh", "-c", f"echo {secret}"]),
    "shell with escaped quotes": lambda secret: "'" + secret.replace("'", "'\\''") + "'",
    "shell in double quotes": lambda secret: '"' + "".join("\\" * (char in '\\"$`') + char for char in secret) + '"',
    "base64": lambda secret: base64.b64encode(secret.encode()).decode(),
    "base64 for URLs": lambda secret: base64.urlsafe_b64encode(secret.encode()).decode(),
    "base64 in a URL": lambda secret: quote(base64.b64encode(secret.encode()), safe=""),
    "header of one name": lambda secret: base64.b64encode(f"u:{secret}".encode()).decode(),
    "header of another": lambda secret: base64.b64encode(f"me:{secret}".encode()).decode(),
    "header of a third": lambda secret: base64.b64encode(f"you:{secret}".encode()).decode(),
    "base64 with more after it": lambda secret: base64.b64encode(f"{secret}, and more".encode()).decode(),
}

SPECIAL = "abcXYZ0189'\"\\\n\r\t /+=&?%:@$`#.-_éß中😀\x1b\x07\x85\u2028"
TYPED = st.text(st.sampled_from(SPECIAL), min_size=6, max_size=40)
ANYTHING = st.text(st.characters(exclude_categories=["Cs"]), min_size=6, max_size=40)
SECRETS = (TYPED | ANYTHING).map(str.strip).filter(lambda secret: len(secret) >= 6)


@pytest.mark.parametrize("form", FORMS)
@given(secret=SECRETS)
@example(secret="p'a\"s\\s\nw/ö r+d")
@example(secret="\\\\\\\\\\\\")
@example(secret="''''''\"\"\"\"")
def test_no_form_of_a_secret_stays(form: str, secret: str) -> None:
    written = FORMS[form](secret)
    text = redacted(f"401: {written}.", {NAME: secret})
    assert MARK in text
    left = text.replace(MARK, "\0")
    assert written not in left
    assert secret not in left


@given(secret=SECRETS)
def test_a_document_with_a_secret_stays_json(secret: str) -> None:
    document = {"text": f"see {secret!r}", "number": 5, "list": [json.dumps(secret)]}
    clean = json.loads(redacted_json(json.dumps(document).encode(), {NAME: secret}))
    assert clean["number"] == 5
    assert MARK in clean["text"] and MARK in clean["list"][0]


@given(secret=SECRETS, text=st.text(st.characters(categories=["L", "N"]), max_size=60))
def test_a_text_without_the_secret_is_left_alone(secret: str, text: str) -> None:
    if secret not in text:
        assert redacted(text, {NAME: secret}) == text


@given(lines=st.lists(st.text(st.sampled_from("abcXYZ01/+='\\"), min_size=1, max_size=64), min_size=2, max_size=6))
def test_each_long_line_of_a_secret_counts(lines: list[str]) -> None:
    secrets = {NAME: "\n".join(lines)}
    for line in lines:
        said = [redacted(f"at {FORMS[form](line)}.", secrets) for form in ("raw", "repr", "JSON", "base64")]
        if len(line) >= 8:
            assert all(MARK in text for text in said)


@given(secret=st.text(st.characters(exclude_categories=["Cs"]), max_size=5))
def test_short_values_are_no_secrets(secret: str) -> None:
    assert redacted(f"it is {secret}.", {NAME: secret}) == f"it is {secret}."


def test_bytes_of_the_environment_that_are_no_text() -> None:
    secret = b"planted \xff\x80 bytes".decode("utf-8", "surrogateescape")
    for written in (
        secret,
        repr(secret),
        repr(b"planted \xff\x80 bytes"),
        json.dumps(secret),
        "planted%20%FF%80+bytes",
    ):
        assert MARK in redacted(written, {NAME: secret})


def test_text_full_of_backslashes_takes_no_time() -> None:
    """A pattern with many ways to share out a run of backslashes would take for ever; the test's time limit says so."""
    secrets = {NAME: "\\'" * 12 + "x", "OTHER_KEY": "\n\\\n\\\n\\ end", "THIRD_KEY": "'\\\\\\\\'\\\\\\\\'"}
    for text in ("\\" * 50_000, "\\'" * 20_000, "'" * 30_000, "\\n\\\\" * 10_000):
        assert redacted(text, secrets) is not None
