"""The one thing that pyproject.toml cannot say: data and lessons travel in the wheel, as the folder mpkit/share.

They stand at the top of the repository, outside the package, and the sources of the labs, with their solutions, stay
at home: `notebooks/ship.py` writes the folder, here into the build, and for `mpkit lab` in a checkout.
An editable install (`pip install -e .`) needs none of it: the library then reads `data/` where it stands.
"""

import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithShare(build_py):
    """build_py, and mpkit/share beside the modules."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            ship = runpy.run_path(str(Path(__file__).parent / "notebooks" / "ship.py"))["ship"]
            share = Path(self.build_lib) / "mpkit" / "share"
            shutil.rmtree(share, ignore_errors=True)  # of an earlier build
            ship(share)


setup(cmdclass={"build_py": BuildWithShare})
