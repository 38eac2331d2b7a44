// Draws any sheet of mpkit/view/sheet.py as SVG: one plain ES module that knows nothing of mixed precision. It reads
// spec (the sheet), index (the step), controls, tries and state (the form), message, rows; `ask` says what the reader
// did. A note has words alone.

const { abs, max, min, round } = Math;
const set = (node, given) => { for (const [k, v] of Object.entries(given)) if (v != null) node.setAttribute(k, v); return node; };
const element = (space) => (parent, tag, given = {}, text = "") => {
	const node = set(document.createElementNS("http://www.w3.org/" + space, tag), given);
	// without this JupyterLab takes the arrow keys of the focused element
	if (given.tabindex != null || /^(input|select|button|summary)$/.test(tag)) node.setAttribute("data-lm-suppress-shortcuts", "true");
	if (text !== "") node.textContent = text;
	parent?.append(node);
	return node;
};
const on = (node, kinds, does, early) => { for (const kind of kinds.split(" ")) node.addEventListener(kind, does, early); return node; };
const press = (parent, text, does) => on(html(parent, "button", { type: "button" }, text), "click", does);
const html = element("1999/xhtml"), svg = element("2000/svg");

// ---- numbers: a scalar stands for all items, nothing for their position
const many = (a) => Array.isArray(a) || ArrayBuffer.isView(a);
const at = (a, i) => (a == null ? i : many(a) ? a[min(i, a.length - 1)] : a);
const length = (m) => max(0, ..."x y x0 y0 x1 y1 text".split(" ").map((k) => (many(m[k]) ? m[k].length : 0)));
const clamp = (v, a, b) => min(max(a, b), max(min(a, b), v));
const within = (v, [a, b]) => a <= v && v <= b;
const finger = () => matchMedia("(pointer: coarse)").matches; // what it has to hit is 24 pixels wide
const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
const afresh = (old, does, wait) => (clearTimeout(old), setTimeout(does, wait));
const reveal = (node, yes) => (node.style.display = yes ? "" : "none");
// of words, in letters' heights
const wideness = (text) => 0.64 * max(1, ...text.split("\n").map((line) => line.length));
const px = (v) => round(v * 10) / 10;
const RAISED = { "-": "⁻", ".": "·", ..."⁰¹²³⁴⁵⁶⁷⁸⁹" };
const raised = (text) => String(text ?? "").replace(/\b2\^(-?[\d.]*\d)/g, (_, n) => "2" + [...n].map((c) => RAISED[c]).join(""));
const plain = (v) => String(+(+v).toPrecision(4));
const said = (v, axis) => axis.names?.[round(v)] ?? (axis.format === "log2" ? raised("2^" + px(v)) : plain(v));

// One item of a column of a sentence in words, exactly as `filled` in sheet.py writes it.
const filled = (v, form, i) => {
	if (v?.words) return v.words[at(v.codes, i)];
	if (typeof (v = at(v, i)) === "string") return v;
	if (!Number.isFinite(v)) return String(v).replace("Infinity", "inf");
	return form?.startsWith(".") ? v.toFixed(+form.slice(1, -1)) : (form === "2^" ? "2^" : "") + plain(v);
};
const sentence = ([template, columns], i) => template.replace(/\{(\w+)(?::([^}]*))?\}/g, (_, name, form) => filled(columns[name], form, i));

// What mpkit/view/ahead.py packed; floats may lie unaligned, and are copied.
async function unpacked(data) {
	const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate"));
	const raw = await new Response(stream).arrayBuffer(), end = 4 + new DataView(raw).getUint32(0, true);
	const array = (kind, [from, length]) => new kind(raw.slice(end + from, end + from + length));
	return JSON.parse(new TextDecoder().decode(raw.slice(4, end)), (_, v) => (v?.f4 ? array(Float32Array, v.f4) : v?.u1 ? array(Uint8Array, v.u1) : v));
}
const replaced = (tree, [key, ...rest], v) => Object.assign(many(tree) ? [...tree] : { ...tree }, { [key]: rest.length ? replaced(tree[key], rest, v) : v });

// ---- looks: colours are roles, variables of the page's theme; "zero/0.3" is a tint towards the page
const paint = (c) => {
	const [role, share] = String(c ?? "none").split("/"), base = role === "none" ? role : `var(--mk-${role})`;
	return share ? `color-mix(in srgb, ${base} ${100 * share}%, var(--mk-paper))` : base;
};
const DASH = { "--": "7 4", ":": "1.5 3", "-.": "7 3 1.5 3" };
const GLYPH = {
	o: (r) => `m${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
	x: (r) => `m${-r} ${-r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`,
	s: (r) => `m${-r} ${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
	D: (r) => `m0 ${-1.3 * r}l${1.3 * r} ${1.3 * r}l${-1.3 * r} ${1.3 * r}l${-1.3 * r} ${-1.3 * r}z`,
	"^": (r) => `m0 ${-1.2 * r}l${1.2 * r} ${2.2 * r}h${-2.4 * r}z`,
	v: (r) => GLYPH["^"](-r),
	"|": (r) => `m0 ${-r}v${2 * r}`,
};
// How many items are there at step `i`: item k appears at step since[k], or k.
const reached = (m, i) => (m.show !== "upto" ? length(m) : m.since ? m.since.filter((from) => from <= i).length : min(length(m), i + 1));

const shownRow = (m, i) => m.count * min(round(at(m.rows ?? null, i)), m.values.length / m.count - 1);

// The outline of a line, with a gap where a value is not finite.
const STAIR = { mid: (from, x, y) => `H${px((from + x) / 2)}V${y}H${x}`, post: (from, x, y) => `H${x}V${y}` };
function trace(p, m, n, ys = m.y) {
	let d = "", from = null;
	for (let i = 0; i < n; i++) {
		const x = px(p.X(at(m.x, i))), y = px(p.Y(at(ys, i))), there = Number.isFinite(x + y);
		if (there) d += from === null ? `M${x} ${y}` : STAIR[m.step]?.(from, x, y) ?? `L${x} ${y}`;
		from = there ? x : null;
	}
	return d;
}

function rectangle(p, x0, y0, x1, y1, least = 0) { // both sides at least so long
	const [a, b, c, d] = [p.X(x0), p.Y(y0), p.X(x1), p.Y(y1)];
	const more = (u, v) => (max(0, least - abs(v - u)) / 2) * (v < u ? -1 : 1), wide = more(a, c), tall = more(b, d);
	return `M${px(a - wide)} ${px(b - tall)}H${px(c + wide)}V${px(d + tall)}H${px(a - wide)}z`;
}

const glyph = (m, x, y) => (Number.isFinite(x + y) ? `M${px(x)} ${px(y)}` + GLYPH[m.glyph ?? "o"](m.size ?? 4) : "");
const glyphs = (p, m, to, every = 1) => Array.from({ length: Math.ceil(to / every) }, (_, k) => k * every)
	.map((i) => glyph(m, p.X(at(m.x, i)), p.Y(at(m.y, i)))).join("");

const path = (g, m, kind, given = {}) => {
	const node = svg(g, "path", { class: kind, "stroke-width": m.width ?? (kind === "box" ? 0 : 2), "stroke-dasharray": DASH[m.dash] ?? m.dash, ...given });
	if (kind !== "line") node.style.fill = paint(at(m.fill ?? m.color, 0));
	if (kind !== "band") node.style.stroke = paint(at(m.color ?? "none", 0));
	return node;
};
const area = (g, p, look, hatch) => [path(g, look, "box"), hatch && svg(g, "path", { fill: `url(#${p.ids}h)` })].filter(Boolean);

// ---- marks: each draws into group `g` and returns what to do at step i, or between two steps
const DRAW = {
	line(g, p, m) {
		if (m.ghost && m.was) svg(g, "path", { class: "line ghost", "stroke-width": 1.5, d: trace(p, m, length(m), m.was) });
		const line = path(g, m, "line", { "data-mark": m.type, "marker-end": m.head && `url(#${p.ids}t)` });
		const spots = m.glyph && path(g, m, "glyph", { "stroke-dasharray": null });
		return (i) => {
			const n = reached(m, i);
			set(line, { d: trace(p, m, n) });
			if (spots) set(spots, { d: glyphs(p, m, n, m.every) });
		};
	},
	band(g, p, m) {
		const n = length(m), pick = (y) => Array.from({ length: n }, (_, i) => at(y, i)).reverse();
		path(g, m, "band", { d: trace(p, m, n) + "L" + trace(p, { x: pick(m.x), y: pick(m.y2) }, n).slice(1) + "z" });
	},
	points(g, p, m) {
		const circle = (kind) => svg(g, "circle", { class: kind, pathLength: 1, r: (m.size ?? 4) + 6 });
		const ring = m.ring && ["ring back", "ring"].map(circle), spots = path(g, m, m.show === "at" ? "glyph now" : "glyph", { "data-mark": m.type });
		if (m.show !== "at") return (i) => set(spots, { d: glyphs(p, m, reached(m, i)) });
		return (i, pos) => {
			const t = clamp((pos - i - 0.6) / 0.4, 0, 1), next = min(i + 1, m.y.length - 1), ease = m.glide ? t * t * (3 - 2 * t) : 0;
			const own = (v) => v[i] + (ease && ease * (v[next] - v[i])), color = at(m.color, m.hue ? m.hue[i] : i);
			const x = px(p.X(m.x == null ? (m.glide ? pos : i) : many(m.x) ? own(m.x) : m.x)), y = px(p.Y(own(m.y)));
			Object.assign(set(spots, { d: glyph(m, x, y) }).style, { stroke: paint(color), fill: paint(m.fill ?? color) });
			ring?.forEach((node, k) => set(node, { cx: x, cy: y, "stroke-dasharray": k ? `${m.ring[i]} 1` : null, transform: `rotate(-90 ${x} ${y})` }));
		};
	},
	boxes(g, p, m, pick) {
		const groups = new Map(), sides = (k) => [m.x0, m.y0, m.x1, m.y1].map((side) => at(side, k));
		for (let k = 0; k < length(m); k++) {
			const look = { fill: at(m.fill ?? "none", k), color: at(m.edge ?? "none", k), dash: m.dash, width: m.width ?? (m.edge ? 1 : 0) };
			const key = m.sets ? k : look.fill + look.color, [x0, y0, x1, y1] = sides(k);
			if (!groups.has(key)) groups.set(key, { nodes: area(g, p, look, m.hatch), items: [] });
			groups.get(key).items.push(k);
			if (m.sets && p.real) pick(m, k, rectangle(p, x0, y0, x1, y1, finger() ? 24 : 0));
			const size = m.text && clamp((abs(p.X(x1) - p.X(x0)) - 6) / wideness(m.text[k]), 8, m.size ?? 12); // words fit into their box
			if (m.text) words(g, p.X((x0 + x1) / 2), p.Y((y0 + y1) / 2), m.text[k], { size, halo: m.hatch });
		}
		const draw = (i) => {
			const last = reached(m, i);
			for (const { nodes, items } of groups.values()) {
				const d = items.filter((k) => k < last).map((k) => rectangle(p, ...sides(k))).join("");
				for (const node of nodes) set(node, { d });
			}
		};
		return m.show ? draw : void draw(0);
	},
	bars(g, p, m) {
		const zones = m.zones ?? [[null, m.fill ?? "own"]], half = (m.width ?? 0.8) / 2, look = { color: m.edge ?? "muted", width: 1 };
		const paths = new Map(zones.map(([, fill]) => [fill, area(g, p, { ...look, fill }, m.hatch)]));
		return (i) => {
			const row = shownRow(m, i), shift = at(m.shift ?? 0, i), d = new Map(), { lo, hi } = m.axis === "y" ? p.y : p.x;
			for (let k = 0; k < m.count; k++) {
				const v = m.values[row + k] * (m.unit ?? 1), a = m.at[k] + shift;
				if (!v || clamp(a, lo, hi) !== a) continue; // none under the axis
				const sides = m.axis === "y" ? [0, a - half, v, a + half] : [a - half, 0, a + half, v];
				const [, role] = zones.find(([upto]) => upto == null || a < upto);
				d.set(role, (d.get(role) ?? "") + rectangle(p, ...sides));
			}
			for (const [role, nodes] of paths) for (const node of nodes) set(node, { d: d.get(role) ?? "" });
		};
	},
	rule(g, p, m) {
		const node = path(g, { width: 1.2, ...m }, "line");
		const place = (v) => set(node, { d: m.axis === "x" ? `M${px(p.X(v))} ${p.top}V${p.bottom}` : `M${p.left} ${px(p.Y(v))}H${p.right}` });
		return m.at === "index" ? (i, v) => place(v + p.first) : void place(m.at);
	},
	text(g, p, m) {
		const nodes = [];
		for (let k = 0; k < length(m); k++) {
			const own = at(m.text, k), across = (m.size ?? 12) * wideness(own), look = standing(p, m, own, across), { dx = 0, dy = 0 } = look;
			const [X, Y] = m.frame ? [(v) => p.left + v * (p.right - p.left), (v) => p.bottom - v * (p.bottom - p.top)] : [p.X, p.Y];
			const [before, behind] = { start: [0, across], end: [across, 0] }[look.anchor] ?? [across / 2, across / 2], x = X(at(m.x, k)) + dx;
			// no word is cut at the edge of the page
			const inside = look.rotate || p.x.follow ? x : clamp(x, before, max(before, p.full - behind));
			nodes.push(words(g, inside, Y(at(m.y, k)) + dy, look.gone ? "" : own, { ...look, color: at(m.color ?? "ink", k) }));
		}
		return m.show === "at" ? (i) => nodes.forEach((node, k) => reveal(node, k === i)) : undefined;
	},
	notes() {}, handle() {}, pen: (...given) => DRAW.line(...given),
};

// The name of a region lies in it, stands where that is too narrow, and is left out where it would lie on the border.
function standing(p, m, text, across) {
	const [axis, low, high] = m.room ?? [], to = axis === "x" ? p.X : p.Y, room = abs(to(high) - to(low));
	if (!axis || room >= (axis === "x" ? across : 14.4 * text.split("\n").length)) return m;
	return axis === "x" && room > 15 ? { ...m, ...m.narrow } : { gone: true };
}

function words(g, x, y, text, { color = "ink", size = 12, anchor = "middle", valign = "middle", halo, rotate, weight } = {}) {
	const lines = raised(text).split("\n"), [first, up] = { top: [0.8, 0], middle: [0.35, 0.6], bottom: [-0.2, 1.2] }[valign];
	const shift = first - up * (lines.length - 1), turned = rotate ? ` rotate(${-rotate})` : "";
	const look = { "text-anchor": anchor, "font-size": size, "font-weight": weight, class: halo ? "halo" : null };
	const node = svg(g, "text", { ...look, transform: `translate(${px(x)} ${px(y)})${turned}` });
	node.style.color = paint(color);
	lines.forEach((line, k) => svg(node, "tspan", { x: 0, y: px((shift + 1.2 * k) * size) }, line));
	return node;
}

// Below 600 pixels panels stand on top of each other, each as high as it was; small multiples keep three in a row.
const NARROW = 600, MOUSE = 680; // a page is seldom narrower than the latter, but under a finger
function stacked(panels, height, width) {
	// so high it gets at most
	const flat = ({ pad, x, y, equal }) => (equal ? pad[0] + pad[2] + (width - pad[1] - pad[3]) * abs((y.hi - y.lo) / (x.hi - x.lo)) : Infinity);
	const above = ({ place: [x, , y] }, { place: [u, , v] }) => y - v || x - u, places = [];
	const order = [...panels.keys()].sort((a, b) => above(panels[a], panels[b]));
	let y = 0, line = 0, tall = 0;
	for (const k of order) {
		const [x0, x1, y0, y1] = panels[k].place, share = x1 - x0 > 0.26 ? 1 : 1 / 3;
		if (line + share > 1.01) { y += tall; line = tall = 0; }
		const high = min(height * (y1 - y0), flat(panels[k]));
		places[k] = [line, min(line + share, 1), y, y + high];
		[line, tall] = [line + share, max(tall, high)];
	}
	return { height: y + tall, places: places.map(([a, b, c, d]) => [a, b, c / (y + tall), d / (y + tall)]) };
}

// Where every panel lies; X and Y take data to pixels, backX and backY the way back.
function arrange(spec, width, ids, before) {
	const { places, height } = width < NARROW ? stacked(spec.panels, spec.height, width) : { places: spec.panels.map((p) => p.place), height: spec.height };
	return spec.panels.map((given, k) => {
		const [up, right, down, left] = given.pad, [x0, x1, y0, y1] = places[k];
		const marks = given.marks.map((m) => ({ ...m, ...(m.type === "pen" && { y: m.y.slice() }) })); // which it draws into
		for (const m of marks) if (m.ghost) m.was = before?.[k]?.marks.find((q) => q.label === m.label)?.y;
		// `out`: so far beside the panel a mark on its edge is whole
		const p = { ...given, out: given.x.follow ? 0 : 9, marks, ids, height, full: width, wide: width * x1, first: spec.index?.first, real: true, off: 0 };
		Object.assign(p, { left: width * x0 + left, right: width * x1 - right, top: height * y0 + up, bottom: height * y1 - down });
		if (given.equal) { // one unit is as long on both axes
			const [wide, high] = [p.x, p.y].map((a) => abs(a.hi - a.lo)), unit = min((p.right - p.left) / wide, (p.bottom - p.top) / high);
			Object.assign(p, { right: p.left + unit * wide, bottom: p.top + unit * high });
		}
		const map = (a, b, c, d) => (v) => c + (v - a) / (b - a) * (d - c), { x, y } = p;
		const back = map(p.left, p.right, x.lo, x.hi), backX = (v) => back(v) + p.off, backY = map(p.bottom, p.top, y.lo, y.hi);
		return Object.assign(p, { X: map(x.lo, x.hi, p.left, p.right), Y: map(y.lo, y.hi, p.bottom, p.top), backX, backY });
	});
}

function axes(g, moved, names, p) {
	// room for letters so high
	const { left, right, top, bottom, title = "" } = p, height = (text) => (p.wide - left) / wideness(text);
	const two = height(title) < 10 ? title.replace(new RegExp(`^(.{${title.length >> 1},}?) `), "$1\n") : title;
	const size = clamp(height(two), 9, two === title ? p.title_size ?? 13 : 10);
	words(g, left, two === title ? top - 10 : top - 5, two, { anchor: "start", valign: "bottom", size, weight: 600 });
	if (p.bare) return;
	for (const [axis, across] of [[p.x, true], [p.y, false]].filter(([a]) => !a.hidden)) {
		// where names would run together only every so many stays; of categories the first word does
		const room = (k) => axis.ticks.every(([v, { length }], i, all) => i % k || i < k || p.X(v) - p.X(all[i - k][0]) > 3.3 * (length + all[i - k][1].length) + 8);
		const each = across && !axis.names ? [1, 2, 3, 4, 6, 8].find(room) ?? axis.ticks.length : 1;
		const tight = axis.names && 6.4 * max(...axis.ticks.map(([, name]) => name.length)) > (right - left) / axis.ticks.length;
		for (const [i, [value, name]] of axis.ticks.entries()) {
			const v = across ? p.X(value) : p.Y(value);
			if (!axis.bare) svg(axis.follow ? moved : g, "path", { class: "grid", d: across ? `M${px(v)} ${top}V${bottom}` : `M${left} ${px(v)}H${right}` });
			if (axis.blank) continue;
			if (axis.slant) words(g, v + 4, bottom + 10, name, { anchor: "end", rotate: axis.slant });
			else if (across && i % each === 0) words(names, v, bottom + 6, tight ? name.split(" ")[0] : name, { valign: "top" }).at = value;
			else if (!across) words(g, left - 9, v, name, { anchor: "end" });
		}
		svg(g, "path", { class: "axis", d: across ? `M${left} ${bottom}H${right}` : `M${left} ${top}V${bottom}` });
		if (axis.label && across) words(g, (left + right) / 2, bottom + p.pad[2] - 6, axis.label, { valign: "bottom" });
		else if (axis.label) words(g, left - p.pad[3] + 12, (top + bottom) / 2, axis.label, { rotate: 90 });
	}
}

// As the axis tells it: a tick has a name; what is cut at an end of an axis of powers lies there or beyond.
const told = (v, a) => (!a.format ? "" : v < a.lo + 1e-6 ? "≤ " : v > a.hi - 1e-6 ? "≥ " : "") + (a.ticks.find(([t]) => t === v)?.[1] ?? said(v, a));

// What lies at `x` (data) in a panel: [name, value] of every labelled mark; `told` where the value is not the place of an
// item.
function readout(p, x, y, i) {
	const found = [], inside = (a, b, v) => min(a, b) <= v && v < max(a, b);
	for (const m of p.marks.filter(({ only }) => !only || within(i, only))) {
		if (m.type === "boxes" && (m.text || m.told)) {
			for (let k = 0; k < reached(m, i); k++) if (inside(at(m.x0, k), at(m.x1, k), x) && inside(at(m.y0, k), at(m.y1, k), y))
				found.push([at(m.names ?? m.label, k), at(m.told ?? m.text, k)]);
		} else if (m.type === "bars" && m.label) {
			const row = shownRow(m, i), [own, axis] = m.axis === "y" ? [y, p.x] : [x, p.y], off = own - at(m.shift ?? 0, i);
			const value = (v) => (m.told ? at(m.told, i) : said(m.unit ? px(v * m.unit) : v, axis));
			for (let k = 0; k < m.count; k++) if (abs(m.at[k] - off) <= (m.width ?? 0.8) / 2) found.push([m.label, value(m.values[row + k])]);
		} else if ((m.codes || (m.label && m.y && !m.y2)) && m.show !== "at") {
			let best = -1, gap = Infinity;
			for (let k = 0; k < (m.codes?.length ?? reached(m, i)); k++) {
				const off = abs(at(m.y, k) - y), g = abs(at(m.x, k) - x) + 1e-9 * off;
				if (g < gap && !(p.y.names && off > 0.5)) [best, gap] = [k, g]; // in its row, if there are rows
			}
			if (best < 0 || gap * abs(p.X(1) - p.X(0)) >= (m.type === "points" ? 4 : 30)) continue;
			found.push([m.label, m.told ? at(m.told, m.codes?.[best] ?? best) : told(at(m.y, best), p.y)]);
		}
	}
	return found;
}

const GONE = "The kernel of this picture has gone. Run its cell again to change it; Play, the steps and reading values still work.";
const LATE = "The kernel has not answered for 5 seconds. It may be busy; if it was started again, run this cell once more.";

const KEYS = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 };

// What a page stores is the output before this one, and stands until this one does.
function hideStored(el) {
	const before = () => el.previousElementSibling?.querySelector(".mpk-still");
	while (el && !before()) el = el.parentElement;
	if (el) before().hidden = true;
}

// Figures, or a prediction: the first press is the reader's, each further one tells of another answer. It needs no kernel.
function note({ figures, ask, answers, says }, root) {
	new ResizeObserver(() => hideStored(root)).observe(root); // once it stands in the page
	if (figures) return void (root.innerHTML = figures);
	let first;
	html(root, "p", {}, " " + ask).prepend(html(null, "b", {}, "Predict."));
	const buttons = answers.map((text, now) => press(root, text, () => {
		buttons[(first ??= now)].className = "mpk-chosen";
		status.textContent = says[first][now];
	}));
	const status = html(root, "p", { role: "status" });
}

function render({ model, el }) {
	const get = (name) => model.get(name), root = html(el, "div", { class: "mpk" }), ids = "mk" + Math.random().toString(36).slice(2);
	if (get("note")) return note(get("note"), root);
	const part = (kind, given, parent = root) => html(parent, "div", { class: "mpk-" + kind.replace(" ", " mpk-"), ...given });
	const legend = part("legend", { "aria-hidden": "true" }), stage = part("stage");
	const picture = svg(stage, "svg", { role: "img" }), reads = { role: "group", tabindex: 0, "aria-label": "Arrow keys read the values" };
	const over = svg(stage, "svg", { class: "mpk-over", ...reads }), cross = svg(over, "line", { class: "cross" }), grips = svg(over, "g"), layer = svg(over, "g");
	const tip = part("tip", { hidden: "" }, stage), player = part("player"), bar = part("bar"), form = part("form", {}, bar);
	const presses = part("form", {}, bar), progress = html(presses, "progress", { max: 1, "aria-label": "work done" });
	const row = part("bar"), tries = part("form tries", { role: "group", "aria-label": "Try" }, row);
	const status = part("status", { role: "status" }), phrase = html(status, "span", { class: "mpk-said" }), word = html(status, "b");
	const more = html(root, "details"), opens = html(more, "summary", {}, "Show as table");
	const table = html(part("rows", { tabindex: 0, role: "group", "aria-label": "Table" }, more), "table");
	let scene, spec, panels = [], moving = [], local = null, seen, telling; // the picture
	let index = get("index"), pos = index, frame = 0, timer = 0, drag = null, near, wished, typing; // what the reader does
	// what the kernel is asked
	let turn = Promise.resolve(), asked = 0, waiting = [], away = null, owed = null, rest = 0, late = 0, gone = false;
	const of = (kind, name) => form.querySelector(`[data-${kind}="${name}"]`);
	const handles = new Map(), picks = new Map(), sent = new Map(), used = new Set();
	// One question is under way (ipywidgets loses what overtakes), others wait; a newer one takes the place of the last if
	// it has the same `id`: a parameter, a stroke; NaN, a press, equals nothing.
	const ask = (what, id = Object.keys(what)[0]) => { unsay(); settle(); queue({ what, id }); };
	const mark = () => { root.ariaBusy = !!(away || waiting.length || rest || timer); }; // the picture may be older
	function queue(question) {
		if (gone) return say(GONE), back();
		if (waiting.at(-1)?.id === question.id) waiting.pop();
		waiting.push(question);
		if (!away) next();
		mark();
	}
	function next() {
		away = waiting.shift();
		late = clearTimeout(late);
		if (away) {
			late = setTimeout(() => say(LATE), 5000);
			// a Reset has to know of it; what is not saved now the next wish would bring back
			if (spec.index) { model.set("index", index); heard(() => model.save_changes()); }
			return heard(() => model.send({ ask: away.what.call ? away.what() : away.what, n: (away.n = ++asked), ...(spec.index && { index }) }));
		}
		if (!gone && [GONE, LATE].includes(word.textContent)) say(get("message"));
		back();
	}
	function back() { // what was put is where the kernel has it
		for (const h of handles.values()) h.sent = false;
		if (local) answered(); else show(pos);
		showState();
		mark();
	}
	function settle() { if (!rest) return; rest = clearTimeout(rest); queue(owed); owed = null; }

	function heard(tells) { try { tells(); } catch { lost(); } } // a page learns that a kernel was ended where it asks it
	function say(text) { word.textContent = text ?? ""; }
	function unsay() { if (![GONE, LATE].includes(word.textContent)) say(get("message")); } // a refused step
	function lost() {
		[gone, away, waiting, owed, late, rest] = [true, null, [], null, clearTimeout(late), clearTimeout(rest)];
		for (const part of [form, presses, tries]) part.inert = true;
		queue(); // says so
	}

	// ---- pictures of other values: wished for near a handle, so a drag asks nothing; not if closed
	const holds = (b) => Object.keys(b.params).every((n) => b.moves.includes(n) || b.params[n] === get("state").params[n]);
	const ready = (name) => (sent.get(name) ?? []).filter((b) => (b.index ?? index) === index && holds(b));
	function want(name) {
		const { params, busy } = get("state"), have = ready((near = name)).flatMap((b) => b.values), key = [name, JSON.stringify(params), index, have.length].join();
		if (!name || gone || !root.isConnected || busy || key === wished || name === spec.index?.name) return;
		model.set("wish", { name, have, n: (wished = key) });
		heard(() => model.save_changes());
	}
	async function arrived() {
		const given = get("ahead");
		if (JSON.stringify(given.params) !== JSON.stringify(get("state").params)) return; // of one that has gone
		sent.set(given.name, [...ready(given.name), { ...given, base: scene, columns: await unpacked(given.data) }]);
		if (given.name === near) want(near);
	}
	function choose(name, place, what = { set: { [name]: place } }, id = name, later = what) { // the kernel hears where it rests
		const alone = [owed, ...waiting, away].every((q) => !q || q.id === id); // else the pictures are of another
		const key = +(+place).toPrecision(9), found = !gone && alone && (drag?.ready ?? ready(name)).find((b) => b.values.includes(key));
		if (!found) return ask(later, id);
		const k = found.values.indexOf(key), box = of("box", name), h = handles.get(name);
		local = found.columns.reduce((tree, [path, values]) => replaced(tree, path, values[k]), found.base);
		if (box && what.set?.[name] != null) box.value = what.set[name];
		if (h) h.sent = false;
		draw();
		owed = { what, id };
		rest = afresh(rest, settle, 60);
		mark();
	}
	on(root, "input", (e) => (typing = e.target)); // nobody overwrites what is typed
	on(root, "change focusout", () => (typing = null), true);
	// JupyterLab stops what ends typing
	on(root, "keydown", (e) => { if (typing && e.key === "Enter") { e.target.blur(); e.target.focus(); } });
	const comesNear = (at) => !drag && at && want(at.for ?? handles.get(at.name).m.name);
	on(root, "pointerover focusin", (e) => comesNear(e.target.closest("[data-for], [data-name]")?.dataset));

	// ---- the picture
	function pick(m, k, d) { // what can be clicked is a button above the picture: it stays, and its focus
		const name = `${m.name} ${k}`;
		if (!picks.has(name)) {
			const node = svg(layer, "path", { class: "pick", role: "button", "data-for": m.name, tabindex: picks.size ? -1 : 0 });
			// after what was pressed before
			const fresh = () => scene.panels.flatMap((q) => q.marks).find((q) => q.sets && q.name === m.name);
			const does = () => choose(m.name, k, { set: node.sets }, NaN, () => ({ set: fresh()?.sets[k] ?? {} }));
			on(node, "click", does);
			on(node, "keydown", (e) => {
				const to = { ArrowRight: node.nextSibling, ArrowLeft: node.previousSibling }[e.key];
				if (e.key === "Enter" || e.key === " ") does(); else if (to?.classList.contains("pick")) to.focus(); else return;
				e.preventDefault(); e.stopPropagation();
			});
			picks.set(name, node);
		}
		set(picks.get(name), { d, "aria-label": [at(m.names ?? m.label, k), m.text?.[k]].filter(Boolean).join(": ") }).sets = m.sets[k];
		used.add(name);
	}
	function draw() {
		if (!(spec = local ?? scene)) return;
		const width = max(finger() ? spec.least : min(spec.least, MOUSE), round(clamp(stage.clientWidth || spec.width, 280, 1.3 * spec.width)));
		stage.classList.toggle("wide", width > (seen = stage.clientWidth) + 1);
		picture.replaceChildren();
		const defs = svg(picture, "defs"), stripes = { width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
		svg(svg(defs, "pattern", { id: ids + "h", ...stripes }), "path", { d: "M0 0V6", class: "hatching" });
		const head = { viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" };
		svg(svg(defs, "marker", { id: ids + "t", ...head }), "path", { d: "M0 0L8 4L0 8z", class: "tip" });
		panels = arrange(spec, width, ids, drag?.panels);
		const height = panels[0]?.height ?? spec.height;
		for (const node of [picture, over]) set(node, { width, height, viewBox: `0 0 ${width} ${height}` });
		moving = [];
		used.clear();
		for (const [k, p] of panels.entries()) {
			svg(svg(defs, "clipPath", { id: ids + k }), "rect", { x: p.left - p.out, y: p.top - 6, width: p.right - p.left + 2 * p.out, height: p.bottom - p.top + 12 });
			const g = svg(picture, "g", p.bare ? {} : { "clip-path": `url(#${ids + k})` }), inner = svg(g, "g");
			const { follow, lo, hi } = p.x, names = follow ? svg(picture, "g") : picture;
			axes(picture, inner, names, p);
			picture.append(g); // the grid lies below
			if (follow) moving.push((i, pos) => {
				p.off = pos;
				for (const part of [inner, names]) set(part, { transform: `translate(${px(p.X(0) - p.X(pos))})` });
				for (const name of names.children) reveal(name, within(name.at - pos, [lo, hi]));
			});
			for (const m of p.marks) {
				const own = svg(m.free || m.frame || (m.type === "text" && !p.x.follow) ? picture : inner, "g"), step = DRAW[m.type](own, p, m, pick);
				if (step) moving.push(step);
				if (m.only) moving.push((i) => reveal(own, within(i, m.only)));
			}
		}
		for (const [name, node] of picks) if (!used.has(name)) { node.remove(); picks.delete(name); }
		keepHandles();
		drawLegend();
		keepPlayer();
		show(frame ? pos : clamp(index, 0, (spec.index?.count ?? 1) - 1));
	}
	function show(to) {
		[pos, index] = [to, Math.floor(to + 1e-6)];
		for (const step of moving) step(index, pos);
		if (telling !== spec.says || telling.at !== index) { // the sentence walks, too; read out where it rests
			(telling = spec.says).at = index;
			phrase.textContent = raised(sentence(spec.says, index)) + " ";
			status.ariaLive = frame ? "off" : "polite";
			if (!frame) picture.ariaLabel = phrase.textContent;
		}
		const shown = index + spec.index?.first;
		if (spec.index) { slider.value = index; slider.ariaValueText = shown; if (typing !== typed) typed.value = shown; }
		const where = ({ m }) => (m.name === spec.index?.name ? shown : m.axis === "xy" ? m.at : at(m.at, index));
		for (const [name, h] of handles) if (drag?.name !== name && !h.sent) place(h, where(h));
		if (tip.dataset.x) hover(panels[tip.dataset.panel], +tip.dataset.x, +tip.dataset.y);
		if (!stage.classList.contains("wide")) return;
		// where no ring can be seen any more the picture is moved; while one is dragged, no further than it
		const { left, right } = stage.getBoundingClientRect(), from = drag?.name ? handles.get(drag.name).g : stage;
		const boxes = [...from.querySelectorAll("circle:not(.ring), .now")].map((n) => n.getBoundingClientRect()).filter((box) => box.width);
		const off = boxes.length || !spec.index ? boxes.map((box) => max(0, box.right + 8 - right) - max(0, left + 8 - box.left))
			: [(stage.scrollWidth * (index + 1)) / spec.index.count - stage.scrollLeft - seen]; // a step without a ring
		if (off[0] && off.every(Boolean)) stage.scrollLeft += off[0] + (drag ? 0 : (Math.sign(off[0]) * seen) / 3);
	}
	function drawLegend() {
		legend.replaceChildren();
		for (const m of spec.legend) {
			const item = html(legend, "span"), small = svg(item, "svg", { width: 26, height: 12 });
			DRAW[m.type](small, { left: 0, right: 26, top: 0, bottom: 12, X: (v) => v, Y: (v) => v, ids }, m, pick)?.(0, 0);
			item.append(raised(m.label));
		}
	}

	// ---- play: the kernel hears of the step where it stops
	function go(to) { unsay(); pause(); show(clamp(to, 0, spec.index.count - 1)); tell(); }
	const button = press(player, "Play", () => (frame ? pause() : play()));
	const fast = press(player, "10×", () => { fast.ariaPressed = fast.ariaPressed !== "true"; if (frame) { cancelAnimationFrame(frame); play(); } });
	const slider = html(player, "input", { type: "range" }), output = html(player, "label"), typed = html(output, "input", { type: "number" });
	set(fast, { "aria-label": "10× as fast", "aria-pressed": "false" });
	on(slider, "input", () => go(+slider.value));
	on(typed, "change", () => {
		if (typed.value && typed.checkValidity()) return go(typed.value - spec.index.first);
		show(pos); if (!gone) say(`This is a whole number from ${typed.min} to ${typed.max}.`);
	});
	function keepPlayer() {
		const { label = "", first = 0, count = 1 } = spec.index ?? {};
		player.hidden = !spec.index;
		output.replaceChildren(label, typed);
		set(slider, { max: count - 1, "aria-label": label });
		set(typed, { min: first, max: first + count - 1 });
	}
	function tell(wait = 120) {
		timer = afresh(timer, () => { timer = 0; if (get("index") !== index) queue({ what: {}, id: "index" }); mark(); }, wait);
		mark();
	}
	function pause() { if (!frame) return; frame = cancelAnimationFrame(frame); button.textContent = "Play"; telling = null; show(index); tell(0); }
	function play() {
		const last = spec.index.count - 1, first = index >= last ? 0 : pos, start = performance.now();
		const every = max(spec.index.every / (fast.ariaPressed === "true" ? 10 : 1), calm() ? 250 : 0);
		const tick = (now) => {
			const to = min(last, first + max(0, now - start) / every);
			frame = requestAnimationFrame(tick);
			show(calm() ? Math.floor(to) : to);
			if (to >= last) pause();
		};
		button.textContent = "Pause"; unsay();
		frame = requestAnimationFrame(tick);
	}

	// ---- handles: their nodes stay, so that focus and drag survive
	function keepHandles() {
		const wanted = panels.flatMap((p) => p.marks.filter((m) => m.type === "handle").map((m) => ({ m, p, name: m.name })));
		for (const [name, { g }] of handles) if (!wanted.some((h) => h.name === name)) { g.remove(); handles.delete(name); }
		for (const [k, { m, p, name }] of wanted.entries()) {
			if (!handles.has(name)) {
				const g = svg(null, "g", { class: "handle", role: "slider", tabindex: 0, "data-name": name });
				svg(g, "line", { class: "reach" }); svg(g, "line", { class: "bar" });
				svg(g, "text", { class: "halo" }); svg(g, "circle", { r: 7, class: m.look });
				on(g, "keydown", (e) => key(e, handles.get(name)));
				handles.set(name, { g });
				grips.insertBefore(g, grips.children[k]); // in the order of the Tab key
			}
			const { g } = Object.assign(handles.get(name), { m, p });
			set(g, { "aria-label": m.label, "aria-orientation": m.axis === "x" ? "horizontal" : "vertical" });
		}
	}
	function place(h, v) {
		const { m, p, g } = h, [reach, bar, note, grip] = g.children, across = m.axis === "x", both = m.axis === "xy";
		const own = (u) => at(m.base ?? 0, index) + (m.slope ?? 1) * u, free = both || m.cross != null;
		const other = free ? at(m.cross, index) : across ? p.backY(m.foot ? p.bottom - 4 : p.top + 4) : p.x.hi;
		const [a, b] = both ? v : across ? [own(v), other] : [other, own(v)];
		const x = clamp(p.X(a), p.left, p.right), y = clamp(p.Y(b), p.top, p.bottom - 3); // off the numbers of the axis
		h.value = v;
		const ends = free ? m.stem && (across ? { x1: p.X(own(0)) } : { y1: p.Y(own(0)) }) : across ? { y1: p.top, y2: p.bottom } : { x1: p.left, x2: p.right };
		for (const line of [reach, bar]) set(line, { x1: x, x2: x, y1: y, y2: y, ...ends });
		set(grip, { cx: px(x), cy: px(y) });
		note.textContent = m.note ?? "";
		const long = 12 + 7 * note.textContent.length, stem = m.stem && across, before = stem ? x - long > p.left : x + long > p.right || !(free || across);
		// above a line are others
		const on = m.stem && !across ? (before ? -18 : -2) : free && !across ? -9 - (m.up ?? 0) : free || across ? 4 : y + 20 < p.bottom ? 15 : -6;
		set(note, { x: x + (before ? -12 : 12), y: y + (stem && !before ? -11 : on), "text-anchor": before ? "end" : "start" });
		const read = both ? [...v].map(plain).join(", ") : m.log2 ? plain(2 ** v) : m.slope || m.base != null ? plain(v) : said(v, across ? p.x : p.y);
		set(g, { "aria-valuemin": m.lo, "aria-valuemax": m.hi, "aria-valuenow": both ? v[0] : v, "aria-valuetext": read });
	}
	function move(h, v) {
		const { lo, hi, step, name } = drag?.m ?? h.m, snap = (u) => clamp(+(lo + round((u - lo) / step) * step).toPrecision(12), lo, hi);
		// a tip lies above its axis
		const near = many(v) ? min(1, hi / Math.hypot(...v)) : 1, to = many(v) ? [snap(near * v[0]), max(0, snap(near * v[1]))] : snap(v);
		if (String(to) === String(h.value)) return;
		place(h, to);
		if (name === spec.index?.name) return go(to - spec.index.first);
		pause();
		h.sent = true; // stays where it is put until drawn there
		const { m } = h, value = m.gesture ? { [index]: to } : m.log2 ? +(2 ** to).toPrecision(to % 1 ? 4 : 17) : to;
		const sets = m.sets ? m.sets[round((to - m.lo) / m.step)] : m.turns ? polar(m, to) : { [name]: value };
		choose(name, to, { set: sets }, m.gesture ? name + index : name);
	}
	function polar(m, [x, y]) { // a tip as its length and its angle in degrees, from 0 to 180
		const size = min(+Math.hypot(x, y).toFixed(1), m.hi);
		return { [m.name]: size, ...(size && { [m.turns]: round(Math.atan2(y, x) * 180 / Math.PI) }) };
	}
	function key(e, h) {
		const { m, value: v } = h, by = KEYS[e.key], end = { Home: m.lo, End: m.hi }[e.key];
		if (by == null && end == null) return;
		e.preventDefault(); e.stopPropagation();
		const to = (u) => end ?? u + by * m.step;
		move(h, m.axis !== "xy" ? to(v) : /Up|Down/.test(e.key) ? [v[0], to(v[1])] : [to(v[0]), v[1]]);
	}
	const spot = (e) => { const box = over.getBoundingClientRect(); return [e.clientX - box.left, e.clientY - box.top]; };
	const panelAt = (x, y) => panels.find((p) => x >= p.left - 8 && x <= p.right + 8 && y >= p.top - 8 && y <= p.bottom + 8);
	function draws(e) { // the pen: a step that it has passed gets the height of its way there, the nearest one that of the pointer
		const [x, y] = spot(e), { stroke, passed, last } = drag, p = panels[drag.at], m = p.marks.find((q) => q.type === "pen");
		const u = clamp(p.backX(x), 0, m.y.length - 1), v = clamp(p.backY(y), m.lo, m.hi), [a, b] = last ?? [u, v], way = u < a ? -1 : 1; drag.last = [u, v];
		for (let i = way * Math.floor(way * a + 1); way * i <= way * u; i += way) passed[i] = +(b + (v - b) * (i - a) / (u - a)).toFixed(2);
		Object.assign(stroke, passed, { [round(u)]: +v.toFixed(2) });
		for (const q of panels.flatMap((r) => r.marks)) if (q.type === "pen" && q.name === m.name) Object.assign(q.y, stroke);
		for (const step of moving) step(index, pos);
		ask({ set: { [m.name]: stroke } }, stroke);
	}
	const pulled = ({ m, p }, x, y) => ((m.axis === "x" ? p.backX(x) - p.off : p.backY(y)) - at(m.base ?? 0, index)) / (m.slope ?? 1);
	on(over, "pointerdown", (e) => {
		// also under another's line
		const ring = root.getRootNode().elementsFromPoint(e.clientX, e.clientY).find((n) => n.matches(".handle circle"));
		const [x, y] = spot(e), p = panelAt(x, y), name = (ring ?? e.target).closest?.("[data-name]")?.dataset.name, m = p?.marks.find((q) => q.type === "pen");
		if (!name && !m) return;
		pause();
		drag = name ? { ...handles.get(name), name, panels, ready: ready(handles.get(name).m.name) } : { at: panels.indexOf(p), m, stroke: {}, passed: {}, panels };
		// from where it is, also beyond the edge; after 100 pixels it is under the pointer
		const off = name && drag.m.axis !== "xy" ? drag.value - pulled(drag, x, y) : 0;
		drag.held = (u, v) => off * max(0, 1 - abs(drag.m.axis === "x" ? u - x : v - y) / 100);
		if (name) handles.get(name).g.focus(); else draws(e);
		unhover(); over.setPointerCapture(e.pointerId); e.preventDefault();
	});
	on(over, "pointermove", (e) => {
		const [x, y] = spot(e), p = panelAt(x, y), { m, p: q } = drag ?? {}; // with the axes when the drag began
		if (drag?.name) move(handles.get(drag.name), m.axis === "xy" ? [q.backX(x), q.backY(y)] : drag.held(x, y) + pulled(drag, x, y));
		else if (drag) draws(e);
		else if (p && !p.bare) hover(p, p.backX(x), p.backY(y));
		else unhover();
		over.style.cursor = p?.marks.some((m) => m.type === "pen") ? "crosshair" : "";
	});
	on(over, "pointerup pointercancel", () => { if (drag) { drag = null; settle(); draw(); } });

	// ---- reading values: by pointer or arrow keys
	function hover(p, x, y) {
		const found = readout(p, x, y, index), place = clamp(p.X(x - p.off), p.left, p.right);
		set(cross, { x1: px(place), x2: px(place), y1: p.top, y2: p.bottom });
		Object.assign(tip.dataset, { x, y, panel: panels.indexOf(p) });
		cross.style.opacity = found.length ? 1 : 0;
		tip.hidden = !found.length;
		tip.replaceChildren();
		if (!p.x.hidden) html(tip, "b", {}, `${p.x.label || spec.index?.label || ""} ${said(p.x.format || abs(p.x.hi - p.x.lo) < 20 ? x : round(x), p.x)}`);
		for (const [name, value] of found) html(tip, "div", {}, `${name}: ${value}`);
		tip.style.cssText = `top:${p.top + 4}px;` + (place > (p.left + p.right) / 2 ? `right:${stage.clientWidth - place + 10}px` : `left:${place + 10}px`);
	}
	function unhover() { tip.hidden = true; cross.style.opacity = 0; delete tip.dataset.x; }
	on(over, "keydown", (e) => {
		const by = { ArrowRight: 1, ArrowLeft: -1 }[e.key], p = panels.find((q) => !q.bare);
		if (!by || e.target !== over || !p) return;
		e.preventDefault();
		if (spec.index) return go(index + by), hover(p, index, 0);
		const width = abs(p.x.hi - p.x.lo), step = width / (width < 200 ? 40 : 100);
		hover(p, clamp((+tip.dataset.x || p.x.lo) + by * step, p.x.lo, p.x.hi), (p.y.lo + p.y.hi) / 2);
		[phrase.textContent, telling] = [tip.innerText.replaceAll("\n", ", "), null];
	});
	on(over, "blur pointerleave", () => { unhover(); if (telling === null) show(pos); }); // the sentence again

	// ---- the form: native, named controls; what has a handle in the picture is a number box alone
	function drawForm() {
		for (const c of get("controls")) {
			const line = html(form, "label", { "data-for": c.name });
			html(line, "span", {}, raised(c.label));
			const kind = c.kind === "choice" ? "select" : "input", most = c.grid && c.grid.length - 1;
			const input = html(line, kind, { type: c.kind, max: most, "data-control": c.name, "aria-label": c.label });
			for (const [text, value] of c.options ?? []) html(input, "option", { value }, raised(text));
			const typed = c.kind === "range" && { type: "number", min: c.grid[0], max: c.grid.at(-1), step: c.step, style: `width:${c.wide}ch` };
			const box = typed && html(line, "input", { ...typed, "data-box": c.name, "aria-label": `${c.label}, number` });
			const value = () => (c.kind === "range" ? c.grid[+input.value] : c.kind === "checkbox" ? input.checked : input.value);
			on(input, c.costly || c.kind === "text" ? "change" : "input", () => { if (box) box.value = value(); choose(c.name, value()); });
			if (box) on(box, "change", () => ask({ set: { [c.name]: box.value && +box.value } }, c.name));
			if (box) on(box, "blur", () => away || waiting.length || rest || showState()); // a refused number goes
		}
		const [first, ...others] = get("tries").map(pressing);
		(first ? row : bar).prepend(presses); // no button is alone in its line: these stand first, the last two tries together
		if (first) { html(tries, "span").append("Try:", first); html(tries, "span").append(...others); }
		showState();
	}
	const pressing = (text) => press(null, raised(text), () => { pause(); ask({ press: text }, NaN); });
	function showState() {
		const { values, idle, buttons, busy, progress: value } = get("state");
		if (buttons.join("\n") !== presses.told) { // a button that stays keeps its node, and its focus
			const there = [...presses.querySelectorAll("button")], held = there.find((b) => b === document.activeElement);
			presses.replaceChildren(...buttons.map((text) => there.find((b) => b.textContent === raised(text)) ?? pressing(text)), progress);
			presses.told = buttons.join("\n");
			if (held) (held.isConnected ? held : presses.firstChild).focus();
		}
		Object.assign(progress, { value, hidden: !busy });
		for (const c of get("controls")) {
			const line = of("for", c.name), [, input, box] = line.children, v = values[c.name];
			line.hidden = idle.includes(c.name);
			if (c.kind === "checkbox") input.checked = v;
			else if (c.kind !== "range") { if (c.kind === "choice" || (typing !== input && !(input.value && get("message")))) input.value = v; } else {
				if (document.activeElement !== box) box.value = +(+v).toPrecision(9);
				Object.assign(input, { hidden: handles.has(c.name), ariaValueText: v });
				input.value = c.grid.reduce((best, g, k) => (abs(g - v) < abs(c.grid[best] - v) ? k : best), 0);
			}
		}
	}
	function showRows() {
		const rows = get("rows");
		table.replaceChildren();
		for (const [k, cells] of [Object.keys(rows[0] ?? {}), ...rows.map(Object.values)].entries()) {
			const line = html(table, "tr");
			for (const cell of cells) html(line, k ? "td" : "th", k ? {} : { scope: "col" }, cell ?? "");
		}
	}
	function showMessage() { if (!gone) say(get("message")); if (get("message")) answered(); }
	function answered() { if (!rest && !waiting.length) local = null; draw(); showState(); } // a slider whose handle has come goes
	on(more, "toggle", () => ask({ table: more.open }));
	const events = {
		"msg:custom": ({ done }) => { if (done === away?.n) next(); }, "change:index": () => { if (!frame && get("index") !== index) show(get("index")); },
		"change:spec": async () => { const given = get("spec"); scene = given.panels ? given : await unpacked(given); answered(); }, // open without a kernel
		"change:state": () => { showState(); want(near); },
		"change:controls": drawForm, "change:ahead": arrived, "change:message": showMessage, "change:rows": showRows, "comm_live_update": lost };
	for (const [name, does] of Object.entries(events)) // in turn, as unpacking takes a moment
		model.on(name, events[name] = (...given) => { turn = turn.then(() => does(...given)).catch(reportError); });
	const size = new ResizeObserver(() => { if (panels.length) hideStored(el); if (abs(stage.clientWidth - seen) > 2) draw(); });
	for (const name of ["controls", "spec", "message"]) events["change:" + name]();
	size.observe(stage);
	const forget = () => Object.entries(events).forEach(([name, handler]) => model.off(name, handler));
	return () => { size.disconnect(); cancelAnimationFrame(frame); clearTimeout(timer); forget(); };
}

export default { render };
