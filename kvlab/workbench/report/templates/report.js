// Claims are narrowed by paper, model, verdict and words; a link opens what it leads to.
(() => {
  const form = document.querySelector("form.filters");
  const claims = [...document.querySelectorAll("details.claim")].map((line) => ({
    line,
    states: line.dataset.states.split(" "),
    text: line.textContent.toLowerCase(),
  }));
  const unmeasured = ["unmeasured", "untested"];

  function fits({ line, states, text }, wanted) {
    if (wanted.paper && line.dataset.paper !== wanted.paper) return false;
    const mine = wanted.model ? [states[Number(wanted.model)]] : states;
    if (wanted.verdict ? !mine.includes(wanted.verdict) : wanted.model && unmeasured.includes(mine[0])) return false;
    return wanted.words.every((word) => text.includes(word));
  }

  function narrow() {
    const value = (name) => (form.elements[name] ? form.elements[name].value : "");
    const words = value("words").toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = { paper: value("paper"), model: value("model"), verdict: value("verdict"), words };
    const any = Boolean(wanted.paper || wanted.model || wanted.verdict || words.length);
    let shown = 0;
    for (const claim of claims) {
      claim.line.hidden = !fits(claim, wanted);
      shown += !claim.line.hidden;
    }
    for (const part of document.querySelectorAll("details.group, section.paper")) {
      part.hidden = !part.querySelector("details.claim:not([hidden])");
      if (part.tagName !== "DETAILS") continue;
      // What a filter opened it closes again; what a reader opened stays open.
      if (any && !part.hidden && !part.open) {
        part.open = true;
        part.dataset.opened = "";
      } else if (!any && "opened" in part.dataset) {
        part.open = false;
        delete part.dataset.opened;
      }
    }
    form.querySelector("output").textContent = `${shown} of ${claims.length} claims`;
  }

  function reveal() {
    let name = location.hash.slice(1);
    try {
      name = decodeURIComponent(name);
    } catch {
      // A hash that somebody typed need not be well formed.
    }
    const target = name && document.getElementById(name);
    if (!target) return;
    if (target.closest("[hidden]")) {
      form.reset();
      narrow();
    }
    for (let part = target; part; part = part.parentElement) {
      if (part.tagName !== "DETAILS") continue;
      part.open = true;
      delete part.dataset.opened;
    }
    target.scrollIntoView();
  }

  form.addEventListener("input", narrow);
  form.addEventListener("reset", () => setTimeout(narrow));
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", reveal);
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (link && link.hash === location.hash) reveal();
  });
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });
  form.hidden = false;
  narrow();
  reveal();
})();
