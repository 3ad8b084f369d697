// Shows an answer of the API that this page has no words for: its names and values as they are.

import { call } from "./api.js";

export async function show(list) {
  let rows;
  try {
    const told = await (await call("GET", list.dataset.shown)).json();
    rows = Object.entries(told).map(([name, value]) => [name.replaceAll("_", " "), text(value)]);
  } catch (error) {
    rows = [["State", error.message]];
  }
  list.replaceChildren(
    ...rows.map(([name, value]) => {
      const row = document.createElement("div");
      const term = document.createElement("dt");
      const detail = document.createElement("dd");
      term.textContent = name;
      detail.textContent = value;
      row.append(term, detail);
      return row;
    }),
  );
}

function text(value) {
  if (value === null) return "none";
  if (typeof value === "number") return value.toLocaleString("en");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
