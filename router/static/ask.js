// Requests to the router, with the key of this tab where one is needed.

import { byId, write } from "./dom.js";

const TIMEOUT_MS = 10000;
const TITLES = { operator: "The operator's key", client: "The client's key" };
const TEXTS = {
  operator:
    "This router shows its replicas and requests to those who hold its operator key " +
    "(server.operator_api_key).",
  client:
    "This router explains routes to those who hold its operator key, or its client key where " +
    "server.clients_see_hits is set.",
};
const REFUSED = "The router refused that key. ";

export class NeedsKey extends Error {}

// The router responded, and said what is wrong with the request.
export class Refused extends Error {}

const nameOf = (role) => `kvroute.${role}-key`;
const kept = (role) => sessionStorage.getItem(nameOf(role)) ?? "";
// Routes are explained to operators, and to clients only where the configuration says so.
const keyOf = (role) => kept(role) || (role === "client" ? kept("operator") : "");

// Returns the parsed body. Throws NeedsKey, Refused, or what `fetch` throws without a response.
export async function ask(role, path, body) {
  const headers = { accept: "application/json" };
  if (keyOf(role)) headers.authorization = `Bearer ${keyOf(role)}`;
  const options = { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) };
  if (body !== undefined) {
    headers["content-type"] = "application/json";
    Object.assign(options, { method: "POST", body });
  }
  const response = await fetch(path, options);
  if (response.status === 401) throw new NeedsKey(role);
  if (!response.ok) throw new Refused(await messageIn(response));
  return response.json();
}

async function messageIn(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `the router responded with status ${response.status}`;
  }
}

// True once a key was given; false where the dialog was dismissed.
export function askForKey(role) {
  const dialog = byId("key-dialog");
  write(byId("key-title"), TITLES[role]);
  write(byId("key-text"), (keyOf(role) ? REFUSED : "") + TEXTS[role]);
  byId("key-input").value = "";
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((resolve) => {
    const close = () => resolve(keep(role, dialog.returnValue));
    dialog.addEventListener("close", close, { once: true });
  });
}

function keep(role, choice) {
  const key = byId("key-input").value.trim();
  byId("key-input").value = "";
  if (choice !== "keep" || !isKey(key)) return false;
  sessionStorage.setItem(nameOf(role), key);
  return true;
}

// Printable ASCII: a header can carry nothing else.
const isKey = (text) => /^[!-~]+$/.test(text);
