// A list that the server tells. What it told last stays until it tells another one.

import { ask, server } from "./jupyter.js";

const PATIENCE = 60000; // milliseconds: the first time there may be many files to read

export class ServerList {
  // `answered()` is called when a question is over, whatever came of it.
  constructor(path, answered, find = server) {
    Object.assign(this, { _path: path, _answered: answered, _find: find });
    this.items = [];
    this._asking = false;
    this._again = false;
  }

  // One question at a time: what changes meanwhile is asked for in the next one.
  async ask() {
    this._again = true;
    if (this._asking) return;
    this._asking = true;
    try {
      while (this._again) await this._once();
    } finally {
      this._asking = false;
    }
  }

  async _once() {
    this._again = false;
    const behind = this._find();
    if (!behind) return;
    const { body } = await ask(behind, this._path, null, PATIENCE);
    if (Array.isArray(body)) this.items = body;
    this._answered();
  }
}
