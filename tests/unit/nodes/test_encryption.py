"""TLS with a certificate that is known by its fingerprint: what is hidden, who is refused, and in which words."""

import random
import socket
import ssl
import time
from contextlib import closing, suppress
from importlib import import_module
from pathlib import Path

import pytest

import dryfit.processes.connection as encryption
from dryfit.ledger.folder import StudyLayout
from dryfit.processes.agent import serve
from dryfit.processes.agent_link import AgentLink, Meeting, listening, publish, read_address, read_fingerprint
from dryfit.processes.connection import Connection, PlainBytes, TlsBytes, WireBytes, agent_context, control_context
from dryfit.processes.joined_nodes import Listener
from dryfit.processes.node_messages import Bye, Left, LineError, Side, new_token
from dryfit.settings.errors import ConfigError, FileError, MachineError

TOKEN = new_token()
OTHER = "0" * 64
Certificate = tuple[ssl.SSLContext, str]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return control_context(StudyLayout(tmp_path_factory.mktemp("study")))


def pair(agents: WireBytes | None, controls: WireBytes | None) -> tuple[Connection, Connection]:
    """The two ends of a connection, after what each says of itself."""
    near, far = socket.socketpair()
    agent, control = Connection(near, Side.AGENT, TOKEN, agents), Connection(far, Side.CONTROL, TOKEN, controls)
    for _ in range(6):
        control.receive()
        agent.receive()
    return agent, control


def test_two_sides_talk_and_nobody_else_reads_it(certificate: Certificate) -> None:
    context, fingerprint = certificate
    agent, control = pair(TlsBytes(agent_context(), fingerprint), TlsBytes(context))
    with closing(agent), closing(control):
        agent.send(Left(number=1, why="w" * 3_000_000))
        heard: list[bytes] = []
        while not heard:
            agent.flush()
            heard = control.receive()
        assert heard == [Left(number=1, why="w" * 3_000_000).model_dump_json().encode()]
        control.send(Bye(why="over"))
        assert agent.receive() == [Bye(why="over").model_dump_json().encode()]
    here, there = TlsBytes(agent_context(), fingerprint), TlsBytes(context)
    here.put(b"a secret")
    sent = bytearray()
    for _ in range(4):
        sent += (said := here.to_send())
        if heard_now := there.heard(said):
            assert heard_now == b"a secret"
            break
        here.heard(there.to_send())
    else:
        pytest.fail("it was never heard")
    assert b"secret" not in sent


def test_another_certificate_is_refused_in_words_before_anything_is_proved(certificate: Certificate) -> None:
    context, fingerprint = certificate
    agent, control = pair(TlsBytes(agent_context(), OTHER), TlsBytes(context))
    with closing(agent), closing(control):
        assert agent.broken == f"the certificate there has the fingerprint {fingerprint}, not {OTHER}"
        assert "another certificate" in control.broken
        assert agent.is_refused and control.is_refused and not (agent.is_proved or control.is_proved)


@pytest.mark.parametrize("encrypted", list(Side))
def test_a_side_without_tls_is_told_apart_at_once(encrypted: Side, certificate: Certificate) -> None:
    context, fingerprint = certificate
    if encrypted is Side.AGENT:
        agent, control = pair(TlsBytes(agent_context(), fingerprint), None)
    else:
        agent, control = pair(None, TlsBytes(context))
    with closing(agent), closing(control):
        with_tls, without = (agent, control) if encrypted is Side.AGENT else (control, agent)
        assert with_tls.broken == "the other side does not speak TLS, this one does (nodes.tls of the study)"
        assert "the other side speaks TLS, this one does not" in without.broken
        assert agent.is_refused and control.is_refused


@pytest.mark.parametrize("side", list(Side))
def test_bytes_that_were_changed_on_the_way_are_refused(side: Side, certificate: Certificate) -> None:
    context, fingerprint = certificate
    draw, refused = random.Random(3), 0
    for _ in range(400):
        agent, control = TlsBytes(agent_context(), fingerprint), TlsBytes(context)
        agent.put(b"said by the agent")
        control.put(b"said by control")
        target, turn, heard = draw.randrange(4), 0, {Side.AGENT: b"", Side.CONTROL: b""}
        try:
            while turn < 6:
                for source, goal, name in ((agent, control, Side.CONTROL), (control, agent, Side.AGENT)):
                    data = bytearray(source.to_send())
                    if data and name is not side and turn // 2 == target // 2:
                        for _ in range(draw.randint(1, 4)):
                            data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
                    heard[name] += goal.heard(bytes(data))
                    turn += 1
        except LineError:
            refused += 1
        assert b"said by control".startswith(heard[Side.AGENT])
        assert b"said by the agent".startswith(heard[Side.CONTROL])
    assert refused > 200, "what was changed is refused, or still waited for"


def test_ten_thousand_strangers_are_cut_off_or_waited_for(certificate: Certificate) -> None:
    draw, hello = random.Random(4), TlsBytes(agent_context(), OTHER).to_send()
    for _ in range(10_000):
        data = bytearray(hello)
        for _ in range(draw.randint(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        control = TlsBytes(certificate[0])
        with suppress(LineError):
            assert control.heard(bytes(data[: draw.randint(1, len(data))])) == b""


def test_the_certificate_is_made_once_and_its_key_is_its_owners_alone(tmp_path: Path) -> None:
    layout = StudyLayout(tmp_path)
    _, fingerprint = control_context(layout)
    (tmp_path / "other").mkdir()
    assert control_context(layout)[1] == fingerprint != control_context(StudyLayout(tmp_path / "other"))[1]
    file = layout.node_certificate
    assert file.stat().st_mode & 0o777 == 0o600 and [one.name for one in layout.nodes.iterdir()] == [file.name]
    file.chmod(0o640)
    with pytest.raises(FileError, match="others can read its key"):
        control_context(layout)
    file.chmod(0o600)
    file.write_text("-----BEGIN CERTIFICATE-----\nno\n")
    with pytest.raises(FileError, match="another one is made"):
        control_context(layout)
    publish(layout, ("127.0.0.1", 4), "study-id", "session", fingerprint)
    address = read_address(layout)
    assert address is not None and address.fingerprint == fingerprint


def test_what_makes_certificates_may_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> object:
        if name.startswith("cryptography"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return import_module(name)

    monkeypatch.setattr(encryption, "import_module", absent)
    with pytest.raises(MachineError, match=r"dryfit\[tls\]"):
        control_context(StudyLayout(tmp_path))


@pytest.mark.parametrize("text", ["", "00", "g" * 64, OTHER + "0"])
def test_a_fingerprint_has_64_digits(text: str) -> None:
    assert read_fingerprint(":".join(["AB"] * 32)) == "ab" * 32
    with pytest.raises(ConfigError, match="--fingerprint"):
        read_fingerprint(text)
    with pytest.raises(ConfigError, match="without --join"):
        serve(StudyLayout(Path("study")), None, None, 1.0, print, text)


@pytest.mark.parametrize("given", ["right", OTHER, ""])
def test_agent_and_study_each_say_why_they_do_not_meet(given: str, certificate: Certificate) -> None:
    context, fingerprint = certificate
    listener = Listener(listening("127.0.0.1", 0), TOKEN, time.monotonic, context)
    meeting = Meeting(*listener.address, TOKEN, fingerprint if given == "right" else given)
    link = AgentLink(lambda: meeting, lambda _fd: None, lambda _fd: None, time.monotonic)
    try:
        link.dial()
        until_s, cut_off = time.monotonic() + 120, list[str]()
        while time.monotonic() < until_s and not (link.is_proved or (link.refused and cut_off)):
            listener.look()
            cut_off += listener.refused()
            link.hear()
        assert link.is_proved is (given == "right")
        if given == "right":
            assert not cut_off and not link.refused
        else:
            assert ("fingerprint" if given else "speaks TLS") in link.refused
            assert len(cut_off) == 1 and ("another certificate" if given else "does not speak TLS") in cut_off[0]
    finally:
        link.hang_up("")
        listener.close()


def test_what_is_said_in_the_plain_is_left_as_it_is() -> None:
    plain = PlainBytes(greets=True)
    plain.put(b"line\n")
    assert plain.to_send() == b"\nline\n" and plain.to_send() == b""
    assert plain.heard(b"") == b"" and plain.heard(b"{\x16") == b"{\x16" and plain.heard(b"\x16") == b"\x16"
