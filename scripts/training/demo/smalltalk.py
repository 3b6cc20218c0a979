"""Questions the model cannot answer, and the one honest sentence it gives instead; greetings; invented functions.

Knows wording only. Off-topic questions are templates filled from lists, so a held-out set (other wording, other topics)
tests whether refusing generalises.
"""

from __future__ import annotations

import random

from .chat import WORDINGS, ask

REFUSAL = "I cannot help with that: I am a tiny demo model that only describes common Python functions and makes small code edits."
ABOUT = (
    "I am the demo model of mlxspec, a very small model trained on Python's standard library: "
    "ask me what a common function does, or paste a function to rename, edit, explain or continue."
)
UNKNOWN = "I do not know that function: I only know common functions of Python's library."
_WORDS = WORDINGS["smalltalk"]
HELD_OUT: list[str] = _WORDS["held_out"]


def off_topic_question(rnd: random.Random) -> str:
    """A question outside what the model knows."""
    text = rnd.choice(_WORDS["templates"])
    for slot, words in _WORDS["slots"].items():
        while "{" + slot + "}" in text:
            text = text.replace("{" + slot + "}", rnd.choice(words).replace("_", " "), 1)
    while "{n}" in text:
        text = text.replace("{n}", str(rnd.randrange(1, 200)), 1)
    text = text.replace("{year}", str(rnd.randrange(1500, 2025)))
    text = text.replace("{pet}", rnd.choice(["dog", "cat", "band", "boat"]))
    text = (
        rnd.choice(_WORDS["leads"])
        + text
        + rnd.choice(["", "", "?", "?", "?", ".", "!", " please", ", please"])
    )
    return text[0].upper() + text[1:] if rnd.random() < 0.45 else text


def refusal_chat(rnd: random.Random) -> str:
    return ask(off_topic_question(rnd), REFUSAL)


def invented_chat(rnd: random.Random) -> str:
    """A function that does not exist, in a wording that is otherwise a good question."""
    name = rnd.choice(_WORDS["invented_stems"]) + rnd.choice(_WORDS["invented_tails"])
    name = rnd.choice(_WORDS["invented_modules"]) + name
    return ask(rnd.choice(_WORDS["invented_forms"]).format(name), UNKNOWN)


def greeting_chat(rnd: random.Random) -> str:
    if rnd.random() < 0.3:
        return ask(rnd.choice(_WORDS["thanks"]), "You are welcome.")
    text = rnd.choice(_WORDS["greetings"]) + rnd.choice(["", "", "?", ".", "!"])
    return ask(text[0].upper() + text[1:] if rnd.random() < 0.4 else text, ABOUT)
