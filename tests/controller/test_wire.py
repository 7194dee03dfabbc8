"""Frames: what was packed is read, and anything else ends in an error that is ours, never in a hang or a surprise."""

from __future__ import annotations

import json
import math
import random
import socket
import struct
import threading
import time

import pytest
import torch
from hypothesis import given, settings, strategies as st

import meshloom as loom
from meshloom import Partial, Replicate, Shard
from meshloom.controller import wire
from meshloom.controller.session import _Peer
from meshloom.controller.values import decode, encode
from meshloom.controller.worker import Table, Worker

GOOD = [
    (b"call", [["d", [1, 2]], ["a", 3]]),
    (b"data", {"id": 1, "dtype": "float32", "shape": [2], "place": None}),
    (b"tell", {"done": 5}),
    (b"give", {"request": 1, "value": None}),
    (b"beat", {"worker": 0, "done": 1, "busy": 0.5, "memory": 1, "call": "m:add", "line": "a.py:1"}),
]


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def feed(data: bytes) -> list[object]:
    """What the client reads of some bytes, and then the end."""
    near, far = pair()
    far.setblocking(False)
    peer = _Peer(0, far)
    found: list[object] = []
    near.sendall(data)
    near.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + 5
    try:
        while time.monotonic() < deadline:
            frames = peer.receive()
            if frames is None:
                return found
            found += frames
            time.sleep(0.0005)
        raise AssertionError("it hangs")
    finally:
        near.close()
        far.close()


@pytest.mark.parametrize("kind, header", GOOD, ids=lambda value: value.decode() if isinstance(value, bytes) else "")
def test_what_was_packed_is_read(kind, header):
    payload = b"12345678"
    data = wire.pack(kind, header, len(payload)) + payload + wire.pack(kind, header)
    near, far = pair()
    near.sendall(data)
    line = wire.Line(far)
    found = line.receive()
    assert found == (kind, header, 8)
    room = bytearray(8)
    line.read_into(memoryview(room))
    assert bytes(room) == payload
    assert line.receive() == (kind, header, 0)
    near.close()
    assert line.receive() is None
    far.close()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, len(GOOD) - 1), st.integers(0, 250), st.integers(0, 255))
def test_bytes_that_are_no_frames_are_refused_and_never_hang(noise, which, place, value):
    """Noise, and good frames with one byte changed, cut off anywhere: frames, the end, or a WireError."""
    good = bytearray(wire.pack(*GOOD[which]))
    good[place % len(good)] = value
    for data in (noise, bytes(good), bytes(good[: place % len(good)]), bytes(good) + noise):
        size = struct.unpack("<4sIQ", data[:16])[2] if len(data) >= 16 else 0
        if size > 1 << 20:
            continue  # it would wait for that much, which the next test bounds
        try:
            for _, header, _ in feed(data):
                assert isinstance(header, (dict, list))
        except wire.WireError:
            pass


def test_sizes_are_bounded_before_anything_is_allocated():
    for header, payload in ((wire.MOST_HEADER + 1, 0), (0, wire.MOST_PAYLOAD + 1), (2**32 - 1, 2**63)):
        with pytest.raises(wire.WireError, match="announces"):
            wire.read_head(wire.HEAD.pack(b"give", header, payload))
    with pytest.raises(wire.WireError, match="too long"):
        wire.pack(b"give", {"request": 1, "value": "x" * (wire.MOST_HEADER + 1)})


@pytest.mark.parametrize(
    "kind, text",
    [
        (b"tell", b"{}"), (b"tell", b'{"done": true}'), (b"tell", b'{"done": "1"}'), (b"tell", b'{"done": 1, "x": 2}'),
        (b"call", b"{}"), (b"call", b"\xff\xfe"), (b"call", b"[" * 100_000), (b"give", b"null"), (b"data", b"[]"),
    ],
)  # fmt: skip
def test_headers_of_another_form_are_refused(kind, text):
    with pytest.raises(wire.WireError):
        wire.read_header(kind, text)


def test_the_schema_is_checked_at_all():
    assert wire.read_header(b"tell", b'{"done": 1}') == {"done": 1}  # what the test above changes is good otherwise


VALUES = [
    1, -0.0, math.inf, True, None, "word", 2**70, [1, [2.5]], (1, (2,)), slice(1, None, 2), Ellipsis, torch.bfloat16,
    torch.device("cpu"), torch.preserve_format, 1 + 2j, Shard(-1), Replicate(), Partial("max"),
    {"dp": Shard(0), 1: (2,)}, torch.Size((2, 3)),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_arguments_survive_the_wire(value):
    sent = json.loads(json.dumps(encode(value, lambda tensor: 0, lambda mesh: 0)))
    assert decode(sent, Table(), {}) == value
    assert math.copysign(1, decode(json.loads(json.dumps(-0.0)), Table(), {})) == -1


def test_what_would_have_to_be_pickled_is_refused():
    for value in (lambda x: x, object(), threading.Lock(), {1, 2}):
        with pytest.raises(loom.UnsupportedError, match="pickled"):
            encode(value, lambda tensor: 0, lambda mesh: 0)


def test_both_ends_prove_the_secret():
    def meet(theirs: bytes, ours: bytes) -> list[object]:
        near, far = pair()
        found: list[object] = []

        def work() -> None:
            try:
                found.append(wire.welcome(far, ours, time.monotonic() + 2))
            except loom.LaunchError as error:
                found.append(error)
                far.close()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            wire.greet(near, theirs, 3, time.monotonic() + 2)
        except (loom.LaunchError, OSError) as error:
            found.append(error)
        thread.join()
        near.close()
        far.close()
        return found

    assert meet(b"secret", b"secret") == [3]
    wrong = meet(b"secret", b"another")
    assert len(wrong) == 2 and all(isinstance(each, Exception) for each in wrong)


def test_a_worker_answers_nonsense_with_failures_and_goes_on():
    """Commands of the right frame that make no sense: each is a failure that is told, none ends the worker."""
    near, far = pair()
    worker = Worker(wire.Line(far), 0)
    told: list[object] = []
    worker.send = lambda kind, header, payload=None: told.append((kind, header))
    draw = random.Random(0)
    nonsense = [
        ["c", "f:torch.load", ["file"], 0, [], "", 0],
        ["c", "m:__class__", [], 0, [], "", 0],
        ["c", "loom:__builtins__", [], 0, [], "", 0],
        ["c", "os:system", ["true"], 0, [], "", 0],
        ["c", "m:relu", [{"t": 99}], 0, [1], "", 0],
        ["c", "m:relu", [{"?": 1}], 0, [1], "", 0],
        ["c", "m:relu"],
        ["f", 12, 1],
        ["zzz"],
        [],
        *([draw.choice("cdmxfaqrk"), *(draw.randrange(9) for _ in range(draw.randrange(8)))] for _ in range(200)),
    ]
    for command in nonsense:
        worker.perform(command)
    failures = [header for kind, header in told if kind == b"fail"]
    assert len(failures) >= len(nonsense) // 2
    assert any("no function 'f:torch.load'" in each["headline"] for each in failures)
    near.close()
    far.close()
