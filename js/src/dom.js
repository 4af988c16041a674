// element("td", { class: "nbt-n", title: "…" }, "text", child): names that begin with "on" are listeners.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Of SVG.
export function drawing(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Only what differs is touched: a panel is brought up to date ten times a second, and somebody may be selecting in it.
export function text(node, words) {
  if (node.textContent !== words) node.textContent = words;
}

export function attribute(node, name, value) {
  if (value === null || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

// One by one, not as an attribute: the server's page allows no styles but those of its own files.
export function style(node, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value);
  }
}
