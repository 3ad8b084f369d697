// Keeps a page up to date. Invariant: only elements marked data-live-part change, and never one that has the focus.

const EVERY_MS = 5000;
let asking = null;

export async function refresh() {
  asking?.abort();
  asking = new AbortController();
  const response = await fetch(location.href, { signal: asking.signal, headers: { Accept: "text/html" } });
  if (response.redirected && new URL(response.url).pathname === "/login") {
    location.assign(response.url); // the session is over
    return;
  }
  if (!response.ok) return;
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
  for (const part of document.querySelectorAll("[data-live-part]")) {
    const found = fresh.getElementById(part.id);
    if (found && found.innerHTML !== part.innerHTML && !part.contains(document.activeElement)) {
      part.replaceChildren(...found.childNodes);
    }
  }
}

export function keepFresh() {
  setInterval(() => {
    if (!document.hidden) refresh().catch(() => {}); // away for now: the next one tries again
  }, EVERY_MS);
}
