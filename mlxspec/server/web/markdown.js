// Markdown to a tree of plain objects. Knows no DOM, so that nothing of a model's text can become markup here.
//
// The subset: paragraphs, headings (#), fenced code, block quotes, lists, tables, rules; emphasis, strikethrough, code spans, links,
// bare http addresses, backslash escapes. HTML is text. Indented code, reference links and entities are not known. A line break is kept.
// A link must lead to http or https; any other link stays the text that it is. An image becomes a link.
//
// Blocks   {type, from, to, ...}: from and to are offsets in the source
//   paragraph, heading (level)   children
//   code                         info, text, at
//   quote                        children: blocks
//   list                         ordered, start, tight, items: [blocks]
//   table                        align: [""|"left"|"center"|"right"], head: [children], rows: [[children]]
//   rule
//   math                         text, at: TeX between \[ \] or $$, its marks included
// Inlines  text, codespan, math (text, at) | em, strong, del (children) | link (href, children) | break
//
// `at[i]` is the offset in the source of character i of `text`. Offsets and lengths count UTF-16 units.

const DEEPEST = 12; // levels of quotes and lists; what lies deeper is text
const LONGEST_ADDRESS = 2000;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const MARKER = /^( *)([-*+]|\d{1,9}[.)])(?=[ \t]|$)/;
const DELIMITER = /^:?-+:?$/;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const MATH = /^ {0,3}(\\\[|\$\$)/;
const CLOSES = { "\\[": "\\]", "\\(": "\\)", $$: "$$", $: "$" };
const ADDRESS = /https?:\/\/[^\s<>"`]+/y;
const ANGLE = /<(https?:\/\/[^\s<>]*)>/y;

/** The blocks of a text. */
export function parse(source) {
  const lines = [];
  let at = 0;
  for (const line of source.split("\n")) {
    lines.push({ text: line.endsWith("\r") ? line.slice(0, -1) : line, at });
    at += line.length + 1;
  }
  return blocks(lines, 0);
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

// ---- blocks. A line is {text, at}; `at` is the offset in the source of its first character.

function blocks(lines, depth) {
  const out = [];
  let i = 0;
  while (i < lines.length) {
    if (isBlank(lines[i])) {
      i += 1;
      continue;
    }
    const [block, next] = blockAt(lines, i, depth);
    const last = lines[next - 1];
    out.push({ ...block, from: lines[i].at, to: last.at + last.text.length });
    i = next;
  }
  return out;
}

/** The block that begins at line i, and the line behind it. */
function blockAt(lines, i, depth) {
  const text = lines[i].text;
  if (isFence(text)) return fence(lines, i);
  const heading = HEADING.exec(text);
  if (heading) return [{ type: "heading", level: heading[1].length, children: inline([title(lines[i], heading[0].length)]) }, i + 1];
  if (RULE.test(text)) return [{ type: "rule" }, i + 1];
  const formula = math(lines, i);
  if (formula) return formula;
  if (depth < DEEPEST) {
    if (QUOTE.test(text)) return quote(lines, i, depth);
    if (MARKER.test(text) && indent(text) < 4) return list(lines, i, depth);
  }
  if (isTable(lines, i)) return table(lines, i);
  return paragraph(lines, i, depth);
}

function isBlank(line) {
  return line.text.trim() === "";
}

/** Columns of white space at the beginning; a tab has four. */
function indent(text) {
  let columns = 0;
  for (const c of text) {
    if (c === " ") columns += 1;
    else if (c === "\t") columns += 4 - (columns % 4);
    else break;
  }
  return columns;
}

/** A line without white space of so many columns at its beginning. */
function stripped(line, columns) {
  let left = columns;
  let i = 0;
  while (left > 0 && (line.text[i] === " " || line.text[i] === "\t")) {
    left -= line.text[i] === " " ? 1 : 4;
    i += 1;
  }
  return slice(line, i);
}

function slice(line, from, to = line.text.length) {
  return { text: line.text.slice(from, to), at: line.at + from };
}

function trimmed(line) {
  const text = line.text.trimEnd();
  return slice(line, text.length - text.trimStart().length, text.length);
}

function isFence(text) {
  const found = FENCE.exec(text);
  return found !== null && !(found[1][0] === "`" && found[2].includes("`"));
}

function fence(lines, i) {
  const [, marks, info] = FENCE.exec(lines[i].text);
  const columns = indent(lines[i].text);
  const inside = [];
  let next = i + 1;
  for (; next < lines.length; next += 1) {
    const text = lines[next].text.trim();
    if (text.length >= marks.length && text === marks[0].repeat(text.length) && indent(lines[next].text) < 4) break;
    inside.push(stripped(lines[next], columns));
  }
  return [{ type: "code", info: info.trim(), ...joined(inside) }, Math.min(next + 1, lines.length)];
}

/** Lines from \[ or $$ to what closes it, or to the end of a text that still grows. Null where a blank line comes first. */
function math(lines, i) {
  const found = MATH.exec(lines[i].text);
  if (!found) return null;
  const close = CLOSES[found[1]];
  let from = found[0].length;
  for (let next = i; next < lines.length && !isBlank(lines[next]); next += 1) {
    const at = lines[next].text.indexOf(close, from);
    if (at >= 0 && lines[next].text.slice(at + 2).trim()) return null; // text behind it: a formula in a sentence
    if (at >= 0 || next === lines.length - 1) return [{ type: "math", ...joined(lines.slice(i, next + 1)) }, next + 1];
    from = 0;
  }
  return null;
}

/** A heading's text, without the marks that may close it. */
function title(line, from) {
  const rest = trimmed(slice(line, from));
  let end = rest.text.length;
  while (end > 0 && rest.text[end - 1] === "#") end -= 1;
  const closes = end < rest.text.length && (end === 0 || /[ \t]/.test(rest.text[end - 1]));
  return closes ? trimmed(slice(rest, 0, end)) : rest;
}

function quote(lines, i, depth) {
  const inside = [];
  let next = i;
  for (; next < lines.length; next += 1) {
    const found = QUOTE.exec(lines[next].text);
    if (!found) break;
    inside.push(slice(lines[next], found[0].length));
  }
  return [{ type: "quote", children: blocks(inside, depth + 1) }, next];
}

function list(lines, i, depth) {
  const kind = kindOf(lines[i].text);
  const start = Number.parseInt(lines[i].text, 10);
  const items = [];
  let tight = true;
  let next = i;
  while (next < lines.length) {
    const [, space, mark] = MARKER.exec(lines[next].text);
    const behind = space.length + mark.length;
    const gap = indent(lines[next].text.slice(behind));
    const offset = behind + (gap > 4 || lines[next].text.trim() === mark ? 1 : gap);
    const inside = [stripped(slice(lines[next], behind), offset - behind)];
    let blank = false;
    next += 1;
    for (; next < lines.length; next += 1) {
      const line = lines[next];
      if (isBlank(line)) {
        blank = true;
        inside.push(line);
        continue;
      }
      const columns = indent(line.text);
      // a list that is indented by two columns is taken for one of this item's, also below "1. "
      const isInside = columns >= offset || (columns >= space.length + 2 && MARKER.test(line.text));
      const goesOn = !blank && !begins(lines, next, depth) && !MARKER.test(line.text);
      if (!isInside && !goesOn) break;
      if (blank && isInside && columns < offset + 4) tight = tight && inside.every(isBlank);
      blank = false;
      inside.push(stripped(line, offset));
    }
    while (inside.length && isBlank(inside.at(-1))) inside.pop();
    items.push(blocks(inside, depth + 1));
    const isSame = next < lines.length && kindOf(lines[next].text) === kind && indent(lines[next].text) < 4;
    if (!isSame || RULE.test(lines[next].text)) break;
    if (blank) tight = false;
  }
  while (next > i + 1 && isBlank(lines[next - 1])) next -= 1;
  return [{ type: "list", ordered: Number.isFinite(start), start: Number.isFinite(start) ? start : 1, tight, items }, next];
}

/** What a list's marker ends with: items of one list have the same. Null where there is none. */
function kindOf(text) {
  const found = MARKER.exec(text);
  return found ? found[2].at(-1) : null;
}

function cells(line) {
  const row = trimmed(line);
  const out = [];
  let from = row.text.startsWith("|") ? 1 : 0;
  for (let i = from; i < row.text.length; i += 1) {
    if (row.text[i] === "\\") i += 1;
    else if (row.text[i] === "|") {
      out.push(trimmed(slice(row, from, i)));
      from = i + 1;
    }
  }
  if (from < row.text.length) out.push(trimmed(slice(row, from)));
  return out;
}

function isTable(lines, i) {
  if (i + 1 >= lines.length || !lines[i].text.includes("|")) return false;
  const marks = cells(lines[i + 1]);
  return marks.length > 0 && marks.every((c) => DELIMITER.test(c.text)) && cells(lines[i]).length === marks.length;
}

function table(lines, i) {
  const head = cells(lines[i]);
  const align = cells(lines[i + 1]).map(({ text }) => {
    const [left, right] = [text.startsWith(":"), text.endsWith(":")];
    return left && right ? "center" : right ? "right" : left ? "left" : "";
  });
  const rows = [];
  let next = i + 2;
  for (; next < lines.length && lines[next].text.includes("|"); next += 1) {
    const found = cells(lines[next]);
    rows.push(head.map((_, column) => (column < found.length ? inline([found[column]]) : [])));
  }
  return [{ type: "table", align, head: head.map((c) => inline([c])), rows }, next];
}

/** Whether line i begins a block that ends a paragraph. */
function begins(lines, i, depth) {
  const text = lines[i].text;
  if (isFence(text) || HEADING.test(text) || RULE.test(text) || isTable(lines, i)) return true;
  if (depth >= DEEPEST) return false;
  if (QUOTE.test(text)) return true;
  const found = MARKER.exec(text);
  if (!found || found[1].length > 3 || text.trim() === found[2]) return false;
  return !/\d/.test(found[2]) || Number.parseInt(found[2], 10) === 1;
}

function paragraph(lines, i, depth) {
  const inside = [];
  let next = i;
  for (; next < lines.length && !isBlank(lines[next]); next += 1) {
    if (next > i && begins(lines, next, depth)) break;
    inside.push(trimmed(lines[next]));
  }
  return [{ type: "paragraph", children: inline(inside) }, next];
}

/** {text, at} of lines with a line break between them. */
function joined(lines) {
  const text = lines.map((line) => line.text).join("\n");
  const at = new Int32Array(text.length);
  let place = 0;
  for (const line of lines) {
    for (let i = 0; i <= line.text.length && place < text.length; i += 1, place += 1) at[place] = line.at + i;
  }
  return { text, at };
}

// ---- inlines. An item is a text, a finished node, an opening bracket, or a run of equal marks (* _ ~), which emphasis() pairs.

function inline(lines) {
  return new Inline(joined(lines)).children();
}

class Inline {
  constructor({ text, at }) {
    this.text = text;
    this.at = at;
    this.place = 0;
    this.items = [];
    this.brackets = [];
    this.unclosed = new Set(); // lengths of runs of backticks that nothing closes
  }

  children() {
    while (this.place < this.text.length) this.step();
    return this.built(0);
  }

  step() {
    const c = this.text[this.place];
    if ((c === "\\" || c === "$") && this.math()) return;
    if (c === "\\") this.escape();
    else if (c === "$") this.literal(this.place + 1);
    else if (c === "`") this.codespan();
    else if (c === "*" || c === "_" || c === "~") this.run(c);
    else if (c === "[") this.bracket(false, 1);
    else if (c === "!" && this.text[this.place + 1] === "[") this.bracket(true, 2);
    else if (c === "]") this.close();
    else if (c === "\n") this.node({ type: "break" }, 1);
    else if (c === "<" || c === "h") this.address(c);
    else this.words();
  }

  words() {
    let end = this.place + 1;
    while (end < this.text.length && !"\\`*_~[]!\n<h$".includes(this.text[end])) end += 1;
    this.literal(end);
  }

  /** The text up to `end` as it is. */
  literal(end) {
    this.items.push({ kind: "text", from: this.place, to: end });
    this.place = end;
  }

  node(node, length) {
    this.items.push({ kind: "node", node });
    this.place += length;
  }

  escape() {
    const next = this.text[this.place + 1];
    if (next === "\n") this.place += 1;
    else if (next !== undefined && ESCAPABLE.test(next)) {
      this.place += 1;
      this.literal(this.place + 1);
    } else this.literal(this.place + 1);
  }

  /** TeX between \( \), \[ \], $$ or $, kept as it is. A single $ is money unless it hugs a text that ends in one. */
  math() {
    const open = ["\\(", "\\[", "$$", "$"].find((mark) => this.text.startsWith(mark, this.place));
    if (!open) return false;
    const close = CLOSES[open];
    const from = this.place + open.length;
    if (this.unclosed.has(open)) return false;
    let to = this.text.indexOf(close, from);
    if (open === "$") {
      const found = /\$(?![\s$])(?:[^$\n\\]|\\.)*?[^\s\\]\$(?!\d)/y;
      found.lastIndex = this.place;
      const formula = found.exec(this.text);
      to = formula ? found.lastIndex - 1 : -1;
    } else if (to < 0) this.unclosed.add(open);
    if (to <= from) return false;
    const end = to + close.length;
    this.node(this.part("math", this.place, end), end - this.place);
    return true;
  }

  codespan() {
    let end = this.place;
    while (this.text[end] === "`") end += 1;
    const length = end - this.place;
    const close = this.unclosed.has(length) ? -1 : closing(this.text, end, length);
    if (close < 0) {
      this.unclosed.add(length);
      this.literal(end);
      return;
    }
    let [from, to] = [end, close];
    const inside = this.text.slice(from, to);
    if (/^[ \n]/.test(inside) && /[ \n]$/.test(inside) && inside.trim() !== "") [from, to] = [from + 1, to - 1];
    this.node({ ...this.part("codespan", from, to) }, close + length - this.place);
  }

  part(type, from, to) {
    return { type, text: this.text.slice(from, to), at: this.at.subarray(from, to) };
  }

  run(mark) {
    let end = this.place;
    while (this.text[end] === mark) end += 1;
    const count = end - this.place;
    if (mark === "~" && count !== 2) {
      this.literal(end);
      return;
    }
    const before = this.place === 0 ? " " : characterBefore(this.text, this.place);
    const after = end >= this.text.length ? " " : String.fromCodePoint(this.text.codePointAt(end));
    const [spaceBefore, spaceAfter] = [/\s/u.test(before), /\s/u.test(after)];
    const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
    const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
    const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
    const inWord = mark === "_";
    this.items.push({
      kind: "run", mark, from: this.place, count, left: count, opens: [], closes: [],
      canOpen: left && (!inWord || !right || markBefore),
      canClose: right && (!inWord || !left || markAfter),
    });
    this.place = end;
  }

  bracket(isImage, length) {
    this.brackets.push({ item: this.items.length, isImage, isActive: true });
    this.literal(this.place + length);
  }

  /** A closing bracket: of a link if an address follows that may be visited. */
  close() {
    const open = this.brackets.pop();
    const target = open?.isActive ? destination(this.text, this.place + 1) : null;
    const href = target ? safeAddress(target.address) : null;
    if (href === null) {
      this.literal(this.place + 1);
      return;
    }
    const children = unlinked(this.built(open.item + 1));
    this.items.length = open.item;
    this.place = target.end;
    const shown = children.length ? children : [this.part("text", target.from, target.to)];
    this.items.push({ kind: "node", node: { type: "link", href, children: shown } });
    if (!open.isImage) for (const earlier of this.brackets) earlier.isActive = false;
  }

  /** An address that stands in the text by itself, or in angle brackets. */
  address(c) {
    const pattern = c === "<" ? ANGLE : ADDRESS;
    pattern.lastIndex = this.place;
    const found = c === "h" && this.place > 0 && /[\p{L}\p{N}]/u.test(this.text[this.place - 1]) ? null : pattern.exec(this.text);
    const shown = found && (c === "<" ? found[1] : withoutEnd(found[0]));
    const href = shown ? safeAddress(shown) : null;
    if (href === null) {
      this.words();
      return;
    }
    const from = this.place + (c === "<" ? 1 : 0);
    const child = this.part("text", from, from + shown.length);
    this.node({ type: "link", href, children: [child] }, c === "<" ? found[0].length : shown.length);
  }

  /** The tree of the items from number `first` on. */
  built(first) {
    const items = this.items.slice(first);
    emphasis(items.filter((item) => item.kind === "run"));
    const root = [];
    const open = [root];
    for (const item of items) {
      if (item.kind === "node") open.at(-1).push(item.node);
      else if (item.kind === "text") this.push(open.at(-1), item.from, item.to);
      else {
        for (let i = 0; i < item.closes.length; i += 1) open.pop();
        this.push(open.at(-1), item.from, item.from + item.left);
        for (const type of item.opens.reverse()) {
          const node = { type, children: [] };
          open.at(-1).push(node);
          open.push(node.children);
        }
      }
    }
    return root;
  }

  /** Add text, to the one before it if it continues that. */
  push(children, from, to) {
    if (from === to) return;
    const last = children.at(-1);
    const offset = last?.type === "text" ? last.at.byteOffset / 4 + last.at.length - this.at.byteOffset / 4 : -1;
    if (offset === from) children[children.length - 1] = this.part("text", from - last.text.length, to);
    else children.push(this.part("text", from, to));
  }
}

/** Pair runs of marks, the innermost first. Fills in what each run opens and closes, and how many marks are left as text. */
function emphasis(runs) {
  const openers = []; // numbers of runs that may still open something, in order
  const floor = new Map(); // by kind of closer: below this number there is no opener for it
  runs.forEach((closer, number) => {
    const kind = `${closer.mark}${closer.count % 3}${closer.canOpen}`;
    while (closer.canClose && closer.left > 0) {
      let k = openers.length - 1;
      const least = floor.get(kind) ?? -1;
      while (k >= 0 && openers[k] > least && !pairs(runs[openers[k]], closer)) k -= 1;
      if (k < 0 || openers[k] <= least) {
        floor.set(kind, number - 1);
        break;
      }
      const opener = runs[openers[k]];
      openers.length = k + 1; // what lies between cannot open any more
      const two = opener.left >= 2 && closer.left >= 2;
      const type = closer.mark === "~" ? "del" : two ? "strong" : "em";
      opener.opens.push(type);
      closer.closes.push(type);
      opener.left -= two ? 2 : 1;
      closer.left -= two ? 2 : 1;
      if (opener.left === 0) openers.pop();
    }
    if (closer.canOpen && closer.left > 0) openers.push(number);
  });
}

function pairs(opener, closer) {
  if (opener.mark !== closer.mark) return false;
  const both = opener.canClose || closer.canOpen;
  return !(both && (opener.count + closer.count) % 3 === 0 && (opener.count % 3 !== 0 || closer.count % 3 !== 0));
}

/** Where a run of exactly so many backticks begins, from `place` on; -1 where there is none. */
function closing(text, place, length) {
  for (let at = text.indexOf("`", place); at >= 0; ) {
    let end = at;
    while (text[end] === "`") end += 1;
    if (end - at === length) return at;
    at = text.indexOf("`", end);
  }
  return -1;
}

function characterBefore(text, place) {
  const low = text.charCodeAt(place - 1);
  return low >= 0xdc00 && low <= 0xdfff && place > 1 ? text.slice(place - 2, place) : text[place - 1];
}

/** `(address "title")` at `place`: the address, where it stands, and what is behind. Null where that is not there. */
function destination(text, place) {
  if (text[place] !== "(") return null;
  let from = place + 1;
  while (text[from] === " " || text[from] === "\n") from += 1;
  let to = from;
  let end;
  if (text[from] === "<") {
    from += 1;
    to = from;
    while (to < text.length && to - from <= LONGEST_ADDRESS && !"<>\n".includes(text[to])) to += 1;
    if (text[to] !== ">") return null;
    end = to + 1;
  } else {
    let depth = 0;
    for (; to < text.length && to - from <= LONGEST_ADDRESS && !" \t\n".includes(text[to]); to += 1) {
      if (text[to] === "(") depth += 1;
      else if (text[to] === ")" && depth-- === 0) break;
    }
    end = to;
  }
  const rest = /[ \n]*(?:"[^"\n]{0,500}"|'[^'\n]{0,500}')?[ \n]*\)/y;
  rest.lastIndex = end;
  return rest.test(text) && to > from ? { address: text.slice(from, to), from, to, end: rest.lastIndex } : null;
}

/** An address in running text without the punctuation of the sentence around it. */
function withoutEnd(address) {
  let end = address.length;
  let unopened = 0; // closing parentheses that nothing in the address opens
  for (const c of address) unopened += c === "(" ? -1 : c === ")" ? 1 : 0;
  for (; end > 0; end -= 1) {
    const c = address[end - 1];
    if (c === ")" && unopened > 0) unopened -= 1;
    else if (!".,:;!?*_~']|".includes(c)) break;
  }
  return address.slice(0, end);
}

/** Without links, which cannot lie in a link. */
function unlinked(children) {
  return children.flatMap((node) => {
    if (node.type === "link") return unlinked(node.children);
    return node.children ? [{ ...node, children: unlinked(node.children) }] : [node];
  });
}
