// A request's receipt: who did what for it, and why there.

import { el } from "./dom.js";
import { failure } from "./failure.js";
import { bytes, clock, count, duration, short } from "./format.js";
import { ORIGINS } from "./timeline.js";
import { waterfall } from "./waterfall.js";

const PLACEMENTS = {
  any: "any worker with a free slot",
  held: "this worker holds the prompt's beginning, or its node the images",
  nearest: "by a hash of the prompt's beginning",
  next: "by a hash of the prompt's beginning; the nearest worker had too much",
  crowded: "any worker, as the two nearest had too much",
};

const RESCUES = {
  ordered: "ordered again by the PD worker",
  local: "encoded by the PD worker itself",
};

// view: see waterfall.
export function receiptView(receipt, { view, nowS }) {
  return [
    head(receipt),
    receipt.error ? failure({ error: { ...receipt.error, requestId: receipt.request_id } }) : null,
    el("h3", {}, "Waterfall"),
    waterfall(receipt, { view, nowS }),
    el("h3", {}, "Receipt"),
    facts(receipt),
    receipt.items?.length ? items(receipt.items) : null,
  ].filter(Boolean);
}

function head({ request_id: id, state, status }) {
  return el(
    "p",
    { class: "receipt-head" },
    chip(state, status),
    el("code", { class: "id" }, id),
  );
}

export function chip(state, status = null) {
  const text = status && state !== "open" && status !== 200 ? `${state} ${status}` : state;
  return el("span", { class: "chip", "data-state": state }, text);
}

function facts(receipt) {
  const { pd, prefill } = receipt;
  const list = [
    ["Arrived", receipt.arrived ? clock(receipt.arrived) : null],
    ["Route", receipt.route],
    ["Model", receipt.model],
    ["Gateway", receipt.gateway],
    ["First token", receipt.first_s === null ? null : duration(receipt.first_s)],
    ["Whole answer", receipt.ended_s === null ? null : duration(receipt.ended_s)],
    ["Prefill worker", prefill ? `${prefill.worker} on ${prefill.node}` : null],
    [prefill ? "Decode worker" : "PD worker", pd ? `${pd.worker} on ${pd.node}` : null],
    [prefill ? "Why prefilled there" : "Why there", PLACEMENTS[receipt.placement] ?? receipt.placement],
    ["Attempt", pd ? attempts(pd, prefill) : null],
    ["Prompt", pd?.prompt_tokens ? count(pd.prompt_tokens, "token") : null],
    ["Loaded", prefill ? loaded(pd) : null],
    ["Images", receipt.items?.length ? hits(receipt.items) : null],
    ["Rescues", receipt.items?.length ? rescues(receipt.items) : null],
    ["Moved", receipt.items?.length ? moved(receipt.items) : null],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { class: "facts" }, ...list.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]));
}

const loaded = ({ loaded_tokens: tokens }) =>
  tokens ? `${count(tokens, "token")} of the prompt` : "nothing; the decode worker prefilled it itself";

// A decode worker's attempts count on from those of the prefill worker.
function attempts(pd, prefill) {
  if (prefill) {
    const each = [`prefill: ${attempts(prefill)}`, `decode: ${attempts({ ...pd, attempt: pd.attempt - prefill.attempt })}`];
    return each.join("; ");
  }
  const more = [];
  if (pd.restarts) more.push(count(pd.restarts, "restart"));
  if (pd.resumed_tokens) more.push(`went on behind ${count(pd.resumed_tokens, "token")}`);
  return [pd.attempt === 1 ? "the first" : `number ${pd.attempt}`, ...more].join(", ");
}

function hits(all) {
  const of = (origin) => all.filter((item) => item.origin === origin).length;
  return Object.keys(ORIGINS)
    .map((origin) => [of(origin), origin])
    .filter(([number]) => number)
    .map(([number, origin]) => `${number} ${origin}`)
    .join(", ");
}

function rescues(all) {
  const rescued = all.map(({ rescue }, index) => [index + 1, RESCUES[rescue] ?? rescue]).filter(([, how]) => how);
  return rescued.length ? rescued.map(([number, how]) => `image ${number} ${how}`).join("; ") : "none";
}

function moved(all) {
  const by = new Map();
  for (const { store, bytes: size } of all) if (store) by.set(store, (by.get(store) ?? 0) + (size ?? 0));
  return [...by].map(([store, size]) => `${bytes(size)} through ${store}`).join(", ") || "nothing";
}

function items(all) {
  const row = (item, index) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, String(index + 1)),
      el("td", {}, ORIGINS[item.origin] ?? item.origin ?? ""),
      el("td", {}, item.encoder || (item.rescue === "local" ? "the PD worker" : "–")),
      el("td", { class: "number" }, item.attempt ? String(item.attempt) : "–"),
      el("td", {}, item.store || "–"),
      el("td", { class: "number" }, item.rows ? String(item.rows) : "–"),
      el("td", { class: "number" }, item.bytes ? bytes(item.bytes) : "–"),
      el("td", {}, el("code", { title: item.key }, short(item.key ?? ""))),
    );
  const columns = [["#"], ["Origin"], ["Encoder"], ["Attempt", 1], ["Store"], ["Rows", 1], ["Bytes", 1], ["Key"]];
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Images of the request" },
    el(
      "table",
      { class: "items" },
      el("thead", {}, el("tr", {}, ...columns.map(([text, number]) => el("th", { scope: "col", class: number ? "number" : null }, text)))),
      el("tbody", {}, ...all.map(row)),
    ),
  );
}
