// What is wrong with the pictures of a page: words that are cut or lie on each other, rings that cannot be grabbed.
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
  for (const ring of moves ? [] : stage.querySelectorAll(".handle circle")) {
    const { x, y, width, height } = ring.getBoundingClientRect(), there = document.elementsFromPoint(x + width / 2, y + height / 2);
    if (there.find((n) => n.matches(".handle circle")) !== ring) found.push([name, "not grabbed", ring.parentNode.dataset.name]);
  }
  return found;
})
