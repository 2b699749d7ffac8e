"""Show running and finished runs on a page.

For example:

  crankshaft monitor runs/first
  crankshaft monitor runs
  crankshaft monitor --port=8080 runs/first runs/second rate.json

Only this machine reaches the page, unless --bind is set, and who has the link. Nothing is written, and the runs are not
disturbed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import json
import secrets
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any

from ...runner.command_line import command_flags, rules
from ...runner.command_line.rules import Boolean, Integer, Text, flag
from ...runner.failures import UsageError
from . import page
from .recorded_run import RecordedRun, recorded_runs
from .serving import Application, Server

_HEADERS = [
    ("Cache-Control", "no-store"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
]
_READ_SECONDS = 0.4  # per answer: a long record is shown while it is still being read


@dataclasses.dataclass(kw_only=True)
class DashboardFlags:
    """The values of a command line."""

    port: int = flag(Integer(0, 65535), 6007, "Port of the page; 0 takes a free one.")
    bind: str = flag(
        Text("an IP address", rules.check_ip_address),
        "127.0.0.1",
        "Address to listen on.",
    )
    allow_host: str | None = flag(
        Text("a host name", rules.check_host_name),
        None,
        "Host of a proxy through which the page is opened, such as a hosted notebook's, and whose pages may frame it.",
    )
    no_token: bool = flag(Boolean(), False, "Show the page to all who reach its port, such as this machine's users.")


def main(argv: list[str]) -> int:
    """Serves the page of the runs on the command line until Ctrl-C."""
    usage = "crankshaft monitor [flags] RUN_DIR|FOLDER_OF_RUNS|RESULT.json ..."
    flags, paths = command_flags.read(argv, DashboardFlags, usage, takes_words=True)
    bind, port = flags.bind, flags.port
    if not paths:
        raise UsageError("the run's folder is missing; name it: crankshaft monitor RUN_DIR")
    address = ipaddress.ip_address(bind)
    token = "" if flags.no_token else secrets.token_urlsafe(24)
    shown = application(recorded_runs(paths), token, flags.allow_host)
    try:
        server = Server(bind, port, shown, any_host=bool(token))
    except OSError as error:
        fix = "--bind=ADDRESS takes another of this host's, see `ip address`"
        if error.errno != errno.EADDRNOTAVAIL:
            fix = "--port=0 takes a free one"
        raise UsageError(f"--bind={bind} --port={port} can't be listened on ({error.strerror}); {fix}") from None
    host = socket.gethostname() if address.is_unspecified else f"[{address}]" if address.version == 6 else address
    query = f"?token={token}" if token else ""
    proxied = f"; through {flags.allow_host}: /proxy/{server.port}/{query}" if flags.allow_host else ""
    print(f"http://{host}:{server.port}/{query}   (Ctrl-C ends it{proxied})", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


def application(runs: list[RecordedRun], token: str = "", framed_by: str | None = None) -> Application:
    """Returns the server's application: the page at `/`, and its data at `/data`.

    `framed_by` is the host whose pages may show it in a frame.
    """
    lock = threading.Lock()
    ancestors = f"{framed_by}:*" if framed_by else "'none'"
    frames = ("Content-Security-Policy", f"frame-ancestors {ancestors}")

    def answer(environ: dict[str, Any], start_response: Callable) -> Iterable[bytes]:
        def answered(status: str, kind: str, text: str) -> list[bytes]:
            start_response(status, [("Content-Type", f"{kind}; charset=utf-8"), frames, *_HEADERS])
            return [text.encode()]

        if environ["REQUEST_METHOD"] != "GET":
            return answered("405 Method Not Allowed", "text/plain", "Use GET.\n")
        query = dict(urllib.parse.parse_qsl(environ.get("QUERY_STRING", "")))
        if not secrets.compare_digest(query.get("token", "").encode(), token.encode()):
            return answered("403 Forbidden", "text/plain", "Open the whole link that crankshaft monitor has printed.\n")
        if environ["PATH_INFO"] == "/":
            return answered("200 OK", "text/html", page.html())
        if environ["PATH_INFO"] != "/data":
            return answered("404 Not Found", "text/plain", "Not Found\n")
        seen = query.get("seen", "").split(",")
        with lock:  # answers are made in threads
            shown: list[dict[str, Any]] = [
                run.shown(_READ_SECONDS / len(runs), seen[index] if index < len(seen) else "", query.get("find", ""))
                for index, run in enumerate(runs)
            ]
        return answered("200 OK", "application/json", json.dumps({"runs": shown}))

    return answer
