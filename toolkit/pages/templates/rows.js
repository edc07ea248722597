{
  const PAGE = 25, card = document.getElementById("examples"), controls = card.querySelector(".controls");
  const rows = [...card.querySelectorAll("details")].map((row) => ({ row, text: row.textContent.toLowerCase() }));
  const search = controls.querySelector("input"), split = controls.querySelector("select");
  const [back, next] = controls.querySelectorAll("button"), place = controls.querySelector("output");
  let first = 0;

  function show() {
    const words = search.value.trim().toLowerCase();
    const found = rows.filter(({ row, text }) =>
      text.includes(words) && (!split || !split.value || row.dataset.split === split.value));
    const last = Math.min(first + PAGE, found.length), shown = new Set(found.slice(first, last));
    for (const one of rows) one.row.hidden = !shown.has(one);
    place.textContent = found.length ? `${first + 1} to ${last} of ${found.length.toLocaleString("en")}` : "no such row";
    back.disabled = first === 0;
    next.disabled = last === found.length;
  }

  function go(to) {
    first = to;
    show();
  }

  search.oninput = () => go(0);
  if (split) split.onchange = () => go(0);
  back.onclick = () => go(first - PAGE);
  next.onclick = () => go(first + PAGE);
  controls.hidden = false;
  show();
}
