// How Stop, Stacks and Kill reach the ranks.

import { interrupt, PATIENCE, post, server } from "./jupyter.js";
import { isOver, lost, whereabouts } from "./liveness.js";

// More than the server waits for the kernel: a stop that is only slow must not become an interrupt besides, which ends
// the ranks at once.
const VERDICT = 3500;

// A command takes the first way that answers: nbtrain's own server extension, which reaches a busy kernel; the
// server's interrupt, to stop; a message to the kernel, which a busy one may read only when its cell has ended.
export class Commands {
  // `send(message)` is the third way; null where there is none. `alive(run)`: see whereabouts.
  constructor(store, { send = null, find = server, alive = (run) => whereabouts(run, { find }) } = {}) {
    this._store = store;
    this._send = send;
    this._find = find;
    this._alive = alive;
  }

  // `report(words, tone)` is called whenever something is known; tone: busy, wait, good or bad.
  async run(command, report) {
    const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16)).join("");
    const { kernel, background, id: run } = this._store.run ?? {};
    const behind = kernel ? this._find() : null;
    if (behind) {
      report(`${command}: asking the server …`, "busy");
      const asked = `nbtrain/api/pools/${encodeURIComponent(kernel)}/command`;
      const said = await post(behind, asked, { command, id, run }, VERDICT);
      if (said?.ok) return report(said.text || `${command}: done`, "good");
      // The kernel may be another one by now, and what it runs is not what was to be stopped.
      const where = this._store.run ? await this._alive(this._store.run) : "unknown";
      if (isOver(where)) {
        this._store.lose(lost(where));
        return report("", null);
      }
      if (said) return report(said.text || `${command}: refused`, "bad");
      // A run in the background is not what an interrupt would end.
      if (command === "stop" && !background && !this._store.over) {
        report("stop: no answer; interrupting the kernel …", "busy");
        if (await interrupt(kernel, this._find)) {
          return report("stop: the kernel was interrupted", "good");
        }
      }
    }
    if (this._store.over) return report("", null);
    if (!this._send) return report(`${command}: nobody answered; ■ in the notebook interrupts the cell`, "bad");
    report(`${command}: asking the kernel …`, "busy");
    this._send({ kind: "command", id, command });
    const late = setTimeout(() => {
      const words = "the kernel is busy and will read it when the cell ends; ■ in the toolbar interrupts at once";
      report(`${command}: sent, but ${words}`, "wait");
    }, PATIENCE);
    const ack = await this._acknowledged(id);
    clearTimeout(late);
    return ack ? report(ack.text || `${command}: done`, ack.ok ? "good" : "bad") : report("", null);
  }

  // What the kernel said to it; null when the run ended before it said anything.
  _acknowledged(id) {
    return new Promise((found) => {
      const look = () => {
        const ack = this._store.acks.get(id);
        if (!ack && !this._store.over) return;
        end();
        found(ack ?? null);
      };
      const end = this._store.subscribe(look);
      look();
    });
  }
}
