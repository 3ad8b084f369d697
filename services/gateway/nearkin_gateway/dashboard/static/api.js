// Requests to the gateway. Invariant: every change carries the page's CSRF token; a refusal says its problem's detail.

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
    // not a problem document: the status says it
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

export function say(text, failed = false) {
  const said = document.getElementById("said");
  said.classList.toggle("failed", failed);
  said.textContent = text;
}
