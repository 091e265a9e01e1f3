// The table of claims is narrowed by paper, verdict, kind and words. What is chosen stands behind the page's # (by the
// controls' names), so that it can be linked; a claim's id there leads to its row.
document.addEventListener("DOMContentLoaded", () => {
  const table = document.getElementById("ledger-of-claims");
  if (!table) return;
  const rows = [...table.tBodies[0].rows];
  const controls = [...document.querySelectorAll("[data-filter]")];
  const count = document.getElementById("count");
  const narrow = () => {
    let shown = 0;
    for (const row of rows) {
      const fits = controls.every((control) => {
        const wanted = control.value.trim().toLowerCase();
        if (!wanted) return true;
        if (control.dataset.filter === "words") {
          const text = row.textContent.toLowerCase();
          return wanted.split(/\s+/).every((word) => text.includes(word));
        }
        return row.dataset[control.dataset.filter].toLowerCase() === wanted;
      });
      row.hidden = !fits;
      shown += fits;
    }
    count.textContent = `${shown} of ${rows.length} claims`;
  };
  const take = () => {
    const asked = location.hash.slice(1);
    if (asked && !asked.includes("=")) return narrow();
    const wanted = new URLSearchParams(asked);
    for (const control of controls) {
      control.value = wanted.get(control.name) ?? "";
      if (control.selectedIndex === -1) control.value = "";
    }
    narrow();
  };
  const keep = () => {
    const chosen = controls.filter((control) => control.value).map((control) => [control.name, control.value]);
    history.replaceState(null, "", `#${new URLSearchParams(chosen)}`);
    narrow();
  };
  for (const control of controls) control.addEventListener("input", keep);
  addEventListener("hashchange", take);
  take();
});
