// Change the store: deletions, settings, dead letters. Invariant: an action that removes data asks for confirmation.

import { call, keyPath, say, visible } from "./api.js";
import { refresh } from "./live.js";

async function act(button, message, work) {
  button.disabled = true;
  try {
    await work();
    if (message) say(message);
    return true;
  } catch (error) {
    say(error.message, true);
    return false;
  } finally {
    button.disabled = false;
  }
}

// The next page shows the message, once: this one is replaced before it could be read.
function sayOnNextPage(text, go) {
  sessionStorage.setItem("message", text);
  go();
}

// Resolves to the reason, "" where none is asked for; null: cancelled.
function sure(title, text, { verb = "Delete", asksReason = true } = {}) {
  const dialog = document.getElementById("sure");
  dialog.querySelector("#sure-title").textContent = title;
  dialog.querySelector("#sure-text").textContent = text;
  dialog.querySelector('[value="yes"]').textContent = verb;
  dialog.querySelector("#sure-reason").hidden = !asksReason;
  const reason = dialog.querySelector('[name="reason"]');
  reason.value = "";
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener("close", () => done(dialog.returnValue === "yes" ? reason.value : null), { once: true });
  });
}

async function remove(button) {
  const { delete: key, version } = button.dataset;
  const name = visible(key);
  const what = version ? `${name}, version ${version}` : `${name} with all its versions`;
  const reason = await sure(`Delete ${what}?`, "It can be brought back for a while; then its bytes are freed.");
  if (reason === null) return;
  const query = new URLSearchParams({ ...(version && { version }), ...(reason && { reason }) });
  if (await act(button, null, () => call("DELETE", `/v1/blobs/${keyPath(key)}?${query}`))) {
    sayOnNextPage(`Deleted ${what}.`, () => location.assign(`/ui/blob?${new URLSearchParams({ key })}`));
  }
}

async function bringBack(button) {
  const { undelete: key, version } = button.dataset;
  const path = `/v1/undelete/${keyPath(key)}?${new URLSearchParams({ version })}`;
  if (await act(button, null, () => call("POST", path))) {
    sayOnNextPage(`${visible(key)}, version ${version} is back.`, () => location.reload());
  }
}

async function callForLetter(button, letter, action, message) {
  const body = JSON.stringify({ letters: [letter] });
  const headers = { "Content-Type": "application/json" };
  if (await act(button, message, () => call("POST", `/v1/dead/${action}`, { body, headers }))) {
    button.blur();
    await refresh();
  }
}

async function replay(button) {
  const letter = button.dataset.replay;
  await callForLetter(button, letter, "replay", `Letter ${letter} was sent back.`);
}

async function drop(button) {
  const letter = button.dataset.drop;
  const text = "It is neither listed nor sent back from then on. The record stays in the topic until its retention ends.";
  const answer = await sure(`Drop letter ${letter}?`, text, { verb: "Drop", asksReason: false });
  if (answer !== null) await callForLetter(button, letter, "drop", `Letter ${letter} was dropped.`);
}

async function set(form, button, value) {
  const { section, field } = form.dataset;
  const body = JSON.stringify({ [section]: { [field]: value } });
  const headers = { "Content-Type": "application/merge-patch+json" };
  const text = value === null ? `${section}.${field} has the value of the configuration file again.` : `${section}.${field} is ${value} now.`;
  if (await act(button, null, () => call("PATCH", "/v1/config", { body, headers }))) {
    sayOnNextPage(text, () => location.reload());
  }
}

function valueOf(input) {
  if (input.dataset.type === "number") return Number(input.value);
  return input.dataset.type === "bool" ? input.value === "true" : input.value;
}

export function setUp() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.delete !== undefined) remove(button);
    else if (button.dataset.undelete !== undefined) bringBack(button);
    else if (button.dataset.replay !== undefined) replay(button);
    else if (button.dataset.drop !== undefined) drop(button);
    else if (button.dataset.reset !== undefined) set(button.form, button, null);
  });
  document.addEventListener("submit", (event) => {
    if (!event.target.matches("[data-setting]")) return;
    event.preventDefault();
    set(event.target, event.submitter ?? event.target.querySelector("button"), valueOf(event.target.elements.value));
  });
  const message = sessionStorage.getItem("message");
  if (message) {
    sessionStorage.removeItem("message");
    say(message);
  }
}
