"""Makes `readme.gif`, the animation of the README, from the living view of lesson 04.

`python data/make_readme_animation.py`; needs Chromium and playwright, as the browser tests do.
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from mpkit.lessons.dynamic_scale import dynamics
from mpkit.view.page import Page

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "page")]
STEPS = range(96, 206)
WIDTH, COLOURS, EACH = 700, 160, 90  # pixels, colours, milliseconds a frame


def main() -> None:
    from browser import CHROMIUM, QUIET
    from scenes import page

    view = Page(dynamics(window=16, step=STEPS[0]))
    frames = []
    with sync_playwright() as tool, tempfile.TemporaryDirectory() as folder:
        browser = tool.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        tab = browser.new_page(viewport={"width": view.view.sheet.size[0] + 16, "height": 700})
        file = Path(folder) / "page.html"
        file.write_text(page([view]))
        tab.goto(file.as_uri())
        tab.wait_for_function("window.done && models.length")
        box = tab.locator(".mpk-stage").bounding_box()
        clip = {"x": 0, "y": 0, "width": view.view.sheet.size[0] + 16, "height": box["y"] + box["height"]}
        for step in STEPS:
            tab.evaluate(f"models[0].put('index', {step})")
            frames.append(Image.open(io.BytesIO(tab.screenshot(clip=clip))).convert("RGB"))
        browser.close()
    small = [f.resize((WIDTH, round(WIDTH * f.height / f.width)), Image.Resampling.LANCZOS) for f in frames]
    palette = small[-1].quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    flat = [f.quantize(palette=palette, dither=Image.Dither.NONE) for f in small]
    target = HERE / "readme.gif"
    flat[0].save(target, save_all=True, append_images=flat[1:], duration=EACH, loop=0, optimize=True)
    print(f"{len(flat)} frames, {target.stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
