// Joins the parts of the page.

import { ApiError, apiKey, askJson, setApiKey } from "./api.js";
import { byId, el, say, show } from "./dom.js";
import { failure } from "./failure.js";
import { Playground } from "./playground.js";
import { Poll } from "./poll.js";
import { receiptView } from "./receipt.js";
import { showRecent } from "./recent.js";
import { showSystem } from "./system.js";

const HASH = "#request=";

const playground = new Playground((id) => select(id));
let live = null;
let liveSince = 0; // performance.now() of the last look
let selected = "";
let shown = ""; // what of the selected request is on the page
let view = {};
let looks = 0;

const MODELS_EACH = 10; // looks, where no worker tells that there is another model

// -- the live view ----------------------------------------------------------------------------------

const poll = new Poll({ seen, failed });

function seen(found) {
  const served = (state) => JSON.stringify(state?.workers?.map(({ role, model, state: is }) => [role, model, is]));
  const others = served(live) !== served(found);
  live = found;
  liveSince = performance.now();
  state("live", "live");
  byId("notice").replaceChildren();
  showSystem(live);
  showList();
  showSelected();
  looks += 1;
  const due = !live.workers && looks % MODELS_EACH === 0;
  if (others || due || !playground.models?.length) playground.loadModels();
}

function failed(error) {
  const keyMissing = error.status === 401;
  state("fail", keyMissing ? "key needed" : "no answer");
  const old = live ? ` What is shown is ${Math.round((performance.now() - liveSince) / 1000)} s old.` : "";
  const notice = keyMissing
    ? failure({ error })
    : failure({
        title: error.status ? `The gateway answers with ${error.status}` : "The gateway does not answer",
        message: `${error.message}${old}`,
        advice: "Look whether it runs. This page goes on trying.",
      });
  // An alert is read out whenever it changes, and the seconds change.
  const before = byId("notice").querySelector("p");
  if (!keyMissing && before && byId("notice").querySelector("strong").textContent === notice.querySelector("strong").textContent) {
    byId("notice").setAttribute("aria-live", "off");
    before.textContent = notice.querySelector("p").textContent;
    return;
  }
  byId("notice").removeAttribute("aria-live");
  byId("notice").replaceChildren(notice);
}

function state(kind, text) {
  const element = byId("live-state");
  element.dataset.state = kind;
  say(element, text);
}

byId("pause-button").addEventListener("click", () => {
  const paused = !poll.paused;
  byId("pause-button").setAttribute("aria-pressed", String(paused));
  poll.pause(paused);
  if (paused) state("wait", "paused");
});

// -- the selected request ---------------------------------------------------------------------------

function showList() {
  if (live) showRecent(live.requests, { nowUnixS: live.time, selected, select });
}

async function select(id, { focus = true } = {}) {
  if (id !== selected) {
    selected = id;
    shown = "";
    view = {};
    byId("detail-body").replaceChildren(el("p", { class: "hint" }, "Looking for it."));
  }
  history.replaceState(null, "", id ? HASH + encodeURIComponent(id) : "#");
  show(byId("detail"), id !== "");
  showList();
  if (!id) return;
  if (focus) byId("detail").focus();
  if (!showSelected()) await fetchSelected(id);
}

// From the live view, which has the most recent ones; says whether it was there.
function showSelected() {
  const found = live?.requests.find(({ request_id: id }) => id === selected);
  if (found) draw({ gateway: live.gateway, ...found }, live.time - found.arrived);
  return Boolean(found);
}

async function fetchSelected(id) {
  try {
    const receipt = await askJson(`ui/api/requests/${encodeURIComponent(id)}`, { timeoutS: 5 });
    if (id === selected) draw(receipt, receipt.ended_s ?? 0);
  } catch (error) {
    if (id !== selected || !(error instanceof ApiError)) return;
    byId("detail-body").replaceChildren(
      error.status === 404
        ? failure({ title: "Not known any more", message: error.message, advice: "Receipts are kept for recent requests only." })
        : failure({ error }),
    );
  }
}

function draw(receipt, nowS) {
  const now = JSON.stringify([receipt, receipt.state === "open" ? nowS : 0]);
  if (now === shown) return;
  shown = now;
  const body = byId("detail-body");
  const kept = body.contains(document.activeElement) ? document.activeElement.dataset.keep : null;
  body.replaceChildren(...receiptView(receipt, { view, nowS }));
  if (kept) body.querySelector(`[data-keep="${kept}"]`)?.focus({ preventScroll: true });
}

byId("detail-close").addEventListener("click", () => {
  const from = selected;
  select("");
  const row = [...byId("requests").children].find(({ dataset }) => dataset.key === from);
  (row?.querySelector("button") ?? byId("recent")).focus();
});

function selectByHash() {
  if (!location.hash.startsWith(HASH)) return;
  try {
    select(decodeURIComponent(location.hash.slice(HASH.length)), { focus: false });
  } catch {
    // No request's id.
  }
}

// -- the beginning ----------------------------------------------------------------------------------

byId("api-key").value = apiKey();
byId("api-key").addEventListener("change", (event) => {
  setApiKey(event.target.value);
  live = null;
  shown = "";
  playground.loadModels();
  poll.again();
});
window.addEventListener("hashchange", selectByHash);
selectByHash();
playground.loadModels();
poll.again();
