// The parts of the page that need no browser: node page_checks.mjs NUMBER_OF_RANDOM_TEXTS, beside a copy of the page's files.
import assert from "node:assert/strict";
import { ApiError, GoneError, Received, events, units } from "./web/api.js";
import { fenced, textOf } from "./web/attachments.js";
import { Conversation, areTurns } from "./web/conversation.js";
import { asJson, asMarkdown, fileName } from "./web/export.js";
import { coloured } from "./web/colours.js";
import { parse, plain, safeAddress } from "./web/markdown.js";
import { Settings, numbersOf } from "./web/settings.js";
import { formulaOf } from "./web/mathematics.js";
import { contextOf, countsOf, curl, differenceOf, draftingOf, samenessOf, endOf, firstDifference, isFull, proofOf, ratioOf, sdk, sizeOf } from "./web/words.js";

/** A tree without positions, short enough to write down. */
function short(node) {
  if (Array.isArray(node)) return node.map(short);
  switch (node.type) {
    case "text":
      return node.text;
    case "codespan":
      return { code: node.text };
    case "code":
      return { fence: node.info, text: node.text };
    case "list":
      return { [(node.ordered ? `ol${node.start}` : "ul") + (node.tight ? "" : " loose")]: node.items.map(short) };
    case "table":
      return { table: [node.head, ...node.rows].map(short), align: node.align };
    case "paragraph":
      return { p: short(node.children) };
    case "heading":
      return { [`h${node.level}`]: short(node.children) };
    case "task":
      return { task: node.done };
    case "link":
      return { a: short(node.children), href: node.href };
    default:
      return node.children ? { [node.type]: short(node.children) } : node.type;
  }
}

const p = (...children) => ({ p: children });
const CASES = [
  ["a *b **c*** d", [p("a ", { em: ["b ", { strong: ["c"] }] }, " d")]],
  ["***both*** __two__ snake_case_name", [p({ em: [{ strong: ["both"] }] }, " ", { strong: ["two"] }, " snake_case_name")]],
  ["2 * 3 * 4, *open **and half*", [p("2 * 3 * 4, *open *", { em: ["and half"] })]],
  ["~~gone~~ ~not~", [p({ del: ["gone"] }, " ~not~")]],
  ["# One\n###### Six ##\n####### seven", [{ h1: ["One"] }, { h6: ["Six"] }, p("####### seven")]],
  ["one\ntwo\\\nthree  \nfour", [p("one", "break", "two", "break", "three", "break", "four")]],
  ["```python\nx = 1\n\n  y\n```\nafter", [{ fence: "python", text: "x = 1\n\n  y" }, p("after")]],
  ["~~~\n```\nnever closed", [{ fence: "", text: "```\nnever closed" }]],
  ["`` a`b `` and `open", [p({ code: "a`b" }, " and `open")]],
  ["- a\n- b\n  - c\n- d", [{ ul: [[p("a")], [p("b"), { ul: [[p("c")]] }], [p("d")]] }]],
  ["1. a\n  - b\n2. c\n\nend", [{ ol1: [[p("a"), { ul: [[p("b")]] }], [p("c")]] }, p("end")]],
  ["3) a\n\n   b\n4) c", [{ "ol3 loose": [[p("a"), p("b")], [p("c")]] }]],
  ["year\n1984. was", [p("year", "break", "1984. was")]],
  ["- x\n```\ncode\n```", [{ ul: [[p("x")]] }, { fence: "", text: "code" }]],
  ["* * *\n- - -\n___", ["rule", "rule", "rule"]],
  ["> a\n> - b\n\nc", [{ quote: [p("a"), { ul: [[p("b")]] }] }, p("c")]],
  ["| a | b |\n|:--|--:|\n| 1 | x\\|y |\n| 2 |\n\nend", [{ table: [[["a"], ["b"]], [["1"], ["x|y"]], [["2"], []]], align: ["left", "right"] }, p("end")]],
  ["a | b\nno table", [p("a | b", "break", "no table")]],
  ["[a *b*](https://c.d/e_(f) \"title\")", [p({ a: ["a ", { em: ["b"] }], href: "https://c.d/e_(f)" })]],
  ["see https://a.b/c. (http://d.e/f)", [p("see ", { a: ["https://a.b/c"], href: "https://a.b/c" }, ". (", { a: ["http://d.e/f"], href: "http://d.e/f" }, ")")]],
  ["![a picture](https://a.b/c.png)", [p({ a: ["a picture"], href: "https://a.b/c.png" })]],
  ["[x](javascript:alert(1)) [y](data:text/html,z) [z](/metrics)", [p("[x](javascript:alert(1)) [y](data:text/html,z) [z](/metrics)")]],
  ["[a](java\nscript:alert(1)) <javascript:alert(1)>", [p("[a](java", "break", "script:alert(1)) <javascript:alert(1)>")]],
  ["<script>alert(1)</script>\n<img src=x onerror=alert(1)>", [p("<script>alert(1)</script>"), p("<img src=x onerror=alert(1)>")]],
  ["&lt;b&gt; &amp;nope; &#8594;&#x2192; \\* \\a", [p("<b> &nope; →→ * \\a")]],
  ["a<br>b<BR/>c", [p("a", "break", "b", "break", "c")]],
  ["| a |\n|-|\n| b<br>c |", [{ table: [[["a"]], [["b", "break", "c"]]], align: [""] }]],
  ["- [x] a\n- [ ] b", [{ ul: [[p({ task: true }, "a")], [p({ task: false }, "b")]] }]],
  ["10. a\n  - b\n    - c\n  - d\n11. e", [{ ol10: [[p("a"), { ul: [[p("b"), { ul: [[p("c")]] }], [p("d")]] }], [p("e")]] }]],
  ["a\n\n    x = 1\n      y\n\nb", [p("a"), { fence: "", text: "x = 1\n  y" }, p("b")]],
  ["[x]: http://a.b\n\n[x]", [p("[x]: ", { a: ["http://a.b"], href: "http://a.b/" }), p("[x]")]],
  ["from ~5 to ~10, x_1 and y_1", [p("from ~5 to ~10, x_1 and y_1")]],
  ["", []],
];
for (const [source, wanted] of CASES) assert.deepEqual(short(parse(source)), wanted, JSON.stringify(source));

for (const address of ["javascript:alert(1)", "JaVaScRiPt:x", " https://a.b", "data:,x", "vbscript:x", "file:///etc/passwd", "//a.b", "https:", "http://", "blob:https://a.b/c"])
  assert.equal(safeAddress(address), null, address);
assert.equal(safeAddress("HTTPS://a.b/ü"), "https://a.b/%C3%BC");

const places = { all: 0, wrong: 0 };

/** Every text of a tree stands at its place in the source, and every link leads to http or https. */
function check(node, source) {
  if (Array.isArray(node)) return node.forEach((inner) => check(inner, source));
  if (node.text !== undefined) {
    assert.equal(node.text.length, node.at.length);
    for (let i = 0; i < node.text.length; i += 1) {
      const there = source[node.at[i]];
      // a blank may stand for a tab or a line break, and a character for an entity
      places.all += 1;
      if (there !== node.text[i] && there !== "&" && !(/\s/.test(node.text[i]) && /\s/.test(there))) places.wrong += 1;
    }
  }
  if (node.type === "link") assert.match(node.href, /^https?:\/\//);
  for (const inner of [node.children, node.items, node.head, node.rows]) if (inner) check(inner, source);
  return undefined;
}

// Random texts: places hold, and a block that has the same key as before has the same content, so that its elements may stay.
let state = 1;
const random = (below) => {
  state = (Math.imul(state, 1103515245) + 12345) >>> 0;
  return (state >>> 8) % below;
};
const WORDS = ["a", "b c", " ", "  ", "\n", "\n\n", "*", "**", "_", "`", "```\n", "# ", "- ", "1. ", "> ", "|", "|-|-|\n", "[", "](", ")", "http://x.y", "<", ">", "!", "\\", "~~", "<br>", "&amp;", "    x", "- [ ] ", "[a]: b\n", "  - ", "é", "\u{1f600}", "\t", "\r\n", "---", "javascript:"];
const rounds = Number(process.argv[2]);
for (let round = 0; round < rounds; round += 1) {
  let source = "";
  let before = new Map();
  for (let step = 0; step < 1 + random(14); step += 1) {
    for (let i = 0; i < 1 + random(4); i += 1) source += WORDS[random(WORDS.length)];
    const blocks = parse(source);
    check(blocks, source);
    const now = new Map();
    let shared = true;
    for (const [number, block] of blocks.entries()) {
      const key = `${number} ${block.type} ${block.from} ${block.to}`;
      const content = JSON.stringify(short(block));
      shared &&= before.has(key);
      if (shared) assert.equal(content, before.get(key), JSON.stringify(source));
      now.set(key, content);
      assert.equal(typeof plain(block), "string");
    }
    before = now;
  }
}
// marked joins the lines of a few broken quotes and lists otherwise than they were written; drafted text is then tinted a little beside.
assert.ok(places.all > 50 * rounds && places.wrong * 2000 <= places.all, JSON.stringify(places));

// Texts made to take long
for (const [piece, times] of [["*a ", 9000], ["[", 9000], ["**a*", 9000], ["a_*b", 9000], ["[a](", 900], ["> ", 9000], ["- ", 9000], ["`a``b", 5000], ["https://a)", 5000], ["|a", 9000], ["![a](http://b ", 900], ["~~a~~ ", 9000], ["<a ", 9000], ["&amp;", 9000], ["1. a\n  - b\n", 3000], ["|a|\n|-|\n", 3000]])
  parse(piece.repeat(times));

// ---- the stream

const chunk = (delta, more = {}) => ({ choices: [{ delta, finish_reason: null }], ...more });
const CHUNKS = [
  chunk({ role: "assistant", content: "" }),
  chunk({}, { prompt_progress: { processed: 3, total: 9 } }),
  chunk({ reasoning_content: "hm" }, { mlxspec: { drafted_chars: 1, drafter: "mtp" } }),
  chunk({ content: "\u{1f600}ab" }, { mlxspec: { drafted_chars: 2, drafter: "mtp" } }),
  chunk({ content: "cd" }, { mlxspec: { drafted_chars: 1, drafter: "mtp" } }),
  chunk({ content: "ef" }, { mlxspec: { drafted_chars: 2, drafter: "mtp" }, timings: { predicted_n: 4, predicted_per_second: 8 } }),
  { choices: [{ delta: {}, finish_reason: "length" }], mlxspec: { notices: ["n"] } },
  { choices: [], usage: { prompt_tokens: 9, completion_tokens: 5 } },
];
const wire = new TextEncoder().encode(`: hello\n\n${CHUNKS.map((c) => `data: ${JSON.stringify(c)}\n\n`).join("")}data: [DONE]\n\n`);

function streamOf(bytes, size) {
  let at = 0;
  return new ReadableStream({
    pull(control) {
      if (at >= bytes.length) control.close();
      else control.enqueue(bytes.slice(at, (at += size)));
    },
  });
}

for (const size of [1, 2, 7, 10_000]) {
  const received = new Received();
  for await (const found of events(streamOf(wire, size))) received.take(found);
  assert.equal(received.text, "\u{1f600}abcdef");
  assert.deepEqual(received.marks, [[0, 3], [4, 5], [6, 8]]);
  assert.equal(received.thought, "hm");
  assert.deepEqual(received.thoughtMarks, [[0, 1]]);
  assert.equal(received.reason, "length");
  assert.deepEqual(received.notices, ["n"]);
  assert.deepEqual(received.receipts, []);
  assert.deepEqual(received.progress, { processed: 3, total: 9 });
  assert.equal(countsOf(received).tokens, 5);
}
const all = async (stream) => {
  for await (const found of events(stream)) assert.ok(found);
};
await assert.rejects(all(streamOf(wire.slice(0, -10), 50)), GoneError);
await assert.rejects(all(streamOf(new TextEncoder().encode('data: {"error": {"message": "no", "code": "c"}}\n\n'), 9)), (error) => error instanceof ApiError && error.message === "no" && error.code === "c");
assert.equal(units("\u{1f600}é", 1), 2);
assert.equal(units("ab", 9), 2);

// ---- the conversation and the settings, with a storage of our own

class Storage {
  items = new Map();
  getItem = (key) => this.items.get(key) ?? null;
  setItem = (key, value) => {
    this.items.set(key, value);
  };
}
const answer = (text, more = {}) => ({ role: "assistant", text, thought: "", marks: [], thoughtMarks: [], notices: [], end: "stop", asked: {}, ...more });
const kept = new Conversation();
for (const turn of [{ role: "user", text: "q1" }, answer("a1", { thought: "t" }), { role: "user", text: "q2" }, answer("", { end: "failed" }), { role: "user", text: "q3" }]) kept.add(turn);
assert.deepEqual(kept.messages(0, 5, "s"), [
  { role: "system", content: "s" }, { role: "user", content: "q1" }, { role: "assistant", content: "a1", reasoning_content: "t" }, { role: "user", content: "q3" },
]);
assert.deepEqual(kept.messages(0, 1, ""), [{ role: "user", content: "q1" }]);
assert.deepEqual(kept.messages(4, 5, ""), [{ role: "user", content: "q3" }]);
assert.equal(kept.forgotten, 0);
assert.deepEqual([...kept.changed], kept.turns);
kept.changed.clear();
const restore = kept.cut(2);
assert.deepEqual([kept.turns.length, kept.changed.size], [2, 0]);
restore();
assert.deepEqual([kept.turns.length, kept.changed.size], [5, 5]);
const { id } = kept;
Object.assign(kept, { version: 3, changed: new Set() }).detach();
assert.deepEqual([kept.id === id, kept.version, kept.changed.size], [false, 0, 5]);
assert.ok(areTurns(kept.turns));
for (const broken of [[null], [answer("x")], [{ role: "user", text: 5 }], [{ role: "user", text: "q" }, { role: "assistant", text: "a" }], [{ role: "user", text: "q", images: ["http://a.b/c.png"] }]])
  assert.ok(!areTurns(broken), JSON.stringify(broken));
const titled = (text, more = {}) => new Conversation({ turns: [{ role: "user", text, ...more }] }).title;
assert.deepEqual([titled(" a\n\n b "), titled("", { images: ["data:image/png;base64,"] }), titled("x".repeat(90)).length], ["a b", "Image", 80]);

// ---- files, from the page and into it

const IMAGE = "data:image/png;base64,AA==";
const exported = new Conversation({ time: 0, turns: [{ role: "user", text: "q\n", images: [IMAGE] }, answer("a", { thought: "t\n\nu", model: "demo" })] });
assert.equal(asMarkdown(exported), `# q\n\n## You\n\n![Image 1](${IMAGE})\n\nq\n\n## demo\n\n> t\n> \n> u\n\na\n`);
const { turns: whole } = exported;
whole.push({ role: "user", text: "no answer" }, answer("", { end: "failed" }), { role: "user", text: "r" }, answer("b", { model: "other", asked: { system: "s" } }));
const messages = [
  { role: "user", content: "q\n" }, { role: "assistant", content: "a", reasoning_content: "t\n\nu" }, { role: "user", content: "r" }, { role: "assistant", content: "b" },
];
assert.deepEqual(JSON.parse(asJson(exported)), {
  format: "mlxspec-conversation", version: 1, model: "other", system: "s", messages, title: "q", changed: "1970-01-01T00:00:00.000Z", turns: whole,
});
assert.deepEqual([fileName("what/../ is é?", "md"), fileName("???", "json")], ["what-is-é.md", "conversation.json"]);
assert.equal(fenced("a.py", "x = 1"), "a.py:\n```py\nx = 1\n```\n");
assert.equal(fenced("note", "````\n"), "note:\n`````\n````\n`````\n");
for (const [bytes, text] of [["é", "é"], [new Uint8Array([0x89, 0x50]), null], ["a\0", null], ["x".repeat(1_000_001), null]])
  assert.equal(await textOf(new Blob([bytes])), text);

const own = new Settings(new Storage());
assert.deepEqual(own.fields(7), { seed: 7 });
own.change({ temperature: 0, draft: "off", thinking: "off", max_tokens: 5, seed: 0 });
assert.deepEqual(own.fields(7), { temperature: 0, draft: "off", enable_thinking: false, max_tokens: 5, seed: 0 });
own.change({ prove: true });
assert.equal(own.fields(7).prove, true);
assert.deepEqual(numbersOf({ temperature: " 0.5 ", max_tokens: "", seed: "3" }), { values: { temperature: 0.5, max_tokens: null, seed: 3 } });
for (const [field, text] of [["temperature", "-1"], ["temperature", "x"], ["max_tokens", "0"], ["max_tokens", "1.5"], ["seed", "1e99"]])
  assert.equal(numbersOf({ temperature: "", max_tokens: "", seed: "", [field]: text }).field, field);

// ---- formulas
const written = (node) => (typeof node === "string" ? node : `${node.name}(${node.children.map(written).join(" ")})`);
for (const [tex, shown] of [
  ["\\(\\frac{a}{b}\\)", "math(mfrac(mi(a) mi(b)))"],
  ["$$\\int_0^1 x^2\\,dx$$", "math(mrow(msubsup(mo(∫) mn(0) mn(1)) msup(mi(x) mn(2)) mspace() mi(d) mi(x)))"],
  ["$x$", "math(mi(x))"],
]) assert.equal(written(formulaOf(tex)), shown);
assert.match(written(formulaOf("\\[\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}\\]")), /mtable\(mtr\(mtd\(mn\(1\)\) mtd/);
assert.equal(formulaOf("$$x$$").attributes.display, "block");
assert.equal(formulaOf("\\(x\\)").attributes.display, "inline");
for (const tex of ["\\(\\frac{a}", "$\\nosuch$", "\\(\\href{javascript:alert(1)}{x}\\)", "\\(\\includegraphics{http://a.b/c.png}\\)", `$${"x".repeat(6000)}$`]) assert.equal(formulaOf(tex), null, tex);
const everything = (node) => (typeof node === "string" ? [] : [node, ...node.children.flatMap(everything)]);
for (const tex of ["\\(\\style{position:fixed}{x}\\)", "\\(\\class{a}{x} \\id{b}{y}\\)", "\\(\\color{red}\\boxed{y} \\cancel{z} \\phase{1}\\)"]) {
  for (const { name, attributes, style } of everything(formulaOf(tex) ?? "")) {
    assert.match(name, /^m[a-z]+$/);
    assert.doesNotMatch(JSON.stringify([attributes, style]), /href|position|url|"id"|"class"|"on/);
  }
}

// ---- mathematics and colours

const math = (text) => parse(text).flatMap((block) => (block.type === "math" ? [block.text] : (block.children ?? []).filter((node) => node.type === "math").map((node) => node.text)));
for (const [text, found] of [
  ["inline \\(e^{i\\pi} + 1 = 0\\) here", ["\\(e^{i\\pi} + 1 = 0\\)"]],
  ["\\[\\int_0^1 x\\,dx\\]", ["\\[\\int_0^1 x\\,dx\\]"]],
  ["$a_1 * b * c_1$ and $$\\{x\\}$$", ["$a_1 * b * c_1$", "$$\\{x\\}$$"]],
  ["\\[\n- x\n+ y\n\\]", ["\\[\n- x\n+ y\n\\]"]],
  ["$$\nx_1 * y_1\n$$", ["$$\nx_1 * y_1\n$$"]],
  ["$$\nx * y", ["$$\nx * y"]], // it still grows
  ["it costs $5 or $6, and \\(this is text", []],
  ["\\$5 and *b*", []],
  ["`$x$` stays code", []],
]) {
  assert.deepEqual(math(text), found, text);
  assert.equal(plain(parse(text)).includes(found[0] ?? ""), true);
}
assert.equal(plain(parse("it costs $5 or $6")), "it costs $5 or $6\n");
assert.equal(plain(parse("\\$5")), "$5\n");
const parts = (code, language) => coloured(code, language).map(([from, to, name]) => [code.slice(from, to), name.slice(5)]);
assert.deepEqual(parts('def f(x):  # "no"\n    return "a\\"b" + 12', "python"), [["def", "word"], ['# "no"', "comment"], ["return", "word"], ['"a\\"b"', "string"], ["12", "number"]]);
assert.deepEqual(parts("let a = `x`; // end", "JS"), [["let", "word"], ["`x`", "string"], ["// end", "comment"]]);
assert.deepEqual(parts("select 1 -- one", "sql"), [["select", "word"], ["1", "number"], ["-- one", "comment"]]);
assert.deepEqual(parts("def f", ""), []);
assert.deepEqual(parts('"""not closed', "py"), [['"""not closed', "string"]]);
for (const code of ['"'.repeat(40_000), "'a".repeat(20_000), "/*".repeat(20_000), "#".repeat(40_000), "$a ".repeat(10_000)]) {
  coloured(code, "python");
  coloured(code, "c");
  parse(code);
}

// ---- sentences

const counts = (speed, more = {}) => ({ tokens: 56, speed, drafted: 45, accepted: 41, prompt: 20, cached: 0, ...more });
assert.equal(sizeOf(counts(83.14)), "56 tokens · 83.1 tokens/s");
assert.equal(sizeOf(counts(0, { tokens: 1 })), "1 token");
assert.equal(draftingOf(counts(1), {}), "41 of 45 drafted tokens accepted (91 %)");
assert.equal(samenessOf(counts(1, { exact: true })), "same text, proved");
assert.equal(samenessOf(counts(1, { exact: true, drafted: 0 })), "");
assert.equal(samenessOf(counts(1, { exactWidth: 3 })), "same bits in rounds to 3 tokens");
assert.equal(samenessOf(counts(1, { exactWidth: 1 })), "");
assert.equal(draftingOf(counts(1), { draft: "off" }), "without drafting");
assert.equal(draftingOf(counts(1, { drafted: 0 }), {}), "nothing was drafted");
assert.equal(proofOf({ equal: true, num_tokens: 1, difference: null }), "Proved: decoding without drafts gives the same 1 token.");
assert.equal(
  proofOf({ equal: false, num_tokens: 9, difference: { place: 3 } }),
  "Not proved: decoding without drafts gives another text from token 4 on.",
);
const words = (text, thought = "") => ({ text, thought });
assert.equal(differenceOf(words("x", "hm"), words("x", "hm")), "");
for (const [one, other, where] of [[words("abc"), words("abd"), "The texts differ from character 3 on"], [words("abc"), words("ab"), "The texts differ from character 3 on"], [words("a", "hm"), words("a", "ho"), "The thinking differs from character 2 on"]]) {
  assert.equal(differenceOf(one, other), `${where}, so no speeds are compared.`);
}
assert.equal(ratioOf({ refusal: "nothing was drafted", words: "", num_pairs: 0 }), "The texts are equal. No speeds are compared, as nothing was drafted.");
assert.equal(ratioOf({ refusal: "", words: "2.00 times as fast (1.90 to 2.10)", num_pairs: 3 }), "The texts are equal. In 3 pairs of runs it was 2.00 times as fast (1.90 to 2.10).");
assert.equal(firstDifference("ab", "ab"), null);
assert.ok(isFull({ prompt: 60, tokens: 4 }, 64));
assert.ok(!isFull({ prompt: 60, tokens: 4 }, null));
assert.match(endOf(answer("x", { end: "context" }), 2048), /context of 2,048 tokens is full/);
assert.match(endOf(answer("x", { end: "length", asked: { max_tokens: 5 } }), 64), /limit of 5 tokens/);
assert.equal(endOf(answer("x"), 64), "");
assert.match(endOf(answer(""), 64), /empty/);
assert.equal(contextOf({ prompt: 20, tokens: 5 }, 2048), "25 of 2,048 tokens of context used");
console.log(JSON.stringify({ curl: [curl("B", false), curl("B", true)], sdk: [sdk("B", false), sdk("B", true)] }));
