// The strategy picker's front end, as anywidget calls it. What is shown is the kernel's: the page says what was clicked
// and typed, and gets everything anew.

import { Picking } from "./picker_view.js";

export default {
  render({ model, el }) {
    const send = (message) => {
      try {
        model.send(message);
      } catch {
        // a saved notebook without a kernel: what is there is all there is
      }
    };
    const picking = new Picking(el, send, model.widget_manager);
    const show = () => picking.update(model.get("data"));
    model.on("change:data", show);
    show();
    return () => {
      model.off("change:data", show);
      picking.close();
    };
  },
};
