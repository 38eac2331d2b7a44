// ---- Questions: an answer is read as leniently as mpkit/view/answers.py reads it, and told what quiz.verdict tells.
const RAISED_DIGITS = "⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹";
const bare = (text) => text.replace(/^[ '"\n]+|[ .'"\n]+$/g, "");
const nameOf = (v) => bare(String(v)).toLowerCase().replace(/^torch\./, "").replace(/(?<=\w)[_-](?=\w)/g, " ");

function numberOf(given) { // "65,504", "0xc000", "2⁻²⁴", "3 x 10^-8", "1/4", "25 %", "inf"; null for anything else
	if (typeof given !== "string") return typeof given === "number" ? given : null;
	let text = bare(given).replace(new RegExp(`[${RAISED_DIGITS}]+`, "g"), (found) => "^" + [...found].map((c) => "-+0123456789"[RAISED_DIGITS.indexOf(c)]).join("")).replace(/−/g, "-");
	const share = text.endsWith("%") ? 0.01 : 1, plain = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
	text = text.replace(/%$/, "").trim();
	if (/^[+-]?\d{1,3}(,\d{3})+(\.\d*)?$/.test(text)) text = text.replaceAll(",", "");
	const named = /^([+-]?)(inf|infinity|nan)$/i.exec(text), based = /^([+-]?)(0[xbo][0-9a-f]+)$/i.exec(text), parts = text.split("/"), sign = (m) => (m[1] === "-" ? -share : share);
	if (named) return sign(named) * (/nan/i.test(named[2]) ? NaN : Infinity);
	if (based) return sign(based) * Number(based[2]);
	if (plain.test(text)) return share * Number(text);
	if (parts.length === 2 && parts.every((part) => plain.test(part.trim()))) return share * parts[0] / parts[1];
	const power = /^([+-]?)\s*(?:(\d+(?:\.\d+)?)\s*[·×x*]\s*)?(\d+(?:\.\d+)?)\s*(?:\^|\*\*)\s*[({]?([+-]?\d{1,4})[)}]?$/.exec(text);
	return power ? sign(power) * (power[2] ?? 1) * power[3] ** power[4] : null;
}
const areNames = (truth) => Array.isArray(truth) && truth.every((v) => typeof v === "string" || Number.isInteger(v));
function read(text, truth) {
	if (!Array.isArray(truth)) return text;
	const parts = (text.match(/[\w.]+/g) ?? []).filter((part) => part !== "and");
	return truth.length > 1 ? parts : bare(text.replace(/[[\]()]/g, "")) ? [bare(text.replace(/[[\]()]/g, ""))] : [];
}
function same(value, truth, rel) {
	if (Array.isArray(truth)) {
		if (!Array.isArray(value) || value.length !== truth.length) return false;
		const order = (list) => (areNames(truth) ? [...list].sort((a, b) => (nameOf(a) < nameOf(b) ? -1 : 1)) : list), sorted = order(truth);
		return order(value).every((v, i) => same(v, sorted[i], rel));
	}
	if (typeof truth !== "number") return nameOf(value) === nameOf(truth);
	const found = numberOf(value);
	return found !== null && (Object.is(found, truth) || found === truth || Number.isFinite(found - truth) && Math.abs(found - truth) <= rel * Math.max(Math.abs(found), Math.abs(truth)));
}
function meant(value, wrong, rel) { // whether an answer is the wrong one that a hint is for
	if (wrong === null || typeof wrong !== "object" || Array.isArray(wrong)) return same(value, wrong, rel);
	const found = Array.isArray(value) ? value.length : numberOf(value);
	return found !== null && (wrong.above ?? -Infinity) < found && found < (wrong.below ?? Infinity);
}
function verdict(text, { truth, right, hint, hints, rel }) {
	const value = read(text, truth), isNumber = typeof truth === "number";
	if (same(value, truth, rel)) return "Right. " + right;
	for (const [wrong, told] of hints) if (meant(value, wrong, rel)) return "Not yet. " + told;
	const aside = isNumber && numberOf(value) === null ? "A number, such as 0.1, 1e-5, 1/3 or 2^-14, is asked for. " : typeof truth === "boolean" && !/^(true|false)$/.test(nameOf(value)) ? "True or False is asked for. " : "";
	return "Not yet. " + aside + hint;
}
function asked(form, known) {
	form.addEventListener("submit", (e) => {
		e.preventDefault();
		const text = form.querySelector("input").value;
		form.querySelector("[role=status]").textContent = text.trim() ? verdict(text, known) : "Write an answer first.";
	});
}
function predicted(el, note) { // as in a notebook
	render({ el, model: { get: (name) => (name === "note" ? note : []), set() {}, save_changes() {} } });
}
const UNJSON = { nan: NaN, inf: Infinity, "-inf": -Infinity };
for (const box of document.querySelectorAll("[data-quiz]")) {
	const known = JSON.parse(box.querySelector("script").textContent, (_, v) => (v?.float ? UNJSON[v.float] : v));
	({ predict: predicted, answer: asked })[box.dataset.quiz](box, known);
}
