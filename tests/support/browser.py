"""A page in a real browser without a window: what its document is after its scripts have run, and a picture of it."""

import html
import re
import subprocess
from pathlib import Path

from parts import need


def _run(page: Path, folder: Path, *options: str) -> str:
    command = [
        need("chromium-headless-shell"),
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,2400"),
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=20000",
        "--enable-logging=stderr",
        *options,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"CONSOLE[^\n]*", done.stderr)
    assert not said, said  # an error of a script, or something that the page's policy forbids
    return done.stdout


def document_of(page: Path, folder: Path) -> str:
    """The document of a page after its scripts, which said nothing on its console."""
    return html.unescape(_run(page, folder, "--dump-dom"))


def picture_of(page: Path, folder: Path) -> Path:
    """A picture of the page."""
    file = folder / "page.png"
    _run(page, folder, f"--screenshot={file}")
    return file
