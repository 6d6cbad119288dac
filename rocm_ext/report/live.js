"use strict";
(() => {
  const main = document.querySelector("main"), told = document.getElementById("connection");
  const every = 1000 * document.body.dataset.interval, tags = {};
  let ahead = 0, lost = 0;  // milliseconds: this clock before the server's; when it last answered

  const key = node => node.nodeType === 1 ? node.nodeName + "/" + (node.dataset.key || "") : node.nodeName;

  // Makes `a` equal to `b` and keeps the nodes that both have: with them what is under the pointer, scrolled, selected.
  function morph(a, b) {
    if (a.nodeType !== 1) {
      if (a.data !== b.data) a.data = b.data;
      return;
    }
    if ("own" in a.dataset || a.isEqualNode(b)) return;
    const kept = name => name === "open" && a.nodeName === "DETAILS";  // the reader opens and closes them
    for (const { name, value } of b.attributes)
      if (!kept(name) && a.getAttribute(name) !== value) a.setAttribute(name, value);
    for (const { name } of [...a.attributes]) if (!kept(name) && !b.hasAttribute(name)) a.removeAttribute(name);
    const old = new Map();
    for (const child of a.childNodes) old.set(key(child), [...(old.get(key(child)) || []), child]);
    let next = a.firstChild;
    for (const child of [...b.childNodes]) {
      const found = (old.get(key(child)) || []).shift();
      if (found) morph(found, child);
      if (found && found === next) next = next.nextSibling;
      else a.insertBefore(found || document.importNode(child, true), next);
    }
    for (const left of [...old.values()].flat()) left.remove();
  }

  function ago(seconds) {
    if (seconds < 100) return Math.max(0, Math.round(seconds)) + " s ago";
    if (seconds < 6000) return Math.round(seconds / 60) + " min ago";
    return seconds < 172800 ? Math.round(seconds / 3600) + " h ago" : Math.round(seconds / 86400) + " days ago";
  }

  function tick() {
    for (const each of document.querySelectorAll("time[data-at]"))
      each.textContent = ago((Date.now() - ahead) / 1000 - each.dataset.at);
    told.classList.toggle("lost-connection", lost > 0);
    const text = lost ? `No answer since ${new Date(lost).toLocaleTimeString()}: these are the values of then` : "Live";
    if (told.textContent !== text) told.textContent = text;
  }

  async function ask(name, put) {
    const headers = name in tags ? { "If-None-Match": tags[name] } : {};
    const answer = await fetch(name, { headers, cache: "no-store", signal: AbortSignal.timeout(60000) });
    if (answer.status === 304) return;
    if (!answer.ok) throw new Error(answer.statusText);
    const found = new DOMParser().parseFromString(await answer.text(), "text/html");
    tags[name] = answer.headers.get("ETag");
    ahead = Date.now() - Date.parse(answer.headers.get("Date"));
    put(found);
    tick();  // before the browser paints the times as the server wrote them
  }

  async function update() {
    const asked = Date.now();
    try {
      await ask("page", found => {
        morph(main, found.querySelector("main"));
        document.title = found.title;
      });
      await ask("machine", found => {
        const place = document.getElementById("machine");
        delete place.dataset.own;
        morph(place, found.querySelector("section"));
        place.dataset.own = "";
      });
      lost = 0;
    } catch (error) {
      lost = lost || asked;
    }
    tick();
    setTimeout(next, every);
  }

  function next() {  // a hidden page asks when it is shown again
    if (document.hidden) document.addEventListener("visibilitychange", update, { once: true });
    else update();
  }

  setInterval(tick, 1000);
  update();
})();
