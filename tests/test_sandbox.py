"""The sandbox of the labs: what each attack earns, and that honest answers lose nothing."""

import nbformat
import pytest

pytest.importorskip("resource", reason="limits of processes are Unix's")
import labs
import sandbox

SETUP = "import math\nfrom mpkit.arguments import check_number\nlimits = [5]\ndef twice(x):\n    return 2 * x"
SOLUTION = "def f(x):\n    return 2.0 * x + 1"
TEST = """_want = [twice(float(x)) + 1 for x in range(4)]
assert all(math.isclose(f(x), w) for x, w in zip(range(4), _want))
assert [f(x) for x in range(4)] == _want
assert limits == [5]
assert not {"check_number", "float16"} & set(f.__code__.co_names)"""


def lab(answer, added=None, test=TEST, setup=SETUP, seconds=60, solution=SOLUTION):
    """What the points of a question are when it is answered so, behind a cell that the student added."""
    mark = {"schema_version": 3, "locked": False, "task": False}
    new = nbformat.v4.new_code_cell
    question = {"nbgrader": mark | {"grade_id": "q1", "grade": False, "solution": True}}
    graded = {"nbgrader": mark | {"grade_id": "q1_hidden", "grade": True, "solution": False, "points": 3}}
    source = nbformat.v4.new_notebook(cells=[new(setup), new(solution, metadata=question), new(test, metadata=graded)])
    submission = nbformat.from_dict(source)
    submission.cells[1].source = answer
    if added:
        submission.cells.insert(1, new(added))
    (score,) = labs.grade(submission, source, timeout=seconds)
    return score


HONEST = {
    "the solution": (SOLUTION, None),
    "a helper": ("def f(x):\n    return g(x) + 1", "%matplotlib inline\ndef g(x):\n    return 2 * x"),
    "what the lab gives": ("def f(x):\n    return twice(x) + 1.0", None),
    "a class": (
        "class Line:\n    def __init__(self, a):\n        self._a = a\n    def __call__(self, x):\n"
        "        return self._a * x + 1\nf = Line(2.0)",
        None,
    ),
    "imports and words": (
        "from functools import reduce\nimport itertools\ndef f(x):\n    text = f'{x!r:>4}' + '{:.2f}'.format(x)\n"
        "    held = {}\n    held[text] = type(x)\n    return reduce(lambda a, b: a + b, (x, x, 1.0))",
        None,
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_answer_earns_its_points(name):
    test = TEST if name != "a class" else TEST.rpartition("\n")[0]
    score = lab(*HONEST[name], test=test)
    assert (score.points, score.note) == (3, "")


def test_an_answer_may_write_anew_what_the_solution_calls_and_so_use_what_that_uses():
    setup = SETUP.replace("    return", "    check_number('x', x)\n    return")
    own = "def mine(x):\n    check_number('x', x)\n    return 2.0 * x + 1\nf = mine"
    test = TEST.rpartition("\n")[0]
    solution = "def f(x):\n    return twice(float(x)) + 1"
    assert lab(own, test=test, setup=setup, solution=solution).note == ""
    refused = lab(own, test=test, setup=setup)
    assert "check_number of the library is not for this question" in refused.note


@pytest.mark.parametrize("answer", ["pass", "def f(x):\n    return g(x)"])
def test_the_library_is_not_for_an_answer_in_a_cell_that_was_added_either(answer):
    """The answer's own cell was looked at, and the function of its name could stand in the cell before."""
    test, library = TEST.rpartition("\n")[0], "return 2 * check_number('x', x) + 1"
    score = lab(answer, f"def f(x):\n    {library}\ndef g(x):\n    {library}", test=test)
    assert score.points == 0
    assert "check_number of the library is not for this question" in score.note
    assert lab("pass", f"def f(x):\n    {library}", test=test, solution=f"def f(x):\n    {library}").points == 3


WRONG = "def f(x):\n    return 0.0"
ANY = "class Any:\n    def __init__(self): pass\n    {}\ndef f(x):\n    return Any()"
ATTACKS = {
    "a transformer that strips assert": (
        WRONG,
        "import ast\nclass Strip(ast.NodeTransformer):\n    def visit_Assert(self, node):\n        return ast.Pass()\n"
        "get_ipython().ast_transformers.append(Strip())",
    ),
    "the library behind a helper": (
        "def f(x):\n    return g(x)",
        "def g(x):\n    return 2 * check_number('x', x) + 1",
    ),
    "an import of the library": ("def f(x):\n    return g(x)", "from mpkit.formats import get_format as g"),
    "a forbidden name behind two helpers": (
        "def f(x):\n    return g(x)",
        "import numpy\ndef h(x):\n    return float(numpy.float16(x))\ndef g(x):\n    return 2 * h(x) + 1",
    ),
    "a forbidden name under another": (
        "def f(x):\n    return 2 * float(half(x)) + 1",
        "from numpy import float16 as half",
    ),
    "a built-in of one's own": (WRONG, "all = lambda _: True\nset = lambda _: {}\nfloat = lambda x: Any()"),
    "a function of the lab": (WRONG, "def twice(x):\n    return -1.0"),
    "a module in place of another": (WRONG, "class math:\n    isclose = staticmethod(lambda a, b: True)"),
    "a patched module": (WRONG, "math.isclose = lambda a, b: True"),
    "a patched module by another name": (WRONG, "m = [math][0]\nm.isclose = lambda a, b: True"),
    "a patch while the test runs": ("def f(x):\n    math.isclose = lambda a, b: True\n    return 0.0", None),
    "a patch by update_wrapper": (
        WRONG,
        "import functools\ndef isclose(a, b):\n    return True\n"
        "functools.update_wrapper(math, isclose, assigned=('isclose',), updated=())",
    ),
    "setattr": (WRONG, "setattr(math, 'isclose', lambda a, b: True)"),
    "a dict of a module": (WRONG, "vars(math)['isclose'] = lambda a, b: True"),
    "equal to everything": (ANY.format("def __eq__(self, other): return True"), None),
    "equal by assignment": (ANY.format("__eq__ = lambda self, other: True"), None),
    "a class by type": ("def f(x):\n    return type('A', (float,), {'__eq__': lambda s, o: True})()", None),
    "type by another name": (
        "def f(x):\n    def g():\n        t = type\n        return t('A', (), {})\n    return g()",
        None,
    ),
    "what the test expects": ("def f(x):\n    return _want[x]", None),
    "what the test expects, as words": (
        "def f(x):\n    form = '{0.__globals__[_want]}'\n    return float(form.format(f)[1:-1].split(',')[x])",
        None,
    ),
    "the globals of a test": (WRONG, "twice.__globals__['all'] = lambda _: True"),
    "a frame": ("def f(x):\n    g = (i for i in (1,))\n    return g.gi_frame.f_back.f_locals['_want'][x]", None),
    "attributes by their names": (
        "def f(x):\n    return fractions.operator.attrgetter('__globals__')(f)['_want'][x]",
        "import fractions",
    ),
    "the file of the tests": ("def f(x):\n    return eval(open('/proc/self/fd/0').read())", None),
    "an attribute in a pattern": (
        "def f(x):\n    match f:\n        case object(__globals__=g):\n            return g['_want'][x]",
        None,
    ),
    "a module called self": (
        "def f(x):\n    self = random\n    system = self._os\n    system.write(1, b'0')\n    return 2.0 * x + 1",
        "import random",
    ),
    "a private part of a module by a method": (
        "class A:\n    def g(self):\n        return self._os\ndef f(x):\n    A.g(random)\n    return 2.0 * x + 1",
        "import random",
    ),
    "names of the caller, by NumPy": ("def f(x):\n    return float(numpy.bmat('_want')[0, x])", "import numpy"),
    "names of the caller, by NumPy without its name": (
        "def f(x):\n    return float(TOOLS[0]('_want')[0, x])",
        None,
    ),
    "a verdict in the answers' pipe": (
        WRONG,
        "import torch\nlog = torch.autograd.graph.logging\nfor n in range(3, 20):\n    try:\n"
        "        h = log.FileHandler(f'/proc/self/fd/{n}', 'a')\n        h.emit(log.makeLogRecord({'msg': '\"\"'}))\n"
        "        h.close()\n    except BaseException:\n        pass",
    ),
    "attributes in the form of a log": (
        "class W:\n    def __init__(self):\n        self.text = ''\n    def write(self, s):\n        self.text += s\n"
        "    def flush(self):\n        pass\ndef f(x):\n    w = W()\n    h = log.StreamHandler(w)\n"
        "    h.setFormatter(log.StrFormatStyle('{msg.__globals__[_want]}'))\n"
        "    h.handle(log.makeLogRecord({'msg': f}))\n    return float(w.text.strip()[1:-1].split(',')[x])",
        "import torch\nlog = torch.autograd.graph.logging",
    ),
    "a module that the lab imports for itself": (
        "sys.modules['math'] = None\ndef f(x):\n    return 2.0 * x + 1",
        None,
    ),
    "how things are copied": (
        "import copy\ncopy.dispatch_table[complex] = None\ndef f(x):\n    return 2.0 * x + 1",
        None,
    ),
    "how things are copied, imported": (
        "from copy import dispatch_table\ndispatch_table[complex] = None\ndef f(x):\n    return 2.0 * x + 1",
        None,
    ),
    "a compiler of one's own": (
        "import torch\ng = torch.compile(lambda x: x, backend=lambda m, _: m)\ndef f(x):\n    return 2.0 * x + 1",
        None,
    ),
    "a global statement": ("def f(x):\n    global math\n    math = None\n    return 0.0", None),
    "an end of the process": ("import os\nos._exit(0)", None),
    "an end of the test": ("def f(x):\n    raise SystemExit(0)", None),
    "a file": (WRONG, "import numpy\nnumpy.save('/tmp/x.npy', numpy.zeros(3))"),
    "all memory": ("def f(x):\n    return len(bytearray(2**36))", None),
    "no end": ("def f(x):\n    while True:\n        pass", None),
}


IMPORTED = {  # what the lab has more
    "names of the caller, by NumPy without its name": "import numpy\nTOOLS = [numpy.bmat]",
    "a module that the lab imports for itself": "import sys",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_earns_nothing(name):
    setup = f"{SETUP}\n{IMPORTED.get(name, '')}"
    seconds = 3 if name == "no end" else 60  # a busy machine is slow at importing
    score = lab(*ATTACKS[name], setup=setup, seconds=seconds)
    assert score.points == 0
    assert score.note


EQUAL = {  # ways to give a class a method, of which the code of an answer shows no name
    "a pattern": "match lambda self, other: True:\n        case __eq__:\n            pass",
    "a rest": "match {1: 2}:\n        case {**__eq__}:\n            pass",
    "an import": "from math import isfinite as __eq__",
    "an error": "try:\n        1 / 0\n    except ZeroDivisionError as __eq__:\n        x = 1",
    "a default": "g = lambda __eq__=1: __eq__",
}


@pytest.mark.parametrize("name", EQUAL)
def test_a_method_by_another_way_than_a_name_is_refused(name):
    answer = f"class Any(float):\n    {EQUAL[name]}\ndef f(x):\n    return Any(7.0)"
    score = lab(answer, test="assert all(f(x) == 2 * x + 1 for x in range(4))")
    assert score.points == 0
    assert "__eq__ is not allowed in an answer" in score.note


def test_what_a_process_says_without_the_key_of_its_run_is_no_answer():
    """Also where it says much: the grader reads as much as an answer can have."""
    write = "import os\nfor n in range(3, 20):\n    try:\n        os.write(n, {})\n    except OSError:\n        pass"
    for said in ("b'\"\"\\n'", 'b\'["", ""]\\n\'', "b'1\\n'", "b'x' * 60_000"):
        assert sandbox.run([sandbox.Step("given", write.format(said))], {}, timeout=10) == [None]
    (told,) = sandbox.run([sandbox.Step("given", "raise ValueError('x' * 10**7)")], {}, timeout=10)
    assert told == ("ValueError: " + "x" * sandbox.WORDS)[: sandbox.WORDS]


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_names_of_the_tests_are_in_no_namespace_of_an_answer():
    room = sandbox.Room({"f": set()})
    room.given("import numpy\nTOOLS = [numpy.bmat]")
    room.answer("def f(name):\n    return TOOLS[0](name)", "")
    test = "_want, shown = [1.0], [2.0]\ndef _right():\n    return f('shown')[0, 0]\nassert _right() == 2"
    room.given(test, hidden=True)
    room.answer("f = lambda name: numpy.array([[9.0]])", "")
    room.given("assert _right() == 9 and _want == [1.0]", hidden=True)  # the answer of now, by a helper of then
    room.answer("def f(name):\n    return TOOLS[0](name)", "")
    with pytest.raises(NameError, match="name '_want' is not defined"):
        room.given("f('_want')", hidden=True)


def test_the_attacks_would_work_where_nothing_is_in_their_way():
    """Two of them by plain exec, as a check of the table: the built-in of one's own, and the patch in mid-test."""
    for name in ("a built-in of one's own", "equal by assignment"):
        answer, added = ATTACKS[name]
        space = {}
        for cell in (SETUP, added or "", "Any = object" if name[2] == "b" else "", answer):
            exec(cell, space)
        exec(TEST.splitlines()[1 if name[2] == "b" else 2].replace("_want", "[1.0, 3.0, 5.0, 7.0]"), space)


def test_what_refuses_an_answer_is_said_beside_the_failed_test():
    score = lab("def f(x):\n    import os\n    return 0.0")
    assert "line 2: import of os is not allowed in an answer" in score.note


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("def f(x):\n    return 1 / x", "f(0) raised ZeroDivisionError: division by zero"),
        ("def f(x):\n    raise NotImplementedError()", "f(0) raised NotImplementedError"),
        ("def f(x):\n    assert x", "f(0) raised AssertionError"),
        ("def f(x):\n    while True:\n        pass", "f(0) took too long"),
        (
            "def f(x):\n    return None",
            "f(0) returned None, and with that the test could not go on: TypeError: must be real number, not NoneType",
        ),
        ("def g(x):\n    return 1.0", "no answer defines f"),
        ("def f(x):\n    return x", "AssertionError"),
    ],
)
def test_what_an_answer_raises_is_said_with_the_call_that_raised_it(answer, said):
    test = "assert [math.isclose(f(x), 2 * x + 1) for x in range(4)] == [True] * 4"
    assert lab(answer, test=test, seconds=3).note == said


def test_a_call_is_told_in_few_characters_with_what_it_was_given_before_it_changed_that():
    room = sandbox.Room({"f": set()})
    room.given("import torch")
    room.answer("def f(x, *rest, **named):\n    x.zero_()\n    return x.sum() / rest[0]", "")
    cases = {
        "f(torch.ones(2), [])": "f(tensor([1.0, 1.0]), []) raised TypeError",
        "f(torch.ones(3, 4), [1, {2: [3.0, 'a']}])": "f(tensor of shape (3, 4), [1, {2: [3.0, ...]}]) raised TypeError",
        "f(torch.ones(1), None, n=torch.nn.ReLU())": "f(tensor([1.0]), None, n=<ReLU>) raised TypeError",
        "f(torch.ones(1, device='meta'), (), n=10**5000)": "f(<Tensor>, (), n=<int>) raised",
        "f(torch.ones(1), list(range(99)))": "f(tensor([1.0]), [0, 1, 2, 3, 4, 5, ...]) raised TypeError",
        "f(torch.ones(1), *['a' * 30] * 9)": f"f(tensor([1.0]), {', '.join([repr('a' * 30)] * 4)}"[:116]
        + "...) raised",
        "1 + len(f(torch.ones(1), 2))": "f(tensor([1.0]), 2) returned tensor(0.0), and with that the test could not",
    }
    for call, said in cases.items():
        with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever torch raises
            room.given(call)
        assert room.told(raised.value).startswith(said)


def test_an_error_is_laid_to_the_call_that_raised_it_alone():
    room = sandbox.Room({"f": set(), "g": set()})
    room.answer("def f(x):\n    return g(x) if x else x", "")
    for run, code, said in (
        (room.given, "f(1)", "f(1) raised NameError: name 'g' is not defined"),
        (room.given, "g(1)", "no answer defines g"),
        (room.given, "1 / 0", "ZeroDivisionError: division by zero"),
        (lambda code: room.answer(code, ""), "1 / 0", "ZeroDivisionError: division by zero"),
    ):
        room.given("f(0)")
        with pytest.raises((NameError, ZeroDivisionError)) as raised:
            run(code)
        assert room.told(raised.value) == said


def test_limits_of_the_process_hold_for_everything_in_it():
    steps = [
        sandbox.Step("given", "open('large', 'wb').write(bytes(2**27))"),
        sandbox.Step("given", "held = bytearray(2**33)"),
        sandbox.Step("given", "files = [open('/dev/null') for _ in range(1000)]"),
        sandbox.Step(
            "given", "import os\nassert 'mpkit-grading-' in os.getcwd() and os.environ['HOME'] == os.getcwd()"
        ),
        sandbox.Step("given", "assert not [k for k in os.environ if 'TOKEN' in k or 'KEY' in k]"),
    ]
    ends = sandbox.run(steps, {}, timeout=10)
    assert [end.split(":")[0] for end in ends] == ["OSError", "MemoryError", "OSError", "", ""]


CHANGES = {
    "a list": "numbers.append(9)\n    numbers[0] = 7\n    numbers[1].clear()",
    "a dict": "table.clear()",
    "a set": "names.add('b')",
    "a tensor": "weights.zero_()",
    "a view of a tensor": "weights[1:].mul_(2)",
    "the shape of a tensor": "weights.resize_(1)",
    "an array": "values[:] = 0",
    "a record": "found.rows.append(3)",
    "a network": "network.weight.data.zero_()\n    network.running_mean.add_(1)",
}
HELD = """import dataclasses
import numpy
import torch
@dataclasses.dataclass(frozen=True)
class Found:
    rows: list
numbers, table, names = [1, [2]], {'a': [1.5]}, {'a'}
weights, values, found = torch.arange(3.0), numpy.arange(3), Found([1, 2])
part, network = weights[1:], torch.nn.BatchNorm1d(2)"""
SAME = """assert (numbers, table, names) == ([1, [2]], {'a': [1.5]}, {'a'})
assert weights.tolist() == [0, 1, 2] and part.tolist() == [1, 2] and values.tolist() == [0, 1, 2]
assert found.rows == [1, 2] and network.weight.tolist() == [1, 1] and network.running_mean.tolist() == [0, 0]"""


@pytest.mark.parametrize("name", CHANGES)
def test_an_answer_that_changes_data_in_place_changes_no_later_question(name):
    answer = f"def f():\n    {CHANGES[name]}\n    return 1"
    steps = [("given", HELD), ("test", SAME), ("answer", answer), ("test", f"{SAME}\nassert f() == 1"), ("test", SAME)]
    room = sandbox.Room({"f": set()})
    for kind, source in steps:
        room.answer(source, "") if kind == "answer" else room.given(source)
    with pytest.raises(AssertionError):  # or the change would change nothing
        room.given(f"f()\n{SAME}")
