"""Writes a Lark grammar without recursion as one regular expression: inside a JSON string only such an expression can be held.

Rules, terminals, literals, expressions, groups, options, repetitions, and `%import common.NAME` are read. A grammar with recursion, flags,
`%ignore` or templates has no such form here.
"""

from __future__ import annotations

import ast
import re

from mlxspec.errors import GrammarError

_DEFINITION = re.compile(r"^[?!]?(\w+)(?:\.-?\d+)?[ \t]*:", re.M)
_IMPORT = re.compile(
    r"^%import[ \t]+common(?:\.(\w+)(?:[ \t]*->[ \t]*(\w+))?|[ \t]*\(([\w, \t]+)\))[ \t]*$", re.M
)
_TOKEN = re.compile(
    r"""\s+|//[^\n]*|->\s*\w+|(?P<text>"(?:[^"\\\n]|\\.)*")(?!i)|(?P<regex>/(?:[^/\\\n]|\\.)+/)(?![a-z])"""
    r"""|(?P<times>\{\d+(?:,\d*)?\}|~\s*\d+(?:\s*\.\.\s*\d+)?)|(?P<name>\w+)|(?P<mark>[|()\[\]?*+])"""
)
_COMMON = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+", "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+", "LETTER": "[A-Za-z]", "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*", "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
}  # fmt: skip
_NO_FORM = "the grammar has no form as one regular expression"
_LONGEST = 10_000  # characters


def regex_of(lark: str) -> str:
    """Return a regular expression, without anchors, for the texts that a Lark grammar allows. Raises GrammarError for a grammar that
    cannot be written as one."""
    rules = {own or name: _COMMON[name] for name, own in _imported(lark)}
    bodies = _IMPORT.sub("", lark)
    if re.search(r"^\s*%", bodies, re.M):
        raise GrammarError(_NO_FORM)
    found = list(_DEFINITION.finditer(bodies))
    ends = [f.start() for f in found[1:]] + [len(bodies)]
    texts = {f[1]: bodies[f.end() : end] for f, end in zip(found, ends, strict=True)}
    return _Inlined(texts, rules).rule("start")


def _imported(lark: str) -> list[tuple[str, str]]:
    """Return (name, alias) of each terminal that the grammar imports from `common`; the alias is empty where there is none. Raises
    GrammarError for an unknown name."""
    named = [
        (name.strip(), own)
        for one, own, several in _IMPORT.findall(lark)
        for name in (one or several).split(",")
    ]
    if any(name not in _COMMON for name, _ in named):
        raise GrammarError(_NO_FORM)
    return named


class _Inlined:
    """A translator of rules to regular expressions, in which each rule's name is replaced by its expression. texts: the body of each
    rule, by name. known: the expressions that exist already, by name."""

    def __init__(self, texts: dict[str, str], known: dict[str, str]) -> None:
        self._texts, self._known, self._open = texts, known, list[str]()

    def rule(self, name: str) -> str:
        if name not in self._known:
            if name in self._open or name not in self._texts:
                raise GrammarError(_NO_FORM)
            self._open.append(name)
            tokens = self._tokens(self._texts[name])
            found = self._choice(tokens)
            if tokens or len(found) > _LONGEST:
                raise GrammarError(_NO_FORM)
            self._open.pop()
            self._known[name] = f"(?:{found})"
        return self._known[name]

    @staticmethod
    def _tokens(text: str) -> list[tuple[str, str]]:
        """Return the tokens of a rule's body as (kind, text), in reverse order. Raises GrammarError for a token that is not supported."""
        found, at = list[tuple[str, str]](), 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            if token is None:
                raise GrammarError(_NO_FORM)
            if token.lastgroup is not None:
                found.append((token.lastgroup, token[0]))
            at = token.end()
        return found[::-1]

    def _choice(self, tokens: list[tuple[str, str]]) -> str:
        options = [""]
        while tokens and tokens[-1][1] not in (")", "]"):
            kind, text = tokens.pop()
            if (kind, text) == ("mark", "|"):
                options.append("")
            else:
                options[-1] += self._item(kind, text, tokens)
        return "|".join(options)

    def _item(self, kind: str, text: str, tokens: list[tuple[str, str]]) -> str:
        if kind == "text":
            found = f"(?:{''.join(map(_escaped, ast.literal_eval(text)))})"
        elif kind == "regex":
            found = f"(?:{text[1:-1]})".replace(r"\/", "/")
        elif kind == "name":
            found = self.rule(text)
        elif text in ("(", "["):
            found = f"(?:{self._choice(tokens)})" + ("?" if text == "[" else "")
            if not tokens or tokens.pop()[1] != {"(": ")", "[": "]"}[text]:
                raise GrammarError(_NO_FORM)
        else:
            raise GrammarError(_NO_FORM)
        while tokens and (tokens[-1][0] == "times" or tokens[-1][1] in ("?", "*", "+")):
            times = tokens.pop()[1]
            if times[0] == "~":
                least, _, most = times[1:].replace(" ", "").partition("..")
                times = f"{{{least},{most}}}" if most else f"{{{least}}}"
            found = f"(?:{found}){times}"
        return found


def _escaped(char: str) -> str:
    return {"\n": r"\n", "\t": r"\t", "\r": r"\r"}.get(char) or (re.escape(char) if ord(char) < 128 else char)
