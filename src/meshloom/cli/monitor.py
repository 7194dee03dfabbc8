"""Show the jobs of this host on a page that updates itself: workers, queue, last calls with plans, bytes, errors."""

from __future__ import annotations

import argparse
import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from meshloom.processes.jobs import memory_of, note_watching, read_jobs

PORT = 8900
PAGE = Path(__file__).with_name("monitor.html")
HOSTS = ("127.0.0.1", "localhost", "[::1]")


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `meshloom monitor` takes."""
    parser.add_argument("--port", type=int, default=PORT, help="the port on loopback (%(default)s; 0 takes a free one)")


def run(options: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C."""
    with make_server(options.port) as server:
        print(f"open http://127.0.0.1:{server.server_address[1]} in a browser; Ctrl-C ends this", flush=True)
        server.serve_forever()


def make_server(port: int) -> ThreadingHTTPServer:
    """A server on loopback, and nowhere else."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    return server


def state() -> dict[str, Any]:
    """What runs on this host now."""
    note_watching()
    jobs = read_jobs()
    for job in jobs:
        for each in job.get("workers", []):
            if "pid" in each:
                each["memory"] = memory_of(each["pid"])
    return {"jobs": jobs}


class Handler(BaseHTTPRequestHandler):
    """Two answers: the page, and the state that it asks for every second."""

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0] or self.headers.get("Host") or ""
        if host not in HOSTS:  # a page from elsewhere that calls itself by another name must not read this
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._answer("text/html; charset=utf-8", PAGE.read_bytes())
        elif self.path == "/state.json":
            self._answer("application/json", json.dumps(state()).encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, kind: str, content: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline'")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line per second would fill the screen."""
