// What a page of JupyterLab tells the browser tests: added to each before it loads.
"use strict";
const notebook = () => window.jupyterapp?.shell.currentWidget;
const cellsOf = () => notebook().content.model.sharedModel.toJSON().cells;
const cellAt = (index) => document.querySelectorAll(".jp-Cell")[index];
const isEmpty = (c) => !(Array.isArray(c.source) ? c.source.join("") : c.source).trim();

// every widget output with its controls and pictures
window.__outline = () => [...document.querySelectorAll(".jp-Cell")].map((cell, index) => ({
  index,
  controls: [".mpk .handle", ".mpk input[type=range]", "select", "input:not([type=range])", "button", ".mpk summary",
    '.mpk .pick[tabindex="0"]']
    .flatMap((kind) => [...cell.querySelectorAll(".jp-OutputArea " + kind)])
    .filter((e) => e instanceof SVGElement || e.offsetParent !== null)
    .map((e, n) => {
      e.setAttribute("data-control", index + "-" + n);
      const kind = e.matches(".handle, [type=range]") ? "slider" : e.matches("button, summary, .pick") ? "button"
        : e.matches("select") ? "select" : e.type;
      const named = e.labels && e.labels.length ? e.labels[0].textContent : "";
      return { id: index + "-" + n, kind, disabled: !!e.disabled, focusable: e.tabIndex >= 0,
        name: (e.getAttribute("aria-label") || named || e.title || e.textContent).trim() };
    }),
  pictures: [...cell.querySelectorAll(".jp-OutputArea :is(img, svg[role=img])")]
    .map((e) => e.getAttribute("alt") || e.getAttribute("aria-label") || ""),
})).filter((cell) => cell.controls.length || cell.pictures.length);

// everything a reader sees of a cell's view (pictures, status line, table, the bar of what is done), as one short hash;
// when a key went down
addEventListener("keydown", (event) => { window.__pressed = event.timeStamp; }, true);
const sights = new WeakMap(); // written anew only where something has moved since: it is looked at in every frame
window.__sight = (index) => {
  const cell = cellAt(index);
  let seen = sights.get(cell);
  if (!seen) {
    seen = { observer: new MutationObserver(() => { seen.moved = true; }) };
    seen.observer.observe(cell, { subtree: true, childList: true, attributes: true, characterData: true });
    sights.set(cell, seen);
  } else if (!seen.observer.takeRecords().length && !seen.moved) {
    window.__shown = seen.text;
    return seen.hash;
  }
  const all = (what, of) => [...cell.querySelectorAll(".jp-OutputArea " + what)].map(of).join("|");
  const words = (what) => all(what, (e) => e.textContent);
  const drawn = all(":is(svg[role=img], .handle)", (e) => e.innerHTML.replaceAll(' style=""', ""));
  const bar = all("progress", (e) => (e.hidden ? "" : e.value));
  const text = [all("img", (e) => e.src), drawn, bar, words("[role=status]"), words("table")].join("#");
  window.__shown = text;
  let hash = 2166136261;
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 16777619);
  return Object.assign(seen, { text, moved: false, hash: text.length + ":" + (hash >>> 0) }).hash;
};

// what the page has asked of the kernel and not yet got done: the end of waiting, on a quick machine and on a busy one
window.__listen = () => {
  window.__pending = new Set();
  window.__values = [];
  notebook().sessionContext.session.anyMessage.connect((_, { msg, direction }) => {
    if (direction === "send" && msg.header.msg_type === "comm_msg")
      for (const [name, value] of Object.entries(msg.content.data.state || msg.content.data.content || {}))
        if (["value", "ask", "index"].includes(name)) window.__values.push(value);
    const ahead = direction === "send" && "wish" in (msg.content?.data?.state || {}); // changes nothing that is seen
    if (direction === "send" && msg.channel === "shell" && !ahead) window.__pending.add(msg.header.msg_id);
    if (direction === "recv" && msg.header.msg_type === "status" && msg.content.execution_state === "idle")
      window.__pending.delete(msg.parent_header.msg_id);
  });
};

// whether the kernel, a view of the cell, or what one of its buttons started is under way
const atWork = (index) => window.__pending.size > 0
  || !!cellAt(index).querySelector(".mpk[aria-busy=true], .mpk progress:not([hidden])");

// milliseconds from the last key until the cell looks different from `before`; null once nothing has been under way for
// `patience` ms
window.__watch = ([index, before, patience, timeout, looks]) => new Promise((done) => {
  const start = performance.now();
  let busy = start, calm = 0;
  const look = () => {
    const now = performance.now();
    calm += 1;
    if (atWork(index)) { busy = now; calm = 0; }
    if (window.__sight(index) !== before) done(now - window.__pressed);
    else if ((now - busy > patience && calm > looks) || now - start > timeout) done(null);
    else requestAnimationFrame(look);
  };
  look();
});

// what the cell shows when nothing has been under way, and picture and focus have been the same, for `quiet` ms
window.__settled = ([index, quiet, timeout, looks]) => new Promise((done) => {
  const start = performance.now();
  let last = window.__sight(index), held = document.activeElement, since = start, calm = 0;
  const look = () => {
    const now = performance.now(), seen = window.__sight(index), focus = document.activeElement;
    calm += 1;
    if (seen !== last || focus !== held || atWork(index)) { last = seen; held = focus; since = now; calm = 0; }
    if ((now - since > quiet && calm > looks) || now - start > timeout) done(seen);
    else requestAnimationFrame(look);
  };
  look();
});

// gives a control the focus, as the Tab key does; what it says of itself, or null where it does not take the focus
window.__focus = (id) => {
  const e = document.querySelector(`[data-control="${id}"]`);
  if (!e) return null;
  if (document.activeElement !== e) e.focus();
  const top = e.matches(".handle") ? +e.getAttribute("aria-valuenow") >= +e.getAttribute("aria-valuemax")
    : e.max !== undefined && +e.value >= +e.max;
  return document.activeElement === e ? { top } : null;
};

// type, execution count, tags and errors of every cell
window.__cells = () => cellsOf().map((c, index) => ({ index, type: c.cell_type, ran: c.execution_count,
  tags: c.metadata.tags || [], empty: isEmpty(c),
  errors: (c.outputs || []).filter((o) => o.output_type === "error").map((o) => o.ename + ": " + o.evalue) }));
window.__ready = () => {
  const kernel = notebook()?.sessionContext?.session?.kernel;
  return !!(notebook()?.content?.model && notebook().content.widgets.length && kernel?.status === "idle");
};
window.__allRan = () => cellsOf().every((c) => c.cell_type !== "code" || c.execution_count || isEmpty(c));

// One page of JupyterLab serves all notebooks of a worker: loading it anew for each takes seconds.
// What is on its way is kept by the page and asked for again and again: a promise that only the browser's debugger holds
// may be collected as garbage before it is kept.
window.__open = (path) => {
  const { commands, shell } = window.jupyterapp;
  const opening = async () => {
    const opened = await commands.execute("docmanager:open", { path });
    await opened.context.ready;
    shell.activateById(opened.id);
  };
  window.__opened = null;
  window.__opening = opening().then(() => { window.__opened = "yes"; }, (e) => { window.__opened = String(e); });
};
window.__runAll = () => {
  window.__ran = false;
  window.jupyterapp.commands.execute("notebook:run-all-cells").finally(() => { window.__ran = true; });
};
window.__end = (index) => [...cellAt(index).querySelectorAll(".mpk button")].find((b) => b.textContent === "Stop")?.click();
