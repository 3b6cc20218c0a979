"""An image whose decoding does not end is ended, and another client's image is answered meanwhile."""

from __future__ import annotations

import base64
import io
import threading
import time
from typing import Any

import pytest
from PIL import Image

from tests.server.serving import Served

SLOW = "import mlxspec.images.source as d\nd._SECONDS = 0.5\n"


def url(data: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


def scans(side: int, number: int) -> bytes:
    """A progressive JPEG whose last scan stands there so many times."""
    out = io.BytesIO()
    Image.new("RGB", (side, side)).save(out, "JPEG", progressive=True)
    data = out.getvalue()
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * number + data[-2:]


def asked(data: bytes) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": url(data)}}
    return {
        "max_tokens": 2,
        "messages": [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}],
    }


@pytest.mark.slow
def test_an_image_of_many_scans_holds_nobody_up() -> None:
    """Refused by its number of scans, or ended after its time; small images of another client are answered all the while."""
    with Served("--model", "demo-vision", "--draft", "off", plant=SLOW) as served:
        small = asked(scans(64, 0))
        assert served.post("/v1/chat/completions", small)[0] == 200
        ended: list[tuple[float, int, str]] = []

        def attack() -> None:
            for data in (scans(7000, 90), scans(7000, 2000), scans(7000, 90)):
                began = time.monotonic()
                status, answer = served.post("/v1/chat/completions", asked(data))
                ended.append((time.monotonic() - began, status, answer["error"]["message"]))

        thread = threading.Thread(target=attack)
        thread.start()
        waits = []
        while thread.is_alive():
            began = time.monotonic()
            assert served.post("/v1/chat/completions", small)[0] == 200
            waits.append(time.monotonic() - began)
        thread.join()
    print("attacker:", ended)
    print("small images:", len(waits), "slowest", round(max(waits), 2))
    assert [status for _, status, _ in ended] == [400] * 3
    assert "takes more than 0.5 seconds" in ended[0][2]
    assert "scans" in ended[1][2]
    assert len(waits) > 2 * len(
        ended
    )  # if an image waited for the attacker's, there would be one for each of them
