// Upload files by tus 1.0. Invariant: after a lost connection or a reload, an upload continues at the offset that is
// durable in the gateway.

import { call, csrf, problemOf, Refused, say, visible } from "./api.js";
import { refresh } from "./live.js";

const TUS = { "Tus-Resumable": "1.0.0" };
const TRIES_MAX = 8;
const WAIT_MS_MAX = 20_000;
const RUNNING_MAX = 3;
const waiting = [];
let running = 0;

const base64 = (text) => btoa(String.fromCodePoint(...new TextEncoder().encode(text)));
const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const mark = (file, key) => `nearkin-upload ${key} ${file.size} ${file.lastModified}`;

export function human(bytes) {
  let value = bytes;
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (value < 1000 || unit === "TB") return `${unit === "B" ? value : value.toPrecision(3)} ${unit}`;
    value /= 1000;
  }
}

export function setUp(form) {
  const files = form.querySelector('input[type="file"]');
  const prefix = form.elements.namedItem("prefix");
  const begin = (chosen) => {
    for (const file of chosen) waiting.push(new Upload(file, prefix.value + file.name, form.querySelector("#uploads")));
    next();
  };
  const taken = () => {
    const chosen = [...files.files];
    files.value = "";
    if (chosen.length) begin(chosen);
  };
  files.addEventListener("change", taken);
  taken(); // files chosen before this script was loaded
  form.addEventListener("submit", (event) => event.preventDefault());
  for (const kind of ["dragenter", "dragover"]) {
    form.addEventListener(kind, (event) => {
      event.preventDefault();
      form.classList.add("over");
    });
  }
  for (const kind of ["dragleave", "drop"]) form.addEventListener(kind, () => form.classList.remove("over"));
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    begin([...event.dataTransfer.files]);
  });
}

function next() {
  while (running < RUNNING_MAX && waiting.length) {
    running += 1;
    waiting.shift().run().finally(() => {
      running -= 1;
      next();
    });
  }
}

class Upload {
  constructor(file, key, list) {
    this.file = file;
    this.key = key;
    this.row = document.createElement("li");
    const name = document.createElement("span");
    name.className = "name";
    name.textContent = visible(key);
    name.title = visible(key);
    this.size = document.createElement("span");
    this.size.className = "note";
    this.size.textContent = `waiting, ${human(file.size)}`;
    this.bar = document.createElement("progress");
    this.bar.max = Math.max(1, file.size);
    this.bar.value = 0;
    this.bar.setAttribute("aria-label", `Upload of ${visible(key)}`);
    this.status = document.createElement("p");
    this.status.className = "upload-status note";
    this.row.append(name, this.size, this.bar, this.status);
    list.prepend(this.row);
  }

  async run() {
    try {
      const url = await this.send();
      this.size.textContent = "committing";
      const outcome = await this.outcome(url);
      this.bar.value = this.bar.max;
      this.size.textContent = human(this.file.size);
      const added = outcome.ledger?.stored_bytes;
      this.status.textContent =
        `version ${outcome.version} is committed` + (added === undefined ? "" : `; it added ${human(added)} to the store`);
      say(`${this.key}: version ${outcome.version} is committed.`);
      refresh().catch(() => {});
    } catch (error) {
      this.size.textContent = "failed";
      this.status.className = "upload-status problem";
      this.status.textContent = error.message;
      say(`${this.key}: ${error.message}`, true);
    }
  }

  // Returns the URL of the upload once all its bytes are durable.
  async send() {
    let url = localStorage.getItem(mark(this.file, this.key));
    for (let tries = 0; ; tries += 1) {
      try {
        let offset = 0;
        if (url === null) {
          url = await this.create();
          localStorage.setItem(mark(this.file, this.key), url);
        } else {
          const head = await fetch(url, { method: "HEAD", headers: TUS });
          if (head.status === 404) {
            url = null; // expired
            continue;
          }
          if (!head.ok) throw await problemOf(head);
          offset = Number(head.headers.get("Upload-Offset"));
        }
        if (offset < this.file.size) await this.patch(url, offset);
        localStorage.removeItem(mark(this.file, this.key));
        return url;
      } catch (error) {
        const passes = !(error instanceof Refused) || [409, 423, 429, 503].includes(error.status);
        if (!passes || tries >= TRIES_MAX) throw error;
        this.size.textContent = "interrupted; going on";
        await pause(Math.min(WAIT_MS_MAX, 500 * 2 ** tries));
      }
    }
  }

  async create() {
    const headers = { ...TUS, "Upload-Length": this.file.size, "Upload-Metadata": `key ${base64(this.key)}` };
    const response = await call("POST", "/v1/uploads", { headers });
    return response.headers.get("Location");
  }

  patch(url, offset) {
    return new Promise((done, failed) => {
      const request = new XMLHttpRequest(); // fetch reports no progress of a request body
      request.open("PATCH", url);
      const headers = { ...TUS, "Upload-Offset": offset, "X-Nearkin-CSRF": csrf() };
      for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
      request.setRequestHeader("Content-Type", "application/offset+octet-stream");
      request.upload.addEventListener("progress", (event) => this.progress(offset + event.loaded));
      request.addEventListener("error", () => failed(new Error("the connection broke")));
      request.addEventListener("load", () => {
        if (request.status === 204) return done();
        let detail = `${request.status}`;
        try {
          detail = JSON.parse(request.responseText).detail;
        } catch {
          // no problem document: the status is shown
        }
        failed(new Refused(request.status, detail));
      });
      request.send(this.file.slice(offset));
    });
  }

  progress(bytes) {
    this.bar.value = bytes;
    this.size.textContent = `${human(bytes)} of ${human(this.file.size)}`;
  }

  async outcome(url) {
    for (;;) {
      const upload = await (await call("GET", url)).json();
      if (upload.state === "failed") throw new Error(upload.failure ?? "the upload failed");
      if (upload.status) {
        const found = await (await call("GET", `${upload.status}?wait=20`)).json();
        if (found.state === "failed") throw new Error(found.failure ?? "the upload failed");
        if (found.state !== "pending") return found;
      } else {
        await pause(500);
      }
    }
  }
}
