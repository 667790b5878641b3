// Questions to the router, with the key of this tab where one is needed.

import { byId, write } from "./dom.js";

const TIMEOUT_MS = 10000;
const TITLES = { operator: "The operator's key", client: "The client's key" };
const TEXTS = {
  operator: "This router shows its replicas and requests to those who hold its operator key (server.operator_api_key).",
  client: "This router explains routes to those who hold its client key (server.client_api_key).",
};
const REFUSED = "The router refused that key. ";

export class NeedsKey extends Error {}

// The router answered, and said what is wrong with the question.
export class Refused extends Error {}

const nameOf = (role) => `kvroute.${role}-key`;
const keyOf = (role) => sessionStorage.getItem(nameOf(role)) ?? "";

// Answers the parsed body. Throws NeedsKey, Refused, or whatever `fetch` throws where nobody answers.
export async function ask(role, path, body) {
  const headers = { accept: "application/json" };
  if (keyOf(role)) headers.authorization = `Bearer ${keyOf(role)}`;
  const options = { headers, cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) };
  if (body !== undefined) Object.assign(options, { method: "POST", body });
  const answer = await fetch(path, options);
  if (answer.status === 401) throw new NeedsKey(role);
  if (!answer.ok) throw new Refused(await messageIn(answer));
  return answer.json();
}

async function messageIn(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `the router answered ${answer.status}`;
  }
}

// True once a key was given; false where the person would rather not.
export function askForKey(role) {
  const dialog = byId("key-dialog");
  write(byId("key-title"), TITLES[role]);
  write(byId("key-text"), (keyOf(role) ? REFUSED : "") + TEXTS[role]);
  byId("key-input").value = "";
  dialog.returnValue = "cancel";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(keep(role, dialog.returnValue)), { once: true });
  });
}

function keep(role, answer) {
  const key = byId("key-input").value.trim();
  byId("key-input").value = "";
  if (answer !== "keep" || !isKey(key)) return false;
  sessionStorage.setItem(nameOf(role), key);
  return true;
}

// A header can carry nothing else.
const isKey = (text) => /^[!-~]+$/.test(text);
