"""How a conversation on the page goes on: when its context is full, behind Continue, by its address, from the list and from the keys; and
what the empty page says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.server import chromium
from tests.server.page_window import IDLE, SLOW, ask, home_of, kept, last, sent
from tests.server.serving import QUESTION, Served

FORGETS = r"The first (?:(\d+) turns are|turn is) no longer shown to the model: the context is full\."


@pytest.fixture(scope="module")
def small(program: str) -> Iterator[chromium.Browser]:
    """The page of a server whose model has a short context."""
    with Served("--max-context", "256", "--draft", "off") as served, chromium.Browser(program) as browser:
        browser.open(home_of(served.port))
        browser.js(
            "localStorage.setItem('mlxspec.settings', JSON.stringify({temperature: 0, max_tokens: 12}))"
        )
        browser.reload()
        browser.until("document.querySelector('#model-facts').textContent")
        yield browser


def test_a_conversation_goes_on_when_its_context_is_full(small: chromium.Browser) -> None:
    """As chat does: the model is shown the last turns, and the page says from when on. So it is over a reload, too."""
    for number in range(7):
        ask(small, f"what does len do? {number} " + "red " * 20)
        assert last(small, ".answer"), last(small, ".end")
    told = [turn["notices"] for turn in kept(small) if turn["role"] == "assistant"]
    found = [re.search(FORGETS, " ".join(notices)) for notices in told]
    assert found[0] is None
    assert sum(match is not None for match in found) >= 1
    forgotten = [turn.get("forgotten", 0) for turn in kept(small) if turn["role"] == "assistant"]
    assert forgotten == sorted(forgotten)
    assert forgotten[-1] >= 2
    answers = [body for body in sent(small) if body.get("stream")]
    assert len(answers[-1]["messages"]) == 2 * 7 - 1 - forgotten[-1]
    assert answers[-1]["messages"][-1]["content"].startswith("what does len do? 6")
    small.reload()
    small.until("document.querySelectorAll('.turn').length === 14")
    small.until("document.querySelector('#model-facts').textContent")
    ask(small, "what does len do?")
    assert last(small, ".answer")
    assert kept(small)[-1]["forgotten"] >= forgotten[-1]


def test_one_message_that_is_too_long_is_still_an_error(small: chromium.Browser) -> None:
    small.click("#new")
    ask(small, "word " * 300)
    assert "maximum context length is 256 tokens" in last(small, ".end")


def test_continue_keeps_the_focus(browser: chromium.Browser) -> None:
    """What is typed behind it is not lost."""
    ask(browser, SLOW, wait=False)
    browser.until("document.querySelector('.turn.assistant .answer')?.textContent.length > 2")
    browser.press("Escape")
    browser.until(IDLE)
    browser.js("document.querySelector('[aria-label=\"Continue this answer\"]').focus()")
    browser.press("Enter")
    browser.until(f"!({IDLE})")
    assert browser.js("document.activeElement.id") == "stop"
    browser.press("Escape")
    browser.until(IDLE)
    browser.type("typed")
    assert browser.js("document.querySelector('#question').value") == "typed"


BROKEN = """
window.whole = window.fetch;
window.fetch = async (...asked) => {
  const answer = await window.whole(...asked);
  if (!String(asked[0]).endsWith("chat/completions")) return answer;
  const reader = answer.body.getReader();
  let left = 8;
  const pull = async (to) => {
    const { value } = await reader.read();
    if ((left -= 1)) to.enqueue(value);
    else to.error(new TypeError("network error"));
  };
  return new Response(new ReadableStream({ pull }));
};
"""


def test_an_answer_that_failed_can_be_continued(browser: chromium.Browser) -> None:
    browser.js(BROKEN)
    ask(browser, SLOW)
    assert "broke off" in last(browser, ".end")
    before = kept(browser)[1]["text"]
    assert before
    browser.js("window.fetch = window.whole")
    browser.until("document.querySelector('#banner').hidden")
    browser.click("[aria-label='Continue this answer']")
    browser.until(f"{IDLE} && !document.querySelector('.turn.assistant .end')")
    after = kept(browser)[1]["text"]
    assert after.startswith(before)
    assert len(after) > len(before)


def test_a_conversation_has_a_title_and_an_address(browser: chromium.Browser) -> None:
    assert browser.js("document.title") == "demo · mlxspec"
    ask(browser, QUESTION)
    kept(browser)
    assert browser.js("document.title") == f"{QUESTION} · mlxspec"
    first = browser.js("location.hash")
    assert re.fullmatch(r"#c=[0-9a-f]{24}", first)
    browser.click("#new")
    assert browser.js("location.hash") == ""
    ask(browser, "what is a list?")
    kept(browser)
    second = browser.js("location.hash")
    assert second not in ("", first)
    browser.js("history.back()")
    browser.until(f"document.title.startsWith({json.dumps(QUESTION)})")
    assert browser.js("location.hash") == first
    browser.js(f"location.hash = {json.dumps(second)}")
    browser.until("document.title.startsWith('what is a list?')")
    browser.js("sessionStorage.clear()")
    browser.reload()
    browser.until("document.title.startsWith('what is a list?')")
    browser.js("location.hash = '#c=0123'")
    browser.until(
        "document.querySelector('#notice-text').textContent === 'This conversation cannot be read.'"
    )


def test_the_empty_page_says_what_this_is(browser: chromium.Browser) -> None:
    """And that the demo is a toy, with the way to others."""
    said = str(browser.js("document.querySelector('#empty').innerText"))
    assert "text with this tint was drafted" in said
    assert "toy" in said
    tint = "getComputedStyle(document.querySelector('#empty .drafted')).backgroundColor"
    assert browser.js(tint) not in ("transparent", "rgba(0, 0, 0, 0)")
    browser.click("#toy-models")
    browser.until("document.querySelector('#models').open")
    browser.press("Escape")


def test_keys_that_reach_the_list_and_the_last_message(browser: chromium.Browser) -> None:
    ask(browser, QUESTION)
    kept(browser)
    browser.press("ArrowUp")
    assert browser.js("document.querySelector('#question').value") == QUESTION
    browser.js("document.querySelector('#question').value = ''")
    browser.js("document.querySelector('#open-list').click()")
    browser.until("document.querySelector('#conversations li')")
    browser.js("document.querySelector('#search').focus()")
    browser.press("ArrowDown")
    assert browser.js("document.activeElement.closest('#conversations li') !== null")
    browser.press("Escape")


def test_code_in_a_message_is_shown_as_code(browser: chromium.Browser) -> None:
    """Any other message stays as it was typed; the text that is sent is the same."""
    browser.js(
        "document.querySelector('#question').value = 'explain:\\n```python\\nx = 1\\n```\\n# not a heading <b>x</b>'"
    )
    browser.js("document.querySelector('#composer').requestSubmit()")
    browser.until(f"{IDLE} && document.querySelectorAll('.turn').length === 2")
    assert browser.js("document.querySelector('.turn.user pre code').textContent").strip() == "x = 1"
    assert not browser.js("document.querySelector('.turn.user b')")
    assert sent(browser)[-1]["messages"][0]["content"].startswith("explain:\n```python\n")
    ask(browser, "# 1 * 2 * 3")
    assert browser.js("[...document.querySelectorAll('.turn.user .text')].at(-1).innerHTML") == "# 1 * 2 * 3"
