"use strict";
(() => {
  // Tables sort by the column whose head is clicked, numbers as numbers, and back on the next click.
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.querySelectorAll("thead th")];
    heads.forEach((head, column) => {
      head.title = "sort";
      head.addEventListener("click", () => {
        const body = table.tBodies[0];
        const falling = head.dataset.order === "rising";
        const value = (row) => row.cells[column].textContent.trim();
        const compare = (a, b) => {
          const [x, y] = [value(a), value(b)];
          if (x !== "" && y !== "" && !isNaN(x) && !isNaN(y)) return x - y;
          return x.localeCompare(y, "en", { numeric: true });
        };
        const rows = [...body.rows].sort((a, b) => (falling ? compare(b, a) : compare(a, b)));
        heads.forEach((other) => delete other.dataset.order);
        head.dataset.order = falling ? "falling" : "rising";
        body.append(...rows);
      });
    });
  }
})();
