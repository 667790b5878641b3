// Numbers, times and the router's own words, as a person reads them.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const oneDecimal = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const natural = new Intl.Collator("en", { numeric: true });

export const count = (value) => whole.format(value);

// For a narrow column.
export const shortCount = (value) => (value < 1e6 ? whole.format(value) : `${oneDecimal.format(value / 1e6)}M`);

export const timeOfDay = (unixSeconds) => clock.format(new Date(unixSeconds * 1000));
export const byName = (left, right) => natural.compare(left, right);

export function rate(value) {
  return value >= 100 ? whole.format(value) : oneDecimal.format(value);
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

// Never rounded up to all or down to nothing: "100 %" of almost all would hide what is wrong.
export function share(part, all) {
  if (!all) return "–";
  const percent = (100 * part) / all;
  if (part < all && percent > 99.9) return "99.9 %";
  if (part > 0 && percent < 0.1) return "0.1 %";
  return percent >= 99.95 || percent < 0.05 ? `${whole.format(percent)} %` : `${oneDecimal.format(percent)} %`;
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 90 * 60) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} days`;
}

export function milliseconds(value) {
  if (value === null) return "";
  if (value < 10) return `${oneDecimal.format(value)} ms`;
  return value < 1000 ? `${whole.format(value)} ms` : `${oneDecimal.format(value / 1000)} s`;
}

const KINDS = {
  full_attention: "full",
  sliding_window: "window",
  chunked_local_attention: "chunked",
  mamba: "Mamba",
  not_cached: "not cached",
};

export function kindOfGroup(kind, reach) {
  const word = KINDS[kind] ?? kind.replaceAll("_", " ");
  return reach ? `${word} ${reach}` : word;
}

const TIERS = ["GPU", "CPU"];

// The fastest first; those nobody here has heard of by name.
export function byTier(left, right) {
  const place = (tier) => (TIERS.includes(tier) ? TIERS.indexOf(tier) : TIERS.length);
  return place(left) - place(right) || byName(left, right);
}

const ENDS = {
  completed: null,
  client_left: "client left",
  client_stalled: "client stalled",
  replica_died: "replica died",
  no_replica: "unserved",
  overloaded: "overloaded",
  abandoned: "abandoned",
};

// What a request's end adds to its status; nothing where it simply completed.
export const endOf = (end) => (end in ENDS ? ENDS[end] : end.replaceAll("_", " "));

const UNKNOWN = {
  media: "it holds images or other media",
  busy: "too many prompts waited for the tokenizer",
  prompt_too_long: "it is longer than the router tokenises",
  replica_failed: "no replica gave a good answer to /tokenize",
  not_unicode: "it holds half a character",
  no_chat_template: "the model has no chat template here",
  no_local_tokenizer: "the model has no tokenizer here",
};

export const whyUnknown = (reason) => UNKNOWN[reason] ?? reason.replaceAll("_", " ");
