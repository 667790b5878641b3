// Numbers and times as a person reads them; and the router's words, which come with its overview.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const oneDecimal = new Intl.NumberFormat("en-US", {
  minimumFractionDigits: 1,
  maximumFractionDigits: 1,
});
const clock = new Intl.DateTimeFormat("en-GB", {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
});

export const count = (value) => whole.format(value);

// For a narrow column.
export const shortCount = (value) =>
  value < 1e6 ? whole.format(value) : `${oneDecimal.format(value / 1e6)}M`;

export const timeOfDay = (unixSeconds) => clock.format(new Date(unixSeconds * 1000));

export function rate(value) {
  return value >= 100 ? whole.format(value) : oneDecimal.format(value);
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

// A running clock: 12 s, 2 min 5 s, 1 h 0 min 5 s.
export function elapsed(seconds) {
  const total = Math.max(0, Math.floor(seconds));
  const [hours, minutes] = [Math.floor(total / 3600), Math.floor(total / 60) % 60];
  const parts = [];
  if (hours) parts.push(`${hours} h`);
  if (hours || minutes) parts.push(`${minutes} min`);
  return [...parts, `${total % 60} s`].join(" ");
}

export function milliseconds(value) {
  if (value === null) return "";
  if (value < 10) return `${oneDecimal.format(value)} ms`;
  return value < 1000 ? `${whole.format(value)} ms` : `${oneDecimal.format(value / 1000)} s`;
}

const asWords = (name) => name.replaceAll("_", " ");

let kinds = {};

// Takes the router's labels for the kinds of KV cache groups.
export function learnKinds(labels) {
  kinds = labels;
}

export const kindLabel = (kind) => kinds[kind] ?? asWords(kind);

const ENDS = {
  completed: null,
  no_replica: "unserved",
};

// What a request's end adds to its status; null where it simply completed.
export const endLabel = (end) => (end in ENDS ? ENDS[end] : asWords(end));

const UNKNOWN = {
  media: "it holds images or other media",
  busy: "too many prompts waited for the tokenizer",
  prompt_too_long: "it is longer than the router tokenises",
  replica_failed: "no replica gave a usable response to /tokenize",
  replica_refused: "the replica asked refused it at /tokenize, or has no /tokenize",
  not_unicode: "it holds half a character",
  no_chat_template: "the router has no chat template for the model",
  no_local_tokenizer: "the router has no tokenizer for the model",
};

// Why the router does not know a prompt in full.
export const whyUnknown = (reason) => UNKNOWN[reason] ?? asWords(reason);
