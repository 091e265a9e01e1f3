// The table of claims is narrowed by paper, verdict, kind and words, and shown in pages. The part of the address behind #
// holds the filters (by the controls' names) and the page, so that a view can be linked. A claim's id there leads to its row.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.getElementById("ledger-of-claims");
  if (!table) return;
  const SIZE = 25;
  const rows = [...table.tBodies[0].rows];
  const controls = [...document.querySelectorAll("[data-filter]")];
  const count = document.getElementById("count");
  let page = 0;
  const fits = (row) =>
    controls.every((control) => {
      const wanted = control.value.trim().toLowerCase();
      if (!wanted) return true;
      if (control.dataset.filter === "words") {
        const text = row.textContent.toLowerCase();
        return wanted.split(/\s+/).every((word) => text.includes(word));
      }
      return row.dataset[control.dataset.filter].toLowerCase() === wanted;
    });
  const show = () => {
    const found = rows.filter(fits);
    const pages = Math.max(1, Math.ceil(found.length / SIZE));
    page = Math.min(Math.max(page, 0), pages - 1);
    const shown = new Set(found.slice(page * SIZE, (page + 1) * SIZE));
    for (const row of rows) row.hidden = !shown.has(row);
    count.textContent = `${found.length} of ${rows.length} claims`;
    for (const turn of document.querySelectorAll(".turn")) {
      turn.hidden = pages === 1;
      turn.querySelector("span").textContent = `page ${page + 1} of ${pages}`;
      for (const button of turn.querySelectorAll("button")) {
        const next = page + Number(button.dataset.step);
        button.disabled = next < 0 || next >= pages;
      }
    }
  };
  const read = () => {
    const asked = location.hash.slice(1);
    const row = asked && !asked.includes("=") ? rows.find((each) => each.id === asked) : null;
    const wanted = new URLSearchParams(row ? "" : asked);
    for (const control of controls) {
      control.value = wanted.get(control.name) ?? "";
      if (control.selectedIndex === -1) control.value = "";
    }
    page = row ? Math.floor(rows.indexOf(row) / SIZE) : Number(wanted.get("page") ?? 1) - 1 || 0;
    show();
    if (row) row.scrollIntoView();
  };
  const write = () => {
    const chosen = controls.filter((control) => control.value).map((control) => [control.name, control.value]);
    if (page) chosen.push(["page", page + 1]);
    history.replaceState(null, "", `#${new URLSearchParams(chosen)}`);
  };
  for (const control of controls)
    control.addEventListener("input", () => {
      page = 0;
      show();
      write();
    });
  for (const button of document.querySelectorAll(".turn button"))
    button.addEventListener("click", () => {
      page += Number(button.dataset.step);
      show();
      write();
      document.querySelector(".turn").scrollIntoView();
    });
  addEventListener("hashchange", read);
  read();
});

// The search's page gets an excerpt under each result: the text around the first word that was searched.
document.addEventListener("DOMContentLoaded", () => {
  const results = document.getElementById("search-results");
  if (!results) return;
  const AROUND = 110;
  const root = document.documentElement.dataset.content_root ?? "";
  const words = (new URLSearchParams(location.search).get("q") ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const excerpt = (text) => {
    const small = text.toLowerCase();
    const at = words.map((word) => small.indexOf(word)).filter((place) => place >= 0);
    const near = at.length ? Math.max(0, Math.min(...at) - AROUND / 2) : 0;
    const start = near && text.indexOf(" ", near) + 1;
    const shown = text.slice(start, start + 2 * AROUND);
    return `${start ? "… " : ""}${shown}${start + shown.length < text.length ? " …" : ""}`;
  };
  const fill = () => {
    for (const link of results.querySelectorAll("li > a:first-child")) {
      const item = link.parentElement;
      const name = new URL(link.href).pathname.replace(new URL(root || ".", location.href).pathname, "");
      const text = window.kvlabTexts?.[decodeURIComponent(name).replace(/\.html$/, "")];
      if (!text || item.querySelector(".excerpt")) continue;
      const line = document.createElement("p");
      line.className = "excerpt";
      line.textContent = excerpt(text);
      item.append(line);
    }
  };
  const script = document.createElement("script");
  script.src = `${root}_static/excerpts.js`;
  script.addEventListener("load", () => {
    fill();
    new MutationObserver(fill).observe(results, { childList: true, subtree: true });
  });
  document.head.append(script);
});
