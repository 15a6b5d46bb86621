// Elements as plain descriptions, and how they get into the document: only what differs is touched, so that focus,
// selection, scrolling and open details stay as they are. Text arrives as text nodes, whatever it says: names and paths
// come from pages of runs, and those from anywhere.

/** Describes an element. `props` are attributes; `style` is an object, and `key` says which one of a list it is. */
export function h(tag, props, ...children) {
  return {tag, props: props || {}, children};
}

/** Makes the children of `parent` what `children` describes: elements, text, lists of them; not null and false. */
export function patch(parent, ...children) {
  const wanted = children
    .flat(Infinity)
    .filter(child => child !== null && child !== undefined && child !== false);
  const keys = new Set(wanted.map(child => child.props?.key).filter(key => key !== undefined));
  const kept = new Map();
  for (const node of [...parent.childNodes])
    if (node.key !== undefined)
      if (keys.has(node.key)) kept.set(node.key, node);
      else node.remove();
  let at = parent.firstChild;
  for (const child of wanted) {
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

function style(node, wanted, before) {
  for (const name of Object.keys(before)) if (!(name in wanted)) node.style.removeProperty(name);
  for (const [name, value] of Object.entries(wanted))
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

/** A state: a shape and a word, never a colour alone. */
export const marked = ([word, shape], className = "state") =>
  h("span", {class: `${className} ${shape}`}, h("i", {class: "mark"}), word);
