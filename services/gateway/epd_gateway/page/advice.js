// What to do about an error, by its code, else by its status. docs/operations.md says more of each.

const BY_CODE = {
  invalid_api_key: "Put your API key into the field at the top. Who runs the gateway makes one with epd key new.",
  model_not_found: "Choose another model. A model is listed while a PD worker of it is ready.",
  prompt_too_long: "Send fewer or smaller pictures, or a shorter question.",
  item_too_large: "Send a smaller picture: this one alone is more than the engine's encoder cache holds.",
  invalid_image: "Send a picture that opens elsewhere: PNG, JPEG, WebP or GIF, not cut off.",
  unsupported_media: "Send a picture in another format: PNG, JPEG, WebP or GIF.",
  reserved_token: "Take the model's own token, such as <|image_pad|>, out of the question.",
  body_too_large: "Send fewer or smaller pictures.",
  media_too_large: "Send a smaller picture.",
  too_many_pixels: "Scale the picture down.",
  too_many_items: "Send fewer pictures.",
  media_kills_engine: "Send another picture: two engines died of this one.",
  media_not_encodable: "Send another picture: the model cannot take this one.",
  tenant_over_share: "Wait, then ask again: other requests of this API key hold its share.",
  tenant_over_media_bytes: "Wait, or send fewer or smaller pictures: this API key has its bytes in the media store.",
  system_full: "Wait, then ask again: the system holds all that it takes.",
  queue_full: "Wait, then ask again, or add workers: the queue is full.",
  worker_lost: "Ask again: the worker was lost in the middle, and this answer could not go on with another one.",
  reader_too_slow: "Ask again over a faster connection.",
  media_gone: "Ask again: the store lost the picture before it was used.",
  gateway_stopped: "Ask again: the gateway was shut down.",
  worker_stopped: "Ask again: the workers were shut down.",
  unavailable: "Look at the workers: the model needs a PD worker and an encoder that are ready.",
  nats_unavailable: "Look whether NATS runs and can be reached from the gateway (epd doctor).",
  redis_unavailable: "Look whether Valkey runs and can be reached from the gateway (epd doctor).",
  store_full: "Wait, then ask again; if that does not help, give the stores more room.",
  unreachable: "Look whether the gateway runs, and whether this machine reaches it.",
  no_answer: "Look whether the gateway and its brokers run; then ask again.",
  no_json: "Look whether this address is the gateway's, and what a proxy in between answers.",
  stream_cut: "Ask again; if it happens again, the logs say more of the request's id.",
};

const BY_STATUS = {
  400: "Change what the message names; as it is, the request can never work.",
  404: "Look whether the name is right.",
  413: "Send less: fewer or smaller pictures.",
  415: "Send another kind of file.",
  429: "Wait, then ask again.",
  499: "Somebody cancelled it. Ask again if you want the answer.",
  500: "Search the gateway's log for the request's id.",
  502: "Ask again; if it fails again, search the logs for the request's id.",
  503: "Wait, then ask again; look at the workers' states.",
  504: "Ask again, or look which stage is slow: the queues and workers show it.",
};

export function advice({ code, status, retryAfterS = null }) {
  const what = BY_CODE[code] ?? BY_STATUS[status] ?? "Search the logs for the request's id.";
  return retryAfterS ? `${what} The gateway says: after ${retryAfterS} s.` : what;
}
