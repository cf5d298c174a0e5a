// Making elements and writing numbers. Text goes in as text nodes only: none of it is ever parsed.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const el = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

/** One line: a name, a bar of parts ({kind, share of 0..1}), a number. */
export function barRow(name, parts, number) {
  const bar = el("div", { class: "bar", "aria-hidden": "true" });
  for (const part of parts) {
    const piece = el("span", { class: part.kind });
    piece.style.width = `${100 * Math.max(0, Math.min(1, part.share))}%`;
    bar.append(piece);
  }
  return el("div", { class: "row" }, el("span", {}, name), bar,
    el("span", { class: "number" }, number));
}

export const count = (value) => Number(value).toLocaleString("en");

export const percent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(0)} %` : "–");

export function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024 || unit === "GiB") return `${value.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    value /= 1024;
  }
}
