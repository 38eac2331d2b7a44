// Moves every control of a view, one after the other, and puts it back: what has not answered, and what stands at the end.
async (box) => {
  const all = (css) => [...box.querySelectorAll(css)], pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const sight = () => [...all(".mpk-stage, .mpk-status, table").map((n) => n.innerHTML.replace(/ (class="(fresh)?"|style="")/g, "")),
    ...all("input, select").map((n) => [n.value, n.checked])].join();
  const reset = async () => { all("button").find((b) => b.textContent === "Reset").click(); await pause(20); };
  const send = (n) => { for (const kind of ["input", "change"]) n.dispatchEvent(new Event(kind, { bubbles: true })); };
  const press = (n, key) => n.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const put = (value) => (n) => { n.value = value; send(n); };
  const kinds = { // what can be moved -> its name and all that is done with it
    ".mpk-bar select": (n) => [n.dataset.control, ...[...n.options].filter((o) => !o.selected).map((o) => put(o.value))],
    ".mpk-bar input[type=checkbox]": (n) => [n.dataset.control, (m) => { m.checked = !m.checked; send(m); }],
    ".mpk-bar input[type=range]:not([hidden])": (n) => [n.dataset.control, ...[0, n.max].filter((v) => v != n.value).map(put)],
    ".mpk-bar input[type=number]": (n) => [n.dataset.box, put(n.value === n.min ? n.max : n.min)],
    ".mpk-bar input[type=text]": (n) => [n.dataset.control, put("7")],
    ".handle": (n) => [n.dataset.name, (m) => press(m, n.ariaValueNow === n.ariaValueMax ? "Home" : "End")],
    ".pick": (n) => [n.ariaLabel, (m) => m.dispatchEvent(new MouseEvent("click", { bubbles: true }))],
    ".mpk-bar button, .mpk-tries button": (n) => [n.textContent, ...(n.textContent === "Reset" ? [] : [(m) => m.click()])],
    ".mpk-player:not([hidden]) input": (n) => ["step", put(n.value === n.max ? n.min || 0 : n.max)],
  };
  await reset();
  const opened = sight(), moves = [], dead = [];
  for (const [css, what] of Object.entries(kinds)) for (const [k, node] of all(css).entries()) {
    const [name, ...does] = what(node);
    moves.push(...does.map((move) => [name, async () => { move(all(css)[k]); await pause(50); }]));
  }
  for (const [k, [name, move]] of moves.entries()) {
    const answers = async () => { const before = sight(); await move(); return sight() !== before; };
    let moved = await answers();
    for (const other of [moves[k - 1], moves[k + 1]]) if (!moved && other) { // where it leads to may be where one is
      await other[1]();
      moved = await answers();
    }
    if (!moved) dead.push(name);
    await reset();
  }
  await pause(150);
  const left = sight() === opened;
  for (const more of all("details")) more.open = true;
  await pause(50);
  return { moves: moves.length, dead, left };
}
