"""The proxy of the fault suite, between two plain sockets: what it hands on, and what each rule does to it."""

import time

import pytest
import zmq

from common.errors import ProtocolError
from protocol import messages as m
from protocol.codec import decode, encode
from tests.faults.proxy import Proxy


class Line:
    """A node and a coordinator with a proxy between them."""

    def __init__(self):
        self.context = zmq.Context()
        self.coordinator = self.context.socket(zmq.ROUTER)
        port = self.coordinator.bind_to_random_port("tcp://127.0.0.1")
        self.proxy = Proxy(f"tcp://127.0.0.1:{port}")
        self.node = self.context.socket(zmq.DEALER)
        self.node.setsockopt(zmq.IDENTITY, b"a#1")
        self.node.connect(self.proxy.address)
        for socket in (self.coordinator, self.node):
            socket.setsockopt(zmq.LINGER, 0)

    def up(self, *numbers):
        for number in numbers:
            self.node.send_multipart(encode(m.BatchRequest(step=number), run_id="r", seq=number))

    def down(self, number, re=0):
        self.coordinator.send_multipart([b"a#1", *encode(m.Ack(reason=str(number)), run_id="r", re=re)])

    def arrived(self, count, within_ms=60_000):
        """Steps of the next ``count`` requests."""
        found = []
        while len(found) < count and self.coordinator.poll(within_ms):
            identity, *frames = self.coordinator.recv_multipart()
            assert identity == b"a#1"
            found.append(decode(frames).message.step)
        return found

    def nothing_more(self):
        return not self.coordinator.poll(300) and not self.node.poll(0)

    def close(self):
        self.proxy.close()
        self.context.destroy(linger=0)


@pytest.fixture
def line():
    line = Line()
    yield line
    line.close()


def test_without_rules_all_passes_in_both_directions_and_is_seen(line):
    line.up(1, 2)
    assert line.arrived(2) == [1, 2]
    line.down(7, re=2)
    assert line.node.poll(60_000)
    assert decode(line.node.recv_multipart()).message.reason == "7"
    seen = [(item.direction, item.kind, item.seq, item.re, item.re_kind, item.node_id) for item in line.proxy.seen]
    assert seen == [
        ("up", "batch_request", 1, 0, "", "a"),
        ("up", "batch_request", 2, 0, "", "a"),
        ("down", "ack", 0, 2, "batch_request", "a"),
    ]


def test_a_peer_without_an_identity_gets_none_from_the_proxy_and_its_answer(line):
    """The number that one ROUTER makes up is the next one of another, which aborts when it finds it taken."""
    with line.context.socket(zmq.DEALER) as tool:
        tool.setsockopt(zmq.LINGER, 0)
        tool.connect(line.proxy.address)
        tool.send_multipart(encode(m.StatusRequest(), run_id="r", seq=1))
        assert line.coordinator.poll(60_000)
        identity, *frames = line.coordinator.recv_multipart()
        assert decode(frames).message == m.StatusRequest()
        assert identity != line.proxy.seen[0].identity
        line.coordinator.send_multipart([identity, *encode(m.Ack(reason="here"), run_id="r", re=1)])
        assert tool.poll(60_000)
        assert decode(tool.recv_multipart()).message.reason == "here"


def test_a_dropped_message_does_not_arrive_and_is_counted(line):
    rule = line.proxy.add("drop", "batch_request", skip=1)
    line.up(1, 2, 3)
    assert line.arrived(2) == [1, 3]
    assert line.nothing_more()
    assert len(rule.hits) == 1
    assert rule.wait(1) == rule.hits[0]


def test_a_doubled_message_arrives_twice(line):
    line.proxy.add("duplicate", "batch_request")
    line.up(1, 2)
    assert line.arrived(3) == [1, 1, 2]


def test_a_delayed_message_arrives_later_and_is_overtaken(line):
    line.proxy.add("delay", "batch_request", delay_s=1.0)
    sent = time.monotonic()
    line.up(1, 2)
    assert line.arrived(2) == [2, 1]
    assert time.monotonic() - sent >= 1.0


def test_a_reordered_message_comes_after_two_later_ones_or_after_a_while(line):
    line.proxy.add("reorder", "batch_request", count=2)
    line.up(1)
    assert line.arrived(1) == [1], "nothing came after it, so it was let go"
    line.up(2, 3, 4, 5)
    assert line.arrived(4) == [3, 4, 2, 5]


def test_a_damaged_message_is_no_message(line):
    line.proxy.add("corrupt", "batch_request")
    line.up(1)
    assert line.coordinator.poll(60_000)
    _, *frames = line.coordinator.recv_multipart()
    with pytest.raises(ProtocolError):
        decode(frames)


def test_a_rule_applies_to_its_node_direction_and_request_only(line):
    for conditions in ({"node_id": "b"}, {"direction": "down"}, {"re_kind": "hello"}):
        line.proxy.add("drop", **conditions, count=None)
    line.up(1)
    assert line.arrived(1) == [1]
    line.proxy.add("drop", "ack", re_kind="batch_request")
    line.down(7, re=1)
    assert line.nothing_more()


def test_who_is_cut_off_is_not_heard_until_healed(line):
    line.up(1)
    assert line.arrived(1) == [1]
    line.proxy.cut("a")
    line.up(2)
    line.down(7)
    assert line.nothing_more()
    line.proxy.heal("a")
    line.up(3)
    assert line.arrived(1) == [3], "what was sent meanwhile is gone"


def test_a_function_is_called_before_the_message_is_handed_on(line):
    calls = []
    line.proxy.when("batch_request", calls.append)
    line.up(1, 2)
    assert line.arrived(2) == [1, 2]
    assert [seen.seq for seen in calls] == [1]


def test_what_is_held_comes_when_it_is_released_in_order_and_whatever_other_rules_say(line):
    line.proxy.add("drop", count=None)
    rule = line.proxy.add("hold", "batch_request", count=None)
    line.up(1, 2)
    assert line.nothing_more()
    assert len(rule.hits) == 2
    line.proxy.release(rule)
    assert line.arrived(2) == [1, 2]
    line.up(3)
    assert line.nothing_more(), "the other rule is still there"
    line.proxy.clear()
    line.proxy.release(rule)
    assert line.nothing_more()


def test_an_error_in_the_proxy_fails_the_case():
    line = Line()
    line.proxy.when("batch_request", lambda _: 1 / 0)
    line.up(1)
    line.proxy._thread.join(60)
    with pytest.raises(ZeroDivisionError):
        line.proxy.close()
    line.context.destroy(linger=0)


def test_chance_is_the_seed_s(line):
    rule = line.proxy.add("drop", "batch_request", where=lambda seen: seen.seq <= 40, probability=0.5, count=None)
    line.up(*range(1, 42))
    arrived = []
    while arrived[-1:] != [41]:
        arrived += (step := line.arrived(1))
        assert step
    assert 5 < len(rule.hits) < 35
    assert len(arrived) == 41 - len(rule.hits)
