// The Jupyter Server behind the page, if there is one, and how a command reaches the ranks.

const PATIENCE = 1500; // milliseconds that a way gets
// More than the server waits for the kernel: a stop that is only slow must not become an interrupt besides, which ends
// the ranks at once.
const VERDICT = 3500;

// JupyterLab and Notebook say in the page where their server is; Colab and VS Code have none that a page could ask.
export function server() {
  let page = {};
  try {
    page = JSON.parse(document.getElementById("jupyter-config-data")?.textContent ?? "{}");
  } catch {
    // some other page's element
  }
  const base = page.baseUrl ?? document.body?.dataset?.baseUrl;
  if (!base) return null;
  const headers = { "Content-Type": "application/json" };
  const cookie = document.cookie.match(/(?:^|; )_xsrf=([^;]+)/);
  if (cookie) headers["X-XSRFToken"] = decodeURIComponent(cookie[1]);
  if (page.token) headers.Authorization = `token ${page.token}`;
  return { base: base.endsWith("/") ? base : `${base}/`, headers, token: page.token ?? "" };
}

// The answer of a POST; null when it is refused, or does not come in time.
async function post({ base, headers }, path, body, patience) {
  const hurry = new AbortController();
  const timer = setTimeout(() => hurry.abort(), patience);
  try {
    const asked = {
      method: "POST",
      headers,
      credentials: "same-origin",
      body: JSON.stringify(body),
      signal: hurry.signal,
    };
    const answer = await fetch(base + path, asked);
    if (!answer.ok) return null;
    return answer.status === 204 ? {} : await answer.json();
  } catch {
    return null;
  } finally {
    clearTimeout(timer);
  }
}

// Whether the kernel was interrupted.
export async function interrupt(kernel, find = server) {
  const behind = kernel ? find() : null;
  return Boolean(behind && (await post(behind, `api/kernels/${encodeURIComponent(kernel)}/interrupt`, {}, PATIENCE)));
}

// A command takes the first way that answers: nbtrain's own server extension, which reaches a busy kernel; the
// server's interrupt, to stop; a message to the kernel, which a busy one may read only when its cell has ended.
export class Commands {
  // `send(message)` is the third way; null where there is none.
  constructor(store, { send = null, find = server } = {}) {
    this._store = store;
    this._send = send;
    this._find = find;
  }

  // `report(words, tone)` is called whenever something is known; tone: busy, wait, good or bad.
  async run(command, report) {
    const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16)).join("");
    const { kernel, background } = this._store.run ?? {};
    const behind = kernel ? this._find() : null;
    if (behind) {
      report(`${command}: asking the server …`, "busy");
      const asked = `nbtrain/api/pools/${encodeURIComponent(kernel)}/command`;
      const said = await post(behind, asked, { command, id }, VERDICT);
      if (said) return report(said.text || `${command}: done`, said.ok ? "good" : "bad");
      // A run in the background is not what an interrupt would end.
      if (command === "stop" && !background && !this._store.ended) {
        report("stop: no answer; interrupting the kernel …", "busy");
        if (await interrupt(kernel, this._find)) {
          return report("stop: the kernel was interrupted", "good");
        }
      }
    }
    if (this._store.ended) return report("the run has ended", "good");
    if (!this._send) return report(`${command}: nobody answered; ■ in the notebook interrupts the cell`, "bad");
    report(`${command}: asking the kernel …`, "busy");
    this._send({ kind: "command", id, command });
    const late = setTimeout(() => {
      const words = "the kernel is busy and will read it when the cell ends; ■ in the toolbar interrupts at once";
      report(`${command}: sent, but ${words}`, "wait");
    }, PATIENCE);
    const ack = await this._acknowledged(id);
    clearTimeout(late);
    return ack ? report(ack.text || `${command}: done`, ack.ok ? "good" : "bad") : report("the run has ended", "good");
  }

  // What the kernel said to it; null when the run ended before it said anything.
  _acknowledged(id) {
    return new Promise((found) => {
      const look = () => {
        const ack = this._store.acks.get(id);
        if (!ack && !this._store.ended) return;
        end();
        found(ack ?? null);
      };
      const end = this._store.subscribe(look);
      look();
    });
  }
}
