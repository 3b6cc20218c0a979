// A text with Markdown as elements of the page. Every character of the text becomes part of a text node, never of markup.

import { coloured } from "./colours.js";
import { parse, plain } from "./markdown.js";
import { MATHML, formulaOf } from "./mathematics.js";

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children. Texts among the children become text nodes. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== undefined && value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/**
 * Text nodes of a text. Those parts that were drafted lie in spans of the class "drafted".
 * at: the offset in the source of each character, or the offset of the first.
 * marks: [from, to] offsets in the source of what was drafted, in order, not overlapping.
 */
export function texts(text, at, marks) {
  const place = typeof at === "number" ? (i) => at + i : (i) => at[i];
  const out = [];
  let from = 0;
  while (from < text.length) {
    const isDrafted = isMarked(marks, place(from));
    let to = from + 1;
    while (to < text.length && isMarked(marks, place(to)) === isDrafted) to += 1;
    const part = document.createTextNode(text.slice(from, to));
    out.push(isDrafted ? element("span", { class: "drafted" }, part) : part);
    from = to;
  }
  return out;
}

function isMarked(marks, offset) {
  let [low, high] = [0, marks.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (marks[middle][1] <= offset) low = middle + 1;
    else high = middle;
  }
  return low < marks.length && marks[low][0] <= offset;
}

/** Keeps the elements of a growing text: blocks that stay the same keep their elements, and with them selection and focus. */
export class Markdown {
  #container;
  #keys = [];

  constructor(container) {
    this.#container = container;
  }

  /** Show `source`, which begins with what was shown before. Returns the plain text of each block. */
  show(source, marks) {
    const blocks = parse(source);
    const keys = blocks.map((block) => `${block.type} ${block.from} ${block.to}`);
    let same = 0;
    while (same < keys.length && keys[same] === this.#keys[same]) same += 1;
    while (this.#container.childNodes.length > same) this.#container.lastChild.remove();
    for (const block of blocks.slice(same)) this.#container.append(blockElement(block, marks));
    this.#keys = keys;
    return blocks.map((block) => plain(block));
  }
}

function blockElement(block, marks) {
  const children = (nodes) => inlines(nodes, marks);
  switch (block.type) {
    case "heading": // below the heading of the turn
      return element(`h${Math.min(block.level + 2, 6)}`, {}, ...children(block.children));
    case "code":
      return code(block, marks);
    case "quote":
      return element("blockquote", {}, ...block.children.map((inner) => blockElement(inner, marks)));
    case "list":
      return list(block, marks);
    case "table":
      return table(block, marks);
    case "rule":
      return element("hr");
    case "math":
      return formula("p", block, marks);
    default:
      return element("p", {}, ...children(block.children));
  }
}

function list(block, marks) {
  const items = block.items.map((blocks) => {
    const inside = blocks.flatMap((inner) =>
      block.tight && inner.type === "paragraph" ? inlines(inner.children, marks) : [blockElement(inner, marks)],
    );
    return element("li", {}, ...inside);
  });
  if (!block.ordered) return element("ul", {}, ...items);
  return element("ol", block.start === 1 ? {} : { start: String(block.start) }, ...items);
}

function table(block, marks) {
  const cell = (name, nodes, column, more) => {
    const align = block.align[column];
    return element(name, { ...(align ? { class: align } : {}), ...more }, ...inlines(nodes, marks));
  };
  const head = element("tr", {}, ...block.head.map((nodes, i) => cell("th", nodes, i, { scope: "col" })));
  const rows = block.rows.map((row) => element("tr", {}, ...row.map((nodes, i) => cell("td", nodes, i, {}))));
  const made = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  return element("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, made);
}

function code(block, marks) {
  const language = block.info.split(/\s/)[0];
  const label = language ? `Code, ${language}` : "Code";
  return element(
    "div",
    { class: "code" },
    element("div", { class: "bar" }, element("span", {}, language), copyButton(() => block.text, "Copy code")),
    element(
      "pre",
      { tabindex: "0", role: "group", "aria-label": label },
      element("code", {}, ...colouredTexts(block.text, language, block.at, marks)),
    ),
  );
}

/** A formula, or its source where it cannot be read. One that was drafted whole has the tint. */
function formula(name, { text, at }, marks) {
  const source = texts(text, at, marks);
  const tree = formulaOf(text);
  if (!tree) return element(name, { class: "math" }, ...source);
  const isDrafted = source.length === 1 && source[0].className === "drafted";
  return element(name, { class: isDrafted ? "formula drafted" : "formula" }, mathElement(tree));
}

function mathElement(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const made = document.createElementNS(MATHML, node.name);
  for (const [key, value] of Object.entries(node.attributes)) made.setAttribute(key, value);
  Object.assign(made.style, node.style);
  made.append(...node.children.map(mathElement));
  return made;
}

/** Text nodes of code, its parts in spans of their colours. */
function colouredTexts(text, language, at, marks) {
  const out = [];
  let from = 0;
  const part = (begin, end) => texts(text.slice(begin, end), at.subarray(begin, end), marks);
  for (const [begin, end, name] of coloured(text, language)) {
    out.push(...part(from, begin), element("span", { class: name }, ...part(begin, end)));
    from = end;
  }
  return [...out, ...part(from, text.length)];
}

function inlines(nodes, marks) {
  return nodes.flatMap((node) => {
    switch (node.type) {
      case "text":
        return texts(node.text, node.at, marks);
      case "math":
        return [formula("span", node, marks)];
      case "codespan":
        return [element("code", {}, ...texts(node.text, node.at, marks))];
      case "break":
        return [element("br")];
      case "task":
        return [element("input", { type: "checkbox", disabled: true, checked: node.done, "aria-label": node.done ? "done" : "to do" }), " "];
      case "link": // markdown.js lets http and https through, nothing else
        return [
          element(
            "a",
            { href: node.href, target: "_blank", rel: "noopener noreferrer", title: node.href },
            ...inlines(node.children, marks),
          ),
        ];
      default: // em, strong, del
        return [element(node.type, {}, ...inlines(node.children, marks))];
    }
  });
}

/** A button that copies what `text` returns. It says whether that worked. */
export function copyButton(text, label, shown = "Copy") {
  const button = element("button", { type: "button", "aria-label": label, class: "small" }, shown);
  button.addEventListener("click", async () => {
    const done = await copied(text());
    button.textContent = done ? "Copied" : "Select the text and copy it by hand";
    button.setAttribute("aria-label", button.textContent);
    setTimeout(() => {
      button.textContent = shown;
      button.setAttribute("aria-label", label);
    }, 2500);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedTheOldWay(text); // a page of another machine without TLS has no clipboard
  }
}

function copiedTheOldWay(text) {
  const focused = document.activeElement;
  const area = element("textarea", { class: "aside", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  try {
    return document.execCommand("copy");
  } finally {
    area.remove();
    focused?.focus();
  }
}
