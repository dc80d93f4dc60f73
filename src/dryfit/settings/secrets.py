"""Secrets in texts: found, redacted, and kept out of what strangers may see."""

import functools
import json
import re
from base64 import b64encode
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import unquote, urlsplit

# Patterns that find a secret in a text as it is, quoted, escaped or in base64.
#
# One pattern stands for all ways in which ``repr``, JSON, shells, URLs and forms write a value, also one inside
# another: each character may be there as it is or escaped, after any number of backslashes.


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


# Redaction of secrets: values of environment variables, and passwords in URLs.


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


# Texts that may be published: without secrets, home folders and user texts.
#
# What a log or a value has is known by its shape. Whatever has no known shape is the user's own, and only its length
# is told: nobody can list all the ways in which a text of a data set comes into a log.


MOST_LINE_CHARS: Final = 400
"""Of a line that is shown; what comes after is left out."""

_TOKEN = re.compile(
    r"hf_\w{6,}|api_org_\w{6,}|sk-[\w-]{10,}|gh[pousr]_\w{10,}|github_pat_\w{10,}|glpat-[\w-]{10,}|AKIA[0-9A-Z]{10,}"
    r"|xox[abeprs]-[\w-]{8,}|AIza[\w-]{20,}|eyJ[\w-]{8,}\.[\w.-]+|wandb_v1_\w{8,}|pypi-[\w-]{12,}"
)
"""Tokens of hubs, clouds and forges, by the letters that they begin with."""
_BEARER = re.compile(r"(?i)\b(bearer|basic|digest)\s+(?=[\w.+/=~-]*\d)[\w.+/=~-]{8,}")
_ASSIGNED = re.compile(
    r"(?i)([\w.-]*(?:token|key|secret|passw(?:or)?d|passwd|passphrase|pwd|credential|authorization)s?[\"']?\s*(?:=>|[:=])\s*)"
    r"(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;&\"']+)"
)
_SECRET_KEY = re.compile(r"(?i)token$|secret|passw|passphrase|credential|api_?key|^key$|_key$|pwd$")
_RANDOM = re.compile(r"(?<![\w-])(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{24,}(?![\w-])")
"""Long, with letters and digits: a key of some service, or a hash."""
_NUMBER = re.compile(r"[-+]?[\d_.,]+(?:e[-+]?\d+)?[)\]}]*|None|True|False|null|true|false", re.IGNORECASE)
_HOMES = re.compile(r"/(home|Users)/(?!<user>)[^/\s:\"']+")
_QUOTED = re.compile(
    r"(?<![A-Za-z0-9])[bru]{0,2}'((?:[^'\\\n]|\\.){3,})'|\"((?:[^\"\\\n]|\\.){3,})\"|`([^`\n]{3,})`|«([^»\n]{3,})»"
    r"|“([^”\n]{3,})”"
)
"""Quotations; an apostrophe within a word begins none."""
_CUT = re.compile(r"(?<![^\s:=(\[{,])[bru]{0,2}['\"`«“](?=\S)[^'\"`»”]{6,}$")
"""A quotation whose end was cut off."""
_WORD = re.compile(r"[A-Za-z0-9_.+-]{1,40}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,60}/[A-Za-z0-9][\w.-]{0,60}")

_FRAME = re.compile(r'(\s*File )"([^"\n]+)"(, line \d+(?: in|, in)? ?[\w<>.]*)(.*)')
_RAISED = re.compile(
    r"((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit|Refused|Iteration))(:\s|$)(.*)"
)
_WARNED = re.compile(r"(\S+\.py):(\d+): (\w*Warning): (.*)")
_KNOWN = re.compile(
    r"Traceback \(most recent call last\):|During handling of the above exception, another exception occurred:"
    r"|The above exception was the direct cause of the following exception:|Fatal Python error: .*"
    r"|(?:Current thread|Thread) 0x[0-9a-f]+ .*|Extension modules: .*|\s*\^+~*\^*|\s*<no Python frame>|Killed|Aborted.*"
    r"|Segmentation fault.*|terminate called .*|\s*what\(\):\s+(?:CUDA|NCCL|c10|std::)\S*.*|\[[WEIF]\d* .*"
    r"|CUDA .*|NCCL .*|\s*allowed: .*|\s*next: .*|torch\.\S+.*|\[transformers\] .*"
)
"""Lines that Python, torch and dryfit write; a user's own may look alike, and their quoted texts are left out too."""

_LIBRARIES: Final = ("torch.", "dryfit.", "safetensors", "huggingface_hub.")
"""Their exceptions are raised by them alone: these messages stay also where a user's own code runs."""
_OWN_WORDS: Final = frozenset({"labels", "names", "answers", "no_evidence", "classes", "label_counts", "words"})
"""Keys under which stand names of a user's classes, or words of their answers."""
_IDS: Final = frozenset({"id", "fingerprint", "data_fingerprint", "key"})
_MODEL_KEYS: Final = frozenset({"name", "criteria_model"})
_SENTENCES: Final = frozenset({"sentence", "reason", "reasons", "notes", "terms", "fallback", "found", "fix"})
_LOGS: Final = frozenset({"error", "detail"})
_RAISED_TEXTS: Final = frozenset({"sentence", "reason", "error", "detail"})
"""Keys under which the message of an exception may stand."""


@dataclass(frozen=True, slots=True)
class Shareable:
    """Makes texts shareable.

    Attributes:
        secrets: Values by the names that stand for them.
        places: Folders of this machine, each with what stands for it; longest first.
        names: Of the machine and its user.
        own_code: Whether a user's own code ran, whose messages may be any text.
    """

    secrets: Mapping[str, str]
    places: tuple[tuple[str, str], ...]
    names: re.Pattern[str]
    own_code: bool = False

    def text(self, text: str) -> str:
        """Return a text without secrets and places; all else stays."""
        clean = redacted(text, self.secrets)
        clean = _BEARER.sub(r"\1 <secret>", _TOKEN.sub("<token>", clean))
        clean = _ASSIGNED.sub(_without_value, clean)
        for place, mark in self.places:
            clean = clean.replace(place, mark)
        clean = _HOMES.sub(r"/\1/<user>", _RANDOM.sub(_length, clean))
        return self.names.sub("<name>", clean)

    def sentence(self, text: str) -> str:
        """Return a message of dryfit's, or of a library, without what it quotes."""
        told = _QUOTED.sub(_without_quoted, self.text(" ".join(text.split())))
        return _CUT.sub(_length, told)[:MOST_LINE_CHARS]

    def log(self, text: str) -> str:
        """Return the lines of a log: those of known shape, and of the others the length."""
        shown: list[str] = []
        unknown: list[str] = []
        for line in [*text.splitlines(), None]:
            told = None if line is None else self._line(line)
            if unknown and (line is None or told is not None):
                what = f"{len(unknown)} lines, " if len(unknown) > 1 else ""
                length = sum(map(len, unknown))
                shown.append(f"<{what}{length} characters>" if length else "")
                unknown = []
            if told is not None:
                shown.append(told)
            elif line is not None:
                unknown.append(line)
        return "\n".join(shown)

    def value(self, value: Any, key: str = "", inside: str = "") -> Any:
        """Return a setting, or a part of an event: numbers and names of things stay, texts do not.

        Args:
            value: As JSON or TOML have it.
            key: Its key.
            inside: The key of the table it stands in.
        """
        match value:
            case list() | tuple() | dict() if key in _OWN_WORDS and value:
                return f"<{len(cast('list[Any]', value))} of the user's words>"
            case str() if key in _OWN_WORDS:
                return _length_of(value)
            case str():
                return self._string(value, key, inside)
            case list() | tuple():
                return [self.value(item, key, inside) for item in cast("list[Any]", value)]
            case dict():
                items = cast("dict[str, Any]", value).items()
                return {self._key(name): self.value(item, name, key) for name, item in items}
            case int() | float() | None:
                return value
            case _:  # a date of TOML
                return _length_of(str(value))

    def _key(self, name: str) -> str:
        clean = self.text(name)
        return clean if _WORD.fullmatch(clean) else _length_of(name)

    def _string(self, value: str, key: str, inside: str) -> str:
        if not value:
            return value
        if key in _IDS and inside != "params":
            return value[:8] if value.isalnum() and len(value) >= 16 else _length_of(value)
        if _SECRET_KEY.search(key):
            return "<secret>"
        if key == "host" or (key == "name" and inside in ("", "study")):  # of a machine, of a study
            return _length_of(value)
        if self.own_code and key in _RAISED_TEXTS:
            return _length_of(value)
        if key in _SENTENCES:
            return self.sentence(value)
        if key in _LOGS:
            return self.log(value)
        clean = self.text(value)
        if clean == value and (_WORD.fullmatch(value) or (key in _MODEL_KEYS and _HUB_NAME.fullmatch(value))):
            return value
        suffix = Path(value).suffix if "/" in value and re.fullmatch(r"\.\w{1,10}", Path(value).suffix) else ""
        return f"<path to a {suffix}>" if suffix else _length_of(value)

    def _line(self, line: str) -> str | None:
        """Return a line that has a known shape; None: it has none."""
        clean = self.text(line)[: 4 * MOST_LINE_CHARS]
        if frame := _FRAME.fullmatch(clean):
            return f'{frame[1]}"{_short_path(frame[2])}"{frame[3]}'
        if warned := _WARNED.fullmatch(clean):
            return f"{_short_path(warned[1])}:{warned[2]}: {warned[3]}: {self._message(warned[4])}"
        if raised := _RAISED.fullmatch(clean):
            of_library = raised[1].startswith(_LIBRARIES)
            message = self.sentence(raised[3]) if of_library else self._message(raised[3])
            return f"{raised[1]}{raised[2]}{message}".rstrip()
        return self.sentence(clean) if _KNOWN.fullmatch(clean) else None

    def _message(self, text: str) -> str:
        return _length_of(text) if self.own_code and text else self.sentence(text)


def shareable(
    environment: Mapping[str, str], home: Path, host: str, *, folder: Path | None = None, own_code: bool = False
) -> Shareable:
    """Return the filter that removes private parts from this machine's texts.

    Args:
        environment: The process's. Values that look like keys of services count as secrets, whatever they are called.
        home: The user's home folder.
        host: Name of this machine.
        folder: A study's folder.
        own_code: Whether the study runs a user's own function.
    """
    odd = {name: value for name, value in environment.items() if _RANDOM.fullmatch(value)}
    places = {str(home): "~", str(home.resolve()): "~"}
    places |= {str(folder): "<study>", str(folder.resolve()): "<study>"} if folder is not None else {}
    longest_first = sorted(places.items(), key=lambda item: len(item[0]), reverse=True)
    kept = tuple((place, mark) for place, mark in longest_first if len(place) > 1)
    names = {host, host.partition(".")[0], home.name}
    whole = re.compile(
        "|".join(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])" for name in sorted(names) if name) or "(?!)"
    )
    return Shareable({**secrets_of(environment), **odd}, kept, whole, own_code)


def _without_value(found: re.Match[str]) -> str:
    return found[0] if _NUMBER.fullmatch(found[2]) else f"{found[1]}<secret>"


def _without_quoted(found: re.Match[str]) -> str:
    inner = next(group for group in found.groups() if group is not None)
    is_name = _WORD.fullmatch(inner) or inner.startswith("<") or _HUB_NAME.fullmatch(inner)
    return found[0] if is_name else _length_of(inner)


def _length(found: re.Match[str]) -> str:
    return _length_of(found[0])


def _length_of(text: str) -> str:
    return f"<{len(text)} characters>"


def _short_path(path: str) -> str:
    """Return a source file's path from where it is a package's; of a user's own file its name alone."""
    for mark in ("site-packages/", "dist-packages/", "src/dryfit/"):
        if mark in path:
            return path[path.index(mark) :]
    library = re.search(r"lib/python3\.\d+/", path)
    return path[library.start() :] if library else path if path.startswith("<") else f".../{path.rpartition('/')[2]}"
