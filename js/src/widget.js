// The widget's front end, as anywidget calls it. The state belongs to the widget, not to one of its views: a widget may
// be shown twice or not yet, and no message is lost meanwhile.

import { Announcer } from "./announce.js";
import { Commands } from "./commands.js";
import { Liveness } from "./liveness.js";
import { Panel } from "./panel.js";
import { Store } from "./store.js";

// What a widget's model says when its kernel restarts or dies, or closes the widget; and when it is connected anew, after
// which messages come again.
const DISCONNECTED = ["comm_live_update", "comm:close"];

export default function widget() {
  let store = null;
  let liveness = null;

  function initialize({ model }) {
    const send = (message) => {
      try {
        model.send(message);
      } catch {
        // a saved notebook without a kernel: what is there is all there is
      }
    };
    store = new Store(() => send({ kind: "hello" }));
    store.send = send;
    const begin = () => model.get("start")?.kind === "all" && store.receive(model.get("start"));
    const hear = (message) => store.receive(message);
    liveness = new Liveness(store);
    const announcer = new Announcer(store);
    const disconnected = () => liveness.disconnected();
    begin();
    for (const event of DISCONNECTED) model.on(event, disconnected);
    model.on("change:start", begin);
    model.on("msg:custom", hear);
    // What came before this was there to hear it, and what a page that was loaded again has missed.
    if (!store.ended) store.ask();
    return () => {
      liveness.close();
      announcer.close();
      for (const event of DISCONNECTED) model.off(event, disconnected);
      model.off("change:start", begin);
      model.off("msg:custom", hear);
    };
  }

  function render({ model, el }) {
    if (!store) initialize({ model });
    const alive = (run) => liveness.whereabouts(run);
    const panel = new Panel(el, store, new Commands(store, { send: store.send, alive }));
    return () => panel.close();
  }

  return { initialize, render };
}
