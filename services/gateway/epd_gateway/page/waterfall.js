// Draws a timeline: a row of bars for the gateway, each item and the PD worker, above one axis.

import { el } from "./dom.js";
import { duration } from "./format.js";
import { STAGES, timelineOf } from "./timeline.js";

const LABELS = 5;
const LONG_ANSWER = 2.5;
// The axis ends with the first token, to begin with, where the whole took so many times as long.

// view: {zoomed, figures}, which stays while a receipt is drawn anew. nowS: the age of an open request.
export function waterfall(receipt, { view = {}, nowS = 0 } = {}) {
  const timeline = timelineOf(receipt, nowS);
  const { endS, firstS } = timeline;
  const canZoom = firstS !== null && firstS !== undefined && endS > firstS * 1.2;
  view.zoomed ??= canZoom && endS > firstS * LONG_ANSWER;
  const box = el("div", { class: "waterfall" });

  const draw = () => {
    const scaleS = view.zoomed && canZoom ? firstS * 1.15 : endS;
    const children = [legend(timeline), chart(timeline, receipt, scaleS), figures(timeline, view)];
    if (canZoom) children.splice(1, 0, zoom(view, draw));
    const hadFocus = box.contains(document.activeElement) && document.activeElement.dataset.keep;
    box.replaceChildren(...children);
    if (hadFocus) box.querySelector(`[data-keep="${hadFocus}"]`)?.focus();
  };
  draw();
  return box;
}

function zoom(view, draw) {
  const button = el(
    "button",
    { type: "button", class: "button small", "aria-pressed": String(Boolean(view.zoomed)), "data-keep": "zoom" },
    "Up to the first token",
  );
  button.addEventListener("click", () => {
    view.zoomed = !view.zoomed;
    draw();
  });
  return button;
}

function legend({ rows, firstS }) {
  const used = new Set(rows.flatMap(({ bars }) => bars.map(({ stage }) => stage)));
  const entries = Object.entries(STAGES)
    .filter(([stage]) => used.has(stage))
    .map(([stage, text]) => el("li", {}, el("span", { class: "swatch", "data-stage": stage }), text));
  if (rows.some(({ found }) => found !== null && found !== undefined)) {
    entries.push(el("li", {}, el("span", { class: "swatch found" }), "found ready"));
  }
  if (firstS !== null && firstS !== undefined) entries.push(el("li", {}, el("span", { class: "swatch first" }), "first token"));
  return el("ul", { class: "legend", "aria-label": "Colours" }, ...entries);
}

function chart({ rows, firstS, endS }, receipt, scaleS) {
  const failed = receipt.error ? endS : null;
  const step = tickStep(scaleS);
  const ticks = [];
  for (let at = 0; at <= scaleS * 1.0001; at += step) ticks.push(at);
  const marks = [
    { at: firstS, kind: "first", text: `first token ${duration(firstS)}` },
    { at: failed, kind: "failed", text: `${receipt.state} ${duration(failed)}` },
  ].filter(({ at }) => at !== null && at !== undefined && at <= scaleS);

  const axis = el("div", { class: "axis", "aria-hidden": "true" });
  const flags = el("div", { class: "flags", "aria-hidden": "true" });
  for (const { at, kind, text } of marks) {
    const flag = place(el("span", { class: "flag", "data-kind": kind }, text), at, scaleS);
    if (at > scaleS / 2) flag.classList.add("before");
    flags.append(flag);
  }
  for (const at of ticks) {
    if (at / scaleS > 0.95) continue;
    const label = place(el("span", { class: at ? "tick" : "tick origin" }, tickText(at, step)), at, scaleS);
    axis.append(label);
  }
  const list = el("ol", { class: "rows" });
  for (const row of rows) list.append(drawRow(row, ticks, marks, scaleS));
  return el("div", { class: "chart" }, flags, list, axis);
}

function drawRow({ title, note, bars, found }, ticks, marks, scaleS) {
  const track = el("div", { class: "track", "aria-hidden": "true" });
  for (const at of ticks) track.append(place(el("span", { class: "grid" }), at, scaleS));
  for (const bar of bars) {
    if (bar.from >= scaleS) continue;
    const drawn = el("span", {
      class: bar.to > scaleS ? "bar cut" : "bar",
      "data-stage": bar.stage,
      title: `${bar.text}: ${duration(bar.to - bar.from)}, from ${duration(bar.from)}`,
    });
    drawn.style.setProperty("width", `${((Math.min(bar.to, scaleS) - bar.from) / scaleS) * 100}%`);
    track.append(place(drawn, bar.from, scaleS));
  }
  if (found !== null && found !== undefined && found <= scaleS) {
    track.append(place(el("span", { class: "found", title: `found ready at ${duration(found)}` }), found, scaleS));
  }
  for (const { at, kind } of marks) track.append(place(el("span", { class: "mark", "data-kind": kind }), at, scaleS));
  const spoken = [
    ...(found !== null && found !== undefined ? [`found ready at ${duration(found)}`] : []),
    ...bars.map(({ text, from, to }) => `${text} ${duration(to - from)}`),
  ];
  return el(
    "li",
    {},
    el("span", { class: "row-title" }, el("b", {}, title), el("span", { class: "hint", title: note }, note)),
    track,
    el("span", { class: "hidden" }, spoken.join(", ")),
  );
}

function figures({ rows }, view) {
  const lines = rows.flatMap(({ title, bars, found }) => [
    ...(found !== null && found !== undefined ? [[title, "found ready", found, found]] : []),
    ...bars.map(({ text, from, to }) => [title, text, from, to]),
  ]);
  const details = el(
    "details",
    { open: Boolean(view.figures) },
    el("summary", { "data-keep": "figures" }, "Figures"),
    el(
      "div",
      { class: "scroll" },
      el(
        "table",
        { class: "figures" },
        el("thead", {}, el("tr", {}, ...["Row", "Stage", "From", "Took"].map((text, at) => el("th", { scope: "col", class: at > 1 ? "number" : null }, text)))),
        el(
          "tbody",
          {},
          ...lines.map(([title, text, from, to]) =>
            el("tr", {}, el("td", {}, title), el("td", {}, text), el("td", { class: "number" }, duration(from)), el("td", { class: "number" }, duration(to - from))),
          ),
        ),
      ),
    ),
  );
  details.addEventListener("toggle", () => (view.figures = details.open));
  return details;
}

function place(element, at, scaleS) {
  element.style.setProperty("left", `${(at / scaleS) * 100}%`);
  return element;
}

// 1, 2 or 5 times a power of ten, so that there are about LABELS of them.
function tickStep(scaleS) {
  const rough = scaleS / LABELS;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => power * factor >= rough * 0.999);
}

function tickText(at, stepS) {
  if (at === 0) return "0";
  if (stepS < 0.001) return `${(at * 1000).toFixed(1)} ms`;
  if (stepS < 0.2) return `${(at * 1000).toFixed(0)} ms`;
  return `${at.toFixed(stepS < 1 ? 1 : 0)} s`;
}
