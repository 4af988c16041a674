// Numbers for people, in the words the other views of nbtrain use.

const GROUPED = new Intl.NumberFormat("en-US");

// 310 MB, 1.2 GB (powers of ten, as disks and models are sold)
export function size(bytes) {
  let count = bytes;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (count < 999.5) return `${count >= 99.5 || unit === "B" ? count.toFixed(0) : general(count, 3)} ${unit}`;
    count /= 1000;
  }
  return `${general(count, 3)} TB`;
}

// 0:42, 12:03, 1:02:03
export function duration(seconds) {
  const whole = Math.max(0, Math.ceil(seconds - 0.5));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

// 3,600 · 28.1 · 0.52
export function quantity(value) {
  return value >= 99.95 ? whole(value) : general(value, 3);
}

export function metric(value) {
  if (Number.isFinite(value)) return general(value, 4);
  return value === Infinity ? "inf" : value === -Infinity ? "-inf" : "NaN";
}

export function whole(value) {
  return GROUPED.format(Math.round(value));
}

export function percent(share) {
  return `${Math.round(100 * share)} %`;
}

// 42 ms, 1.3 s, 210 µs
export function milliseconds(value) {
  if (value >= 999.5) return `${general(value / 1000, 3)} s`;
  return value >= 0.9995 || value === 0 ? `${general(value, 3)} ms` : `${general(value * 1000, 3)} µs`;
}

// How much is done of all epochs, where it is known how many there are, or of this one. `trained`: while a training
// evaluates, what it has done of all epochs.
export function share(progress) {
  const { epoch, epochs, stage, done, total, trained } = progress;
  if (Number.isFinite(trained)) return Math.min(1, trained);
  if (!total) return null;
  return Math.min(1, epochs && !stage ? (epoch - 1 + done / total) / epochs : done / total);
}

// `epoch 2 · 340/1200 · 28 % · 0:42 left`; of a known number of epochs, `epoch 2 of 8 · 340/1200 · 16 % · 4:10 left`,
// in all; while a training evaluates, with what it has trained, `epoch 2 of 8 · validation 3/40 · 25 %`
export function place(progress) {
  const { epoch, epochs, stage, done, total, left } = progress;
  const within = !stage || stage === "validation";
  const words = within ? [epochs ? `epoch ${epoch} of ${epochs}` : `epoch ${epoch}`] : [];
  const loader = stage ? `${stage} ` : "";
  words.push(total ? `${loader}${done}/${total}` : `${loader}batch ${done}`);
  const of = share(progress);
  if (of !== null) words.push(`${Math.floor(100 * of + 1e-9)} %`);
  if (of !== null && of < 1 && left !== null && left !== undefined) words.push(`${duration(left)} left`);
  return words.join(" · ");
}

// So many digits that count, and no zeros at the end.
export function general(value, digits) {
  if (value === 0) return "0";
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  const power = Number(exponent);
  if (power >= -4 && power < digits) return String(Number(value.toPrecision(digits)));
  return `${Number(mantissa)}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
}
