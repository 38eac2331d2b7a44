"""A module imports its own layer or lower ones, and `import mpkit` stays small."""

import ast
import re
import subprocess
import sys

from support import ROOT

LAYERS = (
    ("arguments", "files", "device", "data", "networks"),
    ("formats", "rounding", "blocks"),
    ("casting", "policies", "scalers"),
    ("schedules", "optimizers", "step", "model"),
    ("boost",),
    ("record", "replay", "diagnose", "experiment", "bench"),
    ("plots",),
    ("explorers", "widgets", "check"),
    ("command", "info", "lab", "__main__"),
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
UPWARD = "# upward:"  # marks a lazy import against the layers, with its reason on the same line


def imported(tree: ast.AST, package: list[str]) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in the file, relative ones resolved."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def upward_imports(source: str, module: str) -> list[str]:
    """`line: name` of every import in `module` (dotted) that climbs to a higher layer."""
    own = LAYER[module.split(".")[1]]
    lines = source.splitlines()
    return [
        f"{line}: {module} (layer {own}) imports {name}"
        for line, name in imported(ast.parse(source), module.split(".")[:-1])
        if name.startswith("mpkit.") and LAYER.get(name.split(".")[1], -1) > own and UPWARD not in lines[line - 1]
    ]


def test_every_module_has_a_layer_and_imports_downward():
    wrong = []
    for path in sorted((ROOT / "mpkit").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts == ("mpkit", "__init__"):
            continue
        assert parts[1] in LAYER, f"{path.relative_to(ROOT)}:1: give the module a layer in {__file__}"
        wrong += [f"{path.relative_to(ROOT)}:{found}" for found in upward_imports(path.read_text(), ".".join(parts))]
    assert wrong == []


def test_the_check_sees_absolute_relative_and_local_imports():
    source = (
        "from mpkit.boost import auto\nimport mpkit.plots\nfrom .. import boost\ndef f():\n from mpkit import model\n"
    )
    assert [found.split(":")[0] for found in upward_imports(source, "mpkit.casting.levels")] == ["1", "2", "3", "5"]
    assert upward_imports("from mpkit import formats\nimport torch", "mpkit.casting") == []


def graph(*, for_types: bool = False) -> dict[str, set[str]]:
    """Every module of mpkit -> the modules of mpkit that it imports, at its top or in a function.

    `for_types` counts what stands under TYPE_CHECKING too.
    """
    files = {}
    for path in sorted((ROOT / "mpkit").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
        tree = ast.parse(path.read_text())
        if not for_types:
            tree.body = [
                node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node))
            ]
        names = [imported_name for _, imported_name in imported(tree, package)]
        found[name] = {n if n in files else n.rpartition(".")[0] for n in names} & set(files) - {name}
    return found


def cycles(graph: dict[str, set[str]]) -> list[str]:
    """The modules that stand in a cycle: what is left when those that import, or are imported by, no other are gone."""
    left = set(graph)
    while True:
        imported_here = set().union(*(graph[name] & left for name in left))
        stay = {name for name in left if graph[name] & left} & imported_here
        if stay == left:
            return sorted(left)
        left = stay


def test_no_module_imports_itself_through_others():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]
    assert cycles(graph()) == []


def test_no_module_imports_itself_for_its_types():
    assert "mpkit.record" in graph(for_types=True)["mpkit.experiment.store"]  # which stands under TYPE_CHECKING
    assert cycles(graph(for_types=True)) == []


def test_a_step_knows_no_boost_by_name():
    """Training never knows the names of what hooks into it: boosts come in as values, see `Update` and `Scaling`."""
    kinds = "FreezeOpt|AdaSum|DimReduce|GradientAccumulation|GroupLossScaleManager|AutoBoost|LessBN"
    asked = re.compile(rf"isinstance\([^)]*\b(?:{kinds})\b|hasattr\([^)]*unscale_and_update_")
    files = [*sorted((ROOT / "mpkit" / "step").glob("*.py")), ROOT / "mpkit" / "boost" / "cells.py"]
    assert [path.name for path in files if asked.search(path.read_text())] == []


def test_kinds_are_checked_by_one_vocabulary():
    """A bool is an int to Python; that it is no number is said in `mpkit/arguments.py`, and hardly anywhere else."""
    asks = re.compile(r"isinstance\([^()]+, bool\) or not isinstance|not isinstance\([^()]+, bool\)")
    found = [p.name for p in (ROOT / "mpkit").rglob("*.py") for _ in asks.findall(p.read_text())]
    assert len([name for name in found if name != "arguments.py"]) <= 20, sorted(found)


def test_the_rule_of_a_loss_scale_stands_once():
    """The counter meets its interval in one file, and torch's kernel for the same is called in one other."""
    files = [p for p in sorted((ROOT / "mpkit").rglob("*.py")) if p.parent.name != "bench"]  # peers have rules too
    text = {p.relative_to(ROOT).as_posix(): p.read_text() for p in files}
    counter = re.compile(r"(?:good|counter|count|streak)\b[^\n]*[=>]=? [\w.]*(?:growth_interval|window)")
    assert [name for name, source in text.items() if counter.search(source)] == ["mpkit/policies/rule.py"]
    fused = [name for name, source in text.items() if "torch._amp_update_scale_" in source]
    assert fused == ["mpkit/scalers/kernel.py"]


def test_import_mpkit_pulls_in_torch_and_numpy_only():
    code = (
        "import sys, torch; before = set(sys.modules); import mpkit, mpkit.step, mpkit.casting, mpkit.scalers;"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}"
        " & {'matplotlib', 'pandas', 'ipywidgets', 'IPython', 'jupyter_client', 'PIL', 'tqdm', 'scipy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
