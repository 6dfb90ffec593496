"""HTTP servers that only pretend to be an engine: what those of all engines have in common."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class PretendingHandler(BaseHTTPRequestHandler):
    """Says nothing, and sends whole bodies."""

    def log_message(self, *args: Any) -> None:
        pass

    def body(self) -> dict[str, Any]:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_events(self, chunks: list[dict[str, Any]]) -> None:
        """A whole stream at once."""
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self.send("".join([*events, "data: [DONE]\n\n"]).encode())


class PretendingServer(ThreadingHTTPServer):
    """Serves from the start; ``answers_left`` counts down with each completion."""

    def __init__(self, handler: type[PretendingHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.answers_left = 1 << 30
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
