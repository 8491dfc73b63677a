// A receipt as rows of bars: what ran when, in seconds since the request's arrival. Nothing here draws.

// In the order of a legend. `pinned` is a thin line, as nothing is done in it.
export const STAGES = {
  service: "taken in, prepared",
  queue: "queued",
  fetch: "media fetched",
  encode: "encoded",
  store: "stored, announced",
  transfer: "transferred",
  pinned: "pinned",
  wait: "waits for images",
  prefill: "prefill",
  handover: "handed over",
  load: "keys and values loaded",
  decode: "decode",
  unknown: "under way, or not known", // what the gateway learns at the end only
};

const known = (time) => typeof time === "number";

export const ORIGINS = {
  encoded: "encoded for this request",
  shared: "encoded once, for this request and others",
  reused: "reused from a store",
};

// {endS, firstS, rows: [{title, note, bars: [{stage, from, to, text}], found}]}
//
// `found` is when an item was found ready. What has no end yet goes on to nowS, the age of an open request.
export function timelineOf(receipt, nowS = 0) {
  const { prefill } = receipt;
  const pd = receipt.pd ?? {};
  const items = receipt.items ?? [];
  const times = [receipt.ingested_s, receipt.published_s, receipt.first_s, pd.ended_s, pd.first_s];
  for (const item of items) times.push(item.ready_s, item.pinned_s);
  const last = Math.max(0.001, ...times.filter(known));
  const endS = receipt.ended_s ?? Math.max(last, receipt.state === "open" ? nowS : 0);
  const rows = [{ title: "Gateway", note: receipt.gateway ?? "", bars: gatewayBars(receipt, endS), found: null }];
  items.forEach((item, index) => {
    rows.push({
      title: `${titleOf(item.modality)} ${index + 1}`,
      note: itemNote(item),
      bars: itemBars(item, receipt, endS),
      found: item.origin === "reused" ? item.ready_s : null,
    });
  });
  if (prefill) rows.push({ title: WORKERS.prefill, note: prefill.worker, bars: prefillBars(receipt, endS), found: null });
  if (receipt.pd || known(receipt.published_s)) {
    const title = prefill ? WORKERS.decode : WORKERS.pd;
    rows.push({ title, note: pd.worker ?? "", bars: pdBars(receipt, endS), found: null });
  }
  return { endS, firstS: receipt.first_s, rows };
}

const WORKERS = { pd: "PD worker", prefill: "Prefill worker", decode: "Decode worker" };

const titleOf = (modality) => (modality ? modality[0].toUpperCase() + modality.slice(1) : "Item");

function itemNote(item) {
  const size = item.width && item.height ? `${item.width}×${item.height}` : "";
  const how = item.rescue === "local" ? "encoded by PD" : (item.origin ?? "");
  return [size, how].filter(Boolean).join(", ");
}

// Bars one after another, from a beginning; each {stage, to, text}. A step whose end nobody knows is a part of
// the next one; the last of them goes on to endS.
function chain(from, steps, endS) {
  const bars = [];
  if (!known(from)) return bars;
  let begin = from;
  for (const [at, { stage, to, text = STAGES[stage] }] of steps.entries()) {
    const open = !known(to);
    if (open && steps.slice(at + 1).some((later) => known(later.to))) continue;
    const end = open ? endS : to;
    if (end > begin) bars.push({ stage, from: Math.max(0, begin), to: end, text });
    if (open) break;
    begin = end;
  }
  return bars;
}

function gatewayBars(receipt, endS) {
  const taken = { stage: "service", to: receipt.ingested_s, text: "taken in" };
  const steps = known(receipt.ingested_s) ? [{ stage: "service", to: receipt.published_s, text: "published" }] : [];
  return chain(0, [taken, ...steps], endS);
}

function itemBars(item, receipt, endS) {
  const { ready_s: ready, pinned_s: pinned } = item;
  if (!known(ready)) {
    const text = receipt.state === "open" ? "under way" : "not known to be ready";
    return chain(receipt.published_s, [{ stage: "unknown", to: endS, text }], endS);
  }
  const bars = encodeBars(item, receipt, ready);
  if (!known(pinned)) return bars;
  const handedOver = receipt.prefill?.ended_s;
  const until = known(handedOver) && pinned <= handedOver ? handedOver : (receipt.pd?.ended_s ?? endS);
  return [...bars, ...chain(ready, [{ stage: "transfer", to: pinned }, { stage: "pinned", to: until }], endS)];
}

// The durations lie one after another and end when the item is ready.
function encodeBars(item, receipt, ready) {
  const steps = [
    ["queue", item.queued_s],
    ["fetch", item.media_s],
    ["encode", item.encode_s],
    ["store", item.publish_s],
  ].filter(([, took]) => known(took));
  if (!steps.length) {
    if (item.origin === "reused") return [];
    return chain(receipt.published_s, [{ stage: "queue", to: ready, text: "another request's encode" }], ready);
  }
  let at = ready - steps.reduce((sum, [, took]) => sum + took, 0);
  const before = item.rescue
    ? { stage: "unknown", to: at, text: "before its rescue" }
    : { stage: "queue", to: at, text: "queued for an encoder" };
  const bars = item.origin === "encoded" ? chain(receipt.published_s, [before], at) : [];
  for (const [stage, took] of steps) {
    // The encode of a shared item may have begun before this request came.
    const from = Math.max(0, at);
    at += took;
    if (at > from) bars.push({ stage, from, to: at, text: STAGES[stage] });
  }
  return bars;
}

function prefillBars({ published_s: published, prefill }, endS) {
  const steps = [...intoTheEngine(prefill), { stage: "prefill", to: prefill.first_s }];
  return chain(published, [{ stage: "queue", to: prefill.pulled_s }, ...steps], endS);
}

function intoTheEngine(worker) {
  return [
    { stage: "service", to: worker.prepared_s, text: "prepared" },
    { stage: "wait", to: worker.entered_s },
  ];
}

function pdBars(receipt, endS) {
  const pd = receipt.pd;
  if (!pd) {
    // Its receipt comes with the end of the answer.
    const text = receipt.state === "open" ? "under way" : "not known";
    const steps = [{ stage: "unknown", to: receipt.first_s ?? endS, text }, { stage: "decode", to: endS }];
    return chain(receipt.published_s, steps, endS);
  }
  const { prefill } = receipt;
  return chain(
    prefill ? prefill.first_s : receipt.published_s,
    [
      { stage: prefill ? "handover" : "queue", to: pd.pulled_s },
      ...intoTheEngine(pd),
      { stage: pd.loaded_tokens ? "load" : "prefill", to: pd.first_s },
      { stage: "decode", to: pd.ended_s },
    ],
    endS,
  );
}

// A request in one line, for lists: the PD workers' stages, as the pictures' lie within their waiting.
export function summaryBars(receipt, nowS = 0) {
  const { endS, rows } = timelineOf(receipt, nowS);
  const workers = rows.filter(({ title }) => Object.values(WORKERS).includes(title));
  return { endS, bars: [...rows[0].bars, ...workers.flatMap(({ bars }) => bars)] };
}
