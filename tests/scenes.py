"""Scenes in a bare page: scene.js with a stand-in for the widget model, no Jupyter; for quick tests and for looking."""

from __future__ import annotations

import base64
import copy
import json
import zlib
from collections.abc import Sequence
from typing import Any

from support import ROOT

TRAITS = ("spec", "kept", "controls", "tries", "state", "index", "wish", "ahead", "message", "rows")
# what every page but JupyterLab's has, whatever its theme: the variables that ipywidgets brings along
BROUGHT = ":root{--jp-content-font-color1:#000;--jp-layout-color0:#fff;--jp-layout-color1:#fff}"
THEMES = {  # of a front end: attributes of its html, of its body, and its style
    "light": ("", "data-jp-theme-light=true", ":root{--jp-layout-color0:#fff}body{background:#fff}"),
    "dark": (
        "",
        "data-jp-theme-light=false",
        ":root{--jp-content-font-color1:#fff;--jp-layout-color0:#111;--jp-layout-color1:#222}body{background:#111;color:#fff}",
    ),
    # VS Code lays every widget on white (vscode-jupyter, issue 7161)
    "VS Code, dark": (
        "",
        "class=vscode-dark",
        BROUGHT + "body{background:#1e1e1e;color:#d4d4d4}main{background:#fff}",
    ),
    "VS Code, high contrast": (
        "",
        "class=vscode-high-contrast",
        BROUGHT + "body{background:#000;color:#fff}main{background:#fff}",
    ),
    "Colab, dark": ("theme=dark", "", BROUGHT + "body{background:#383838;color:#e3e3e3}"),
}


def plain(value: Any) -> Any:
    """What JSON can carry; bytes in a wrapper."""
    if isinstance(value, bytes | memoryview):
        return {"__b": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def look(view: Any) -> str:
    """All that a view shows, as one text: equal texts are equal pictures."""
    return json.dumps(plain([view.spec, view.kept, view.index]), sort_keys=True)


def unpacked(data: bytes, k: int, tree: Any) -> Any:
    """What `ahead.packed` made, as the page reads it: the base with the k-th values of all that differs."""
    raw = zlib.decompress(data)
    end = 4 + int.from_bytes(raw[:4], "little")

    def revived(value: dict[str, Any]) -> Any:
        return raw[end + value["b"][0] :][: value["b"][1]] if "b" in value else value

    tree = copy.deepcopy(tree)
    for path, values in json.loads(raw[4:end], object_hook=revived):
        *to, last = path
        branch = tree
        for key in to:
            branch = branch[key]
        branch[last] = values[k]
    return tree


def weight(value: Any) -> int:
    """Bytes on the wire, without the envelope."""
    found: list[int] = []

    def strip(part: Any) -> Any:
        if isinstance(part, bytes):
            found.append(len(part))
            return None
        if isinstance(part, dict):
            return {k: strip(v) for k, v in part.items()}
        return [strip(v) for v in part] if isinstance(part, list | tuple) else part

    return len(json.dumps(strip(value)).encode()) + sum(found)


def page(views: Sequence[Any], theme: str = "light") -> str:
    """HTML with the views as the page draws them; `theme` is one of `THEMES`; the first two are JupyterLab's.

    Buffers are handed over unaligned, as the socket does. `models[i].sent` is what the reader did; a model that is
    `slow` answers a question when `done()` is called.
    """
    data = json.dumps([{name: plain(getattr(view, name)) for name in TRAITS} for view in views])
    source, style = (ROOT / "mpkit" / "view" / "scene.js").read_text(), views[0]._css
    root, body, around = THEMES[theme]
    return f"""<!doctype html><html lang=en {root}><meta charset=utf-8><title>scenes</title><style>{around}{style}
body{{font:13px sans-serif;margin:8px}} section{{margin-bottom:20px}}</style>
<body {body}><main></main><script type=module>
const source = new Blob([{json.dumps(source)}], {{ type: "text/javascript" }});
const {{ default: widget }} = await import(URL.createObjectURL(source));
const raw = (text) => Uint8Array.from("." + atob(text), (c) => c.charCodeAt(0));
const revive = (v) => v?.__b !== undefined ? new DataView(raw(v.__b).buffer, 1) : Array.isArray(v) ? v.map(revive)
  : v && typeof v === "object" ? Object.fromEntries(Object.entries(v).map(([k, x]) => [k, revive(x)])) : v;
window.models = []; window.errors = []; window.revive = revive;
addEventListener("error", (e) => errors.push(e.message));
for (const given of {data}) {{
  const on = {{}}, state = revive(given), sent = [], tell = (k) => (on["change:" + k] ?? []).forEach((f) => f());
  const model = {{ state, sent, get: (k) => state[k], set(k, v) {{ state[k] = v; sent.push([k, v]); tell(k); }},
    put(k, v) {{ state[k] = revive(v); tell(k); }}, save_changes() {{}}, slow: false,
    send(question) {{ sent.push(["ask", question]); if (!model.slow) queueMicrotask(() => model.done()); }},
    done() {{
      const last = sent.filter(([k]) => k === "ask").at(-1)[1];
      on["msg:custom"].forEach((f) => f({{ done: last.n }}));
    }},
    on: (k, f) => (on[k] ??= []).push(f), off() {{}} }};
  models.push(model);
  const el = document.querySelector("main").appendChild(document.createElement("section"));
  try {{ widget.render({{ model, el }}); }} catch (e) {{ errors.push(e.stack); }}
}}
window.done = true;
</script>"""
