"""A client's connection to a server goes through a relay, which learns first that the server is gone."""

import socket
import threading

import pytest

from liger_jax.training.relay import Relay


@pytest.fixture
def joined():
    """A relay, the server's end of a connection through it, and the client's."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as client:
        relay = Relay(f"127.0.0.1:{listener.getsockname()[1]}")
        client.connect(relay.address.removeprefix("unix:"))
        server, _ = listener.accept()
        client.settimeout(20)
        server.settimeout(20)
        with server:
            yield relay, server, client
        relay.close()


def watched(relay, seconds=30.0):
    """What the relay says of the server's loss, and what it waits for then."""
    told, is_told, may_close = [], threading.Event(), threading.Event()

    def lost(how):
        told.append(how)
        is_told.set()
        may_close.wait(20)

    relay.watch(lost, seconds)
    return told, is_told, may_close


def is_open(client):
    client.settimeout(0.1)
    try:
        return client.recv(1) != b""
    except TimeoutError:
        return True
    finally:
        client.settimeout(20)


def test_bytes_go_both_ways(joined):
    _, server, client = joined
    sent = bytes(range(256)) * 2000  # more than a relay reads at once
    for one, other in ((server, client), (client, server)):
        sender = threading.Thread(target=one.sendall, args=(sent,))
        sender.start()
        received = b""
        while len(received) < len(sent):
            received += other.recv(2**16)
        assert received == sent
        sender.join()


def test_the_servers_end_is_told_while_the_clients_is_open(joined):
    relay, server, client = joined
    told, is_told, may_close = watched(relay)
    assert is_open(client) and not told
    server.close()
    assert is_told.wait(20) and told == ["has ended"]
    assert is_open(client)
    may_close.set()
    assert client.recv(1) == b""


def test_a_silent_server_is_lost(joined):
    relay, server, client = joined
    told, is_told, may_close = watched(relay, seconds=1.0)
    assert is_told.wait(20) and told == ["has not been heard of for 1 seconds"]
    assert is_open(client)
    may_close.set()


def test_a_client_that_leaves_first_loses_nothing(joined):
    relay, server, client = joined
    told, *_ = watched(relay)
    client.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b""
    server.close()
    assert client.recv(1) == b"" and not told


def test_before_it_is_watched_a_servers_end_closes_the_clients(joined):
    _, server, client = joined
    server.close()
    assert client.recv(1) == b""


def test_a_client_that_comes_before_the_server_is_refused_and_may_come_again():
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # not listening
        address = reserved.getsockname()
        relay = Relay(f"127.0.0.1:{address[1]}")
        path = relay.address.removeprefix("unix:")
        with socket.socket(socket.AF_UNIX) as early:
            early.connect(path)
            assert early.recv(1) == b""
        reserved.listen()
        with socket.socket(socket.AF_UNIX) as late:
            late.connect(path)
            server, _ = reserved.accept()
            server.sendall(b"x")
            assert late.recv(1) == b"x"
            server.close()
        relay.close()
