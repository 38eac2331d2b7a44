"""Makes `readme.png`, the picture of the README, from two real trainings: `python data/make_readme_picture.py`."""

import base64
from pathlib import Path

from mpkit.explorers.start import StartExplorer
from mpkit.plots.start import start_scene
from mpkit.plots.static import png, static_bundle


def main() -> None:
    model = StartExplorer(scale_window=50)
    for window in (50, 10):
        model.set(scale_window=window)
        model.train()
        model.wait()
    bundle = static_bundle(png(start_scene(model).spec()), model.summary())
    Path(__file__).with_name("readme.png").write_bytes(base64.b64decode(bundle["image/png"]))
    print(model.summary())


if __name__ == "__main__":
    main()
