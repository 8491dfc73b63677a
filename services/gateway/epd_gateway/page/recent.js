// The list of recent requests.

import { byId, el, reconcile, say, show } from "./dom.js";
import { age, duration, short } from "./format.js";
import { summaryBars } from "./timeline.js";

// select(id) is called when one is chosen.
export function showRecent(requests, { nowUnixS, selected, select }) {
  show(byId("no-requests"), !requests.length);
  reconcile(
    byId("requests"),
    requests,
    (receipt) => receipt.request_id,
    (receipt) => make(receipt.request_id, select),
    (row, receipt) => update(row, receipt, nowUnixS, selected),
  );
}

function make(id, select) {
  const button = el("button", { type: "button", class: "link id", title: id }, short(id));
  const row = el(
    "tr",
    {},
    el("th", { scope: "row" }, button, el("span", { class: "hint" })),
    el("td", {}, el("span", { class: "chip" })),
    el("td", { class: "number" }, el("span"), el("span", { class: "hint" })),
    el("td", { class: "number" }),
    el("td", { class: "number wide" }),
    el("td", { class: "wide" }, el("span", { class: "summary", "aria-hidden": "true" })),
  );
  row.addEventListener("click", () => select(id)); // a click of the button, too
  return row;
}

function update(row, receipt, nowUnixS, selected) {
  const [who, state, images, first, total, stages] = row.children;
  const nowS = nowUnixS - receipt.arrived;
  const isSelected = receipt.request_id === selected;
  row.classList.toggle("selected", isSelected);
  if (isSelected) who.firstChild.setAttribute("aria-current", "true");
  else who.firstChild.removeAttribute("aria-current");
  say(who.lastChild, age(nowS));
  const failed = receipt.status && receipt.status !== 200 && receipt.state !== "open";
  say(state.firstChild, failed ? `${receipt.state} ${receipt.status}` : receipt.state);
  state.firstChild.dataset.state = receipt.state;
  const items = receipt.items ?? [];
  const of = (origin) => items.filter((item) => item.origin === origin).length;
  const spared = ["reused", "shared"].filter(of).map((origin) => `${of(origin)} ${origin}`);
  say(images.firstChild, String(items.length));
  say(images.lastChild, spared.join(", "));
  say(first, duration(receipt.first_s));
  say(total, receipt.ended_s === null ? "–" : duration(receipt.ended_s));
  drawSummary(stages.firstChild, receipt, nowS);
}

function drawSummary(box, receipt, nowS) {
  const { endS, bars } = summaryBars(receipt, nowS);
  const drawn = JSON.stringify([endS, bars]);
  if (box.dataset.drawn === drawn) return;
  box.dataset.drawn = drawn;
  box.replaceChildren(
    ...bars.map(({ stage, from, to }) => {
      const bar = el("span", { class: "bar", "data-stage": stage });
      bar.style.setProperty("left", `${(from / endS) * 100}%`);
      bar.style.setProperty("width", `${((Math.min(to, endS) - from) / endS) * 100}%`);
      return bar;
    }),
  );
}
