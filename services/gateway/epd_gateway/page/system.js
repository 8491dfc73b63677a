// Workers, queues and stores.

import { byId, el, reconcile, say, show } from "./dom.js";
import { bytes, count, duration } from "./format.js";

const HISTORY = 60;
const ROLES = ["gateway", "encoder", "pd"];
const QUEUES = { encode: "Encode queue", generate: "Generate queue" };

const depths = new Map(); // stage -> the last looks' numbers of jobs

// Where several tenants share the system, its load is nobody's business, and the gateway leaves all this out.
export function showSystem({ workers = [], queues = [], stores = [], workers: told }) {
  const sorted = [...workers].sort((a, b) => ROLES.indexOf(a.role) - ROLES.indexOf(b.role) || order(a.worker, b.worker));
  reconcile(byId("workers"), sorted, (worker) => `${worker.role} ${worker.worker}`, makeWorker, updateWorker);
  show(byId("workers").closest("table"), workers.length > 0);
  show(byId("no-workers"), told !== undefined && !workers.length);
  show(byId("not-told"), told === undefined);
  for (const { stage, jobs } of queues) {
    const looks = depths.get(stage) ?? [];
    depths.set(stage, [...looks, jobs].slice(-HISTORY));
  }
  const tiles = [
    ...queues.map((queue) => ({ key: `queue ${queue.stage}`, queue })),
    ...[...stores].sort((a, b) => order(a.node, b.node)).map((store) => ({ key: `store ${store.node}`, store })),
  ];
  reconcile(byId("tiles"), tiles, ({ key }) => key, makeTile, updateTile);
}

const order = (a, b) => String(a).localeCompare(String(b), undefined, { numeric: true });

function makeWorker() {
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, el("span", { class: "name" }), el("span", { class: "hint" })),
    el("td", {}, el("span", { class: "chip" }), el("span", { class: "hint" })),
    el("td", { class: "wide" }, el("span", { class: "name" }), el("span", { class: "hint" })),
    el("td", {}, el("span", { class: "slots" }, fill()), el("span", { class: "hint" })),
  );
}

function updateWorker(row, worker) {
  const [who, state, model, slots] = row.children;
  say(who.firstChild, worker.worker);
  who.firstChild.title = worker.worker;
  const role = worker.pd_role || worker.role;
  say(who.lastChild, `${role}${worker.node ? ` on ${worker.node}` : ""}`);
  say(state.firstChild, worker.state);
  state.firstChild.dataset.state = worker.state;
  // A gateway's phase is its address.
  say(state.lastChild, worker.error || (worker.state === "starting" ? worker.phase : ""));
  say(model.firstChild, worker.model || "–");
  model.firstChild.title = worker.model;
  say(model.lastChild, versions(worker));
  show(slots.firstChild, worker.slots > 0);
  say(slots.lastChild, worker.slots ? `${worker.busy} of ${worker.slots} busy` : "–");
  setFill(slots.firstChild.firstChild, worker.slots ? worker.busy / worker.slots : 0);
}

function versions({ versions: all, encodes, role }) {
  const parts = Object.entries(all ?? {}).map(([name, version]) => `${name} ${version}`);
  if (role === "pd" && encodes === "queue") parts.push("encodes as well");
  if (role === "pd" && encodes === "rescue") parts.push("encodes as a rescue");
  return parts.join(", ");
}

function makeTile({ queue }) {
  return el(
    "li",
    {},
    el("span", { class: "tile-title" }),
    el("span", { class: "figure" }),
    queue ? spark() : el("span", { class: "slots" }, fill()),
    el("span", { class: "hint" }),
  );
}

function updateTile(tile, { queue, store }) {
  const [title, figure, drawing, hint] = tile.children;
  if (queue) {
    say(title, QUEUES[queue.stage] ?? `Queue ${queue.stage}`);
    say(figure, count(queue.jobs, "job"));
    say(hint, queue.jobs ? `oldest waits ${duration(queue.oldest_s)}` : "nothing waits");
    drawSpark(drawing, depths.get(queue.stage) ?? []);
  } else {
    const share = store.quota_bytes ? store.used_bytes / store.quota_bytes : 0;
    say(title, `Arena of ${store.node}`);
    say(figure, `${Math.round(share * 100)} %`);
    say(hint, `${bytes(store.used_bytes)} of ${bytes(store.quota_bytes)}`);
    setFill(drawing.firstChild, share);
  }
}

const fill = () => el("span", { class: "fill" });

function setFill(element, share) {
  element.style.setProperty("width", `${Math.min(1, Math.max(0, share)) * 100}%`);
  element.dataset.full = String(share >= 0.9);
}

const SVG = "http://www.w3.org/2000/svg";

function spark() {
  const drawn = document.createElementNS(SVG, "svg");
  for (const [name, value] of [["class", "spark"], ["viewBox", `0 0 ${HISTORY - 1} 10`], ["preserveAspectRatio", "none"], ["aria-hidden", "true"]]) {
    drawn.setAttribute(name, value);
  }
  drawn.append(document.createElementNS(SVG, "polyline"));
  return drawn;
}

function drawSpark(drawn, looks) {
  const top = Math.max(4, ...looks);
  const points = looks.map((jobs, at) => `${HISTORY - looks.length + at},${(9.5 - (jobs / top) * 9).toFixed(2)}`);
  drawn.firstChild.setAttribute("points", points.join(" "));
}
