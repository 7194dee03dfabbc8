"""Messages on a socket: eight bytes of length, then as many bytes. A message comes whole or not at all.

The socket never blocks by itself; who waits says how long. A side that cannot send because the other one is sending
takes in what comes meanwhile, so that two long messages never wait for each other.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 16


class Frames:
    """One end of a stream of messages.

    >>> one, other = map(Frames, socket.socketpair())
    >>> one.send(b"hello", timeout=1.0); one.send(b"", timeout=1.0)
    >>> other.receive(1.0), other.receive(1.0), other.receive(0.0)
    (b'hello', b'', None)
    >>> one.close(); other.receive(1.0)
    Traceback (most recent call last):
        ...
    EOFError: the other side is gone
    >>> other.close()
    """

    def __init__(self, made: socket.socket) -> None:
        made.setblocking(False)
        self.socket = made
        self._bytes = bytearray()
        self._messages: deque[bytes] = deque()
        self._is_over = False

    def send(self, message: bytes, timeout: float | None) -> None:
        """Send a message; TimeoutError if the other side takes nothing for that long, EOFError if it is gone."""
        left = memoryview(_LENGTH.pack(len(message)) + message)
        end = None if timeout is None else time.monotonic() + timeout
        while left:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                self.take_in()
                if not self._wait(select.POLLIN | select.POLLOUT, end):
                    raise TimeoutError(f"the other side took nothing for {timeout} s") from None
            except OSError:
                raise EOFError("the other side is gone") from None

    def receive(self, timeout: float | None) -> bytes | None:
        """The next message; None if there is none within the timeout, EOFError if there will never be one."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self.pop()
            if message is not None:
                return message
            if not self._wait(select.POLLIN, end):
                return None

    def pop(self) -> bytes | None:
        """The next message if it is there; EOFError if there will never be one."""
        if not self._messages:
            self.take_in()
        if self._messages:
            return self._messages.popleft()
        if self._is_over:
            raise EOFError("the other side is gone")
        return None

    def take_in(self) -> None:
        """Take what has come, without waiting."""
        while not self._is_over:
            try:
                found = self.socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                found = b""
            self._is_over = not found
            self._bytes += found
            if len(found) < _CHUNK:
                break
        self._cut()

    def _cut(self) -> None:
        """Make messages of the bytes that have come."""
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            self._messages.append(bytes(memoryview(self._bytes)[_LENGTH.size : end]))
            del self._bytes[:end]

    def _wait(self, events: int, end: float | None) -> bool:
        left = None if end is None else max(0.0, end - time.monotonic())
        return wait_for([(self.socket, events)], left)

    def close(self) -> None:
        """The other side finds it gone."""
        self.socket.close()


def wait_for(sockets: list[tuple[socket.socket, int]], timeout: float | None) -> bool:
    """Wait until one of some sockets has one of its events; False if none has within the timeout."""
    poll = select.poll()
    for each, events in sockets:
        poll.register(each, events)
    return bool(poll.poll(None if timeout is None else -(-timeout * 1000 // 1)))
