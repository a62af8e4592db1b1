"use strict";
// A header is a button; pressing it sorts the rows below by that column, pressing it again turns them round.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, table = head.closest("table"), body = table.tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[head.cellIndex].dataset.v ?? row.cells[head.cellIndex].textContent;
    const rows = [...body.rows].map((row) => [key(row), row]);
    rows.sort(([a], [b]) => (a === "") - (b === "") ||
      (down ? -1 : 1) * (a - b || a.localeCompare(b, "en", { numeric: true })));
    body.append(...rows.map(([, row]) => row));
  });
}
