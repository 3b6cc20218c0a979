// Markdown to a tree of plain objects, read by marked's lexer; marked's renderer is not used. This file knows no DOM, so that nothing of a
// model's text can become markup here: HTML is text except for line breaks, a link leads to http or https or stays text, an image becomes a
// link. A line break is kept. Reference links are text, since a definition that arrives late would change what is shown already.
//
// Blocks   {type, from, to, ...}: from and to are offsets in the source, of blocks at the top
//   paragraph, heading (level)   children
//   code                         info, text, at
//   quote                        children: blocks
//   list                         ordered, start, tight, items: [blocks]
//   table                        align: [""|"left"|"center"|"right"], head: [children], rows: [[children]]
//   rule
//   math                         text, at: TeX between \[ \] or $$, its marks included
// Inlines  text, codespan, math (text, at) | em, strong, del (children) | link (href, children) | task (done) | break
//
// `at[i]` is the offset in the source of character i of `text`. Offsets and lengths count UTF-16 units.
import { Marked } from "./marked.js";

const LONGEST_ADDRESS = 2000;
const MOST_MARKS = 1000; // runs of * and _ in a paragraph; marked's time for emphasis grows with their square
const MATH_BLOCK = /^ {0,3}(?:\\\[[^]*?(?:\\\]|$)|\$\$[^]*?(?:\$\$|$))[ \t]*(?:\n|$)/;
const MATH = /^(?:\\\([^\n]*?\\\)|\\\[[^\n]*?\\\]|\$\$[^\n]+?\$\$|\$(?![\s$])(?:[^$\n\\]|\\[^\n])*?(?<!\s)\$(?!\d))/;
const BREAK = /^<br\s*\/?>$/i;
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const ORDERED = /^(\d{1,9}[.)] +)\S/;
const NESTED = /^( {2,})(?:[-*+] |\d{1,9}[.)] )/;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-zA-Z]{2,8}));/g;
const NAMED = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", ndash: "–", mdash: "—", hellip: "…", copy: "©", reg: "®", trade: "™",
  times: "×", divide: "÷", plusmn: "±", deg: "°", middot: "·", bull: "•", laquo: "«", raquo: "»", lsquo: "‘", rsquo: "’", ldquo: "“",
  rdquo: "”", larr: "←", uarr: "↑", rarr: "→", darr: "↓", harr: "↔", rArr: "⇒", le: "≤", ge: "≥", ne: "≠", euro: "€", sect: "§",
};

const found = (type, match) => (match ? { type, raw: match[0], text: match[0].trim() } : undefined);
const marked = new Marked({
  gfm: true,
  breaks: true,
  tokenizer: {
    def: () => undefined,
    del: (source) => (source.startsWith("~~") ? false : undefined), // one tilde means "about" far more often
    emStrong: (_, paragraph) => (hasManyMarks(paragraph) ? undefined : false),
  },
  extensions: [
    { name: "math", level: "block", start: (text) => text.match(/^ {0,3}(?:\\\[|\$\$)/m)?.index, tokenizer: (text) => found("math", MATH_BLOCK.exec(text)) },
    { name: "formula", level: "inline", start: (text) => text.match(/\\[([]|\$/)?.index, tokenizer: (text) => found("formula", MATH.exec(text)) },
  ],
});

let counted = { text: "", isMany: false };

function hasManyMarks(text) {
  if (counted.text !== text) counted = { text, isMany: (text.match(/[*_]+/g) ?? []).length > MOST_MARKS };
  return counted.isMany;
}

/** The blocks of a text. */
export function parse(source) {
  const { text, at } = prepared(source);
  let tokens;
  try {
    tokens = marked.lexer(text);
  } catch {
    tokens = [{ type: "text", raw: text }]; // nested too deeply for marked
  }
  const out = [];
  let begin = 0;
  for (const token of tokens) {
    const end = begin + token.raw.length;
    const made = block(token, at.subarray(begin, end));
    const shown = token.type === "code" ? token.raw : token.raw.replace(/\n+$/, "");
    if (made) out.push({ ...made, from: at[begin], to: at[begin + shown.length - 1] + 1 });
    begin = end;
  }
  return out;
}

/**
 * The text that marked reads, and the offset in the source of each of its characters: without carriage returns, and with blanks before a
 * list that lies in an item of an ordered one and is indented by two blanks alone, as models write it.
 */
function prepared(source) {
  const pieces = [];
  const at = new Uint32Array(4 * source.length + 1);
  let [size, offset, fence, width, shift] = [0, 0, "", 0, 0];
  const put = (text, from, isCopied) => {
    pieces.push(text);
    for (let i = 0; i < text.length; i += 1) at[size++] = isCopied ? from + i : from;
  };
  for (const whole of source.split("\n")) {
    const line = whole.endsWith("\r") ? whole.slice(0, -1) : whole;
    const mark = FENCE.exec(line)?.[1];
    const indent = line.search(/\S|$/);
    if (mark && (!fence || (mark[0] === fence[0] && mark.length >= fence.length))) fence = fence ? "" : mark;
    else if (!fence && line.trim()) {
      const ordered = ORDERED.exec(line);
      if (ordered) [width, shift] = [ordered[1].length, 0];
      else if (indent < 2) [width, shift] = [0, 0];
      else if (width && !shift && NESTED.test(line) && indent < width) shift = Math.min(width - indent, 2);
    }
    if (shift && line.trim() && indent >= 2) put(" ".repeat(shift), offset, false);
    put(line.replaceAll("\r", " "), offset, true);
    offset += whole.length;
    put("\n", offset, false);
    offset += 1;
  }
  pieces.pop();
  return { text: pieces.join(""), at: at.subarray(0, size - 1) };
}

/**
 * Where the lines of `inner` stand in `raw`, from its line `skip` on. marked takes marks and indentation away in front of a line and behind
 * it, writes blanks for a tab, and may add an empty line. Returns the offsets in the source of the characters of `inner`.
 */
function aligned(inner, raw, at, skip = 0) {
  const out = new Uint32Array(inner.length);
  const outer = raw.split("\n");
  const begins = [0];
  for (const line of outer) begins.push(begins.at(-1) + line.length + 1);
  let number = skip;
  let i = 0;
  const put = (place) => {
    out[i++] = at[Math.max(0, Math.min(place, at.length - 1))] ?? 0;
  };
  for (const [k, line] of inner.split("\n").entries()) {
    if (k) put(begins[number] - 1);
    const words = line.trim();
    let here = number;
    if (words) while (here < outer.length && !outer[here].includes(words)) here += 1;
    else if (/[^\s>]/.test(outer[here] ?? "")) here = outer.length; // a line that marked added
    if (here < outer.length) number = here;
    const whole = outer[number] ?? "";
    const part = at.subarray(begins[number], begins[number] + whole.length + 1);
    out.set(followed(line, whole, part, whole.endsWith(line) ? whole.length - line.length : Math.max(0, whole.lastIndexOf(words))).at, i);
    i += line.length;
    if (here < outer.length) number += 1;
  }
  return out;
}

/**
 * As `aligned`, within a line, from a place on. Characters of `raw` that are not in `inner`, such as backslashes, are passed over; blanks
 * that are not in `raw` stand at the blank next to them.
 */
function followed(inner, raw, at, from = 0) {
  const out = new Uint32Array(inner.length);
  const isBlank = (character) => /\s/.test(character ?? "");
  const exact = raw.indexOf(inner, from);
  const lead = exact < 0 ? inner.length - inner.trimStart().length : 0;
  let place = exact < 0 ? Math.max(from, raw.indexOf(inner.trim()[0], from)) : exact;
  const put = (i, there) => {
    out[i] = at[Math.max(0, Math.min(there, at.length - 1))] ?? 0;
  };
  for (let i = 0; i < lead; i += 1) put(i, place - 1);
  for (let i = lead; i < inner.length; i += 1) {
    if (!isBlank(inner[i])) while (place < raw.length && raw[place] !== inner[i]) place += 1;
    const isThere = place < raw.length && (raw[place] === inner[i] || isBlank(raw[place]));
    put(i, isThere ? place++ : place - 1);
  }
  return { at: out, end: place };
}

function block(token, at) {
  const { raw } = token;
  const inner = () => aligned(token.text, raw, at);
  switch (token.type) {
    case "heading":
      return { type: "heading", level: token.depth, children: inlines(token.tokens, inner()) };
    case "code": {
      const isFenced = FENCE.test(raw);
      const text = isFenced ? token.text : token.text.trimEnd();
      return { type: "code", info: token.lang ?? "", text, at: aligned(text, raw, at, isFenced ? 1 : 0) };
    }
    case "blockquote":
      return { type: "quote", children: blocks(token.tokens, token.text, inner()) };
    case "list": {
      let begin = 0;
      const items = token.items.map((item) => {
        const part = at.subarray(begin, (begin += item.raw.length));
        const text = item.tokens.map((found) => found.raw).join("");
        return blocks(item.tokens, text, aligned(text, item.raw, part));
      });
      return { type: "list", ordered: token.ordered, start: token.ordered ? Number(token.start) : 1, tight: !token.loose, items };
    }
    case "table": {
      const starts = [0];
      for (const line of raw.split("\n")) starts.push(starts.at(-1) + line.length + 1);
      const row = (cells, number) => {
        const line = raw.slice(starts[number], starts[number + 1]);
        const places = at.subarray(starts[number]);
        let end = 0;
        return cells.map((cell) => {
          const taken = followed(cell.text, line, places, end);
          end = cell.text ? taken.end : end;
          return inlines(cell.tokens, taken.at);
        });
      };
      const align = token.align.map((side) => side ?? "");
      return { type: "table", align, head: row(token.header, 0), rows: token.rows.map((cells, i) => row(cells, i + 2)) };
    }
    case "hr":
      return { type: "rule" };
    case "math":
      return { type: "math", text: token.text, at: at.subarray(raw.search(/\S/)).subarray(0, token.text.length) };
    case "space":
      return null;
    case "html": {
      const text = raw.trimEnd();
      return { type: "paragraph", children: inlines(marked.Lexer.lexInline(text, marked.defaults), at) };
    }
    default: {
      // paragraph, text
      const children = token.tokens ? inlines(token.tokens, inner()) : lines(raw, at);
      while (children.at(-1)?.type === "break") children.pop();
      return { type: "paragraph", children };
    }
  }
}

/** The blocks of `text`. The box of a task belongs to the text that follows it. */
function blocks(tokens, text, at) {
  const out = [];
  let begin = 0;
  let task = [];
  for (const token of tokens) {
    begin = Math.max(begin, text.indexOf(token.raw, begin));
    const part = at.subarray(begin, (begin += token.raw.length));
    if (token.type === "checkbox") task = inline(token, part);
    else {
      const made = block(token, part);
      if (made?.type === "paragraph") made.children.unshift(...task.splice(0));
      if (made) out.push(made);
    }
  }
  return out;
}

function inlines(tokens, at) {
  const out = [];
  let begin = 0;
  for (const token of tokens) {
    for (const node of inline(token, at.subarray(begin, (begin += token.raw.length)))) {
      const last = out.at(-1);
      if (node.type !== "text" || last?.type !== "text") out.push(node);
      else out[out.length - 1] = { type: "text", text: last.text + node.text, at: Uint32Array.from([...last.at, ...node.at]) };
    }
  }
  return out;
}

function inline(token, at) {
  const { raw } = token;
  const inside = (from) => followed(token.tokens.map((inner) => inner.raw).join(""), raw, at, from).at;
  switch (token.type) {
    case "em":
    case "strong":
    case "del":
      return [{ type: token.type, children: inlines(token.tokens, inside((raw.length - token.text.length) >> 1)) }];
    case "codespan":
      return [{ type: "codespan", text: token.text, at: followed(token.text, raw, at, raw.search(/[^`]|$/)).at }];
    case "formula":
      return [{ type: "math", text: raw, at }];
    case "br":
      return [{ type: "break" }];
    case "checkbox":
      return [{ type: "task", done: token.checked }];
    case "escape":
      return [{ type: "text", text: token.text, at: at.subarray(1) }];
    case "html":
      return BREAK.test(raw) ? [{ type: "break" }] : lines(raw, at);
    case "image":
    case "link": {
      const href = safeAddress(token.href);
      if (href === null) return lines(raw, at);
      const children = token.type === "link" ? inlines(token.tokens, inside(raw[0] === "[" ? 1 : 0)) : lines(token.text, followed(token.text, raw, at, 2).at);
      return [{ type: "link", href, children }];
    }
    default: // text
      return token.tokens ? inlines(token.tokens, at) : lines(raw, at);
  }
}

/** A text as it is, with a break between its lines and characters in place of entities. */
function lines(text, at) {
  const out = [];
  let begin = 0;
  for (const line of text.split("\n")) {
    if (begin) out.push({ type: "break" });
    if (line) out.push(spelled(line, at.subarray(begin, begin + line.length)));
    begin += line.length + 1;
  }
  return out;
}

function spelled(text, at) {
  let made = "";
  const places = [];
  let begin = 0;
  const copy = (end) => {
    made += text.slice(begin, end);
    for (; begin < end; begin += 1) places.push(at[begin]);
  };
  for (const match of text.matchAll(ENTITY)) {
    const code = match[1] ? Number(match[1]) : parseInt(match[2] ?? "", 16);
    const character = match[3] ? NAMED[match[3]] : code > 0 && code < 0x110000 ? String.fromCodePoint(code) : undefined;
    if (character === undefined) continue;
    copy(match.index);
    made += character;
    for (let i = 0; i < character.length; i += 1) places.push(at[begin]);
    begin = match.index + match[0].length;
  }
  if (!begin) return { type: "text", text, at };
  copy(text.length);
  return { type: "text", text: made, at: Uint32Array.from(places) };
}

/** The text of a tree as a person would read it aloud. */
export function plain(node) {
  if (Array.isArray(node)) return node.map(plain).join("");
  switch (node.type) {
    case "text":
    case "codespan":
      return node.text;
    case "code":
      return node.text + "\n";
    case "math":
      return node.text + (node.from === undefined ? "" : "\n");
    case "break":
      return "\n";
    case "rule":
      return "";
    case "task":
      return node.done ? "done: " : "to do: ";
    case "list":
      return node.items.map((item) => plain(item)).join("");
    case "table":
      return [node.head, ...node.rows].map((row) => row.map(plain).join(", ")).join("\n") + "\n";
    case "paragraph":
    case "heading":
      return plain(node.children) + "\n";
    default:
      return plain(node.children);
  }
}

/** The address if it leads to http or https, else null. */
export function safeAddress(text) {
  if (text.length > LONGEST_ADDRESS || !/^https?:\/\//i.test(text)) return null;
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}
