// What look.py asks of a page. Functions only: it is put in front of each question.
const plotOf = (name) => document.getElementById(`plot-${name}`);

function chartNames() {
  return [...document.querySelectorAll(".drawing")].map((plot) => plot.dataset.name);
}

// What is wider than the page, with everything unfolded, but in a box that scrolls.
function pageProblems() {
  document.querySelectorAll("details").forEach((each) => (each.open = true));
  const width = document.documentElement.clientWidth;
  const found = [];
  if (document.documentElement.scrollWidth > width)
    found.push(`it is ${document.documentElement.scrollWidth} pixels wide in a window of ${width}`);
  for (const element of document.querySelectorAll("body *")) {
    if (element.closest(".scroll") && !element.classList.contains("scroll")) continue;
    if (element.closest("svg") || element.closest(".js-plotly-tester")) continue;
    const box = element.getBoundingClientRect();
    if (box.width && (box.right > width + 1 || box.left < -1))
      found.push(`<${element.tagName.toLowerCase()} class="${element.className}"> goes from ${box.left} to ${box.right}`);
  }
  found.push(...hiddenResults(width));
  document.querySelectorAll("details").forEach((each) => (each.open = each.closest("nav") !== null));
  return found;
}

// What a reader has to know first is to be seen without scrolling.
function firstScreenProblems() {
  const answer = document.querySelector(".answer")?.getBoundingClientRect();
  const seen = answer && answer.height && answer.bottom <= innerHeight;
  return seen ? [] : ["the verdict is not on the first screen"];
}

// Of the table of results, what a reader has to scroll for: nothing on a screen, and not all numbers on a phone.
function hiddenResults(width) {
  const box = document.querySelector("#results .scroll");
  if (!box || matchMedia("print").matches) return [];
  if (width > 1000 && box.scrollWidth > box.clientWidth + 1)
    return [`the table of results is ${box.scrollWidth} pixels wide, in a box of ${box.clientWidth}`];
  const numbers = [...box.querySelectorAll("tbody tr:first-child td:not(.word)")];
  const seen = numbers.filter((cell) => cell.getBoundingClientRect().right <= width);
  return seen.length < Math.min(2, numbers.length) ? ["the table of results shows fewer than two numbers"] : [];
}

// As wide as they are on the page, rounded.
function chartWidths() {
  return chartNames().map((name) => {
    const svg = plotOf(name).querySelector("svg.main-svg");
    return Math.round(svg.getBoundingClientRect().width / 10);
  });
}

// The table of all results, taken out of the page: how wide it was.
function takeResults() {
  const results = document.getElementById("results");
  const widths = [...results.querySelectorAll("table")].map((table) => table.getBoundingClientRect().width);
  results.remove();
  return widths;
}

// The choices of a chart's menu; one without a name where there is no menu.
function menuOf(name) {
  const menu = plotOf(name).menu;
  return menu ? [...menu.options].map((option) => option.text) : [""];
}

// With the so-manieth choice of its menu, if it has one.
async function chartState(name, choice) {
  const plot = plotOf(name);
  const menu = plot.menu;
  if (menu && menu.selectedIndex !== choice) {
    menu.selectedIndex = choice;
    menu.dispatchEvent(new Event("change"));
    while (menu.dataset.turned !== String(menu.selectedIndex)) await new Promise(requestAnimationFrame);
  }
  const box = plot.querySelector("svg.main-svg").getBoundingClientRect();
  const { left, top, right, bottom, width, height } = box;
  return { left, top, right, bottom, width, height, marks: marksIn(plot), texts: textsIn(plot) };
}

function marksIn(plot) {
  const kinds = [".js-line", ".point", ".points path", ".fills path"].map((kind) => `.cartesianlayer ${kind}`);
  const marks = plot.querySelectorAll(kinds.join(", "));
  return [...marks].filter((mark) => {
    const box = mark.getBoundingClientRect();
    return box.width + box.height > 1;
  }).length;
}

function textsIn(plot) {
  return [...plot.querySelectorAll("svg.main-svg text")].filter(isSeen).map((text) => ({
    text: text.textContent,
    corners: cornersOf(text),
  }));
}

function isSeen(text) {
  if (!text.textContent.trim()) return false;
  if (text.closest(".modebar, .hoverlayer")) return false;
  const box = text.getBoundingClientRect();
  if (!box.width || !box.height) return false;
  for (let at = text; at && at.tagName !== "svg"; at = at.parentNode) {
    const style = getComputedStyle(at);
    if (style.display === "none" || style.visibility === "hidden" || style.opacity === "0") return false;
  }
  return true;
}

function cornersOf(text) {
  const { x, y, width, height } = text.getBBox();
  const matrix = text.getScreenCTM();
  return [[x, y], [x + width, y], [x + width, y + height], [x, y + height]].map(([px, py]) => [
    matrix.a * px + matrix.c * py + matrix.e,
    matrix.b * px + matrix.d * py + matrix.f,
  ]);
}

function shownTraces(name) {
  return plotOf(name).data.filter((trace) => trace.visible !== "legendonly" && trace.visible !== false).length;
}
