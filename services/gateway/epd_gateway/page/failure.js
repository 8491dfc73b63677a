// An error as a user sees it: what happened, where, and what to do.

import { advice } from "./advice.js";
import { el } from "./dom.js";

// {error} with the fields of an ApiError or of a receipt's error, or {title, message, advice}.
export function failure({ error = null, title = null, message = null, advice: toDo = null }) {
  const heading = title ?? ([error.status || null, error.code].filter(Boolean).join(" ") || "Error");
  const text = message ?? error.message;
  const what = toDo ?? advice(error);
  const facts = [
    ["Field", error?.param],
    ["Stage", error?.stage],
    ["Request", error?.requestId],
  ].filter(([, value]) => value);
  return el(
    "div",
    { class: "notice", "data-kind": "fail" },
    el("strong", {}, heading),
    el("p", {}, text),
    what ? el("p", {}, el("span", { class: "what" }, "What to do: "), what) : null,
    facts.length
      ? el("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { class: "id" }, String(value))]))
      : null,
  );
}
