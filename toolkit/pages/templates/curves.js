{
  const LATE_PX = 12, DOTS = 40;

  function decoded(curve) {
    let step = 0;
    const steps = curve.steps.map((more) => step += more);
    return { ...curve, steps };
  }

  function tick(value) {
    const size = Math.abs(value);
    for (const [scale, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (size >= scale) return Number((value / scale).toPrecision(10)) + suffix;
    if (size > 0 && size < 1e-2) {
      const [digits, exponent] = value.toExponential(3).split("e");
      return Number(digits) + "e" + Number(exponent);
    }
    return String(Number(value.toPrecision(6)));
  }

  function told(value) {
    const size = Math.abs(value);
    return size >= 1e5 || (size > 0 && size < 1e-3) ? value.toExponential(3) : value.toLocaleString("en", { maximumSignificantDigits: 5 });
  }

  function ticks(low, high, most, sizes, whole) {
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    let by = power * (sizes.find((size) => size * power >= rough) || 10);
    if (whole) by = Math.max(1, Math.round(by));
    const found = [];
    for (let number = Math.ceil(low / by - 1e-9); number * by <= high + 1e-9 * by; number++) found.push(number * by);
    return found;
  }

  function logTicks(low, high) {
    if (high < 10 * low) return ticks(low, high, 5, [1, 2, 2.5, 5]);
    const parts = high < 30 * low ? [1, 2, 5] : [1], found = [];
    const by = Math.max(1, Math.ceil(Math.log10(high / low) / 8));
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += by)
      found.push(...parts.map((part) => part * 10 ** power).filter((value) => value >= low && value <= high));
    return found;
  }

  function limits(values, data, log) {
    let low = Math.min(...values), high = Math.max(...values);
    if (log) {
      const room = Math.max((high / low) ** 0.05, 1.02);
      return [low / room, high * room];
    }
    if (data.zero) {
      low = Math.min(0, low), high = Math.max(0, high);
      return [1.12 * low, high > low ? 1.12 * high : 1];
    }
    const room = 0.05 * (high - low) || 0.05 * Math.abs(low) || 1;
    return [low - room, high + room];
  }

  function make(parent, name, style, attributes, text) {
    const made = document.createElementNS(parent.namespaceURI, name);
    Object.assign(made.style, style);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  function drawCurve(group, curve, at, bare) {
    const color = "var(--" + curve.color + ")", faint = curve.kind === "faint" && !bare;
    const dots = curve.kind === "points" && curve.values.length <= DOTS;
    let path = "", pen = "M";
    curve.values.forEach((value, index) => {
      const point = at(curve.steps[index], value);
      if (!point) return void (pen = "M");
      path += pen + point.map((number) => number.toFixed(1)).join(" ");
      const alone = pen === "M" && !at(curve.steps[index + 1], curve.values[index + 1]);
      pen = "L";
      if (dots || alone) make(group, "circle", { fill: color }, { cx: point[0], cy: point[1], r: dots ? 3 : 2 });
    });
    const style = { fill: "none", stroke: color, strokeWidth: curve.kind === "faint" ? 1 : 2, opacity: faint ? 0.4 : 1 };
    make(group, "path", style, { d: path });
  }

  function draw(svg, data, shown, state) {
    const width = svg.viewBox.baseVal.width, height = svg.viewBox.baseVal.height;
    const [left, right, top, bottom] = data.margins, log = state.log;
    const known = shown.flatMap((curve) => curve.values).filter((value) => value !== null && (!log || value > 0));
    const [low, high] = limits(known, data, log), scaled = log ? Math.log : (value) => value;
    const room = 0.015 * (data.x[1] - data.x[0]) || 0.5, first = data.x[0] - room, last = data.x[1] + room;
    const across = (step) => left + (width - left - right) * (step - first) / (last - first);
    const down = (value) => top + (height - top - bottom) * (scaled(high) - scaled(value)) / (scaled(high) - scaled(low));
    const at = (step, value) => value === null || value === undefined || (log && value <= 0) ? null : [across(step), down(value)];
    const group = document.createElementNS(svg.namespaceURI, "g"), label = { fill: "var(--muted)", fontSize: "11px" };
    for (const value of log ? logTicks(low, high) : ticks(low, high, 5, [1, 2, 2.5, 5])) {
      make(group, "path", { stroke: "var(--grid)" }, { d: "M" + left + " " + down(value) + "H" + (width - right) });
      make(group, "text", label, { x: left - 6, y: down(value) + 4, "text-anchor": "end" }, tick(value));
    }
    make(group, "path", { stroke: "var(--grid)" }, { d: "M" + left + " " + (height - bottom) + "H" + (width - right) });
    for (const step of ticks(first, last, width > 500 ? 10 : 6, [1, 2, 5], true))
      make(group, "text", label, { x: across(step), y: height - bottom + 16, "text-anchor": "middle" }, tick(step));
    make(group, "text", label, { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "step");
    const dashes = { stroke: "var(--warn)", strokeDasharray: "3 3" };
    for (const step of data.gaps) make(group, "path", dashes, { d: "M" + across(step) + " " + top + "V" + (height - bottom) });
    for (const curve of shown) drawCurve(group, curve, at, state.level === "none");
    svg.replaceChildren(group);
    return { at, across, width };
  }

  function nearest(curve, place, across) {
    let found = null;
    curve.steps.forEach((step, index) => {
      const far = Math.abs(across(step) - place);
      if (curve.values[index] !== null && (!found || far < found.far)) found = { far, step, value: curve.values[index] };
    });
    return found;
  }

  function readout(svg, box, data, shown, drawn) {
    const marks = make(svg, "g", { pointerEvents: "none" });
    const named = shown.filter((curve) => curve.name).length ? shown.filter((curve) => curve.name) : shown;
    const hide = () => { marks.replaceChildren(); box.hidden = true; };
    svg.onpointerleave = hide;
    svg.onpointermove = (event) => {
      const frame = svg.getBoundingClientRect(), place = (event.clientX - frame.left) * drawn.width / frame.width;
      const found = named.map((curve) => ({ curve, point: nearest(curve, place, drawn.across) })).filter((each) => each.point);
      if (!found.length) return hide();
      const step = found.reduce((one, other) => other.point.far < one.point.far ? other : one).point.step;
      marks.replaceChildren();
      box.replaceChildren();
      make(marks, "path", { stroke: "var(--muted)", opacity: 0.6 }, { d: "M" + drawn.across(step) + " 8V" + (svg.viewBox.baseVal.height - data.margins[3]) });
      make(box, "strong", {}, {}, "step " + step.toLocaleString("en"));
      for (const { curve, point } of found) {
        const own = nearest(curve, drawn.across(step), drawn.across), spot = drawn.at(own.step, own.value);
        if (own.far > LATE_PX || !spot) continue;
        make(marks, "circle", { fill: "var(--" + curve.color + ")" }, { cx: spot[0], cy: spot[1], r: 4 });
        const line = make(box, "span", {}, {});
        make(line, "i", { background: "var(--" + curve.color + ")", opacity: curve.kind === "faint" ? 0.45 : 1 }, {});
        line.append((curve.name || data.title) + (own.step === step ? "" : " (step " + own.step.toLocaleString("en") + ")"));
        make(line, "b", {}, {}, told(own.value));
      }
      const share = drawn.across(step) / drawn.width;
      box.style.left = share < 0.5 ? "calc(" + 100 * share + "% + 12px)" : "";
      box.style.right = share < 0.5 ? "" : "calc(" + 100 * (1 - share) + "% + 12px)";
      box.hidden = false;
    };
  }

  function kept(card) {
    try { return JSON.parse(sessionStorage.getItem(location.pathname + card.id)) || {}; } catch { return {}; }
  }

  function keep(card, state) {
    try { sessionStorage.setItem(location.pathname + card.id, JSON.stringify(state)); } catch { return; }
  }

  function controls(card, data, state, change) {
    const box = make(card.querySelector(".chart-head"), "p", {}, { class: "controls" });
    const smooth = data.curves.filter((curve) => curve.level);
    if (smooth.length) {
      const label = make(box, "label", {}, {}, "smoothing "), select = make(label, "select", {}, {});
      for (const level of ["none", ...data.levels]) make(select, "option", {}, { value: level }, level);
      select.value = state.level;
      select.onchange = () => { state.level = select.value; change(); };
    }
    const values = data.curves.flatMap((curve) => curve.values).filter((value) => value !== null);
    if (Math.min(...values) < 0 || Math.max(...values) <= 0) return void (state.log = false);
    const label = make(box, "label", {}, {}), check = make(label, "input", {}, { type: "checkbox" });
    label.append(" log axis");
    check.checked = state.log;
    check.onchange = () => { state.log = check.checked; change(); };
  }

  function rename(card, data, shown) {
    const middle = data.curves.filter((curve) => curve.level === data.level);
    card.querySelectorAll(".legend li").forEach((entry) => {
      entry.smooth = entry.smooth || middle.find((curve) => curve.name === entry.textContent);
      const now = entry.smooth && shown.find((curve) => curve.level && curve.color === entry.smooth.color);
      if (now) entry.lastChild.textContent = now.name;
      if (entry.smooth) entry.hidden = !now && data.curves.some((curve) => curve.kind === "faint" && curve.name);
    });
  }

  function start(card) {
    const data = JSON.parse(card.dataset.curves), state = { level: data.level, log: data.log, ...kept(card) };
    data.curves = data.curves.map(decoded);
    const boxes = [...card.querySelectorAll(".chart")].map((chart) => make(chart, "div", {}, { class: "readout", hidden: "" }));
    const change = () => {
      let shown = data.curves.filter((curve) => !curve.level || curve.level === state.level);
      const bare = state.level === "none" && data.curves.some((curve) => curve.level);
      rename(card, data, shown);
      /* Without smoothing the raw curve of a nameless pair takes the name of its smooth one. */
      if (bare) shown = shown.map((curve) => curve.name ? curve
        : { ...curve, name: (data.curves[data.curves.indexOf(curve) + 1] || curve).name });
      for (const box of boxes) {
        const svg = box.parentNode.querySelector("svg");
        readout(svg, box, data, shown, draw(svg, data, shown, state));
      }
      keep(card, state);
    };
    controls(card, data, state, change);
    change();
  }

  for (const card of document.querySelectorAll("[data-curves]"))
    try { start(card); } catch (error) { console.error(error); }
}
