"""Plain values between the grader and the kernel of a submission: numbers, words, lists, tensors, as JSON.

The text of this file also runs in the kernel, before any of the student's code does, so it imports nothing of mpkit.
What comes back from there is only ever read as JSON: no object of a student's reaches the grader.
"""

import json
import sys

from IPython.display import publish_display_data

KIND = "application/x-mpkit-value"
# as they were before a student's code could put others in their places
dumps, loads, setprofile = json.dumps, json.loads, sys.setprofile


def written(value, names=()):
    """A value as what `json` writes; `names`: `id` -> name of objects that the kernel has made for itself.

    Raises:  TypeError for anything but None, bool, int, float, str, list, tuple, dict, set and torch's and NumPy's own.
    """
    kind, module = type(value).__name__, type(value).__module__.partition(".")[0]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [written(part, names) for part in value]
    if type(value) in (tuple, set, dict):
        return {kind: written(list(value.items() if kind == "dict" else value), names)}
    if module in ("numpy", "torch") and hasattr(value, "tolist"):
        many = module == "torch" or value.ndim
        return {module: value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")} if many else value.tolist()
    if module == "torch" and kind == "dtype":
        return {"dtype": str(value).removeprefix("torch.")}
    if id(value) in names:
        return {"name": names[id(value)]}
    raise TypeError(f"{kind} is no plain value: a number, a word, a list, a tensor or an array was expected")


def read(value, namespace):
    """The value that `written` wrote; names are looked up in the namespace."""
    if type(value) is list:
        return [read(part, namespace) for part in value]
    if type(value) is not dict:
        return value
    (kind, parts), *more = value.items()
    if kind == "name":
        return namespace[parts]
    if kind == "dtype":
        return getattr(__import__("torch"), parts)
    if kind in ("torch", "numpy"):
        library = __import__(kind)
        return library.asarray(parts, dtype=getattr(library, more[0][1], None))
    return {"tuple": tuple, "set": set, "dict": dict}[kind](read(parts, namespace))


def answer(namespace, request):
    """In the kernel: call a function with each of some tuples of plain arguments, show what it returns.

    Shown are the values, one for each call, and the names that the notebook's own code mentions while it runs.
    """
    function, calls, named = read(loads(request), namespace)
    asked, seen = eval(function, namespace), set()

    def watch(frame, event, called):
        if frame.f_globals is namespace:
            names = frame.f_code.co_names if event == "call" else (called.__name__,) if event == "c_call" else ()
            known = (str(getattr(namespace.get(name), "__name__", name)) for name in names)
            seen.update(part for name in (*names, *known) for part in name.split("."))

    setprofile(watch)
    try:
        values = [asked(*given, **named) for given in calls]
    finally:
        setprofile(None)
    publish_display_data({KIND: dumps(written([values, seen]))})
