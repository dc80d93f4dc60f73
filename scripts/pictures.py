"""Take the pictures of docs/pictures from real runs: a rehearsal's page and timeline, and a search's report.

``make pictures`` runs this file. A headless Chromium (``make engines``) draws the pages.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from PIL import Image

from engines import find

ROOT: Final = Path(__file__).resolve().parents[1]
OUT: Final = ROOT / "docs" / "pictures"
_SCRIPT: Final = ROOT / "tests" / "programs" / "of_pages" / "train.py"
_ARGUMENTS: Final = "--width 2048 --layers 16 --length 1024 --per_device_train_batch_size 8"
_COLOURS: Final = 256
_WIDTH: Final = 1100
_INSIDE: Final = 24
"""So many pixels from the left lie within a card, left of its text."""
_SEARCH: Final = """\
[study]
name = "moons"
task = "objective"
trials = 60
seed = 3

[objective]
function = "objective.py:noisy_moons"
directions = ["minimize"]

[space]
rate = {low = 0.01, high = 5.0, log = true}
decay = {low = 1e-5, high = 1.0, log = true}

[search]
pruner = "median"
startup_trials = 8
"""


@dataclass(frozen=True, slots=True)
class Shot:
    """One picture: of the top of a page, or of one of its cards alone.

    Attributes:
        page: The page's file, within the folder of the runs.
        height: In pixels, of what the browser shows.
        card: The number of the card; None: all that the browser shows.
    """

    name: str
    page: str
    height: int
    card: int | None = None


SHOTS: Final = (
    Shot("rehearsal", "rehearsal.html", 380),
    Shot("timeline", "rehearsal.html", 1300, card=1),
    Shot("report", "report.html", 1150),
)


def run(folder: Path) -> None:
    """Make the pages: a rehearsal that does not fit its device, and the report of a search."""
    (folder / "train.py").write_bytes(_SCRIPT.read_bytes())
    (folder / "objective.py").write_bytes((ROOT / "examples" / "objective.py").read_bytes())
    (folder / "moons.toml").write_text(_SEARCH, encoding="utf-8")
    rehearse = ["rehearse", "--quiet", "--device", "rtx4090", "--html", "rehearsal.html", "train.py"]
    _dryfit(folder, *rehearse, *_ARGUMENTS.split(), statuses=(0, 1))
    _dryfit(folder, "tune", "moons.toml", "--quiet")
    _dryfit(folder, "report", "moons", "-o", "report.html")


def _dryfit(folder: Path, *words: str, statuses: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run([sys.executable, "-m", "dryfit.documents.command_line", *words], cwd=folder, check=False)
    if done.returncode not in statuses:
        raise SystemExit(f"`dryfit {' '.join(words)}` ended with status {done.returncode}")


def take(shot: Shot, folder: Path) -> None:
    """Take one picture, with few colours."""
    browser = find("chromium-headless-shell")
    if browser is None:
        raise SystemExit("there is no chromium-headless-shell: `make engines` installs it")
    file = OUT / f"{shot.name}.png"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={_WIDTH},{shot.height}"]
    command += ["--virtual-time-budget=20000", f"--screenshot={file}", (folder / shot.page).as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    picture = Image.open(file).convert("RGB")
    if shot.card is not None:
        top, bottom = cards(picture)[shot.card]
        picture = picture.crop((0, top, picture.width, bottom))
    picture.quantize(_COLOURS).save(file, optimize=True)
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")


def cards(picture: Image.Image) -> list[tuple[int, int]]:
    """Return where the white cards of a page begin and end, in pixels from its top."""
    found: list[tuple[int, int]] = []
    column = [picture.getpixel((_INSIDE, y)) == (255, 255, 255) for y in range(picture.height)]
    for y, is_card in enumerate(column):
        if is_card and (y == 0 or not column[y - 1]):
            found.append((y, y + 1))
        elif is_card:
            found[-1] = (found[-1][0], y + 1)
    return found


def main() -> None:
    """Run, and take all pictures."""
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dryfit-pictures-") as made:
        folder = Path(made)
        run(folder)
        for shot in SHOTS:
            take(shot, folder)


if __name__ == "__main__":
    main()
