"use strict";
// Draws the charts one after another, and fits them to the screen and to paper.
(() => {
  const PAPER = 930; // pixels: the style sheet makes them three quarters as large, which fits a printed page
  const [LEGEND, LETTER] = [90, 6.8]; // pixels: of a legend without its names, of a letter
  const touch = matchMedia("(pointer: coarse)").matches;
  const plots = [...document.querySelectorAll(".drawing")];
  let printing = false;

  const isNarrow = (plot) => !printing && plot.clientWidth < Number(plot.dataset.narrow);

  // A fresh copy each time: plotly writes into what it is given.
  function figureOf(plot) {
    const { data, layout, narrow } = JSON.parse(document.getElementById(`data-${plot.dataset.name}`).textContent);
    plot.narrow = isNarrow(plot);
    const chosen = plot.narrow ? narrow : layout;
    const size = printing ? { autosize: false, width: PAPER } : { autosize: true };
    if (chosen.legend) chosen.legend.maxheight = 4000; // none of it is hidden: `fit` makes room
    if (plot.narrow) for (const trace of data) if (trace.name) trace.name = wrapped(trace.name, plot.clientWidth);
    // A finger on a chart scrolls the page: only a mouse zooms.
    return { data, layout: { ...chosen, ...size, dragmode: touch ? false : "zoom" } };
  }

  // A legend's name that is wider than a phone goes on in the next line.
  function wrapped(name, width) {
    const letters = Math.floor((width - LEGEND) / LETTER);
    return name.replace(new RegExp(`(?=.{${letters + 1}})(.{1,${letters}},) `, "g"), "$1<br>");
  }

  async function draw(plot) {
    const { data, layout } = figureOf(plot);
    const pages = layout.updatemenus?.[0].buttons;
    delete layout.updatemenus;
    plot.asked = { height: layout.height, bottom: layout.margin?.b ?? 80 };
    await Plotly.react(plot, data, layout, {
      responsive: true,
      displaylogo: false,
      displayModeBar: touch ? false : "hover",
      showSendToCloud: false, // nothing leaves this page
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
      toImageButtonOptions: { format: "svg", filename: plot.dataset.name },
    });
    if (pages) await turnTo(plot, pages, (plot.menu ??= menuFor(plot, pages)).selectedIndex);
    await fit(plot);
  }

  // A chart's pages are chosen in a menu of the browser's own: a phone's has room for long names.
  function menuFor(plot, pages) {
    const menu = document.createElement("select");
    menu.setAttribute("aria-label", "what to show");
    for (const { label } of pages) menu.add(new Option(plain(label)));
    menu.addEventListener("change", async () => {
      menu.dataset.turned = "";
      await turnTo(plot, pages, menu.selectedIndex);
      await fit(plot);
      menu.dataset.turned = menu.selectedIndex;
    });
    plot.before(menu);
    return menu;
  }

  const plain = (label) => new DOMParser().parseFromString(label, "text/html").documentElement.textContent;

  function turnTo(plot, pages, number) {
    const [traces, layout] = structuredClone(pages[number].args);
    return Plotly.update(plot, traces, layout);
  }

  // Plotly makes room for a legend by taking it from the panels: the chart becomes taller instead.
  async function fit(plot) {
    const { height, bottom } = plot.asked;
    if (!height) return;
    for (let turn = 0; turn < 3; turn++) {
      const missing = Math.ceil(plot._fullLayout._size.b - bottom);
      const wanted = height + Math.max(0, missing);
      if (Math.abs(wanted - plot.layout.height) < 2) return;
      await Plotly.relayout(plot, { height: wanted });
    }
  }

  async function drawAll() {
    for (const plot of plots) {
      try {
        await draw(plot);
      } catch (error) {
        plot.textContent = `This chart could not be drawn: ${error.message}`;
        console.error(plot.id, error);
      }
    }
    document.documentElement.dataset.drawn = plots.length;
  }

  // A window that becomes narrow or wide: the panels move below or beside each other.
  const watcher = new ResizeObserver((changes) => {
    for (const { target } of changes) {
      if (!printing && target.layout && isNarrow(target) !== target.narrow) draw(target);
    }
  });
  plots.forEach((plot) => watcher.observe(plot));

  function print(begins) {
    printing = begins;
    plots.forEach(draw);
  }
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));

  // The contents are open where they are beside the page; above it they would hide the verdict.
  document.querySelector("nav details").open = matchMedia("(min-width: 1240px)").matches;
  drawAll();
})();
