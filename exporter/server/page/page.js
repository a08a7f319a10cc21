// Refreshes the page in place, and copies commands; the page also works without this script.
(() => {
  "use strict";
  const PERIOD = 5000;
  const status = document.getElementById("live-status");
  const button = document.getElementById("live-pause");
  let paused = false;
  let asking = false;
  let timer = 0;

  // Copy attributes and children of `fresh` to `old`, reusing equal elements, so that focus,
  // selection, scroll position and opened details survive.
  const renew = (old, fresh) => {
    for (const { name } of [...old.attributes]) {
      if (name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    const known = new Map();
    for (const child of old.children) if (child.id) known.set(child.id, child);
    let here = old.firstChild;
    for (const wanted of [...fresh.childNodes]) {
      let match = wanted.id ? known.get(wanted.id) : undefined;
      if (!match && here && !here.id && !wanted.id && here.nodeName === wanted.nodeName) match = here;
      if (!match) {
        old.insertBefore(document.importNode(wanted, true), here);
        continue;
      }
      if (match === here) here = here.nextSibling;
      else old.insertBefore(match, here);
      if (match.nodeType !== Node.ELEMENT_NODE) {
        if (match.nodeValue !== wanted.nodeValue) match.nodeValue = wanted.nodeValue;
      } else if (!match.isEqualNode(wanted)) renew(match, wanted);
    }
    while (here) {
      const next = here.nextSibling;
      here.remove();
      here = next;
    }
  };

  const say = (text, wrong) => {
    if (status.textContent !== text) status.textContent = text;
    status.classList.toggle("wrong", wrong);
  };

  const refresh = async () => {
    if (asking) return;
    asking = true;
    try {
      const answer = await fetch(location.href, {
        cache: "no-store",
        headers: { Accept: "text/html" },
        signal: AbortSignal.timeout(2 * PERIOD),
      });
      // The page of a deleted VM is a page too, although its status is 404.
      if (!answer.headers.get("Content-Type")?.startsWith("text/html")) throw new Error("no page");
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const focused = document.activeElement;
      renew(document.getElementById("main"), fresh.getElementById("main"));
      document.title = fresh.title;
      if (focused !== document.activeElement && focused.isConnected) {
        focused.focus({ preventScroll: true });
      }
      if (!paused) say(`Refreshes every ${PERIOD / 1000} s`, false);
    } catch (error) {
      const since = document.querySelector("#as-of time").dateTime.slice(11, 19);
      say(`Cannot reach the exporter. Last update ${since} UTC; retrying.`, true);
    } finally {
      asking = false;
    }
  };

  const plan = () => {
    clearInterval(timer);
    if (!paused && !document.hidden) timer = setInterval(refresh, PERIOD);
  };

  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? "Resume" : "Pause";
    say(paused ? "Paused" : `Refreshes every ${PERIOD / 1000} s`, false);
    plan();
    if (!paused) refresh();
  });
  // Browsers have no clipboard for pages over plain HTTP, except from this machine.
  if (navigator.clipboard) {
    document.documentElement.classList.add("copies");
    document.addEventListener("click", async ({ target }) => {
      const copy = target.closest(".copy");
      if (!copy) return;
      try {
        await navigator.clipboard.writeText(copy.parentElement.querySelector("code").textContent);
        say("Copied the command", false);
      } catch (error) {
        say(`The command cannot be copied: ${error.message}`, true);
      }
    });
  }
  document.addEventListener("visibilitychange", () => {
    plan();
    if (!paused && !document.hidden) refresh();
  });
  button.hidden = false;
  say(`Refreshes every ${PERIOD / 1000} s`, false);
  plan();
})();
