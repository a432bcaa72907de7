"use strict";
// Asks for the state of the run every second and shows it. Whatever comes from the run is set as text, never as HTML.
(() => {
  const [EVERY, AFTER_END, SLOWEST] = [1000, 5000, 60000]; // milliseconds between two questions
  const at = (id) => document.getElementById(id);
  const inside = (id, selector) => at(id).querySelector(selector);

  function say(element, text) {
    if (element.textContent !== text) element.textContent = text; // or else what is selected would be no more
    element.hidden = !text;
  }

  function make(tag, name = "", text = "") {
    const element = document.createElement(tag);
    if (name) element.className = name;
    element.textContent = text;
    return element;
  }

  function draw(tag, values, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(values)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // As many children as there are items, each made once and shown again: a tooltip over one stays.
  function each(parent, items, create, show) {
    while (parent.children.length > items.length) parent.lastChild.remove();
    items.forEach((item, index) => {
      if (!parent.children[index]) parent.append(create(item));
      show(parent.children[index], item);
    });
  }

  // Charts

  const digits = (value) =>
    Math.abs(value) >= 1000
      ? Math.round(value).toLocaleString("en-US")
      : String(Number(value.toPrecision(Math.abs(value) >= 100 ? 3 : 4)));

  // Round values between two, about so many.
  function ticks(low, high, count) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
    const found = [];
    for (let value = Math.ceil(low / step - 1e-9); value * step <= high + step * 1e-9; value++) found.push(value * step + 0); // no -0
    return found;
  }

  function powers(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const factor of high / low > 300 ? [1] : [1, 2, 5]) found.push(factor * 10 ** power);
    return found.filter((value) => value >= low && value <= high);
  }

  // A chart of [step, value] by step: a line, and dots if there are some. `zero`: from zero on.
  function chart(svg, line, dots, zero) {
    svg.data = [line, dots, zero];
    const { width, height } = svg.getBoundingClientRect();
    if (!width || !line.length) return;
    const values = [...line, ...dots].map(([, value]) => value);
    let [low, high] = [zero ? 0 : Math.min(...values), Math.max(...values)];
    const log = !zero && low > 0 && high / low > 20;
    if (low === high) [low, high] = [low - Math.abs(low) / 10 - 1e-9, high + Math.abs(high) / 10 + 1e-9];
    else if (log) [low, high] = [low / 1.1, high * 1.1];
    else [low, high] = [zero ? 0 : low - 0.05 * (high - low), high + 0.05 * (high - low)];
    const marks = log ? powers(low, high) : ticks(low, high, 5);
    const last = Math.max(line.at(-1)[0], line[0][0] + 1);
    const first = line[0][0] < last / 5 ? 0 : line[0][0];
    const left = 12 + 7 * Math.max(...marks.map((value) => digits(value).length), 1);
    const [right, top, bottom] = [width - 8, 8, height - 22];
    const x = (step) => left + ((step - first) / (last - first)) * (right - left);
    const scale = log ? Math.log : (value) => value;
    const y = (value) => bottom - ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (bottom - top);
    const parts = [];
    for (const value of marks) {
      parts.push(draw("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }));
      parts.push(draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, digits(value)));
    }
    parts.push(draw("text", { x: right, y: height - 5, "text-anchor": "end" }, "step"));
    for (const step of ticks(first, last, Math.max(4, Math.min(8, width / 80))).filter(Number.isInteger)) {
      const word = step.toLocaleString("en-US");
      if (x(step) + 4 * word.length < right - 36)
        parts.push(draw("text", { x: x(step), y: height - 5, "text-anchor": "middle" }, word));
    }
    const path = line.map(([step, value], index) => `${index ? "L" : "M"}${x(step).toFixed(1)},${y(value).toFixed(1)}`);
    parts.push(draw("path", { d: path.join("") }));
    if (line.length === 1) parts.push(draw("circle", { class: "mark", cx: x(line[0][0]), cy: y(line[0][1]), r: 3 }));
    for (const [step, value] of dots)
      if (step >= first) parts.push(draw("circle", { class: "validation", cx: x(Math.min(step, last)), cy: y(value), r: 4 }));
    if (svg.pointed !== undefined) parts.push(...readout(svg.pointed, [...line, ...dots], x, y, left, right, top, bottom));
    svg.replaceChildren(...parts);
  }

  // The point nearest to the mouse, with its numbers.
  function readout(pointed, points, x, y, left, right, top, bottom) {
    const far = ([step, value]) => Math.abs(x(step) - pointed.x) + Math.abs(y(value) - pointed.y) / 10;
    const near = points.reduce((best, point) => (far(point) < far(best) ? point : best));
    const word = `step ${near[0].toLocaleString("en-US")}: ${digits(near[1])}`;
    const [wide, to] = [word.length * 7 + 8, x(near[0])];
    const from = Math.min(Math.max(left, to - wide / 2), right - wide);
    return [
      draw("line", { class: "guide", x1: to, x2: to, y1: top, y2: bottom }),
      draw("circle", { class: "mark", cx: to, cy: y(near[1]), r: 4 }),
      draw("rect", { class: "halo", x: from, y: top - 6, width: wide, height: 18 }),
      draw("text", { class: "value", x: from + wide / 2, y: top + 7, "text-anchor": "middle" }, word),
    ];
  }

  for (const svg of document.querySelectorAll("figure svg")) {
    const again = () => svg.data && chart(svg, ...svg.data);
    svg.addEventListener("pointermove", ({ clientX, clientY }) => {
      const { left, top } = svg.getBoundingClientRect();
      svg.pointed = { x: clientX - left, y: clientY - top };
      again();
    });
    svg.addEventListener("pointerleave", () => {
      svg.pointed = undefined;
      again();
    });
    new ResizeObserver(again).observe(svg);
  }

  // A small chart of the last minutes, from zero to `most`.
  function graph(svg, values, most) {
    const known = values.map((value, index) => [index, value]).filter(([, value]) => value !== null);
    const high = Math.max(most || 0, ...known.map(([, value]) => value), 1e-9);
    const wide = Math.max(values.length - 1, 1);
    const points = known.map(([index, value]) => `${index},${(1 - value / high).toFixed(3)}`);
    svg.setAttribute("viewBox", `0 -0.05 ${wide} 1.1`);
    svg.setAttribute("preserveAspectRatio", "none");
    if (!points.length) return svg.replaceChildren();
    const line = `M${points.join("L")}`;
    const area = `${line}L${known.at(-1)[0]},1L${known[0][0]},1Z`;
    return svg.replaceChildren(draw("path", { class: "area", d: area }), draw("path", { d: line }));
  }

  // Parts of the page

  function head(state) {
    const { title, about, folder, status, said, next, progress, notes } = state;
    const share = progress.share === null ? "" : `${Math.floor(100 * progress.share)} % · `;
    document.title = `${state.ended ? `${status} · ` : share}${title}`;
    document.body.className = status;
    say(at("title"), title);
    say(at("about"), about);
    say(at("folder"), folder);
    say(at("status"), status);
    at("status").className = `status ${status}`;
    say(at("said"), said);
    at("said").classList.toggle("bad", status === "failed" || status === "killed");
    at("next").hidden = !next;
    at("next").classList.toggle("good", status === "completed");
    if (next) {
      say(inside("next", "span"), `The run has ended. ${next.text}`);
      say(inside("next", "code"), next.command);
    }
    each(at("notes"), notes, () => make("li"), say);
    at("notes").hidden = !notes.length;
  }

  function showProgress({ share, steps, epoch, elapsed, left, stalled }) {
    const bar = inside("progress", ".bar");
    bar.hidden = share === null;
    if (share !== null) {
      bar.firstElementChild.style.width = `${100 * share}%`;
      bar.setAttribute("aria-valuenow", Math.floor(100 * share));
    }
    say(at("steps"), steps);
    say(at("epoch"), epoch);
    say(at("elapsed"), elapsed && `${elapsed} elapsed`);
    say(at("left"), left && `${left} left`);
    say(at("stalled"), stalled);
  }

  function showFigures(figures) {
    const create = () => {
      const box = make("div");
      box.append(make("dt"), make("dd"), make("small"));
      return box;
    };
    each(at("figures"), figures, create, (box, words) => words.forEach((word, index) => say(box.children[index], word)));
  }

  function showCurves({ curve, validations }) {
    const losses = curve.filter(([, loss]) => loss !== null).map(([step, loss]) => [step, loss]);
    const known = validations.filter(([, loss]) => loss !== null);
    at("loss").hidden = !losses.length;
    inside("loss", ".validation").hidden = !known.length;
    chart(inside("loss", "svg"), losses, known, false);
    at("rate").hidden = !curve.length;
    chart(inside("rate", "svg"), curve.map(([step, , rate]) => [step, rate]), [], true);
  }

  function showRanks({ parts, ranks, verdict }) {
    at("ranks").hidden = !ranks.length;
    at("verdict").hidden = !verdict;
    if (verdict) {
      ["b", "span", ".soft"].forEach((selector, index) => say(inside("verdict", selector), verdict[index]));
    }
    const names = Object.keys(parts);
    const used = names.filter((name) => ranks.some((rank) => name in rank.parts));
    const key = () => {
      const item = make("span");
      item.append(make("i"), make("span"));
      return item;
    };
    each(at("parts"), used, key, (item, name) => {
      item.firstChild.className = `part-${name}`;
      say(item.lastChild, parts[name]);
    });
    const longest = Math.max(...ranks.map(({ seconds }) => seconds), 1e-12);
    const create = () => {
      const row = make("div");
      const stack = make("span", "stack");
      for (const name of names) stack.append(make("i", `part-${name}`));
      const end = make("span");
      end.append(make("span"), make("span", "alarm"));
      row.append(make("span"), stack, end);
      return row;
    };
    each(inside("ranks", ".rows"), ranks, create, (row, { rank, slow, host, total, parts: own, late }) => {
      const [label, stack, end] = row.children;
      label.className = slow ? "alarm" : "";
      say(label, host ? `rank ${rank}, ${host}` : `rank ${rank}`);
      names.forEach((name, index) => {
        const [value, word] = own[name] ?? [0, ""];
        stack.children[index].style.width = `${(100 * value) / longest}%`;
        stack.children[index].hidden = !value;
        stack.children[index].title = word;
      });
      say(end.firstChild, total);
      say(end.lastChild, late && ` ${late}`);
    });
  }

  function showNodes(nodes) {
    at("nodes").hidden = !nodes.length;
    const create = () => {
      const card = make("div");
      const name = make("p");
      name.append(make("b"), " ", make("span", "soft"));
      card.append(name, make("div"));
      return card;
    };
    const row = () => {
      const made = make("div", "graph");
      made.append(make("span", "soft"), draw("svg", { "aria-hidden": "true" }), make("span"));
      return made;
    };
    each(inside("nodes", ".rows"), nodes, create, (card, node) => {
      say(card.firstChild.firstChild, node.name);
      say(card.firstChild.lastChild, [node.ranks, node.gpus].filter(Boolean).join(", "));
      each(card.lastChild, node.rows, row, ({ children }, [what, value, most, history]) => {
        say(children[0], what);
        graph(children[1], history, most);
        say(children[2], value);
      });
    });
  }

  function show(state) {
    head(state);
    showProgress(state.progress);
    showFigures(state.figures);
    showCurves(state);
    showRanks(state);
    showNodes(state.nodes);
  }

  // Asking

  let failures = 0;
  let seen = "";

  async function ask() {
    let wait = EVERY;
    try {
      const answer = await fetch("state.json", { signal: AbortSignal.timeout(20000) });
      if (!answer.ok) throw new Error(`${answer.status} ${await answer.text()}`);
      const state = await answer.json();
      show(state);
      at("lost").hidden = true;
      failures = 0;
      if (state.ended) wait = AFTER_END;
      seen = new Date().toLocaleTimeString();
    } catch (error) {
      const since = seen && ` What is shown is of ${seen}.`;
      say(at("lost"), `paceline watch does not answer: it has ended, or cannot be reached.${since}`);
      failures += 1;
      wait = Math.min(EVERY * 2 ** failures, SLOWEST);
    }
    setTimeout(ask, wait);
  }

  ask();
})();
