"""Show runs on a page, while they go on and afterwards.

For example:

  crankshaft monitor runs/first
  crankshaft monitor --port=8080 runs/first runs/second rate.json

Only this machine reaches the page, unless --bind says otherwise. Nothing is written, and the runs are not disturbed.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import secrets
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from absl import flags

from .. import errors, explanations
from ..command_line import help, own_flags, rules
from ..errors import UsageError
from ..host import process
from . import page
from .run import Run

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

FLAGS = flags.FlagValues()  # apart from crankshaft train's
rules.whole("port", 6007, "Where the page is served; 0 takes a free one.", lower=0, upper=65535, flag_values=FLAGS)
rules.text(
    "bind",
    "127.0.0.1",
    "The address to listen on. Where others reach it the link has a token, without which nothing is shown.",
    wants="an IP address",
    rule=rules.ip_address,
    flag_values=FLAGS,
)
_LOOPBACK = ["127.0.0.1", "localhost", "::1", "[::1]"]
_READ_SECONDS = 0.4  # of an answer at most: what a long record holds so far is shown while it is read


def main(argv: list[str]) -> None:
    """Serves what the command line asks for until Ctrl-C, and exits the process."""
    process.prepare_streams()
    try:
        paths = own_flags.read(
            argv, FLAGS, help.doc_of(__name__), "crankshaft monitor [flags] RUN_DIR|RESULT.json ...", takes_words=True
        )
        _serve(paths)
    except Exception as error:  # the border of the program
        sys.exit(errors.fail(*explanations.explain(error, has_debug=False)))
    except KeyboardInterrupt:
        sys.exit(0)
    sys.exit(0)


def _serve(paths: list[str]) -> None:
    if not paths:
        raise UsageError("no run is given; name a run's folder: crankshaft monitor RUN_DIR")
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} not installed; pip install 'crankshaft[monitor]'")
    import uvicorn

    address = ipaddress.ip_address(FLAGS.bind)
    token = "" if address.is_loopback else secrets.token_urlsafe(24)
    app = application([Run(path) for path in paths], token)
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        listener = socket.create_server((FLAGS.bind, FLAGS.port), family=family)
    except OSError as error:
        where = f"--bind={FLAGS.bind} --port={FLAGS.port}"
        raise UsageError(f"{where} can't be listened on ({error.strerror}); --port=0 takes a free one") from None
    host = socket.gethostname() if address.is_unspecified else f"[{address}]" if address.version == 6 else address
    query = f"?token={token}" if token else ""
    print(f"http://{host}:{listener.getsockname()[1]}/{query}   (Ctrl-C ends it)", flush=True)
    with listener:
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


def application(runs: list[Run], token: str = "") -> Starlette:
    """Returns the server's application: the page at `/`, and what it shows at `/data`.

    Without a token only requests to a name of this machine are answered: another site's name, led to this address in a
    browser (DNS rebinding), is not one.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    lock = threading.Lock()
    headers = {
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }

    def answer(request: Request) -> Response:
        asked = request.query_params
        if not secrets.compare_digest(asked.get("token", "").encode(), token.encode()):
            return PlainTextResponse("Open the whole link that crankshaft monitor has printed.\n", 403, headers)
        if request.url.path == "/":
            return HTMLResponse(page.html(), headers=headers)
        seen = asked.get("seen", "").split(",")
        with lock:  # answers are made in threads
            shown: list[dict[str, Any]] = [
                run.shown(_READ_SECONDS / len(runs), seen[place] if place < len(seen) else "", asked.get("find", ""))
                for place, run in enumerate(runs)
            ]
        return JSONResponse({"runs": shown}, headers=headers)

    return Starlette(
        routes=[Route("/", answer), Route("/data", answer)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["*"] if token else _LOOPBACK)],
    )
