"""The page at / as a person uses it, in a real headless Chromium: keys, mouse, what is shown, and no complaint of the browser."""

from __future__ import annotations

import base64
import io
import json
import re

import pytest
from PIL import Image, ImageDraw

from tests.server import chromium
from tests.server.page_window import HOSTILE, IDLE, SLOW, ask, keep, kept, last, sent
from tests.server.serving import QUESTION, Served
from tests.server.test_page import contrast

pytestmark = pytest.mark.slow


def test_send_and_stream(browser: chromium.Browser, served: Served) -> None:
    assert browser.js("document.querySelectorAll('#examples button').length") == 3
    assert "demo" in str(browser.js("document.title"))
    browser.js(
        "window.lengths = new Set(); new MutationObserver(() => window.lengths.add(document.querySelector('.answer')?.textContent.length))"
        ".observe(document.querySelector('#turns'), {subtree: true, childList: true, characterData: true})"
    )
    ask(browser, SLOW)
    assert browser.js("window.lengths.size") > 4
    (body,) = sent(browser)
    wanted = served.chat(SLOW, seed=body["seed"])
    turn = kept(browser)[1]
    assert turn["text"] == wanted["choices"][0]["message"]["content"]
    assert last(browser).split() == turn["text"].replace("`", "").split()
    timings = wanted["timings"]
    said = last(browser, ".counts")
    assert "tokens/s" in said
    assert f"{timings['draft_n_accepted']} of {timings['draft_n']} drafted tokens accepted" in said
    # as much is tinted as the stream said was drafted
    chunks, _, _ = served.stream("/v1/chat/completions", body)
    drafted = sum(c.get("mlxspec", {}).get("drafted_chars", 0) for c in chunks)
    assert drafted == sum(to - start for start, to in turn["marks"])
    tinted = browser.js(
        "[...document.querySelectorAll('.answer .drafted')].map((e) => e.textContent).join('')"
    )
    assert len(tinted) > 0.7 * drafted > 0
    assert "tokens of context used" in str(browser.js("document.querySelector('#context').textContent"))


def test_stop(browser: chromium.Browser, served: Served) -> None:
    for way in ("key", "button"):
        ask(browser, SLOW, wait=False)
        browser.until("[...document.querySelectorAll('.answer')].at(-1).textContent.length > 4")
        if way == "key":
            browser.press("Escape")
        else:
            browser.click("#stop")
        browser.until(IDLE)
        assert last(browser, ".end") == "You stopped this answer."
        assert kept(browser)[-1]["end"] == "stopped"
    whole = served.chat(SLOW)["choices"][0]["message"]["content"]
    assert 0 < len(kept(browser)[1]["text"]) < len(whole)
    assert browser.js("document.activeElement.id") == "question"
    assert served.settle()["mlxspec_rows_running"] == 0


def test_regenerate_and_undo(browser: chromium.Browser) -> None:
    browser.js("localStorage.setItem('mlxspec.settings', JSON.stringify({temperature: 3, max_tokens: 30}))")
    browser.reload()
    ask(browser, QUESTION)
    first = kept(browser)
    browser.click(".turn.assistant .tools button:nth-of-type(2)")
    browser.until("document.querySelector('#notice-text').textContent.includes('replaced')")
    second = kept(browser)
    assert len(second) == 2
    assert second[1]["text"] != first[1]["text"]
    assert second[1]["asked"]["seed"] != first[1]["asked"]["seed"]
    browser.click("#undo")
    assert kept(browser) == first
    browser.js("localStorage.setItem('mlxspec.settings', JSON.stringify({temperature: 0}))")
    browser.reload()
    browser.until("document.querySelector('.turn.assistant .tools button:nth-of-type(2)')")
    browser.click(".turn.assistant .tools button:nth-of-type(2)")
    browser.until(
        "document.querySelector('#notice-text').textContent && document.querySelector('#stop').hidden"
    )
    browser.click(".turn.assistant .tools button:nth-of-type(2)")
    browser.until(
        "document.querySelector('#notice-text').textContent.startsWith('The same answer came again.')"
    )


def test_edit_a_turn(browser: chromium.Browser) -> None:
    ask(browser, QUESTION)
    ask(browser, "what does sorted do?")
    before = kept(browser)
    assert len(before) == 4
    browser.click("[aria-label='Edit message 1']")
    browser.until("document.activeElement.matches('.edit textarea')")
    browser.press("Escape")
    browser.until("!document.querySelector('.edit')")
    assert browser.js("document.activeElement.getAttribute('aria-label')") == "Edit message 1"
    assert kept(browser) == before
    browser.press("Enter")
    browser.until("document.activeElement.matches('.edit textarea')")
    browser.js("document.activeElement.select()")
    browser.type("what does json.dumps do?")
    browser.press("Enter")
    browser.until("document.querySelectorAll('.turn').length === 2 && document.querySelector('#stop').hidden")
    after = kept(browser)
    assert after[0]["text"] == "what does json.dumps do?"
    assert [m["content"] for m in sent(browser)[-1]["messages"]] == ["what does json.dumps do?"]
    assert after[1]["text"] != before[1]["text"]
    browser.click("#undo")
    assert kept(browser) == before
    assert browser.js("document.querySelectorAll('.turn').length") == 4


def test_settings(browser: chromium.Browser) -> None:
    browser.click("#open-settings")
    browser.js("document.querySelector('#temperature').focus()")
    browser.type("-1")
    browser.press("Enter")
    assert "Temperature must be a number from 0" in str(
        browser.js("document.querySelector('#settings-error').textContent")
    )
    assert (
        browser.js("document.activeElement.id + document.activeElement.getAttribute('aria-invalid')")
        == "temperaturetrue"
    )
    browser.js("document.activeElement.select()")
    browser.type("0.5")
    for name, text in (("system", "Answer shortly."), ("max-tokens", "5"), ("seed", "7")):
        browser.js(f"document.querySelector('#{name}').focus()")
        browser.type(text)
    browser.js(
        "document.querySelector('#draft').value = 'off'; document.querySelector('#thinking').value = 'off'"
    )
    browser.click("#settings button[type=submit]")
    browser.until("!document.querySelector('#settings').open")
    ask(browser, QUESTION)
    (body,) = sent(browser)
    wanted = {
        "temperature": 0.5,
        "max_tokens": 5,
        "seed": 7,
        "draft": "off",
        "enable_thinking": False,
        "model": "demo",
    }
    assert {name: body[name] for name in wanted} == wanted
    assert body["messages"][0] == {"role": "system", "content": "Answer shortly."}
    assert (
        last(browser, ".end") == "The answer ends here at the limit of 5 tokens that is set in the settings."
    )
    assert "without drafting" in last(browser, ".counts")
    assert browser.js("document.querySelectorAll('.answer .drafted').length") == 0
    browser.reload()
    browser.click("#open-settings")
    assert (
        browser.js("['temperature', 'seed', 'system'].map((id) => document.getElementById(id).value).join()")
        == "0.5,7,Answer shortly."
    )
    browser.press("Escape")
    browser.until("!document.querySelector('#settings').open")


def test_reload_keeps_the_conversation(browser: chromium.Browser) -> None:
    ask(browser, QUESTION)
    shown = browser.js("document.querySelector('#turns').innerText")
    turns = kept(browser)
    browser.reload()
    browser.until("document.querySelector('.turn.assistant .tools')")
    assert browser.js("document.querySelector('#turns').innerText") == shown
    assert kept(browser) == turns
    browser.js("document.querySelector('#question').focus()")
    browser.type("half a mess")
    browser.reload()
    assert browser.js("document.querySelector('#question').value") == "half a mess"
    browser.js("document.querySelector('#question').select()")
    ask(browser, SLOW, wait=False)
    browser.until("[...document.querySelectorAll('.answer')].at(-1).textContent.length > 4")
    while not kept(browser)[3]["text"]:
        pass
    browser.reload()
    browser.until("document.querySelectorAll('.turn.assistant .tools').length === 2")
    assert last(browser, ".end").startswith("This answer has no end yet: its page was left")
    begun = kept(browser)[3]["text"]
    assert begun
    browser.click("[aria-label='Continue this answer']")
    browser.until(f"{IDLE} && !document.querySelector('.turn:last-child .end')")
    whole = kept(browser)[3]
    assert whole["text"].startswith(begun)
    assert len(whole["text"]) > len(begun)
    assert whole["end"] == "stop"
    assert sent(browser)[-1]["messages"][-1] == {"role": "assistant", "content": begun}
    ask(browser, "what does sorted do?")
    roles = [message["role"] for message in sent(browser)[-1]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]


def test_mathematics_and_colours(browser: chromium.Browser) -> None:
    """Formulas keep their backslashes, parts of code have colours, and neither becomes markup."""
    code = 'def f(x):  # <b>half</b>\n    return "a" * 2'
    text = f"Euler: \\(e^{{i\\pi}} + 1 = 0\\)\n\n\\[\\int_0^1 x\\,dx\\]\n\n```python\n{code}\n```"
    more = {
        "thought": "",
        "marks": [[0, 5]],
        "thoughtMarks": [],
        "notices": [],
        "end": "stop",
        "asked": {},
        "model": "demo",
        "counts": None,
    }
    turns = [{"role": "user", "text": "maths"}, {"role": "assistant", "text": text, **more}]
    keep(browser, "maths", {"title": "maths"}, turns)
    browser.js("sessionStorage.setItem('mlxspec.open', 'maths')")
    browser.reload()
    browser.until("document.querySelectorAll('.answer .formula math').length === 2")
    assert browser.js("[...document.querySelectorAll('math')].map((e) => e.getAttribute('display'))") == [
        "inline",
        "block",
    ]
    assert browser.js("document.querySelector('.answer msup').children.length") == 2
    parts = browser.js(
        "[...document.querySelectorAll('pre [class^=code-]')].map((e) => [e.className, e.textContent])"
    )
    assert parts == [
        ["code-word", "def"],
        ["code-comment", "# <b>half</b>"],
        ["code-word", "return"],
        ["code-string", '"a"'],
        ["code-number", "2"],
    ]
    assert browser.js("document.querySelector('pre').textContent").rstrip() == code
    assert not browser.js("document.querySelector('.answer b')")


def test_settings_show_what_the_server_does_by_default(browser: chromium.Browser) -> None:
    ask(browser, QUESTION)
    browser.click("#open-settings")
    shown = browser.js(
        "['temperature', 'max-tokens', 'seed'].map((id) => document.getElementById(id).placeholder)"
    )
    assert shown == ["0", "", ""]
    browser.press("Escape")


DRAFTERS = "mtp"  # those of the server, but what it has heard before


def test_compare(browser: chromium.Browser) -> None:
    ask(browser, QUESTION)
    browser.click("[aria-label='Compare without drafting']")
    browser.until("document.querySelector('.comparison')")
    said = last(browser, ".comparison")
    # how far apart the pairs are is the machine's; each says a range
    settled = r"[\d.]+ times as fast as without drafting \([\d.]+ to [\d.]+\)\."
    open_ = r"[\d.]+ to [\d.]+ times as fast as without drafting, which is not settled\."
    assert re.match(rf"The texts are equal\. In 3 pairs of runs it was ({settled}|{open_})", said)
    first, *runs = (body for body in sent(browser) if "messages" in body)
    assert [body["draft"] for body in runs] == [DRAFTERS, "off", "off", DRAFTERS, DRAFTERS, "off"]
    assert all({**body, "draft": 0} == {**first, "draft": 0} for body in runs)
    browser.reload()
    browser.until("document.querySelector('.comparison')")
    assert last(browser, ".comparison") == said
    browser.click("#new")
    ask(browser, "differently: what does os.path.join do?")
    browser.click("[aria-label='Compare without drafting']")
    browser.until("document.querySelector('.comparison')")
    said = last(browser, ".comparison")
    assert said.startswith("The texts differ from character 1 on, so no speeds are compared.")
    assert "tokens/s" not in said
    assert "times" not in said
    browser.click(".comparison summary")
    assert "Other: " in last(browser, ".comparison .other")


def test_an_answer_is_proved_by_one_click(browser: chromium.Browser) -> None:
    """By one run without drafting, whose text is compared; what was proved is kept."""
    ask(browser, QUESTION)
    browser.click("[aria-label='Prove this answer']")
    browser.until(
        f"{IDLE} && document.querySelector('.turn.assistant .counts').textContent.includes('proved')"
    )
    assert last(browser, ".counts").endswith(" · same text, proved")
    assert not browser.js("document.querySelector('[aria-label=\\'Prove this answer\\']')")
    assert [body.get("draft") for body in sent(browser)] == [None, "off"]
    assert kept(browser)[1]["counts"]["exact"]
    browser.click("#new")
    ask(browser, "differently: what does os.path.join do?")
    browser.click("[aria-label='Prove this answer']")
    browser.until("document.querySelector('.comparison')")
    assert last(browser, ".comparison").startswith("The texts differ from character 1 on")
    assert "proved" not in last(browser, ".counts")


def test_keyboard_only(browser: chromium.Browser) -> None:
    """Everything by keys alone: where the focus goes, what Enter does there, and that it is never lost."""
    focused = "document.activeElement.id || document.activeElement.textContent.trim()"
    assert browser.js(focused) == "question"
    browser.js("document.activeElement.blur(); document.body.focus()")
    browser.js("document.querySelector('.skip').focus()")
    assert browser.js("document.activeElement.getBoundingClientRect().left >= 0")
    browser.press("Tab")
    reached = [browser.js(focused)]
    for _ in range(10):
        browser.press("Tab")
        reached.append(browser.js(focused))
    assert reached[:4] == [
        "open-list",
        "open-models",
        "open-settings",
        "open-connect",
    ]  # nothing to begin anew yet
    assert reached[4:6] == ["toy-models", QUESTION]
    assert reached[8:] == ["attach", "question", "send"]
    for name in ("settings", "connect"):
        browser.js(f"document.querySelector('#open-{name}').focus()")
        browser.press("Enter")
        browser.until(f"document.querySelector('#{name}').open")
        assert browser.js(f"document.querySelector('#{name}').contains(document.activeElement)")
        for _ in range(12):
            browser.press("Tab")
            assert browser.js(
                f"document.activeElement === document.body || document.querySelector('#{name}').contains(document.activeElement)"
            )
        browser.press("Escape")
        browser.until(f"!document.querySelector('#{name}').open")
        assert browser.js("document.activeElement.id") == f"open-{name}"
    browser.js("document.querySelector('#question').focus()")
    browser.type("two")
    browser.press("Enter", shift=True)
    browser.type("lines")
    assert browser.js("document.querySelector('#question').value") == "two\nlines"
    browser.press("Enter")
    browser.until(f"document.querySelectorAll('.turn').length === 2 && {IDLE}")
    assert browser.js(focused) == "question"
    browser.js("document.querySelector('[aria-label=\"Compare without drafting\"]').focus()")
    browser.press(" ")
    browser.until(f"document.querySelector('.comparison') && {IDLE}")
    assert browser.js("document.activeElement !== document.body")


def test_nothing_is_wider_than_a_phone(browser: chromium.Browser) -> None:
    wide = "document.scrollingElement.scrollWidth"
    browser.resize(360, 640, is_phone=True)
    assert browser.js(wide) <= 360
    ask(browser, "hostile " + "unbroken" * 20)
    assert browser.js(wide) <= 360
    off = (
        "[...document.querySelectorAll('button, input, textarea, select, .turn, dialog[open]')].filter((e) => e.getClientRects().length)"
        ".filter((e) => { const r = e.getBoundingClientRect(); return r.left < 0 || r.right > 360.5; })"
        ".map((e) => e.outerHTML.slice(0, 80))"
    )
    assert browser.js(off) == []
    for name in ("settings", "connect"):
        browser.js(f"document.querySelector('#open-{name}').click()")
        assert browser.js(off) == []
        assert browser.js(
            f"document.querySelector('#{name}').scrollWidth <= document.querySelector('#{name}').clientWidth"
        )
        browser.press("Escape")
        browser.until("!document.querySelector('dialog[open]')")


def test_a_hostile_answer_is_text(browser: chromium.Browser) -> None:
    ask(browser, "hostile")
    assert kept(browser)[1]["text"] == HOSTILE
    text = last(browser)
    for part in (
        "<script>window.isOwned = 1</script>",
        "<img src=x onerror='window.isOwned = 1'>",
        "[click](javascript:window.isOwned=1)",
    ):
        assert part in text
    assert (
        browser.js(
            "document.querySelectorAll('#turns :is(script, img, style, iframe, object, form, svg)').length"
        )
        == 0
    )
    links = browser.js("[...document.querySelectorAll('.answer a')].map((a) => [a.href, a.rel, a.target])")
    assert links == [
        ["https://tracker.example/pixel.png", "noopener noreferrer", "_blank"],
        ["https://good.example/a", "noopener noreferrer", "_blank"],
    ]
    assert browser.js("window.isOwned === undefined")
    assert (
        browser.js(
            "document.querySelectorAll('.answer table td, .answer li li, .answer strong, .answer pre code').length"
        )
        == 5
    )
    assert browser.js("document.querySelector('.answer pre').textContent").startswith("<script>")
    browser.click(".code button")
    browser.until("document.querySelector('.code button').textContent !== 'Copy'")
    keep(browser, "x", {"title": "<b>x</b>"}, [{"role": "user", "text": "<img src=x onerror=alert(1)>"}])
    browser.js("sessionStorage.setItem('mlxspec.open', 'x'); history.replaceState(null, '', '/')")
    browser.reload()
    browser.until("document.querySelectorAll('.turn').length === 1")
    assert browser.js("document.querySelector('.user .text').textContent") == "<img src=x onerror=alert(1)>"
    assert browser.js("document.querySelector('#kept-x .open').textContent") == "<b>x</b>"


def test_the_policy_holds(browser: chromium.Browser) -> None:
    """What the scripts never do, the browser would not let them do."""
    refused = browser.js(
        "(() => { try { document.body.setAttribute('onclick', 'window.isOwned = 1'); document.body.click(); } catch { return true; } })()"
    )
    assert refused or browser.js("window.isOwned === undefined")
    refused = browser.js(
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return false; } catch { return true; } })()"
    )
    assert refused
    assert browser.js("fetch('http://localhost:1/').then(() => false, () => true)")
    assert browser.js("window.isOwned === undefined")
    browser.js("new Promise((done) => setTimeout(done, 200))")  # what is complained of comes later
    assert len([c for c in browser.complaints if "Content Security Policy" in c or "script-src" in c]) >= 1
    browser.complaints.clear()
    browser.requested.clear()


COLOURS = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const hex = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return a === 0 ? null : "#" + [r, g, b].map((v) => v.toString(16).padStart(2, "0")).join("");
  };
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const parent = node.parentElement;
    if (!node.data.trim() || parent.closest("noscript, .aside") || !parent.getClientRects().length) continue;
    let ground = parent;
    while (ground && !hex(getComputedStyle(ground).backgroundColor)) ground = ground.parentElement;
    found.add(hex(getComputedStyle(parent).color) + " " + (ground ? hex(getComputedStyle(ground).backgroundColor) : "#ffffff"));
  }
  return [...found];
})()
"""


def test_contrast_of_what_is_shown(browser: chromium.Browser) -> None:
    """Computed from every text on the page, in both schemes, with a dialog open and without."""
    ask(browser, "hostile")
    ask(browser, SLOW, wait=False)
    browser.press("Escape")
    browser.until(IDLE)
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        pairs = set(browser.js(COLOURS))
        browser.js("document.querySelector('#open-settings').click()")
        pairs |= set(browser.js(COLOURS))
        browser.js("document.querySelector('#settings').close()")
        assert len(pairs) > 6
        low = {pair: round(contrast(*pair.split()), 2) for pair in pairs if contrast(*pair.split()) < 4.5}
        assert not low, scheme


def test_names_and_roles(browser: chromium.Browser) -> None:
    """As assistive technology sees the page."""
    ask(browser, "hostile")
    tree = browser.accessibility_tree()
    nameless = [
        n
        for n in tree
        if n["role"] in ("button", "textbox", "link", "combobox", "log", "dialog", "checkbox")
        and not n["name"]
    ]
    assert not nameless
    found = {(n["role"], n["name"]) for n in tree}
    for wanted in (
        ("textbox", "Your message"), ("log", "Conversation"), ("button", "Send"), ("button", "Copy code"), ("button", "Regenerate"),
        ("article", "You"), ("article", "demo"), ("button", "Compare without drafting"), ("button", "Edit message 1"),
    ):  # fmt: skip
        assert wanted in found, wanted
    browser.until("document.querySelector('#said').textContent.includes('The answer is complete.')")
    said = str(browser.js("document.querySelector('#said').textContent"))
    assert "The model answers." in said
    assert "bold it code" in said
    levels = browser.js(
        "[...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].filter((e) => e.getClientRects().length).map((e) => +e.tagName[1])"
    )
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False)), levels


def test_a_server_that_does_not_answer(browser: chromium.Browser) -> None:
    ask(browser, QUESTION)
    browser.cut_off(True)
    try:
        ask(browser, "what does sorted do?")
        assert last(browser, ".end") == "The server does not answer."
        browser.until(
            "document.querySelector('#banner-text').textContent.startsWith('The server does not answer.')"
        )
    finally:
        browser.cut_off(False)
    browser.until("document.querySelector('#banner').hidden")
    assert browser.js("document.querySelector('#notice-text').textContent") == "The server answers again."
    browser.js(
        "[...document.querySelectorAll('.tools button')].find((b) => b.textContent === 'Try again').click()"
    )
    browser.until(f"[...document.querySelectorAll('.turn.assistant .counts')].length === 2 && {IDLE}")
    assert [m["role"] for m in sent(browser)[-1]["messages"]] == ["user", "assistant", "user"]
    assert all("ERR_INTERNET_DISCONNECTED" in complaint for complaint in browser.complaints)
    browser.complaints.clear()


def test_a_server_with_a_key_and_a_small_context(program: str) -> None:
    key = "a-sécret-key"
    with (
        Served(
            "--api-key", key, "--max-context", "40", headers={"X-API-Key": key.encode().decode("latin-1")}
        ) as served,
        chromium.Browser(program) as browser,
    ):
        browser.open(f"http://127.0.0.1:{served.port}/")
        for given, answer in (("wrong", "The server does not accept this key."), (key, "")):
            browser.until("document.querySelector('#key-dialog').open")
            assert browser.js("document.activeElement.id") == "key"
            browser.type(given)
            browser.press("Enter")
            browser.until(
                f"document.querySelector('#key-error').textContent === {json.dumps(answer)}"
                " || document.querySelector('#model-facts').textContent"
            )
        browser.until("document.querySelector('#model-facts').textContent.includes('40 tokens of context')")
        assert browser.js(
            "document.querySelector('#banner').hidden && !document.querySelector('#key-dialog').open"
        )
        assert browser.js("sessionStorage.getItem('mlxspec.key')") == key
        assert key not in str(browser.js("JSON.stringify({...localStorage})"))
        ask(browser, QUESTION)
        assert last(browser, ".end").startswith(
            "The answer ends here because the context of 40 tokens is full."
        )
        ask(browser, "word " * 60)
        assert "maximum context length is 40 tokens" in last(browser, ".end")
        assert "Start a new conversation" in last(browser, ".end")
        assert not [line for line in served.lines if key in line]


def picture(text: str) -> str:
    """A data: URL."""
    image = Image.new("RGB", (96, 32), "white")
    ImageDraw.Draw(image).text((10, 10), text, fill="black")
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def chosen(browser: chromium.Browser, *files: tuple[str, str, str]) -> None:
    """Choose files of (name, kind, data: URL) as the dialog of the browser does."""
    browser.js(
        f"""(async () => {{
        const transfer = new DataTransfer();
        for (const [name, type, url] of {json.dumps(files)}) {{
            const bytes = Uint8Array.from(atob(url.split(",")[1]), (c) => c.charCodeAt(0));
            transfer.items.add(new File([bytes], name, {{ type }}));
        }}
        const input = document.querySelector("#files");
        input.files = transfer.files;
        input.dispatchEvent(new Event("change"));
        }})()"""
    )


def test_images(program: str) -> None:
    """An image is attached, taken away, sent, kept over a reload and sent again with an edited text; answers are those of the API."""
    one, other, words = picture("2714"), picture("90358"), "Read the number."
    with Served("--model", "demo-vision") as served, chromium.Browser(program) as browser:
        home = f"http://127.0.0.1:{served.port}/"
        browser.open(home)
        browser.js("localStorage.setItem('mlxspec.settings', JSON.stringify({temperature: 0}))")
        browser.reload()
        browser.until("document.querySelector('#model-facts').textContent")
        chosen(
            browser,
            ("a.png", "image/png", one),
            ("b.png", "image/png", other),
            ("c.txt", "text/plain", other),
        )
        browser.until("document.querySelectorAll('#images img').length === 2")
        browser.until("document.querySelector('#notice-text').textContent.includes('c.txt')")
        browser.click("[aria-label='Remove image 1']")
        browser.until("document.querySelectorAll('#images img').length === 1")
        ask(browser, words)
        assert browser.js("document.querySelector('#images').hidden")
        parts = [{"type": "image_url", "image_url": {"url": other}}, {"type": "text", "text": words}]
        assert sent(browser)[-1]["messages"] == [{"role": "user", "content": parts}]
        status, wanted = served.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], "temperature": 0}
        )
        assert status == 200
        assert kept(browser)[1]["text"] == wanted["choices"][0]["message"]["content"]
        assert kept(browser)[1]["text"]
        browser.reload()
        browser.until("document.querySelector('.turn.user img')?.complete")
        assert browser.js("document.querySelector('.turn.user img').naturalWidth") == 96
        browser.until("document.querySelector('#model-facts').textContent")
        browser.click("[aria-label='Edit message 1']")
        browser.until("document.activeElement.matches('.edit textarea')")
        browser.js("document.activeElement.select()")
        browser.type("What number is it?")
        browser.press("Enter")
        browser.until(
            "document.querySelector('#stop').hidden && document.querySelector('.turn.assistant .tools')"
        )
        assert sent(browser)[-1]["messages"][0]["content"] == [
            parts[0],
            {"type": "text", "text": "What number is it?"},
        ]
        browser.resize(360, 640, is_phone=True)
        chosen(browser, ("a.png", "image/png", one))
        browser.until("document.querySelectorAll('#images img').length === 1")
        assert browser.js("document.documentElement.scrollWidth") <= 360
        assert browser.complaints == []
        assert {address for address in browser.requested if not address.startswith((home, "data:"))} == set()


def test_a_model_without_vision_takes_no_images(browser: chromium.Browser) -> None:
    chosen(browser, ("a.png", "image/png", picture("1")))
    said = "Not attached: a.png. This model reads texts only, of at most 1 MB."
    browser.until(f"document.querySelector('#notice-text').textContent === {said!r}")
    assert not browser.js("document.querySelectorAll('#images img').length")
