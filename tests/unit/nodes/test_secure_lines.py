"""Only what the other side has written, in its order, is heard."""

import random
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dryfit.processes.connection import Connection, Inbox, Outbox
from dryfit.processes.node_messages import (
    MOST_GREETING_BYTES,
    MOST_LINE_BYTES,
    Bye,
    Handshake,
    KillChild,
    LineCutter,
    LineError,
    SealedLines,
    Side,
    new_token,
)

TOKEN = new_token()
SHAKEN = Handshake(TOKEN, new_token(), new_token())
PAYLOADS = st.lists(st.binary(max_size=50).filter(lambda one: b"\n" not in one), min_size=1, max_size=6)


def sealed(payloads: list[bytes], key: bytes = SHAKEN.key(Side.AGENT)) -> list[bytes]:
    sealer = SealedLines(key)
    return [sealer.seal(payload).removesuffix(b"\n") for payload in payloads]


@given(PAYLOADS)
def test_what_was_sealed_is_opened(payloads: list[bytes]) -> None:
    opener = SealedLines(SHAKEN.key(Side.AGENT))
    assert [opener.open(line) for line in sealed(payloads)] == payloads


@given(PAYLOADS, st.data())
def test_no_other_line_is_opened(payloads: list[bytes], data: st.DataObject) -> None:
    lines = sealed(payloads)
    at = data.draw(st.integers(0, len(lines) - 1))
    line = bytearray(lines[at])
    where = data.draw(st.integers(0, len(line) - 1))
    line[where] ^= data.draw(st.integers(1, 255))
    opener = SealedLines(SHAKEN.key(Side.AGENT))
    for before in lines[:at]:
        opener.open(before)
    with pytest.raises(LineError):
        opener.open(bytes(line))
    assert opener.open(lines[at]) == payloads[at], "a line that was refused changes nothing"


def test_ten_thousand_mutated_lines_are_refused() -> None:
    draw, good = random.Random(5), sealed([b'{"type":"bye","why":"over"}'])[0]
    for _ in range(10_000):
        line = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            change, at = draw.randint(0, 2), draw.randrange(len(line))
            if change == 0:
                line[at] = draw.randrange(256)
            elif change == 1:
                del line[at]
            else:
                line.insert(at, draw.randrange(256))
        if bytes(line) != good:
            with pytest.raises(LineError):
                SealedLines(SHAKEN.key(Side.AGENT)).open(bytes(line))


def test_a_line_counts_once_in_its_place_and_in_its_direction() -> None:
    first, second = sealed([b"same", b"same"])
    other = Handshake(TOKEN, new_token(), SHAKEN.agent_nonce)
    for key, line in (
        (SHAKEN.key(Side.AGENT), second),  # one was left out
        (SHAKEN.key(Side.CONTROL), first),  # sent back to who said it
        (other.key(Side.AGENT), first),  # taken from another connection
    ):
        with pytest.raises(LineError):
            SealedLines(key).open(line)
    opener = SealedLines(SHAKEN.key(Side.AGENT))
    opener.open(first)
    with pytest.raises(LineError):
        opener.open(first)


def test_a_proof_is_of_one_side_one_token_and_both_nonces() -> None:
    proof = SHAKEN.proof(Side.AGENT)
    assert SHAKEN.is_proof(Side.AGENT, proof)
    assert not SHAKEN.is_proof(Side.CONTROL, proof), "what one side has said proves nothing of the other"
    for other in (
        Handshake(new_token(), SHAKEN.control_nonce, SHAKEN.agent_nonce),
        Handshake(TOKEN, new_token(), SHAKEN.agent_nonce),
        Handshake(TOKEN, SHAKEN.control_nonce, new_token()),
    ):
        assert not other.is_proof(Side.AGENT, proof)
    assert not SHAKEN.is_proof(Side.AGENT, "ä" * 64)


def test_a_line_is_bounded_before_and_after_its_end() -> None:
    for data in (b"x" * 11, b"x" * 11 + b"\n"):
        cutter = LineCutter(10)
        cutter.feed(data)
        with pytest.raises(LineError):
            cutter.next_line()
    with pytest.raises(LineError):
        SealedLines(b"key").seal(b"x" * MOST_LINE_BYTES)
    with pytest.raises(LineError):
        SealedLines(b"key").seal(b"two\nlines")


@given(st.lists(st.binary(max_size=8), max_size=8))
def test_lines_are_cut_wherever_the_bytes_break(parts: list[bytes]) -> None:
    cutter, found = LineCutter(100), list[bytes]()
    for part in parts:
        cutter.feed(part)
        while (line := cutter.next_line()) is not None:
            found.append(line)
    assert found == b"".join(parts).split(b"\n")[:-1]


def pair(token: str = TOKEN, other: str = TOKEN) -> tuple[Connection, Connection]:
    """The two ends of a connection, after what each says of itself."""
    near, far = socket.socketpair()
    agent, control = Connection(near, Side.AGENT, token), Connection(far, Side.CONTROL, other)
    for _ in range(4):
        agent.receive()
        control.receive()
    return agent, control


def test_two_sides_with_one_token_talk() -> None:
    agent, control = pair()
    control.send(Bye(why="over"))
    agent.send(KillChild(number=1, key="trial-1-1", why="now"))
    assert agent.receive() == [Bye(why="over").model_dump_json().encode()]
    assert len(control.receive()) == 1
    agent.close()
    assert control.receive() == [] and control.broken
    control.send(Bye(why="nobody hears it"))
    control.close()


def test_with_another_token_nothing_is_said() -> None:
    agent, control = pair(new_token(), TOKEN)
    assert "token" in control.broken
    assert not agent.is_proved and not control.is_proved
    agent.close()
    control.close()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"x" * (MOST_GREETING_BYTES + 1), b"\xff\xfe\n"])
@pytest.mark.parametrize("role", list(Side))
def test_a_stranger_is_cut_off(said: bytes, role: Side) -> None:
    near, far = socket.socketpair()
    connection = Connection(near, role, TOKEN)
    far.sendall(said)
    assert connection.receive() == []
    assert connection.broken and not connection.is_proved
    connection.close()
    far.close()


@given(st.lists(st.integers(0, 3), max_size=30))
def test_each_message_is_heard_once_and_in_order_over_broken_connections(breaks: list[int]) -> None:
    outbox, inbox, heard = Outbox[int](), Inbox(), list[int]()
    for message, lost in enumerate(breaks):
        outbox.put(message)
        for number, waiting in list(outbox.waiting())[: lost or None]:  # a connection that breaks after so many
            if inbox.is_new(number):
                heard.append(waiting)
        if lost != 1:  # else what was heard is not acknowledged
            outbox.acknowledge(inbox.last)
    for number, waiting in outbox.waiting():
        if inbox.is_new(number):
            heard.append(waiting)
    assert heard == list(range(len(breaks)))
    with pytest.raises(ValueError, match="comes after"):
        inbox.is_new(inbox.last + 2)
