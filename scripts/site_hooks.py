"""What the site has beside docs/: reference pages made of the code, and each file of the repository that pages link to.

MkDocs calls the functions that start with ``on_`` (``hooks`` in ``mkdocs.yml``). A link that leads nowhere is left as
it is, so that MkDocs, which is strict, fails.
"""

import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from reference_pages import PAGES  # MkDocs runs this file by its path

_DOCS: Final = "docs"
_OTHERS: Final = "repository"
"""Folder of the site with the files from outside of docs/."""
_FENCE: Final = re.compile(r"^(`{3,}).*?^\1`*$", re.DOTALL | re.MULTILINE)
_LINK: Final = re.compile(r"(\]\()(?![a-z]+:|#|/)([^)#\s]+)")
_LANGUAGES: Final = {".py": "python", ".toml": "toml", ".json": "json", ".yml": "yaml", ".sh": "sh"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference pages, and the files that pages link to, and those that these link to."""
    for place, make in PAGES.items():
        files.append(File.generated(config, place, content=make()))
    todo = [f"{_DOCS}/{file.src_uri}" for file in files.documentation_pages() if file.src_uri not in PAGES]
    seen = set(todo)
    while todo:
        path = todo.pop()
        for target in sorted(_targets(path) - seen):
            seen.add(target)
            if not target.startswith(f"{_DOCS}/"):
                files.append(File.generated(config, _page_of(target), content=_content(target)))
                todo.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a page to where the site has what they name."""
    del config, files
    here = page.file.src_uri
    if here in PAGES:
        return markdown
    return _over_links(markdown, lambda target: _moved(_source_of(here), target))


def _targets(path: str) -> set[str]:
    """Return the files of the repository that a page, or the list of a folder, links to."""
    if not (path.endswith(".md") or (ROOT / path).is_dir()):
        return set()
    found: set[str] = set()
    text = _listing(path) if (ROOT / path).is_dir() else (ROOT / path).read_text(encoding="utf-8")

    def note(target: str) -> str:
        named = posixpath.normpath(posixpath.join(_folder(path), target))
        if (ROOT / named).exists():
            found.add(named)
        return target

    _over_links(text, note)
    return found


def _over_links(markdown: str, change: Callable[[str], str]) -> str:
    """Change the targets of links outside of code."""
    parts, at = [], 0
    for fence in [*_FENCE.finditer(markdown), None]:
        end = fence.start() if fence else len(markdown)
        parts.append(_LINK.sub(lambda link: link[1] + change(link[2]), markdown[at:end]))
        parts.append(fence[0] if fence else "")
        at = fence.end() if fence else end
    return "".join(parts)


def _moved(source: str, target: str) -> str:
    """Return where the site has what a file of the repository names."""
    named = posixpath.normpath(posixpath.join(_folder(source), target))
    if named.removeprefix(f"{_DOCS}/") in PAGES or not (ROOT / named).exists():
        return target
    here = posixpath.dirname(_page_of(source))
    return posixpath.relpath(_page_of(named), here or ".")


def _folder(path: str) -> str:
    return path if (ROOT / path).is_dir() else posixpath.dirname(path)


def _page_of(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    if path.startswith(f"{_DOCS}/"):
        return path.removeprefix(f"{_DOCS}/")
    if (ROOT / path).is_dir():
        return f"{_OTHERS}/{path}/index.md"
    return f"{_OTHERS}/{path}" if path.endswith(".md") else f"{_OTHERS}/{path}.md"


def _source_of(place: str) -> str:
    """Return the file of the repository that a page of the site shows."""
    if not place.startswith(f"{_OTHERS}/"):
        return f"{_DOCS}/{place}"
    path = place.removeprefix(f"{_OTHERS}/")
    for one in (path, path.removesuffix("/index.md"), path.removesuffix(".md")):
        if (ROOT / one).exists():
            return one
    raise FileNotFoundError(f"{place} shows no file of the repository")


def _content(path: str) -> str:
    """Return a file of the repository as a page that the site's search passes over."""
    head = "---\nsearch:\n  exclude: true\n---\n\n"
    if (ROOT / path).is_dir():
        return head + _listing(path)
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return head + text
    ticks = "`" * max(3, *(len(run) + 1 for run in re.findall("`{3,}", text))) if "```" in text else "```"
    return f"{head}# {path}\n\n{ticks}{_LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n{ticks}\n"


def _listing(path: str) -> str:
    names = sorted(one.name for one in (ROOT / path).iterdir() if one.is_file())
    return f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
