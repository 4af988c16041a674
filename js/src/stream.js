// A WebSocket that comes back by itself, later each time.

import { server } from "./jupyter.js";

const PAUSES = [0.5, 1, 2, 4, 8, 15]; // seconds

export class Stream {
  // `heard(message)` for each message; `state(words, tone)`: what is wrong with the connection, "" when nothing is.
  constructor({ heard, state }) {
    this._heard = heard;
    this._state = state;
    this._failures = 0;
    this._open();
  }

  send(message) {
    if (this._socket.readyState === WebSocket.OPEN) this._socket.send(JSON.stringify(message));
  }

  _open() {
    this._socket = new WebSocket(address());
    this._socket.addEventListener("open", () => {
      this._failures = 0;
      this._state("", "good");
    });
    this._socket.addEventListener("message", ({ data }) => this._heard(JSON.parse(data)));
    this._socket.addEventListener("close", () => this._wait());
  }

  _wait() {
    const pause = PAUSES[Math.min(this._failures++, PAUSES.length - 1)];
    this._state(
      `No connection to the Jupyter Server; trying again in ${pause} s. What is shown is what was known last.`,
      "bad",
    );
    setTimeout(() => {
      this._state("Connecting to the Jupyter Server …", "busy");
      this._open();
    }, 1000 * pause);
  }
}

// Beside the page, which the server may serve below any path.
function address() {
  const found = server();
  const base = found?.base ?? location.pathname.replace(/nbtrain\/?$/, "");
  const url = new URL(`${base}nbtrain/api/stream`, location.href);
  url.protocol = url.protocol.replace("http", "ws");
  if (found?.token) url.searchParams.set("token", found.token);
  return url;
}
