// What is wrong with the views of a page: words that are cut, lie on each other or on a border of regions, rings that
// cannot be grabbed, a button that is alone on its line.
() => [...document.querySelectorAll(".mpk")].flatMap((root) => {
  const stage = root.querySelector(".mpk-stage"), moves = stage.scrollWidth > stage.clientWidth + 1, name = root.parentNode.title;
  stage.scrollIntoView();
  const page = stage.getBoundingClientRect(), found = [];
  const boxes = [...stage.querySelectorAll("text:not([transform*=rotate])")].map((t) => [t.textContent, t.getBoundingClientRect()]).filter(([, box]) => box.width);
  for (const [i, [text, a]] of boxes.entries()) {
    if (!moves && (a.left < page.left - 3 || a.right > page.right + 3)) found.push([name, "cut", text]);
    for (const [other, b] of boxes.slice(i + 1)) {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left), high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 4 && high > 5) found.push([name, "on each other", text, other]);
    }
  }
  const sheet = stage.querySelector("svg").getBoundingClientRect(), inside = (rect, x, y) => x > +rect.getAttribute("x") && x < +rect.getAttribute("x") + +rect.getAttribute("width") && y > +rect.getAttribute("y") && y < +rect.getAttribute("y") + +rect.getAttribute("height");
  const shapes = [...stage.querySelectorAll("path.box, path.band")].filter((p) => p.checkVisibility() && p.style.fill !== "none").map((p) => [p, p.getScreenCTM().inverse(), p.closest("[clip-path]")?.getAttribute("clip-path").slice(5, -1)]);
  const below = (x, y) => shapes.filter(([p, to, clip]) => (!clip || inside(document.getElementById(clip).firstChild, x - sheet.left, y - sheet.top)) && p.isPointInFill(new DOMPoint(x, y).matrixTransform(to))).map(([p]) => p.style.fill).join();
  for (const t of stage.querySelectorAll("text:not(.halo)")) {
    const { left, right, top, bottom, width } = t.getBoundingClientRect(), x = (left + right) / 2, y = (top + bottom) / 2;
    if (width && new Set([below(left + 1, y), below(right - 1, y), below(x, top + 3), below(x, bottom - 3)]).size > 1) found.push([name, "across a border", t.textContent]);
  }
  const line = [...root.querySelectorAll(".mpk-bar :is(button, label)")].map((n) => [n, n.getBoundingClientRect()]).filter(([, box]) => box.width);
  for (const [n, a] of innerWidth < 600 ? [] : line.filter(([n]) => n.matches("button")))
    if (!line.some(([other, b]) => other !== n && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 5)) found.push([name, "alone on its line", n.textContent]);
  for (const select of root.querySelectorAll("select")) if (!select.value) found.push([name, "nothing is chosen", select.name]);
  for (const ring of moves ? [] : stage.querySelectorAll(".handle circle")) {
    const { x, y, width, height } = ring.getBoundingClientRect(), there = document.elementsFromPoint(x + width / 2, y + height / 2);
    if (there.find((n) => n.matches(".handle circle")) !== ring) found.push([name, "not grabbed", ring.parentNode.dataset.name]);
  }
  return found;
})
