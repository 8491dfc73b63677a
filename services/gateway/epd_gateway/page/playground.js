// The question and its answer.

import { ApiError, address, apiKey, ask, askJson, broken, events, toldBy } from "./api.js";
import { COMMANDS } from "./commands.js";
import { byId, el, say, show } from "./dom.js";
import { failure } from "./failure.js";
import { count, duration } from "./format.js";
import { Pictures } from "./pictures.js";
import { waterfall } from "./waterfall.js";

const RECEIPT_TRIES = 10;
const RECEIPT_PAUSE_MS = 200;

export class Playground {
  // select(id) shows a request's receipt.
  constructor(select) {
    this.select = select;
    this.running = null;
    this.models = null;
    this.pictures = new Pictures(() => {});
    byId("ask-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    byId("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.ask();
      }
    });
    byId("ask").addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    byId("stop-button").addEventListener("click", () => this.stop());
    for (const button of document.querySelectorAll("[data-copy]")) {
      button.addEventListener("click", () => this.copy(button.dataset.copy));
    }
  }

  // -- models ---------------------------------------------------------------------------------------

  async loadModels() {
    const hint = byId("model-hint");
    try {
      const { data } = await askJson("v1/models", { timeoutS: 5 });
      this.showModels(data.map(({ id }) => id));
      show(hint, !data.length);
      say(hint, data.length ? "" : "No model is ready: its PD worker is not there or still loads.");
    } catch (error) {
      if (error.name === "AbortError") return;
      this.showModels([]);
      show(hint, true);
      say(hint, error.status === 401 ? "With the API key they can be listed." : error.message);
    }
  }

  showModels(ids) {
    if (JSON.stringify(ids) === JSON.stringify(this.models)) return;
    this.models = ids;
    const chooser = byId("model");
    const before = chooser.value;
    chooser.replaceChildren(...ids.map((id) => el("option", { value: id }, id)));
    if (ids.includes(before)) chooser.value = before;
  }

  // -- asking ---------------------------------------------------------------------------------------

  settings() {
    const number = (id, otherwise) => {
      const { value, valueAsNumber } = byId(id);
      return value === "" || Number.isNaN(valueAsNumber) ? otherwise : valueAsNumber;
    };
    return {
      model: byId("model").value,
      question: byId("question").value,
      maxTokens: number("max-tokens", 256),
      temperature: number("temperature", 0),
    };
  }

  async ask() {
    if (this.running) return;
    const { model, question, maxTokens, temperature } = this.settings();
    if (!question.trim() && !this.pictures.list.length) {
      byId("failure").replaceChildren(failure({ title: "Nothing is asked yet", message: "Write a question, or add a picture.", advice: "" }));
      byId("question").focus();
      return;
    }
    const abort = (this.running = new AbortController());
    this.begin();
    const answer = { started: performance.now(), firstS: null, text: "", usage: null, finish: null, requestId: null };
    try {
      const content = [...(await this.pictures.parts()), { type: "text", text: question }];
      const response = await ask("v1/chat/completions", {
        signal: abort.signal,
        body: {
          model,
          max_tokens: maxTokens,
          temperature,
          stream: true,
          stream_options: { include_usage: true },
          messages: [{ role: "user", content }],
        },
      });
      answer.requestId = response.headers.get("x-request-id");
      await this.read(response, answer);
      this.note(ended(answer));
    } catch (caught) {
      if (abort.signal.aborted) {
        this.note("Stopped. What had come stays.");
      } else {
        const error = broken(caught);
        answer.requestId ??= error.requestId;
        error.requestId ??= answer.requestId;
        byId("failure").replaceChildren(failure({ error }));
        show(byId("answer-part"), answer.text !== "");
        this.note(answer.text ? "The answer broke off here." : "");
      }
    } finally {
      this.running = null;
      this.busy(false);
    }
    if (answer.requestId) await this.showWaterfall(answer.requestId);
  }

  async read(response, answer) {
    const text = document.createTextNode("");
    const box = byId("answer");
    box.replaceChildren(text);
    try {
      for await (const data of events(response)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(toldBy(chunk.error));
        answer.usage = chunk.usage ?? answer.usage;
        answer.finish = chunk.choices?.[0]?.finish_reason ?? answer.finish;
        const more = chunk.choices?.[0]?.delta?.content;
        if (!more) continue;
        answer.firstS ??= (performance.now() - answer.started) / 1000;
        answer.text += more;
        const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 24;
        text.appendData(more);
        if (atEnd) box.scrollTop = box.scrollHeight;
      }
    } catch (error) {
      if (error instanceof ApiError || error.name === "AbortError") throw error;
      throw new ApiError({ code: "stream_cut", message: "The answer's stream broke off." });
    }
    throw new ApiError({ code: "stream_cut", message: "The answer's stream ended without its end mark." });
  }

  stop() {
    this.running?.abort();
  }

  begin() {
    byId("failure").replaceChildren();
    byId("answer").replaceChildren();
    byId("own-waterfall").replaceChildren();
    show(byId("answer-part"), true);
    this.note("Waiting for the first token.");
    this.busy(true);
  }

  busy(yes) {
    const [askButton, stopButton] = [byId("ask-button"), byId("stop-button")];
    byId("answer").setAttribute("aria-busy", String(yes)); // read out once it is whole
    askButton.setAttribute("aria-disabled", String(yes)); // not `disabled`: it keeps its focus
    if (!yes && document.activeElement === stopButton) askButton.focus();
    stopButton.disabled = !yes;
  }

  note(text) {
    say(byId("answer-note"), text);
  }

  // -- afterwards -----------------------------------------------------------------------------------

  // The receipt is complete a moment after the answer.
  async showWaterfall(requestId) {
    let receipt = null;
    for (let tries = 0; tries < RECEIPT_TRIES && !this.running; tries += 1) {
      try {
        receipt = await askJson(`ui/api/requests/${encodeURIComponent(requestId)}`, { timeoutS: 5 });
        if (receipt.state !== "open") break;
      } catch (error) {
        if (error.status !== 404) return;
      }
      await new Promise((resolve) => setTimeout(resolve, RECEIPT_PAUSE_MS));
    }
    if (!receipt || this.running) return;
    const more = el("button", { type: "button", class: "button small" }, "Receipt");
    more.addEventListener("click", () => this.select(requestId));
    byId("own-waterfall").replaceChildren(
      el("div", { class: "panel-head" }, el("h3", {}, "Where the time went"), more),
      waterfall(receipt),
    );
  }

  async copy(kind) {
    const text = COMMANDS[kind]({
      ...this.settings(),
      base: address("v1"),
      pictures: this.pictures.list,
      withKey: apiKey() !== "",
    });
    const shown = byId("copy-text");
    shown.textContent = text;
    show(shown, true);
    const note = byId("copy-note");
    try {
      await navigator.clipboard.writeText(text);
      say(note, `Copied.${kind === "nats" ? " Straight over NATS, with no gateway in between." : ""}`);
    } catch {
      // Only pages over https or on this machine may write to the clipboard.
      getSelection().selectAllChildren(shown);
      shown.focus();
      say(note, "Selected: copy it with Ctrl + C.");
    }
  }
}

function ended({ started, firstS, usage, finish }) {
  const parts = [`Answered in ${duration((performance.now() - started) / 1000)}`];
  if (firstS !== null) parts.push(`first token after ${duration(firstS)}`);
  if (usage) parts.push(`${count(usage.prompt_tokens, "token")} in, ${usage.completion_tokens} out`);
  if (finish === "length") parts.push("cut at max tokens");
  return `${parts.join(", ")}.`;
}
