// The table of claims is narrowed by paper, verdict and words.
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
  for (const control of controls) control.addEventListener("input", narrow);
  narrow();
});
