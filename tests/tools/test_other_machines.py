"""The stand-ins for other machines: the jitter moves bits and repeats itself, and a cell that differs is named."""

import json
import os
import subprocess
import sys

import nbformat
import other_machines
from support import ROOT

PRODUCTS = """
import json, torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
a, b, x = torch.randn(6, 5), torch.randn(5, 6), torch.randn(2, 3, 8, 8)
q, h = torch.randn(1, 2, 4, 8), torch.randn(128, 128)
conv, linear = nn.Conv2d(3, 4, 3), nn.Linear(8, 3)
def grads(module, x):
    out = module(x)
    return [out, *torch.autograd.grad(out.square().sum(), list(module.parameters()))]
def all_of_them():
    return {
        "mm": [a @ b], "addmm": [torch.addmm(b, b @ a, b)], "bmm": [torch.bmm(a[None], b[None])],
        "baddbmm": [torch.baddbmm(a[None] @ b[None], a[None], b[None], beta=0.5)], "mv": [a @ b[:, 0]],
        "addmv": [torch.addmv(a[:, 0], a, b[:, 0])], "dot": [a[0] @ b[:, 0]],
        "half": [h.half() @ h.half()],
        "einsum": [torch.einsum("ij,jk->ik", a, b)], "double": [a.double() @ b.double()], "linear": grads(linear, x),
        "convolution": grads(conv, x), "attention": [F.scaled_dot_product_attention(q, q, q)],
    }
first, second = all_of_them(), all_of_them()
zero, low = torch.zeros(3, 3), (torch.float16, torch.bfloat16, torch.float32)
def refused(a, b):
    try:
        h.to(a) @ h.to(b)
    except RuntimeError as error:
        return "same dtype" in str(error)
    return False
print(json.dumps({
    "bits": {name: [t.double().flatten().tolist() for t in ts] for name, ts in first.items()},
    "repeats": all(torch.equal(s, t) for n in first for s, t in zip(first[n], second[n])),
    "two dtypes are refused": all(refused(a, b) for a in low for b in low if a is not b),
    "zero stays": bool((zero @ zero == 0).all()), "inf stays": bool((zero + torch.inf).mv(torch.ones(3)).isinf().all()),
}))
"""


def with_jitter(seed, code):
    """What the code prints in a process of its own that finds the jitter, with a seed or ""."""
    variables = {"PYTHONPATH": f"{ROOT / 'tests' / 'tools' / 'jitter'}", "OMP_NUM_THREADS": "1", "MPKIT_JITTER": seed}
    return json.loads(subprocess.check_output([sys.executable, "-c", code], env=os.environ | variables, text=True))


def test_the_jitter_moves_the_last_bits_of_every_product_and_repeats_itself(capsys):
    exec(PRODUCTS, {})  # here, where nothing is moved
    plain, three, four = json.loads(capsys.readouterr().out), with_jitter("3", PRODUCTS), with_jitter("4", PRODUCTS)
    assert all(seen[kept] for seen in (plain, three, four) for kept in seen if kept != "bits")
    for name, results in plain["bits"].items():
        # a chain of up to eight products on values of size 10: the bound is generous, the point is that bits move
        for ours, moved, other in zip(results, three["bits"][name], four["bits"][name], strict=True):
            assert ours not in (moved, other), name
            assert moved != other, name
            size = max(map(abs, ours))
            eps = {"half": 2.0**-10, "double": 2.0**-52}.get(name, 2.0**-23)
            assert max(abs(s - t) for s, t in zip(ours, moved)) <= 200 * eps * size, name


def test_without_the_variable_nothing_waits_for_torch():
    code = "import json, sys; print(json.dumps([getattr(f, '__name__', '') for f in sys.meta_path]))"
    assert "AfterTorch" not in with_jitter("", code)
    assert "AfterTorch" in with_jitter("3", code)


PRODUCT = "import torch; torch.manual_seed(0); print((torch.randn(9, 9) @ torch.randn(9, 9)).tolist())"


def test_a_cell_that_differs_is_named(tmp_path, capsys):
    exec(PRODUCT, {})
    cells = {  # source: (what is stored, whether it must be named)
        "print(6 * 7)": ("42\n", False),
        "print(6 * 8)": ("41\n", True),
        PRODUCT: (capsys.readouterr().out, True),
        "1 / 0": ("", True),
    }
    book = nbformat.v4.new_notebook()
    for source, (stored, _) in cells.items():
        outputs = [nbformat.v4.new_output("stream", text=stored)]
        book.cells.append(nbformat.v4.new_code_cell(source, outputs=outputs, execution_count=1))
    path = tmp_path / "small.ipynb"
    nbformat.write(book, path)
    (seed,) = other_machines.variants([5])["seed"]
    named = other_machines.differing(seed, 0, ["--nbval", "--nbval-current-env", str(path)])
    assert [f"Cell {i}" in " ".join(named) for i in range(4)] == [differs for _, differs in cells.values()]


def test_a_variant_that_cannot_run_is_not_told_as_one_without_differences():
    nowhere = other_machines.Variant("none", {"PYTHONHOME": "nowhere"})
    assert other_machines.differing(nowhere, 0, ["tests/test_layers.py"]) == ["pytest ended with 1"]
