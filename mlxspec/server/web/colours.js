// Parts of code for colours: comments, strings, numbers and words of the language. Knows no DOM; what is not known stays plain.

const C = "auto break case catch class const continue default delete do else enum export extends finally for from function if import in interface let match new null of package private protected public return static struct super switch this throw true false try type typeof var void while yield async await int long float double bool char string unsigned signed using namespace template typename virtual override final fn pub mut impl trait use mod self where func go defer range chan map nil val fun object when is as guard extension protocol";
const SHELL = "if then else elif fi for in do done case esac while until function return local export readonly set unset echo exit cd source true false";
const SQL = "select from where and or not in is null as join left right inner outer full on group by order having limit offset insert into values update set delete create table view index drop alter add primary key references distinct union all case when then else end exists between like with";
const PYTHON = "and as assert async await break class continue def del elif else except False finally for from global if import in is lambda match case None nonlocal not or pass raise return True try while with yield self";
const C_STRINGS = String.raw`"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|` + "`(?:[^`\\\\]|\\\\[^])*`?";
const KINDS = {
  c: [String.raw`//[^\n]*|/\*[^]*?(?:\*/|$)`, C_STRINGS, C],
  python: ["#[^\\n]*", String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?`, PYTHON],
  shell: ["(?<![^\\s])#[^\\n]*", String.raw`"(?:[^"\\]|\\[^])*"?|'[^']*'?`, SHELL],
  sql: ["--[^\\n]*", "'(?:[^']|'')*'?", SQL],
};
const NAMES = {
  c: "c cpp c++ cc h hpp cs csharp java js javascript jsx ts typescript tsx json go rust rs swift kotlin kt scala dart php metal glsl css",
  python: "python py python3 ruby rb toml yaml yml r julia jl",
  shell: "sh bash zsh shell console fish dockerfile make makefile",
  sql: "sql",
};
const LONGEST = 50_000; // characters that are coloured

/** [from, to, class] of the parts of a code that have a colour, in order. */
export function coloured(code, language) {
  const kind = Object.keys(NAMES).find((name) => NAMES[name].split(" ").includes(language.toLowerCase()));
  if (!kind || code.length > LONGEST) return [];
  const [comment, string, words] = KINDS[kind];
  const known = new Set(words.split(" "));
  const pattern = new RegExp(`(?<comment>${comment})|(?<string>${string})|(?<number>\\b\\d[\\w.]*)|(?<word>[A-Za-z_]\\w*)`, "g");
  const out = [];
  for (const found of code.matchAll(pattern)) {
    const [name] = Object.entries(found.groups).find(([, text]) => text !== undefined);
    const isWord = name === "word";
    if (!found[0] || (isWord && !known.has(kind === "sql" ? found[0].toLowerCase() : found[0]))) continue;
    out.push([found.index, found.index + found[0].length, `code-${name}`]);
  }
  return out;
}
