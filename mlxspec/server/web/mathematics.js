// TeX as a tree of MathML, read by temml; its writer is not used, so that only elements and attributes named here reach the page. Knows no DOM.
//
// A node is a string or {name, attributes, style, children}.
import temml from "./temml.js";

export const MATHML = "http://www.w3.org/1998/Math/MathML";
const LONGEST = 5000; // characters of a formula; a longer one stays as it was written
const MARKS = /^(?:\\\(|\\\[|\$\$?)|(?:\\\)|\\\]|\$\$?)$/g;
const ELEMENT = /^(?:math|m[a-z]{1,15})$/;
const ATTRIBUTES = new Set(
  "accent accentunder columnalign columnlines columnspacing columnspan depth dir displaystyle fence form frame height largeop linethickness lspace mathvariant maxsize minsize movablelimits notation rowlines rowspacing rowspan rspace scriptlevel separator stretchy symmetric voffset width".split(" "),
);
const STYLE = /^(?:padding|margin|border)[A-Za-z]*$|^(?:color|backgroundColor|textAlign|verticalAlign|width|minWidth|height|fontWeight|fontStyle|fontSize)$/;

/** The tree of a formula with its marks, which say whether it stands alone; null for one that cannot be read, as it has not come to its end. */
export function formulaOf(text) {
  if (text.length > LONGEST) return null;
  const isAlone = text.startsWith("\\[") || text.startsWith("$$");
  try {
    const tree = temml.__renderToMathMLTree(text.replace(MARKS, ""), { displayMode: isAlone, throwOnError: true, trust: false });
    const [made] = nodes(tree);
    return { ...made, attributes: { ...made.attributes, display: isAlone ? "block" : "inline" } };
  } catch {
    return null;
  }
}

/** What temml has made, without what is not known here. */
function nodes(node) {
  const children = () => node.children.flatMap(nodes);
  if (node.type === undefined) return typeof node.text === "string" ? [node.text] : children();
  if (!ELEMENT.test(node.type)) return children();
  const kept = (given, knows) => Object.fromEntries(Object.entries(given ?? {}).filter(([name, value]) => value !== undefined && knows(name, String(value))));
  const attributes = kept(node.attributes, (name) => ATTRIBUTES.has(name));
  const style = kept(node.style, (name, value) => STYLE.test(name) && !value.includes("("));
  return [{ name: node.type, attributes, style, children: children() }];
}
