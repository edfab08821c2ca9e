"""Messages over a stream socket: whole, in order, however the stream cuts them, and the end of it told."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from threading import Thread

from hypothesis import given
from hypothesis import strategies as st

from cluster.frames import LARGEST, LENGTH, FrameProtocol, FrameSocket


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_messages_come_whole_and_in_order_however_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(LENGTH.pack(len(message)) + message for message in messages)
    heard: list[bytes] = []
    end = FrameProtocol(heard.append, lambda cause: None)
    at, cut = 0, 0
    while at < len(stream):
        size = cuts[cut % len(cuts)]
        end.data_received(stream[at : at + size])
        at, cut = at + size, cut + 1
    assert heard == messages


async def linked(path: Path) -> tuple[FrameProtocol, FrameSocket, asyncio.Queue[bytes], asyncio.Event]:
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    lost = asyncio.Event()
    end = FrameProtocol(heard.put_nowait, lambda cause: lost.set())
    server = await asyncio.get_running_loop().create_unix_server(lambda: end, path)
    other = await asyncio.to_thread(FrameSocket.connect, str(path))
    await end.connected.wait()
    server.close()
    return end, other, heard, lost


async def test_both_ends_hear_each_other_and_the_end(tmp_path: Path) -> None:
    end, other, heard, lost = await linked(tmp_path / "s")
    large = bytes(range(256)) * 4096  # more than a socket holds at once

    def echo() -> None:
        while (message := other.receive()) is not None:
            other.send(message)
        other.close()

    thread = Thread(target=echo)
    thread.start()
    for message in (b"", b"one", large):
        end.send(message)
    assert [await heard.get() for _ in range(3)] == [b"", b"one", large]
    end.close()
    await lost.wait()
    await asyncio.to_thread(thread.join)
    with_closed = []
    try:
        end.send(b"two")
    except ConnectionError as error:
        with_closed.append(str(error))
    assert with_closed == ["the connection is closed"]


async def test_an_end_that_stops_in_the_middle_of_a_message_has_said_nothing(tmp_path: Path) -> None:
    end, other, heard, lost = await linked(tmp_path / "s")
    other._socket.sendall(LENGTH.pack(10) + b"half")
    other.close()
    await lost.wait()
    assert heard.empty()
    end.close()

    here, there = socket.socketpair()
    there.sendall(LENGTH.pack(10) + b"half")
    there.close()
    assert FrameSocket(here).receive() is None
    here.close()


async def test_what_claims_to_be_too_long_ends_the_connection(tmp_path: Path) -> None:
    end, other, heard, lost = await linked(tmp_path / "s")
    other._socket.sendall(LENGTH.pack(LARGEST + 1))
    await lost.wait()
    assert heard.empty()
    end.close()
    other.close()
