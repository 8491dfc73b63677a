// What the page asks the gateway, and how a failure is told.

const KEY = "epd-api-key";

// The page lies at .../ui, so that all else is beside it, also behind a proxy that adds a prefix.
export const address = (path) => new URL(path, document.baseURI).href;

// The key stays in this tab: sessionStorage, or memory where a browser forbids that.
let keptKey = "";
try {
  keptKey = sessionStorage.getItem(KEY) ?? "";
} catch {
  keptKey = "";
}

export const apiKey = () => keptKey;

export function setApiKey(key) {
  keptKey = key.trim();
  try {
    if (keptKey) sessionStorage.setItem(KEY, keptKey);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Kept in memory then.
  }
}

export class ApiError extends Error {
  constructor({ status = 0, code = "", message = "", param = null, stage = null, requestId = null, retryAfterS = null }) {
    super(message);
    Object.assign(this, { status, code: String(code ?? ""), param, stage, requestId, retryAfterS });
  }
}

// Asks, and gives the response of a success; else throws an ApiError, or an AbortError.
export async function ask(path, { body = null, signal = undefined, timeoutS = 0 } = {}) {
  const headers = {};
  if (keptKey) headers.authorization = `Bearer ${keptKey}`;
  if (body !== null) headers["content-type"] = "application/json";
  const signals = [signal, timeoutS ? AbortSignal.timeout(timeoutS * 1000) : null].filter(Boolean);
  let response;
  try {
    response = await fetch(address(path), {
      method: body === null ? "GET" : "POST",
      headers,
      body: body === null ? undefined : JSON.stringify(body),
      signal: signals.length ? AbortSignal.any(signals) : undefined,
      cache: "no-store",
    });
  } catch (error) {
    throw broken(error, signal);
  }
  if (response.ok) return response;
  throw await refusal(response);
}

export async function askJson(path, options = {}) {
  const response = await ask(path, options);
  try {
    return await response.json();
  } catch (error) {
    throw broken(error, options.signal);
  }
}

// What an exception of fetch or of a stream means; one who aborted gets that back.
export function broken(error, signal) {
  if (error instanceof ApiError || signal?.aborted) return error;
  if (error.name === "TimeoutError") {
    return new ApiError({ code: "no_answer", message: "The gateway did not answer in time." });
  }
  if (error instanceof SyntaxError) {
    return new ApiError({ code: "no_json", message: "What came back is not the gateway's JSON." });
  }
  return new ApiError({ code: "unreachable", message: "The gateway cannot be reached." });
}

async function refusal(response) {
  const about = {
    status: response.status,
    requestId: response.headers.get("x-request-id"),
    retryAfterS: Number(response.headers.get("retry-after")) || null,
  };
  let told = null;
  try {
    told = (await response.json()).error;
  } catch {
    // Not the gateway's: a proxy's page, perhaps.
  }
  return new ApiError({ ...about, ...toldBy(told ?? { message: response.statusText }) });
}

// The fields of an error in OpenAI's shape.
export function toldBy(error) {
  return {
    code: error.code,
    message: String(error.message ?? ""),
    param: error.param ?? null,
    stage: error.stage ?? null,
  };
}

// The data of each server-sent event.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block
          .split(/\r?\n/)
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
