"""Servers of the OpenAI shape that name the colour of a picture: a sound one, and one that mixes up its clients."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mmattn.encoders import load_image
from mmattn.errors import import_extra
from mmattn.inspect.doctor.questions import COLOURS


def name_of(url: str) -> str:
    """The colour that is nearest to a picture's first pixel."""
    (pixel,) = [load_image(io.BytesIO(base64.b64decode(url.partition(",")[2]))).getpixel((0, 0))]
    named = import_extra("PIL.ImageColor", "vision").getrgb
    return min(COLOURS, key=lambda name: sum((a - b) ** 2 for a, b in zip(named(name), pixel, strict=True)))


@contextmanager
def serving(mixed: bool) -> Iterator[str]:
    """The address of a server, whose requests share one place for the picture if they are mixed."""
    shared, arrival = dict[str, str](), threading.Condition()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.reply({"object": "list", "data": [{"id": "colours", "object": "model"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            urls = [part["image_url"]["url"] for part in asked["messages"][0]["content"] if "image_url" in part]
            mine = shared if mixed else {}
            mine["picture"] = urls[0] if urls else ""
            with arrival:
                arrival.notify_all()
                arrival.wait(0.05 if mixed else 0)  # until the next request, if others come now
            text = name_of(mine["picture"]) if urls else "I see no picture."
            message = {"role": "assistant", "content": f"It is {text}."}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self.reply({"id": "1", "object": "chat.completion", "created": 0, "model": "colours", "choices": [choice]})

        def log_message(self, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
