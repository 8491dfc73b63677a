// Asks for the live view once a second, while somebody can see it.

import { askJson } from "./api.js";

const EACH_MS = 1000;
const SLOWEST_MS = 5000;
const ANSWER_S = 4;

export class Poll {
  // seen(live) and failed(error) are called by turns; hidden tabs and a pause stop all.
  constructor({ seen, failed }) {
    this.seen = seen;
    this.failed = failed;
    this.paused = false;
    this.refused = false; // for want of a key: asking again would not help
    this.failures = 0;
    this.timer = null;
    this.abort = null;
    document.addEventListener("visibilitychange", () => this.again());
  }

  pause(yes) {
    this.paused = yes;
    this.again();
  }

  // Asks now, if anything is to be asked: at the start, with another key, at the end of a pause.
  again() {
    this.refused = false;
    clearTimeout(this.timer);
    this.abort?.abort();
    if (!this.paused && !document.hidden) this.look();
  }

  async look() {
    const abort = (this.abort = new AbortController());
    try {
      const live = await askJson("ui/api/live", { signal: abort.signal, timeoutS: ANSWER_S });
      if (abort.signal.aborted) return;
      this.failures = 0;
      this.seen(live);
    } catch (error) {
      if (abort.signal.aborted) return;
      this.failures += 1;
      this.refused = error.status === 401;
      this.failed(error);
    }
    if (this.refused) return;
    this.timer = setTimeout(() => this.look(), Math.min(EACH_MS * Math.max(1, this.failures), SLOWEST_MS));
  }
}
