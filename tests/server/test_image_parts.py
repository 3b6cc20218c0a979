"""Images over HTTP: the forms of all APIs, what is refused, and that nothing is left behind."""

from __future__ import annotations

import base64
import io
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.engine import sighted_demo
from tests.server.serving import LONG, Served

WORDS = "What does this show, and how many of them are there in the upper left corner of it, as far as you can tell?"
MORE: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sighted_demo.write(tmp_path_factory.mktemp("models") / "sighted")


@pytest.fixture(scope="module")
def sighted(folder: Path) -> Iterator[Served]:
    with Served("--model", str(folder), "--max-rows", "4", "--prefill-chunk", "64") as served:
        yield served
        assert served.process.poll() is None, "the server has ended:\n" + "\n".join(served.lines[-20:])


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64_of(data)}"


def asked(given: str, **part: Any) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": given, **part}}, {"type": "text", "text": WORDS}]
    return {"messages": [{"role": "user", "content": content}], **MORE}


def said(served: Served, given: str, **part: Any) -> str:
    status, answer = served.post("/v1/chat/completions", asked(given, **part))
    assert status == 200, answer
    found: str = answer["choices"][0]["message"]["content"]
    return found


def test_every_api_takes_images_in_its_own_form(sighted: Served) -> None:
    data = sighted_demo.picture()
    wanted = said(sighted, url(data))
    assert said(sighted, url(sighted_demo.picture(seed=1))) != wanted
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(data)}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": WORDS}]
    status, answer = sighted.post("/v1/messages", {"messages": [{"role": "user", "content": blocks}], **MORE})
    assert status == 200, answer
    assert answer["content"][0]["text"] == wanted
    parts = [{"type": "input_image", "image_url": url(data)}, {"type": "input_text", "text": WORDS}]
    body = {"input": [{"role": "user", "content": parts}], **MORE, "max_output_tokens": MORE["max_tokens"]}
    body.pop("max_tokens")
    status, answer = sighted.post("/v1/responses", body)
    assert status == 200, answer
    assert answer["output"][0]["content"][0]["text"] == wanted
    items = [*body["input"], *answer["output"], {"role": "user", "content": "And this?"}]
    status, answer = sighted.post("/v1/responses", {"input": items, "max_output_tokens": 4})
    assert status == 200, answer
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] > 6
    options = {"num_predict": 8, "temperature": 0, "ignore_eos": True}
    for path, more in (
        ("/api/chat", {"messages": [{"role": "user", "content": WORDS, "images": [base64_of(data)]}]}),
        ("/api/generate", {"prompt": WORDS, "images": [base64_of(data)]}),
    ):
        status, answer = sighted.post(path, {**more, "options": options, "stream": False})
        assert status == 200, answer
        assert (answer["message"]["content"] if "message" in answer else answer["response"]) == wanted


def test_a_tool_may_answer_with_an_image(sighted: Served) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(sighted_demo.picture())}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}],
        },
    ]  # fmt: skip
    status, answer = sighted.post("/v1/messages", {"messages": messages, **MORE})
    assert status == 200, answer
    status, counted = sighted.post("/v1/messages/count_tokens", {"messages": messages})
    assert status == 200, counted
    assert counted["input_tokens"] == answer["usage"]["input_tokens"] + answer["usage"].get(
        "cache_read_input_tokens", 0
    )


def test_max_pixels_and_detail_bound_the_tokens(sighted: Served) -> None:
    large = url(sighted_demo.picture(256, 256))

    def tokens(**more: Any) -> int:
        status, answer = sighted.post("/v1/chat/completions", asked(large) | more)
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens"])

    whole = tokens()
    assert whole - tokens(max_pixels=16384) == 64 - 16
    few = asked(large, max_pixels=16384)
    assert whole - tokens(messages=few["messages"]) == 64 - 16
    assert tokens(messages=asked(large, detail="high")["messages"]) == whole


def _png(width: int, height: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG")
    return file.getvalue()


def _bomb() -> bytes:
    """A PNG of 20000 x 20000 black pixels."""
    rows = zlib.compress(b"\0" * (20000 * 20001 // 8), 9)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = (20000).to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows[: 1 << 16]) + chunk(b"IEND", b"")


BAD = {
    "bomb": (url(_bomb()), "20000 x 20000"),
    "truncated": (url(sighted_demo.picture()[:2000]), "damaged or incomplete"),
    "200 to 1": (url(_png(4020, 20)), "200"),
    "svg": (url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "SVG"),
    "no image": (url(b"hello"), "no image in a supported format"),
    "wrong base64": ("data:image/png;base64,####", "not valid base64"),
    "empty": (url(b""), "empty"),
    "http": ("https://example.org/a.png", "not fetched over the network"),
    "file": ("file:///etc/passwd", "Files of the server's machine are not read"),
    "no scheme": ("iVBORw0KGgo=", "data: URL"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_one_sentence(sighted: Served, name: str) -> None:
    given, words = BAD[name]
    status, answer = sighted.post("/v1/chat/completions", asked(given))
    assert status == 400
    message = answer["error"]["message"]
    assert words in message
    assert message.startswith("messages[0].content[0]: ")
    assert "\n" not in message
    assert "Traceback" not in message
    assert sighted.settle()["mlxspec_rows_running"] == 0


def _saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _odd() -> dict[str, tuple[bytes, bytes]]:
    """Files that are unusual and whole, and the plain PNG that the model sees in each."""
    grey = np.linspace(0, 255, 1600).astype(np.uint8).reshape(40, 40)
    cmyk = _saved(Image.fromarray(np.stack([grey, grey.T, 255 - grey, 0 * grey], -1), "CMYK"), "JPEG")
    frames = [Image.fromarray(np.roll(grey, 400 * i)) for i in range(3)]
    return {
        "1x1": (_png(1, 1), _png(2, 2)),
        "cmyk": (cmyk, _saved(Image.open(io.BytesIO(cmyk)).convert("RGB"))),
        "16 bits": (_saved(Image.fromarray(grey.astype(np.uint16) * 257)), _saved(Image.fromarray(grey))),
        "animated": (
            _saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
            _saved(frames[0]),
        ),
    }


@pytest.mark.parametrize("name", _odd())
def test_odd_images_are_read_as_plain_ones(sighted: Served, name: str) -> None:
    """Nothing of them is lost that a model could see, but for an animation's later frames, which is said."""
    odd, plain = _odd()[name]
    status, answer = sighted.post("/v1/chat/completions", asked(url(odd)))
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == said(sighted, url(plain))
    animated = "messages[0].content[0]: the image is animated, and only its first frame is read"
    assert answer["mlxspec"].get("notices", []) == ([animated] if name == "animated" else [])


def test_wrong_parts_are_named(sighted: Served) -> None:
    for part, words in (
        ({"type": "image_url"}, "holds no image"),
        ({"type": "image_url", "image_url": {"url": 7}}, "holds no image"),
        ({"type": "input_image", "file_id": "file-1"}, "files are not stored here"),
        ({"type": "image_url", "image_url": {"url": url(_png(40, 40)), "max_pixels": 0}}, "max_pixels"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "Videos are not supported yet"),
    ):
        body = {"messages": [{"role": "user", "content": [part]}], **MORE}
        status, answer = sighted.post("/v1/chat/completions", body)
        assert status == 400
        assert words in answer["error"]["message"]
    many = [{"type": "image_url", "image_url": {"url": url(_png(40, 40))}}] * 17
    status, answer = sighted.post("/v1/chat/completions", {"messages": [{"role": "user", "content": many}]})
    assert status == 400
    assert answer["error"]["message"] == "A request may hold 16 images at most, not 17."
    status, answer = sighted.post(
        "/api/generate", {"prompt": "x", "raw": True, "images": [base64_of(_png(40, 40))]}
    )
    assert status == 400
    assert "raw prompt holds no images" in str(answer)


def test_a_model_without_images_says_so(demo: Served) -> None:
    status, answer = demo.post("/v1/chat/completions", asked(url(sighted_demo.picture())))
    assert status == 400
    assert "images" in answer["error"]["message"]
    assert answer["error"]["message"].count(". ") == 0


def test_images_at_once_and_text_beside_them(sighted: Served) -> None:
    wanted = [said(sighted, url(sighted_demo.picture(seed=10 + i))) for i in range(4)]
    text = sighted.chat(WORDS, **MORE)["choices"][0]["message"]["content"]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        found[i] = (
            sighted.chat(WORDS, **MORE)["choices"][0]["message"]["content"]
            if i == 4
            else said(sighted, url(sighted_demo.picture(seed=10 + i)))
        )

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert [found.get(i) for i in range(5)] == [*wanted, text]


def test_a_client_that_leaves_while_its_image_is_read_leaves_nothing(sighted: Served) -> None:
    import http.client
    import json

    connection = http.client.HTTPConnection("127.0.0.1", sighted.port, timeout=LONG)
    body = asked(url(sighted_demo.picture(256, 256, seed=77)))
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    time.sleep(0.01)
    connection.close()
    assert sighted.settle()["mlxspec_state_bytes"] == 0


_HELD = """
import os, time
from mlxspec.images import source
decode = source.decode_image
def held(data, limits):
    while not os.path.exists({flag!r}):
        time.sleep(0.02)
    return decode(data, limits)
source.decode_image = held
"""


@pytest.mark.slow
def test_an_image_that_takes_long_to_decode_delays_nobody_else(folder: Path, tmp_path: Path) -> None:
    """Images are decoded outside the engine's thread: text that is asked for meanwhile is answered before they are, all of it."""
    ended: list[str] = []
    flag = tmp_path / "decode"
    with Served("--model", str(folder), "--max-rows", "4", plant=_HELD.format(flag=str(flag))) as served:
        served.chat(WORDS, **MORE)

        def ask(i: int) -> None:
            said(served, url(sighted_demo.picture(seed=30 + i)))
            ended.append("image")

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        for _ in range(3):
            served.chat(WORDS, **MORE)
            ended.append("text")
        flag.touch()
        for thread in threads:
            thread.join(LONG)
    assert ended == ["text"] * 3 + ["image"] * 2


def test_images_of_a_history_that_cannot_be_used_are_left_out(sighted: Served, demo: Served) -> None:
    """Broken ones, the oldest of too many, and all of them on a model without a vision tower."""
    good, broken = url(_png(40, 40)), "data:image/png;base64,iVBORw0KGgoAAAA"

    def turns(*images: str) -> list[dict[str, Any]]:
        parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        return [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": parts},
            {"role": "assistant", "content": "seen"},
            {"role": "user", "content": "What is this?"},
        ]

    for served, images, num_left in (
        (sighted, (good, broken), 1),
        (sighted, ("data:image/png;base64,!", "http://x.example/a.png", good), 2),
        (sighted, (good,) * 18, 2),
        (demo, (good, broken), 2),
    ):
        status, answer = served.post("/v1/chat/completions", {"messages": turns(*images), "max_tokens": 1})
        assert status == 200, answer
        told = [n for n in answer["mlxspec"]["notices"] if "the image was left out: " in n]
        assert len(told) == num_left, answer["mlxspec"]["notices"]
        asked_for = turns(*images)[:-1]
        asked_for[-1] = {"role": "user", "content": asked_for[2]["content"]}
        status, answer = served.post("/v1/chat/completions", {"messages": asked_for, "max_tokens": 1})
        assert (status, "\n" in answer["error"]["message"]) == (400, False)
