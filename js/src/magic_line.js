// The words of a magic's line, as nbtrain/magics/line/split_line.py splits them, and one line completed by another.

// `--keep "a b"  # why` is ["--keep", '"a b"', "# why"]: what is quoted or in brackets is one word, a comment the last.
export function words(line) {
  const found = [];
  let [word, quote, depth] = ["", "", 0];
  for (let at = 0; at < line.length; at++) {
    const char = line[at];
    if (!quote && !depth && char === "#" && !word) return [...found, line.slice(at).trimEnd()];
    if (!quote && !depth && /\s/.test(char)) {
      if (word) found.push(word);
      word = "";
      continue;
    }
    if (quote) quote = char === quote ? "" : quote;
    else if ("\"'".includes(char)) quote = char;
    else if ("([{".includes(char)) depth += 1;
    else if (")]}".includes(char)) depth = Math.max(0, depth - 1);
    word += char;
  }
  return word ? [...found, word] : found;
}

// `line`, and of `before` its comment and the options that `line` does not name. `flags`: how an option is typed -> its
// name. What is not among them belongs to a strategy, and goes with it.
export function completed(line, before, flags) {
  const named = new Set(options(line, flags).map(({ name }) => name));
  const kept = options(before, flags).filter(({ name }) => name && !named.has(name));
  return [line, ...kept.map(({ text }) => text)].join(" ");
}

const FLAG = /^-+[A-Za-z]/;
const COMMENT = "#";

function options(line, flags) {
  const found = [];
  for (const word of words(line)) {
    const typed = word.split("=")[0];
    if (word.startsWith(COMMENT)) found.push({ name: COMMENT, text: word });
    else if (FLAG.test(word)) found.push({ name: flags[typed] ?? flags[typed.replaceAll("_", "-")], text: word });
    else if (found.length) found[found.length - 1].text += ` ${word}`;
  }
  return found;
}
