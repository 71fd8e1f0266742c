"""Frames survive any cutting, and neither side of a channel blocks on the other."""

import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.messages import Abort, Finish, SamplingSpec, Submit, ToEngine
from headrace.engine.wire import Channel, Encoder, Frames

MESSAGES = [
    Abort(("a", "b")),
    Finish("a", 3),
    Submit(id="x", prompt=tuple(range(1000)), max_tokens=5, sampling=SamplingSpec(seed=2**64 - 1)),
    Submit(id="y", prompt=(1,), max_tokens=1, sampling=SamplingSpec(logit_bias={3: -1.5})),
]


@given(st.lists(st.sampled_from(MESSAGES), max_size=6), st.lists(st.integers(1, 700)))
def test_any_cutting_gives_the_same_messages(messages: list[object], cuts: list[int]) -> None:
    encoder, frames = Encoder(), Frames[ToEngine](ToEngine)
    data = b"".join(encoder.frame(message) for message in messages)
    received: list[object] = []
    for cut in cuts:
        received += frames.feed(data[:cut])
        data = data[cut:]
    received += frames.feed(data)
    assert received == messages


def test_a_send_never_blocks_and_the_end_is_seen() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel[ToEngine](ours, ToEngine)
    big = Submit(id="x", prompt=tuple(range(100_000)), max_tokens=1, sampling=SamplingSpec())
    for _ in range(20):
        channel.send(big)  # far more than a socket buffers
    frames = Frames[ToEngine](ToEngine)
    got: list[object] = []
    theirs.setblocking(False)
    while len(got) < 20:
        try:
            got += frames.feed(theirs.recv(1 << 16))
        except BlockingIOError:
            assert channel.receive(0.0) == []
    assert got == [big] * 20
    theirs.sendall(Encoder().frame(Abort(("x",))))
    theirs.close()
    assert channel.receive(1.0) == [Abort(("x",))]
    assert channel.closed
    channel.close()


def test_a_frame_of_the_wrong_type_is_refused() -> None:
    frames = Frames[ToEngine](ToEngine)
    body = msgspec.msgpack.encode({"type": "nonsense"})
    with pytest.raises(msgspec.ValidationError):
        frames.feed(len(body).to_bytes(4, "little") + body)
    with pytest.raises(ValueError, match="limit"):
        Frames[ToEngine](ToEngine).feed(b"\xff\xff\xff\xff")
