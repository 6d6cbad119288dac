"use strict";
(async () => {
  const main = document.querySelector("main"), every = 1000 * document.body.dataset.interval;
  const root = getComputedStyle(document.documentElement), touch = matchMedia("(pointer: coarse)").matches;
  const font = { family: "system-ui, sans-serif", size: 12, color: "var(--muted)" };
  const axis = { gridcolor: "var(--rule)", linecolor: "var(--rule)", zeroline: false, automargin: true };
  const common = {
    font, margin: { l: 44, r: 10, t: 18, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    hovermode: "x unified", hoverlabel: { bgcolor: "var(--paper)", bordercolor: "var(--rule)", font: { color: "var(--ink)" } },
    xaxis: { ...axis, showgrid: false, nticks: 8, title: { standoff: 6, font: { size: 11 } } },
    yaxis: { ...axis, nticks: 6 }, legend: { orientation: "h", x: 0, y: 1.08, yanchor: "bottom", font: { size: 11 } },
    dragmode: touch ? false : "zoom",  // on a phone, a finger scrolls the page
    bargap: 0.15, modebar: { bgcolor: "rgba(0,0,0,0)", color: "var(--muted)", activecolor: "var(--ink)" },
  };
  const buttons = ["zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"];  // they have room beside the title of the x axis
  const options = { displaylogo: false, responsive: true, modeBarButtons: [buttons] };
  if (touch) options.displayModeBar = false;

  // The page carries plotly.js compressed: a third of its size.
  const packed = Uint8Array.from(atob(document.getElementById("library").textContent), letter => letter.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const library = document.createElement("script");
  library.textContent = await new Response(plain).text();
  document.head.append(library);

  function draw(figure) {
    const plot = figure.querySelector(".plot"), source = figure.querySelector("script").textContent;
    const coloured = text => JSON.parse(text.replace(/var\((--\w+)\)/g, (_, name) => root.getPropertyValue(name).trim()));
    const { data, layout } = coloured(source);
    Plotly.react(plot, data, { ...layout, uirevision: "kept", template: { layout: coloured(JSON.stringify(common)) } }, options);
    figure.dataset.drawn = true;
  }
  const seen = new IntersectionObserver(entries => {  // a chart is drawn when it comes near
    for (const { target, isIntersecting } of entries)
      if (isIntersecting && !target.dataset.drawn) draw(target);
  }, { rootMargin: "400px" });
  const watch = () => document.querySelectorAll("figure").forEach(figure => seen.observe(figure));
  const redraw = all => document.querySelectorAll(all).forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw("figure[data-drawn]"));
  for (const event of ["beforeprint", "afterprint"]) addEventListener(event, () => {
    document.documentElement.classList.toggle("paper", event === "beforeprint");  // light colours
    redraw("figure");
  });
  watch();
  if (!every) return;

  // ---- a live page asks for itself again and again, and replaces the parts that changed

  const parts = new Map([...main.children].map(part => [part.dataset.key, part.outerHTML]));
  let ahead = 0, lost = 0;  // milliseconds: this clock before the server's; when it last answered

  function replace(fresh) {
    const old = new Map([...main.children].map(part => [part.dataset.key, part]));
    const charts = new Map([...document.querySelectorAll("figure")].map(figure => [key(figure), figure]));
    const top = each => each.getBoundingClientRect().top;
    const anchor = [...charts.values()].find(figure => scrollY && top(figure) > -200), at = anchor && top(anchor);
    const same = [...fresh.children].map(part => part.dataset.key).join("\n") === [...old.keys()].join("\n");
    for (const part of [...fresh.children]) {
      const name = part.dataset.key, before = old.get(name), text = part.outerHTML;
      if (before && parts.get(name) === text) {
        if (!same) part.replaceWith(before);
        continue;
      }
      parts.set(name, text);
      for (const figure of part.querySelectorAll("figure")) {  // a chart keeps its zoom
        const chart = charts.get(key(figure)), now = figure.querySelector("script").textContent;
        if (!chart) continue;
        const stale = chart.querySelector("script").textContent !== now;
        chart.querySelector("script").textContent = now;
        chart.querySelector("figcaption").replaceWith(figure.querySelector("figcaption"));
        figure.replaceWith(chart);
        if (stale && chart.dataset.drawn) queueMicrotask(() => draw(chart));
      }
      const open = before ? [...before.querySelectorAll("details")].map(each => each.open) : [];
      part.querySelectorAll("details").forEach((each, i) => { each.open = open[i] ?? each.open; });
      if (same) before.replaceWith(part);
    }
    if (!same) main.replaceChildren(...fresh.children);
    if (anchor?.isConnected) scrollBy(0, top(anchor) - at);  // what the reader looks at stays where it is
    watch();
  }
  const key = figure => figure.closest("[data-key]:not(figure)").dataset.key + "\n" + figure.dataset.key;

  function ago(seconds) {
    if (seconds < 100) return Math.max(0, Math.round(seconds)) + " s ago";
    if (seconds < 6000) return Math.round(seconds / 60) + " min ago";
    return seconds < 172800 ? Math.round(seconds / 3600) + " h ago" : Math.round(seconds / 86400) + " days ago";
  }

  function tick() {
    for (const each of document.querySelectorAll("time[data-at]"))
      each.textContent = ago((Date.now() - ahead) / 1000 - each.dataset.at);
    const said = document.getElementById("connection");
    said.classList.toggle("lost", lost > 0);
    said.textContent = lost ? `No answer since ${new Date(lost).toLocaleTimeString()}: these are the values of then` : "Live";
  }

  async function update() {
    const asked = Date.now();
    try {
      const answer = await fetch("page", { cache: "no-store", signal: AbortSignal.timeout(60000) });
      if (!answer.ok) throw new Error(answer.statusText);
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      ahead = Date.now() - Date.parse(answer.headers.get("Date"));
      replace(document.importNode(fresh.querySelector("main"), true));
      document.title = fresh.title;
      lost = 0;
    } catch (error) {
      lost = lost || asked;
    }
    tick();
    setTimeout(() => document.hidden ? document.addEventListener("visibilitychange", update, { once: true }) : update(), every);
  }
  setInterval(tick, 1000);
  update();
})().catch(error => {
  for (const plot of document.querySelectorAll(".plot:empty")) plot.textContent = `This browser cannot draw it: ${error.message}`;
});
