"""Serves a page or figures over HTTP to whoever may connect: few connections, each for some seconds.

Whoever reaches the port can open connections and send nothing. So only a few are open at once, and a new one closes the
oldest; each is closed after some seconds; and none is accepted whose descriptor the process needs itself.
"""

from __future__ import annotations

import contextlib
import ipaddress
import resource
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref import simple_server

Application = Callable[..., Iterable[bytes]]  # by WSGI, PEP 3333

_MOST_CONNECTIONS = 16
_SECONDS = 60.0  # limit of a request and its answer, which may be large, over a slow network
_FREED_SECONDS = 1.0  # until the thread of a connection that was closed has ended
_KEPT_DESCRIPTORS = 64  # the process's last ones: for its files


class Server(socketserver.ThreadingMixIn, simple_server.WSGIServer):
    """Answers each connection's one request in a thread; `serve_forever` serves, `port` is where.

    Args:
      address: IP address of this host, at which connections are taken.
      port: port to listen at; 0 takes a free one.
      any_host: whether the Host header may be any name, as where a request needs a token. Otherwise it has to be an IP
        address or a name of this host: another site's name, led to this address in a browser (DNS rebinding), is not.

    Raises:
      OSError: the port can't be listened at.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # these wait without a descriptor

    def __init__(self, address: str, port: int, application: Application, any_host: bool = False):
        ip = ipaddress.ip_address(address)
        self.address_family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
        names = {"localhost", socket.gethostname(), *(() if ip.is_loopback else (socket.getfqdn(),))}
        self._free = threading.Semaphore(_MOST_CONNECTIONS)
        self._opened: dict[socket.socket, float] = {}  # when, the oldest first
        super().__init__((address, port), _Handler)
        self.port = self.server_port
        self.set_app(application if any_host else _for_names(application, names))

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks the name up, which may take seconds
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        if not self._free.acquire(blocking=False):
            _end(*[*self._opened][:1])
            if not self._free.acquire(timeout=_FREED_SECONDS):
                raise OSError("all connections are at work")
        try:
            request, address = super().get_request()
        except OSError:
            self._free.release()
            time.sleep(_FREED_SECONDS / 10)  # the next call would fail at once for too many descriptors
            raise
        self._opened[request] = time.monotonic()
        return request, address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return most == resource.RLIM_INFINITY or request.fileno() < most - min(_KEPT_DESCRIPTORS, most // 2)

    def service_actions(self) -> None:
        oldest = time.monotonic() - _SECONDS
        for request, opened in [*self._opened.items()]:
            if opened < oldest:
                _end(request)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        del self._opened[request]
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs nothing: whoever connects could fill the log."""


class _Handler(simple_server.WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, as `Server.handle_error`."""


@contextlib.contextmanager
def serving(server: Server) -> Iterator[None]:
    """Serves in a thread, while the context is open."""
    thread = threading.Thread(target=server.serve_forever, name="serving", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _end(*requests: socket.socket) -> None:
    """Shuts down connections, so that their threads stop waiting."""
    for request in requests:
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


def _for_names(application: Application, names: set[str]) -> Application:
    """Makes an application that answers only requests whose Host is one of these names, or an IP address."""

    def answer(environ: dict[str, Any], start_response: Callable) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST", "")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        is_ours = name in names
        with contextlib.suppress(ValueError):
            is_ours = is_ours or bool(ipaddress.ip_address(name.removeprefix("[").removesuffix("]")))
        if is_ours:
            return application(environ, start_response)
        start_response("400 Bad Request", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"The Host header names neither this host nor an IP address.\n"]

    return answer
