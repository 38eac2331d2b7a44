"""The README's examples run, its map is complete, and the package's short names lead where they say."""

import re
from importlib import import_module

import pytest
from support import ROOT

import mpkit

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_examples_of_the_readme_run_one_after_the_other_and_print_what_it_shows(capsys):
    names: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    assert capsys.readouterr().out == "".join(re.findall(r"```text\n(.*?)```", README, re.S))


def test_the_map_names_every_lab_and_every_link_exists():
    listed = (ROOT / "notebooks" / "README.md").read_text()
    students = next(line for line in listed.replace("\n  ", " ").splitlines() if line.startswith("* **Student.**"))
    for path in (ROOT / "notebooks" / "labs").glob("*.ipynb"):
        assert f"lab {path.name[3:5]}" in students
    for text, folder in ((README, ROOT), (listed, ROOT / "notebooks")):
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (folder / link).exists(), link


@pytest.mark.parametrize("name", sorted(set(mpkit.__all__) - {"__version__"}))
def test_a_short_name_is_the_public_name_of_its_module(name):
    module = import_module(f"mpkit.{mpkit._HOME[name]}")
    assert getattr(mpkit, name) is getattr(module, name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Loss'"):
        _ = mpkit.Loss
