"""Point every badge and address of this repository to a fork: `python .ci/fork.py OWNER REPO`.

The address that stands now is read from `Repository` in pyproject.toml, so the command can be given again. Uses the
standard library only.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    "pyproject.toml",
    "CITATION.cff",
    "README.md",
    "notebooks/README.md",
    *(f"notebooks/{f}/lab07_gpu.ipynb" for f in ("labs", "instructor")),
)
PREFIXES = r"github\.com/|colab\.research\.google\.com/github/|mybinder\.org/v2/gh/"
PAGES = "https://{}.github.io/{}/"


def address(root: Path = ROOT) -> tuple[str, str]:
    """(owner, repo) of today; ValueError if pyproject.toml names no repository."""
    project = (root / FILES[0]).read_text("utf-8")
    found = re.search(r'^Repository = "https://github\.com/([^/"]+)/([^/"]+)"', project, re.M)
    if not found:
        raise ValueError('pyproject.toml needs a line Repository = "https://github.com/OWNER/REPO" in [project.urls]')
    return found[1], found[2]


def fork(owner: str, repo: str, root: Path = ROOT) -> list[str]:
    """Write OWNER/REPO into the addresses of FILES; the files that changed.

    Raises:  ValueError if a name cannot be one on GitHub, or pyproject.toml names no repository; FileNotFoundError for
             one of FILES. Nothing is written then.
    """
    for what, name in (("OWNER", owner), ("REPO", repo)):
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ValueError(f"{what} must be a name as GitHub has them, got {name!r}; python .ci/fork.py ada mpkit")
    now = re.escape("/".join(address(root)))
    addresses = re.compile(rf"({PREFIXES}){now}(?![.-]*\w)")
    texts = {name: (root / name).read_text("utf-8") for name in FILES}  # all of them, before one is written
    site = PAGES.format(*address(root)), PAGES.format(owner, repo)
    led = {name: addresses.sub(lambda m: f"{m[1]}{owner}/{repo}", t).replace(*site) for name, t in texts.items()}
    changed = [name for name in FILES if led[name] != texts[name]]
    for name in changed:
        (root / name).write_text(led[name], "utf-8")
    return changed


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python .ci/fork.py ada mpkit")
    try:
        written = fork(*sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"mpkit: {error}")
    print(f"mpkit: written, commit them: {', '.join(written)}" if written else "mpkit: the addresses led there already")
