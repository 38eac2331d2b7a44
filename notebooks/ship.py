"""What travels in the wheel, written to a folder: `python notebooks/ship.py FOLDER` (setup.py and `mpkit lab` call it).

    data/       what the library reads: digits, traces, experiments, benchmarks, and where each comes from
    notebooks/  the lessons as they are stored, and the labs of students; the instructor's folder stays at home

A link of the lessons' README to a file that does not travel becomes the address of that file in the repository.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ("README.md", "*.npz", "*.json", "*/README.md", "*/*.npz", "*/*.json", "*/*.zip")
LESSONS = ("[0-9][0-9]_*.ipynb", "more/*/*.ipynb", "labs/lab*.ipynb", "more/*/*.py")


def ship(to: Path) -> None:
    """Write the folder.

    Raises:  FileExistsError unless it is empty or not there: what stands in it may be somebody's work.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise FileExistsError(f"{to} is there and not empty; name a folder that is not there yet")
    for folder, patterns in (("data", DATA), ("notebooks", LESSONS)):
        for pattern in patterns:
            for path in sorted((ROOT / folder).glob(pattern)):
                target = to / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    readme = (ROOT / "notebooks" / "README.md").read_text(encoding="utf-8")
    (to / "notebooks" / "README.md").write_text(_links_that_lead(readme, to / "notebooks"), encoding="utf-8")


def _links_that_lead(text: str, folder: Path) -> str:
    """`text` with every relative link to a file that `folder` lacks led to the repository."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]

    def led(match: re.Match[str]) -> str:
        path = match[1]
        return match[0] if (folder / path).exists() else f"]({urls['Repository']}/blob/main/notebooks/{path})"

    return re.sub(r"\]\(([^)#:]+)\)", led, text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python notebooks/ship.py FOLDER")
    try:
        ship(Path(sys.argv[1]))
    except OSError as error:
        sys.exit(f"mpkit: {error}")
