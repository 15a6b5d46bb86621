// Element descriptions, and their application to the document: only differences are changed, so focus, selection,
// scrolling and open details stay as they are. Text always becomes text nodes: names and paths come from status files,
// which are untrusted.

/** Describes an element. `props` are attributes; `style` is an object, and `key` says which one of a list it is. */
export function h(tag, props, ...children) {
  return {tag, props: props || {}, children};
}

/** Makes the children of `parent` what `children` describes: elements, text, lists of them; not null and false. */
export function patch(parent, ...children) {
  const described = children
    .flat(Infinity)
    .filter(child => child !== null && child !== undefined && child !== false);
  const keys = new Set(described.map(child => child.props?.key).filter(key => key !== undefined));
  const kept = new Map();
  for (const node of [...parent.childNodes])
    if (node.key !== undefined)
      if (keys.has(node.key)) kept.set(node.key, node);
      else node.remove();
  let at = parent.firstChild;
  for (const child of described) {
    const node = typeof child === "object" ? element(child, at, kept) : text(String(child), at);
    if (node === at) at = at.nextSibling;
    else parent.insertBefore(node, at);
    if (typeof child === "object") {
      assign(node, child.props);
      patch(node, child.children);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function text(said, at) {
  if (at?.nodeType !== Node.TEXT_NODE) return document.createTextNode(said);
  if (at.data !== said) at.data = said;
  return at;
}

function element({tag, props}, at, kept) {
  const found = props.key !== undefined ? kept.get(props.key) : at?.key === undefined ? at : null;
  if (found?.localName === tag) return found;
  const made = document.createElement(tag);
  if (props.key !== undefined) made.key = props.key;
  return made;
}

function assign(node, props) {
  const before = node.given || {};
  for (const name of Object.keys(before)) if (!(name in props)) node.removeAttribute(name);
  for (const [name, value] of Object.entries(props)) {
    if (name === "key") continue;
    if (name === "style") style(node, value, before.style || {});
    else if (before[name] === value) continue;
    else if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.given = props;
}

function style(node, properties, before) {
  for (const name of Object.keys(before)) if (!(name in properties)) node.style.removeProperty(name);
  for (const [name, value] of Object.entries(properties))
    if (before[name] !== value) node.style.setProperty(name, value);
}

/** A table that scrolls by itself where it is too wide: `head` are texts, and each of `bodies` a list of rows. */
export function table(label, look, head, ...bodies) {
  return h(
    "div",
    {class: "wide", role: "group", "aria-label": label, tabindex: "0"},
    h(
      "table",
      {class: look},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          head.map(cell => h("th", {scope: "col"}, cell)),
        ),
      ),
      bodies.map(rows => h("tbody", {}, rows)),
    ),
  );
}

/** A state as a shape and a word: color alone is not accessible. */
export const marked = ([word, shape], className = "state") =>
  h("span", {class: `${className} ${shape}`}, h("i", {class: "mark"}), word);
