"""Texts that may be published: without secrets, home folders and user texts.

What a log or a value has is known by its shape. Whatever has no known shape is the user's own, and only its length is
told: nobody can list all the ways in which a text of a data set comes into a log.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from dryfit.core.text.secrets import redacted, secrets_of

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
