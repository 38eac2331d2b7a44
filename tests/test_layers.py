"""A module imports its own layer or lower ones, and `import mpkit` stays small."""

import ast
import builtins
import re
import subprocess
import sys

from support import ROOT

LAYERS = (
    ("arguments", "files", "device", "data", "networks", "gpt"),
    ("formats", "rounding", "blocks"),
    ("casting", "policies", "scalers"),
    ("schedules", "optimizers", "step", "model"),
    ("boost",),
    ("record", "replay", "diagnose", "experiment", "bench"),
    ("view",),
    ("lessons",),
    ("command", "handin", "info", "lab", "__main__"),
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


def test_lines_of_scripts_are_not_longer_than_160_columns():
    assert [line for line in (ROOT / "mpkit/view/scene.js").read_text("utf-8").splitlines() if len(line) > 160] == []


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
    source = "from mpkit.boost import auto\nimport mpkit.view\nfrom .. import boost\ndef f():\n from mpkit import model"
    assert [found.split(":")[0] for found in upward_imports(source, "mpkit.casting.levels")] == ["1", "2", "3", "5"]
    assert upward_imports("from mpkit import formats\nimport torch", "mpkit.casting") == []


def graph() -> dict[str, set[str]]:
    """Every module of mpkit -> the modules of mpkit that it imports: at its top, in a function, or for its types."""
    files = {}
    for path in sorted((ROOT / "mpkit").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        package = name.split(".") if path.stem == "__init__" else name.split(".")[:-1]
        names = [imported_name for _, imported_name in imported(ast.parse(path.read_text()), package)]
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


def lines_of(source: str) -> dict[int, str]:
    """Number of every line that is neither blank nor in a docstring -> "code" or "comment"."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs |= {*range(node.lineno, node.end_lineno + 1)}
    lines = {number: line.strip() for number, line in enumerate(source.splitlines(), 1) if number not in docs}
    return {number: "comment" if line.startswith("#") else "code" for number, line in lines.items() if line}


def lengths(source: str) -> dict[str, int]:
    """`line name` of every function -> its lines of code, signature and all, without docstring, comments and blanks."""
    code = {number for number, kind in lines_of(source).items() if kind == "code"}
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {f"{f.lineno} {f.name}": len(code & {*range(f.lineno, f.end_lineno + 1)}) for f in functions}


def test_no_function_is_longer_than_a_screen():
    assert lengths('def f(\n    x,\n):\n    """Two\n    lines."""\n\n    # why\n    return x\n') == {"1 f": 4}
    files = [p for p in sorted((ROOT / "mpkit").rglob("*.py")) if p.parent.name != "lessons"]  # drawing is a list
    long = [f"{p.relative_to(ROOT)}:{name}" for p in files for name, n in lengths(p.read_text()).items() if n > 40]
    assert long == []


def annotations(tree: ast.AST) -> list[ast.expr]:
    """What stands behind every argument, result and variable that says its type."""
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.returns)
    return [annotation for annotation in found if annotation is not None]


def test_few_types_say_nothing():
    """A bare Any is for another library's object; what may be anything is an object. There were 476 of 4,276 once."""
    some = annotations(ast.parse("def f(x: Any, *y: int) -> Any: z: list[Any] = []"))
    assert sorted(map(ast.unparse, some)) == ["Any", "Any", "int", "list[Any]"]
    files = [p for p in (ROOT / "mpkit").rglob("*.py") if p.parent.name not in ("view", "lessons")]  # of JSON: anything
    trees = [ast.parse(path.read_text()) for path in files]
    every = [annotation for tree in trees for annotation in annotations(tree)]
    bare = [annotation for annotation in every if isinstance(annotation, ast.Name) and annotation.id == "Any"]
    assert len(bare) <= 476 / 2, f"{len(bare)} of {len(every)} annotations are a bare Any"


HARD = (
    *("rounding.py", "blocks/quantize.py", "record/histograms.py", "policies/rule.py", "scalers/scale.py"),
    *("casting/rules.py", "casting/mode.py", "casting/marks.py", "casting/low.py"),
    *("casting/products.py", "optimizers/base.py", "optimizers/update.py", "scalers/finite.py"),
)


def test_comments_stand_where_the_arithmetic_is_hard():
    """Rounding, the rules of casting, slices of an optimizer, counts and the rule of a scale give their reasons."""
    for name in HARD:
        kinds = [*lines_of((ROOT / "mpkit" / name).read_text()).values()]
        assert kinds.count("comment") >= 0.03 * kinds.count("code"), name


PUBLIC = {"auto_mixed_precision amp_level", "__init__ format"}  # arguments whose names users know


def shadowed(tree: ast.Module) -> set[str]:
    """`function name` of every argument or local name that hides a name of the module, or of Python."""
    names = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)} | {*dir(builtins)} - {"_"}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    found = set()
    for f in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        inside = [part for statement in f.body for part in ast.walk(statement)]
        outer = {name for part in inside if isinstance(part, ast.Global) for name in part.names}
        own = {part.arg for part in ast.walk(f.args) if isinstance(part, ast.arg)}
        own |= {part.id for part in inside if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        found |= {f"{f.name} {name}" for name in own & names - outer}
    return found


def test_no_name_hides_another():
    assert shadowed(ast.parse("import math\ndef f(math): list = 1\ndef g(x): f = x")) == {"f math", "f list", "g f"}
    files = sorted((ROOT / "mpkit").rglob("*.py"))
    hidden = {name: p for p in files for name in shadowed(ast.parse(p.read_text()))}
    assert set(hidden) - PUBLIC == set(), hidden


def test_a_step_knows_no_boost_by_name():
    """Training never knows the names of what hooks into it: boosts come in as values, see `Update` and `Scaling`."""
    kinds = "FreezeOpt|AdaSum|DimReduce|GradientAccumulation|GroupLossScaleManager|AutoBoost|LessBN"
    asked = re.compile(rf"isinstance\([^)]*\b(?:{kinds})\b|hasattr\([^)]*unscale_and_update_")
    files = [*sorted((ROOT / "mpkit" / "step").glob("*.py")), ROOT / "mpkit" / "boost" / "cells.py"]
    assert [path.name for path in files if asked.search(path.read_text())] == []


def test_kinds_are_checked_by_one_vocabulary():
    """A bool is an int to Python; that it is no number is said in `mpkit/arguments.py` alone."""
    asks = re.compile(r"isinstance\([^()]+, bool\) or not isinstance|not isinstance\([^()]+, bool\)")
    found = [p.name for p in (ROOT / "mpkit").rglob("*.py") for _ in asks.findall(p.read_text())]
    assert {*found} == {"arguments.py"}


def test_the_rule_of_a_loss_scale_stands_once():
    """The counter meets its interval in one file, and torch's kernel for the same is called in one other."""
    files = [p for p in sorted((ROOT / "mpkit").rglob("*.py")) if p.parent.name != "bench"]  # peers have rules too
    text = {p.relative_to(ROOT).as_posix(): p.read_text() for p in files}
    counter = re.compile(r"(?:good|counter|count|streak)\b[^\n]*[=>]=? [\w.]*(?:growth_interval|window)")
    assert [name for name, source in text.items() if counter.search(source)] == ["mpkit/policies/rule.py"]
    fused = [name for name, source in text.items() if "torch._amp_update_scale_" in source]
    assert fused == ["mpkit/scalers/scale.py"]


def test_import_mpkit_pulls_in_torch_and_numpy_only():
    code = (
        "import sys, torch; before = set(sys.modules); import mpkit, mpkit.step, mpkit.casting, mpkit.scalers;"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}"
        " & {'matplotlib', 'pandas', 'ipywidgets', 'IPython', 'jupyter_client', 'PIL', 'tqdm', 'scipy'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
