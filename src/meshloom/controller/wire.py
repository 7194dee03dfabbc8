"""Frames between a client and its workers: a length, a header in JSON with a fixed schema, and raw bytes of one tensor.

Nothing is ever unpickled or evaluated. Both ends prove that they know the secret of the cluster before the first frame;
lengths are bounded, and a header that does not have the form of its kind ends the connection.

A frame is `kind, 3 zero bytes, length of the header, length of the payload, header, payload`, numbers little-endian.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from typing import Any

from meshloom.errors import LaunchError, PeerLostError

HEAD = struct.Struct("<4sIQ")
MOST_HEADER = 1 << 24  # bytes of a header
MOST_PAYLOAD = 1 << 38  # bytes of a payload: the largest tensor that is sent as one
NONCE = 32
GREETING = b"meshloom controller 1\n"

# What the header of each kind is: a JSON list or a JSON object with these keys and types.
_NUMBER = (int, float)
SCHEMAS: dict[bytes, dict[str, Any] | type] = {
    b"call": list,  # commands, in order
    b"data": {"id": int, "dtype": str, "shape": list, "place": (dict, type(None))},
    b"tell": {"done": int},  # commands that are done
    b"beat": {"worker": int, "done": int, "busy": _NUMBER, "memory": int, "call": str, "line": str},
    b"fail": {"worker": int, "number": int, "call": str, "line": str, "error": str, "headline": str, "text": str},
    b"give": {"request": int, "value": object},  # an answer, perhaps with the bytes of a tensor
}


class WireError(PeerLostError):
    """Bytes that are no frame: the connection ends."""


def pack(kind: bytes, header: object, payload: int = 0) -> bytes:
    """The beginning of a frame whose payload has so many bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MOST_HEADER or payload > MOST_PAYLOAD:
        raise WireError(f"a frame of {len(text)} + {payload} bytes is too long", most=f"{MOST_HEADER} + {MOST_PAYLOAD}")
    return HEAD.pack(kind, len(text), payload) + text


def read_head(data: bytes | bytearray | memoryview, most: int = MOST_PAYLOAD) -> tuple[bytes, int, int]:
    """Kind, length of the header and length of the payload."""
    kind, header, payload = HEAD.unpack(data)
    if kind not in SCHEMAS:
        raise WireError(f"a frame begins with {bytes(kind)!r}, which is no kind of frame")
    if header > MOST_HEADER or payload > most:
        raise WireError(f"a frame announces {header} + {payload} bytes", most=f"{MOST_HEADER} + {most}")
    return kind, header, payload


def read_header(kind: bytes, text: bytes | bytearray | memoryview) -> Any:
    """The header, if it has the form of its kind."""
    try:
        header = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise WireError(f"the header of a {kind.decode()} frame is no JSON: {str(error)[:80]}") from None
    schema = SCHEMAS[kind]
    if isinstance(schema, type):
        is_right = isinstance(header, schema)
    else:
        is_right = isinstance(header, dict) and header.keys() == schema.keys()
        is_right = is_right and all(
            isinstance(header[key], kinds) and not (kinds is int and isinstance(header[key], bool))
            for key, kinds in schema.items()
        )
    if not is_right:
        raise WireError(f"the header of a {kind.decode()} frame has another form: {str(header)[:80]}")
    return header


class Line:
    """A blocking end of a connection, for the worker."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def receive(self, most: int = MOST_PAYLOAD) -> tuple[bytes, Any, int] | None:
        """Kind, header and the length of the payload, which is to be read next; None at the end."""
        head = self._read(HEAD.size, may_end=True)
        if head is None:
            return None
        kind, header, payload = read_head(head, most)
        text = self._read(header)
        assert text is not None
        return kind, read_header(kind, text), payload

    def _read(self, size: int, may_end: bool = False) -> bytearray | None:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self.socket.recv_into(view)
            if not count:
                if may_end and len(view) == size:
                    return None
                raise WireError(f"the connection ended {len(view)} bytes before the end of a frame")
            view = view[count:]
        return data

    def read_into(self, view: memoryview) -> None:
        """Fill a memory with the payload."""
        while view:
            count = self.socket.recv_into(view)
            if not count:
                raise WireError(f"the connection ended {len(view)} bytes before the end of a payload")
            view = view[count:]

    def send(self, kind: bytes, header: object, payload: memoryview | None = None) -> None:
        """A whole frame."""
        self.socket.sendall(pack(kind, header, 0 if payload is None else payload.nbytes))
        if payload is not None:
            self.socket.sendall(payload)


# Who is there


def prove(secret: bytes, role: bytes, own: bytes, other: bytes) -> bytes:
    """What only somebody who knows the secret can say in this role after these two numbers."""
    return hmac.new(secret, role + own + other, hashlib.sha256).digest()


def greet(connection: socket.socket, secret: bytes, number: int, deadline: float) -> None:
    """The worker's side: prove the secret, and see that the client knows it too."""
    own = secrets.token_bytes(NONCE)
    connection.settimeout(max(0.01, deadline - time.monotonic()))
    connection.sendall(GREETING + struct.pack("<I", number) + own)
    other = _exactly(connection, NONCE)
    connection.sendall(prove(secret, b"worker%d" % number, own, other))
    if not hmac.compare_digest(_exactly(connection, 32), prove(secret, b"client", other, own)):
        raise LaunchError("whoever listens there does not know the secret of this cluster")
    connection.settimeout(None)


def welcome(connection: socket.socket, secret: bytes, deadline: float) -> int:
    """The client's side: the number of a worker that has proven the secret."""
    connection.settimeout(max(0.01, deadline - time.monotonic()))
    if _exactly(connection, len(GREETING)) != GREETING:
        raise LaunchError("a stranger spoke to the cluster's port")
    (number,) = struct.unpack("<I", _exactly(connection, 4))
    other = _exactly(connection, NONCE)
    own = secrets.token_bytes(NONCE)
    connection.sendall(own)
    if not hmac.compare_digest(_exactly(connection, 32), prove(secret, b"worker%d" % number, other, own)):
        raise LaunchError("somebody who does not know the secret spoke to the cluster's port")
    connection.sendall(prove(secret, b"client", own, other))
    connection.settimeout(None)
    return int(number)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise LaunchError("the other end left during the greeting")
        data += piece
    return data


def tune(connection: socket.socket) -> None:
    """Small frames leave at once; a host that is gone is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
