// ---- What stands in for the kernel on a static page: the traits of mpkit/view/page.py, from a table of pictures that
// pictures.py computed. A state is a dict of parameters; what was asked for and not computed is said in words.
const BRINGS = "This page holds pictures that were computed beforehand; make lab opens the lesson with all values.";
const nine = (v) => (typeof v !== "boolean" && v !== "" && v !== null && Number.isFinite(+v) ? String(+(+v).toPrecision(9)) : JSON.stringify(v));
const base = document.currentScript.src.replace(/[^/]*$/, "");

async function opened(text) { // the inverse of pictures.pooled; a picture is put together when it is first shown
	const { pool, root } = await unpacked(Uint8Array.from(atob(text), (c) => c.charCodeAt(0))), done = [];
	const whole = (v) => {
		if (v === null || typeof v !== "object" || ArrayBuffer.isView(v)) return v;
		if (Array.isArray(v)) return v.map(whole);
		if ("$" in v) return (done[v.$] ??= whole(pool[v.$]));
		return "float" in v ? UNJSON[v.float] : Object.fromEntries(Object.entries(v).map(([k, part]) => [k, whole(part)]));
	};
	const part = (v) => (v?.$ != null ? pool[v.$] : v), table = part(root), nodes = part(table.nodes);
	const states = nodes.map((node) => whole(part(node).state));
	return { ...Object.fromEntries(Object.keys(table).filter((k) => k !== "nodes").map((k) => [k, whole(table[k])])), states, node: (k) => whole(nodes[k]) };
}

function standIn({ starts, names, step, line, work, refused, states, node }, start) {
	const { node: first, controls, tries, index } = starts[start];
	const heard = new Map(), pen = new Map(), key = (s) => s.map(nine).join("|"), where = new Map(states.map((s, k) => [key(s), k])), why = new Map(refused.map(([s, said]) => [key(s), said]));
	let now = first, shown = -1, table = false, last, keyed = false;
	const traits = { index, tries: tries.map(([say]) => say), message: "", rows: [], ahead: {}, wish: {} };
	// every slider stops where something was computed
	traits.controls = controls.map((c) => (c.grid ? { ...c, grid: [...new Set(states.map((s) => +s[names.indexOf(c.name)]))].sort((a, b) => a - b) } : c));
	const params = (k = now) => Object.fromEntries(names.map((n, i) => [n, states[k][i]])), label = (n) => controls.find((c) => c.name === n)?.label ?? n.replaceAll("_", " ");
	const tell = (name) => heard.get(name)?.forEach((f) => f());
	function show() {
		const { spec, idle, buttons, rows } = node(now), drew = shown !== now;
		if (spec.index) traits.index = Math.min(traits.index, spec.index.count - 1); // a run may be shorter than the one before
		const drawn = drew || pen.size ? ["spec"] : [], beyond = traits.index >= traits.spec?.index?.count; // or longer: its picture comes first then
		traits.spec = drew || pen.size ? judged(withPen(spec)) : traits.spec;
		traits.state = { values: { ...params(), ...(line && { typed: line.text ?? "" }) }, idle, buttons: [...Object.keys(buttons), "Reset"], busy: false, progress: 0, params: {} };
		traits.rows = table ? rows : [];
		shown = now;
		for (const name of [...(beyond ? [...drawn, "index"] : ["index", ...drawn]), "state", "message", "rows"]) tell("change:" + name);
	}
	const withPen = (spec) => (!pen.size ? spec : { ...spec, panels: spec.panels.map((p) => ({ ...p, marks: p.marks.map((m) => {
		if (m.type !== "pen" && m.label !== "your line") return m; // the reader's line stays, also beside what happened
		const y = m.y.slice();
		for (const [k, v] of pen) y[k] = v;
		return { ...m, y };
	}) })) });
	function judged(spec) { // of the reader's line it is said how near it came, and whether that is right; not which picture it shows
		const [template, columns] = spec.says, y = columns.near != null && line && spec.panels[0].marks.find((m) => m.label === "your line").y;
		if (!y) return spec;
		const near = line.truth.filter((v, i) => Math.abs(y[i + y.length - line.truth.length] - v) <= line.within).length;
		return { ...spec, says: [template, { ...columns, near, picture: near >= 0.88 * line.truth.length ? line.right : "" }] };
	}
	// The picture that has what was asked for, or comes nearest, and is in all else most like the one that stands there.
	function nearest(changed) {
		const from = states[now], one = Object.keys(changed);
		let best = null, least = Infinity;
		for (const [k, s] of states.entries()) {
			let cost = 0;
			for (const [i, n] of names.entries()) {
				const [a, b] = [s[i], n in changed ? changed[n] : from[i]], number = [a, b].every((v) => typeof v === "number" || (typeof v === "string" && v !== "" && Number.isFinite(+v)));
				if (nine(a) === nine(b)) continue;
				if (one.includes(n)) {
					const toward = Math.sign(a - from[i]) === Math.sign(b - from[i]) && nine(a) !== nine(from[i]);
					cost += !number || (keyed && !toward) ? Infinity : 100 * Math.abs(a - b) / (1 + Math.abs(b)); // a key moves to the next one
				} else cost += number && a * b > 0 ? Math.min(1, 0.1 + Math.abs(Math.log2(a / b))) : 1;
			}
			if (cost < least) [best, least] = [k, cost];
		}
		return best;
	}
	function to(changed) {
		const asked = { ...params(), ...changed }, own = key(names.map((n) => asked[n])), exact = where.get(own);
		if (why.has(own)) return say(why.get(own));
		const k = exact ?? nearest(Object.fromEntries(Object.entries(changed).filter(([n]) => names.includes(n))));
		if (step in changed && node(now).spec.index) traits.index = Math.min(Math.max(changed[step] - node(now).spec.index.first, 0), node(now).spec.index.count - 1);
		if (k == null) return say(`${Object.entries(changed).map(([n, v]) => `${label(n)} ${v}`).join(", ")} was not computed. ${BRINGS}`);
		const other = names.filter((n, i) => nine(states[k][i]) !== nine(asked[n]) && !(keyed && n in changed));
		const moved = other.filter((n) => controls.some((c) => c.name === n)).map((n) => `${label(n)} is ${params(k)[n]} here. `); // others are no words of the reader's
		if (other.length) say(moved.join("") + BRINGS);
		now = k;
	}
	const say = (text) => (traits.message = text);
	function type(text) { // a line in numbers, as good as one that is drawn
		const values = text.trim().split(/[\s,;]+/).map(Number), { asked, low, high, parts } = line;
		if (values.length !== parts.length || !values.every((v) => low <= v && v <= high)) return say(asked.replace(/got .*/, `got '${text}'`));
		const y = parts[0].map((_, i) => low + parts.reduce((sum, part, k) => sum + part[i] * (values[k] - low), 0)), mark = node(now).spec.panels[0].marks.find((m) => m.type === "pen");
		if (mark) y.forEach((v, i) => pen.set(mark.y.length - y.length + i, v));
		line.text = text;
	}
	function press(button) {
		const { buttons } = node(now), done = work.filter(([, name]) => name === button);
		const tried = tries.find(([text]) => text === button);
		if (tried) { now = first; return to(tried[1]); }
		if (button === "Reset") { [now, shown, traits.index] = [first, -1, index]; pen.clear(); if (line) line.text = ""; return; }
		if (buttons[button]) {
			if (line && !pen.size) return say(line.first);
			const { spec } = node(now);
			to(buttons[button]);
			return void (node(now).spec === spec && !traits.message && say(`${button} acts while something runs. ${BRINGS}`));
		}
		if (!done.length) return say(`${button} needs a kernel. ${BRINGS}`);
		const apart = (k) => names.filter((n, i) => !["run", "before", "steps"].includes(n) && nine(states[k][i]) !== nine(states[now][i])).length;
		const [from, , end] = done.reduce((best, row) => (apart(row[0]) < apart(best[0]) ? row : best));
		const settings = names.filter((n, i) => nine(states[from][i]) !== nine(states[first][i])).map((n) => `${label(n)} ${params(from)[n]}`).join(", ");
		say(`A recorded training with ${settings || "the lesson's settings"}; make lab trains on your machine.`);
		now = end;
	}
	function ask(what) {
		const kind = Object.keys(what)[0], [n, more] = Object.entries(what.set ?? {})[0] ?? [], drawn = more && typeof more === "object" && !Array.isArray(more), name = kind + (what.press ?? Object.keys(what.set ?? {}));
		if (kind && name !== last) say(""); // a word stays while the same handle goes on
		last = kind ? name : last;
		if ("table" in what) table = what.table;
		if (n && !drawn) n === "typed" && line ? type(more) : to(what.set);
		else if (n && line) for (const [k, v] of Object.entries(more)) pen.set(+k, v);
		else if (n && where.has(key(names.map((m) => (m === n ? more : params()[m]))))) to({ [n]: more });
		else if (n) say(`What you draw has to be computed. ${BRINGS}`);
		if ("press" in what) press(what.press);
	}
	return {
		get: (name) => traits[name],
		set(name, value) { traits[name] = value; },
		save_changes() {},
		on(name, f) { heard.set(name, [...(heard.get(name) ?? []), f]); },
		off(name, f) { heard.set(name, (heard.get(name) ?? []).filter((g) => g !== f)); },
		key(yes) { keyed = yes; },
		send({ ask: what, n, index: at }) {
			if (at != null) traits.index = at;
			ask(what);
			show();
			queueMicrotask(() => heard.get("msg:custom")?.forEach((f) => f({ done: n })));
		},
		start: show,
	};
}

// ---- the page: a view comes to life when the reader is near; until then, and without scripts, its stored picture stands
const tables = new Map();
globalThis.mpkitTable = (name, text) => tables.get(name).done(text);
function table(name) { // of all views that share it, loaded once
	if (!tables.has(name)) {
		const tag = document.createElement("script"), told = {};
		told.text = new Promise((done, failed) => { told.done = done; tag.onerror = failed; }).then(opened);
		tables.set(name, told);
		tag.src = `${base}views/${name}.js`; // a classic script: a page opened from a folder may not fetch
		document.head.append(tag);
	}
	return tables.get(name).text;
}
async function enliven(box) {
	const model = standIn(await table(box.dataset.view), +box.dataset.start), el = document.createElement("div");
	for (const kind of ["keydown", "pointerdown"]) el.addEventListener(kind, (e) => model.key(kind === "keydown" && e.target.closest(".handle, [type=range]") != null), true);
	model.start();
	box.replaceChildren(el);
	render({ model, el });
	box.dataset.alive = "";
}

const seen = new IntersectionObserver((entries) => { for (const e of entries) if (e.isIntersecting) { seen.unobserve(e.target); enliven(e.target); } }, { rootMargin: "600px" });
for (const box of document.querySelectorAll("[data-view]")) seen.observe(box);
// what is wider than the page can be moved by keys
for (const wide of document.querySelectorAll("pre, .cell_output")) if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
