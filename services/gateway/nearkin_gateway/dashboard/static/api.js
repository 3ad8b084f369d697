// Send requests to the gateway. Invariant: every change carries the page's CSRF token; the error of a refusal has the
// detail of its problem document.

export const csrf = () => document.querySelector('meta[name="nearkin-csrf"]')?.content ?? "";

export const keyPath = (key) => (key === "." || key === ".." ? key.replaceAll(".", "%2E") : encodeURIComponent(key));

export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export async function problemOf(response) {
  let detail = `${response.status} ${response.statusText}`;
  try {
    detail = (await response.json()).detail ?? detail;
  } catch {
    // not a problem document: the status is shown
  }
  return new Refused(response.status, detail);
}

export async function call(method, path, { body, headers } = {}) {
  const response = await fetch(path, {
    method,
    body,
    headers: { ...headers, ...(method === "GET" ? {} : { "X-Nearkin-CSRF": csrf() }) },
  });
  if (!response.ok) throw await problemOf(response);
  return response;
}

// Invisible characters as escapes, as on the pages (dashboard/display_names.py).
const INVISIBLE = /[\p{C}\p{Zl}\p{Zp}\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u2800\u3164\uffa0\ufe00-\ufe0f\u{e0100}-\u{e01ef}]/gu;

function escape(character) {
  const code = character.codePointAt(0);
  if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
}

export const visible = (text) => text.replace(INVISIBLE, escape).replace(/^ +| +$/g, (spaces) => "\\x20".repeat(spaces.length));

export function say(text, failed = false) {
  const line = document.getElementById("status-message");
  line.classList.toggle("failed", failed);
  line.textContent = visible(text);
}
