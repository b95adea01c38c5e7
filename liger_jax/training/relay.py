"""A client's connection to a server through this process, which learns before the client that the server is gone.

JAX's client of the coordination service aborts its process, with a trace, at the moment when its connection closes. So
it connects to a socket of this process, whose bytes go to the service and back. When the service's side closes, the
client's side stays open until this process has said why it ends.
"""

import contextlib
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable


class Relay:
    """Listens for a client, and forwards the bytes between it and the server, until the process ends.

    `address`: where the client connects, as gRPC writes it. It is no TCP port, for which gRPC may ask a proxy.
    """

    def __init__(self, server: str):
        host, port = server.rsplit(":", 1)
        self._server = host.strip("[]"), int(port)
        self._lost: Callable[[str], None] | None = None
        self._open = 0  # connections
        self._seconds = float("inf")
        self._folder = tempfile.mkdtemp(prefix="liger-jax-", dir="/tmp")  # a socket's path has at most 103 bytes
        path = f"{self._folder}/relay"
        self.address = f"unix:{path}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        _start(self._accept)

    def watch(self, lost: Callable[[str], None], seconds: float) -> None:
        """Reports the server's end from now on, before the client can notice it.

        `lost`: is called with the way in which the server was lost, such as "has ended". The client's connection closes
        when it returns. `seconds`: the server is also lost when it has sent nothing for so long.
        """
        self._lost, self._seconds = lost, seconds

    def close(self) -> None:
        """Accepts no more clients."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            try:
                server = socket.create_connection(self._server, timeout=20)
            except OSError:  # it does not listen yet: the client tries again
                client.close()
                continue
            server.settimeout(None)
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open += 1
            _start(self._to_server, client, server)
            _start(self._to_client, client, server)

    def _to_server(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the other thread notices it, too
            while data := client.recv(2**16):
                server.sendall(data)
            self._open -= 1
            if not self._open:
                self._lost = None  # the client has left
            server.shutdown(socket.SHUT_WR)

    def _to_client(self, client: socket.socket, server: socket.socket) -> None:
        how = "has ended"
        with contextlib.suppress(OSError):
            while self._is_heard(server):
                if not (data := server.recv(2**16)):
                    break
                client.sendall(data)
            else:
                how = f"has not been heard of for {self._seconds:.0f} seconds"
        if self._lost is not None:
            self._lost(how)
        for end in (client, server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _is_heard(self, server: socket.socket) -> bool:
        """Waits for the server. Returns whether it sends something, or ends, in time."""
        begun = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            while not selector.select(timeout=1):
                if time.monotonic() - begun > self._seconds:
                    return False
        return True


def _start(work: Callable[..., None], *arguments: socket.socket) -> None:
    threading.Thread(target=work, args=arguments, name="relay", daemon=True).start()
