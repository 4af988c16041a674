// What the kernel would say, as it would say it: four cards, one of them half full, and a model too large for most.

const GB = 1e9;
const asked = new URLSearchParams(location.search);

// [name, what it is, parameters, gradients, optimizer, activations, buffers, sent] in GB
const KNOWN = [
  ["single", "one process, one device", 26, 26, 52, 9, 0, 0],
  ["ddp", "every rank holds the model and a share of the batches; gradients are averaged", 26, 26, 52, 9, 26, 39],
  ["zero1", "as ddp; each rank keeps the optimizer's state of a share of the parameters", 26, 26, 13, 9, 5, 58],
  ["fsdp", "every rank holds a part of all there is; a layer is gathered while it computes", 6.5, 6.5, 13, 9, 1.2, 58],
  ["sharded", "as ddp; gradients and the optimizer's state of a share of the parameters", 26, 6.5, 13, 9, 18, 39],
];
const FEW = 4;
const ROOM = asked.has("roomy") ? 40_000 * GB : 40 * GB;

function card([name, summary, ...parts], { chosen, recommended, first }) {
  const [parameters, gradients, optimizer, activations, buffers, sent] = parts.map((part) => part * GB);
  const peak = parameters + gradients + optimizer + activations + buffers;
  const memory = { parameters, gradients, optimizer, activations, buffers, sent, peak, kept: peak, host: 0, notes: [] };
  const figures = { memory, room: ROOM, fits: peak <= ROOM, tight: peak > 0.9 * ROOM && peak <= ROOM, note: "" };
  const line = `--strategy ${name} --devices 4`;
  const shown = { name, stands: line, line, planned: true, chosen, recommended, reason: "", ...figures };
  const cpu = { ...shown, name: "fsdp_cpu_offload", stands: "-s fsdp --cpu-offload", chosen: false, recommended: false };
  const variants = name === "fsdp" ? [shown, cpu] : [shown];
  return { name, summary, shards: "", reason: "", variants, shown, chosen, recommended, first };
}

function unusable(name, reason) {
  const shown = { name, stands: "", line: `--strategy ${name}`, planned: false, chosen: false, recommended: false };
  const none = { reason: "", memory: null, room: 0, fits: null, tight: false, note: "" };
  return { name, summary: "", shards: "", reason, variants: [], shown: { ...shown, ...none }, chosen: false };
}

function picked(chosen = "fsdp") {
  const marks = (name, at) => ({ chosen: name === chosen, recommended: name === "fsdp", first: at < FEW });
  const cards = KNOWN.map((one, at) => card(one, marks(one[0], at)));
  const option = (field, kind, value, rest = {}) => ({
    field,
    flag: `--${field.replaceAll("_", "-")}`,
    kind,
    value,
    usual: value,
    choices: [],
    help: "",
    ...rest,
  });
  const gpu = (at, used) => ({ name: `GPU ${at} · NVIDIA H100 80GB HBM3`, total: 80 * GB, used: used * GB });
  return {
    kernel: "",
    magic: "distributed",
    flags: { "-s": "strategy", "--strategy": "strategy", "-d": "devices", "--devices": "devices" },
    found: [gpu(0, 39), gpu(1, 0.5), gpu(2, 0.5), gpu(3, 0.5)],
    devices: "4",
    batch: null,
    precision: "32",
    goal: "model",
    loss: "small",
    ranks: 4,
    goals: ["speed", "batch", "model"],
    losses: ["no", "small", "any"],
    precisions: ["32", "bf16-mixed", "16-mixed", "bf16-true", "16-true"],
    plan: {
      model: "gpt",
      parameters: 6_500_000_000,
      optimizer: "AdamW",
      samples: 8,
      room: "",
      why: "fsdp needs 36.2 GB per rank of the 40 GB that it may have.",
      notes: ["the loss was taken to be cross_entropy"],
    },
    lacks: "",
    cards: [...cards, unusable("xla", "torch_xla is not installed: pip install torch_xla")],
    strategy: chosen,
    options: [
      option("sharding", "choice", "FULL_SHARD", { choices: ["FULL_SHARD", "SHARD_GRAD_OP"], help: "what is divided" }),
      option("cpu_offload", "switch", "off", { help: "what is not gathered waits in main memory" }),
      option("replicas", "number", "0"),
      option("wrap", "text", ""),
    ],
    line: `%%distributed --strategy ${chosen} --devices 4`,
    wrong: "",
    note: "",
    cell: "Measure and Verify run 10 steps of the last cell [3].",
    worth: ["fsdp", "zero1"],
    compared: null,
    busy: "",
    said: ["", ""],
    answered: 0,
  };
}

// As anywidget hands it to a widget.
class Model {
  sent = [];
  _listeners = new Set();
  _data = picked();

  get() {
    return this._data;
  }

  on(name, listener) {
    this._listeners.add(listener);
  }

  off(name, listener) {
    this._listeners.delete(listener);
  }

  send(message) {
    this.sent.push(message);
  }

  // The kernel's next word; to what was sent last, unless it is late.
  say(changes, answered = this.sent.at(-1)?.seq ?? 0) {
    this._data = { ...this._data, answered, ...changes };
    for (const listener of this._listeners) listener();
  }
}

document.body.classList.toggle("dark", asked.has("dark"));
const { default: widget } = await import("../../nbtrain/static/picker.js");
const model = new Model();
const close = widget.render({ model, el: document.getElementById("nbtrain") });
window.demo = { model, picked, close, ready: true };
