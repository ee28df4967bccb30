"""Frames: what travels, what is refused, and with which words."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ProtocolError
from protocol import messages as m
from protocol.codec import decode, encode, peek, seal


def sample_frames(**changes):
    message = m.SampleResult(
        lease_id="a-1",
        group_id=7,
        sample_index=3,
        text="x = 1",
        finish_reason="stop",
        segments=[m.Segment(version=2, num_tokens=3)],
    )
    arrays = {
        "prompt_ids": np.arange(4, dtype=np.int32),
        "completion_ids": np.arange(3, dtype=np.int32),
        "logprobs": np.array([-0.5, -1.0, -2.0], dtype=np.float32),
    }
    return [bytes(frame) for frame in encode(message, run_id="r", seq=5, re=0, arrays={**arrays, **changes})]


def test_a_sample_comes_back_as_it_was_sent_without_a_copy_of_its_arrays():
    frames = sample_frames()
    received = decode(frames)
    assert received.message.group_id == 7
    assert (received.run_id, received.seq) == ("r", 5)
    assert received.arrays["logprobs"].tolist() == [-0.5, -1.0, -2.0]
    assert not received.arrays["completion_ids"].flags.owndata
    assert not received.arrays["completion_ids"].flags.writeable


ROUTES = np.arange(24, dtype=np.uint16).reshape(6, 2, 2)


def test_an_optional_array_travels_behind_the_others_or_not_at_all():
    received = decode(sample_frames(routed_experts=ROUTES))
    assert list(received.arrays) == ["prompt_ids", "completion_ids", "logprobs", "routed_experts"]
    assert np.array_equal(received.arrays["routed_experts"], ROUTES)
    assert received.arrays["routed_experts"].dtype == np.uint16
    assert "routed_experts" not in decode(sample_frames()).arrays


def test_empty_arrays_travel():
    received = decode(sample_frames(completion_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32)))
    assert received.arrays["completion_ids"].shape == (0,)


def reseal(frames):
    return seal(frames[0][:-4], frames[1:])


def header_of(frames, **changes):
    return seal(msgpack.packb(peek(frames[0]) | changes), frames[1:])


def renamed(old, new):
    """A sample with routed_experts, one of whose arrays has another name in the header."""
    frames = sample_frames(routed_experts=ROUTES)
    specs = [[new if name == old else name, *rest] for name, *rest in peek(frames[0])["arrays"]]
    return header_of(frames, arrays=specs)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "empty"),
        ([b"\xc1"], "checksum"),
        (seal(b"\xc1", []), "not msgpack"),
        (seal(msgpack.packb([1, 2]), []), "malformed"),
        (header_of(sample_frames(), kind="os.system"), "Unknown message kind"),
        (header_of(sample_frames(), protocol=99), "Protocol version 99"),
        (sample_frames()[:2], "checksum"),
        (reseal(sample_frames()[:2]), "must come with arrays"),
        (reseal([*sample_frames()[:3], b"123"]), "takes 12"),
        (header_of(sample_frames(), arrays=[["prompt_ids", "object", [4]]]), "must come with arrays"),
        (header_of(sample_frames(), body={"lease_id": 5}), "field"),
        (renamed("routed_experts", "experts"), "must come with arrays"),
        (renamed("logprobs", "routed_experts"), "its frame is described by"),
        (renamed("routed_experts", 7), "must come with arrays"),
        ([b"\xdc" * (33 << 20)], "over the bounds"),
    ],
)
def test_a_bad_frame_is_refused_with_a_reason(frames, words):
    with pytest.raises(ProtocolError, match=words):
        decode(frames)


def test_an_array_of_objects_never_travels():
    with pytest.raises(ProtocolError, match="doesn't travel"):
        sample_frames(logprobs=np.array([object()]))


def test_an_array_that_the_message_does_not_know_never_travels():
    with pytest.raises(ProtocolError, match="travels with arrays"):
        sample_frames(weights=np.zeros(2, np.float32))


def test_a_forged_shape_is_refused():
    frames = sample_frames()
    header = peek(frames[0])
    header["arrays"][0][2] = [2**40, 2**40]
    with pytest.raises(ProtocolError, match="takes"):
        decode(seal(msgpack.packb(header), frames[1:]))


@given(st.integers(min_value=0, max_value=3), st.integers(min_value=0), st.integers(min_value=0, max_value=7))
def test_no_flipped_bit_passes(index, at, bit):
    frames = [bytearray(frame) for frame in sample_frames()]
    frames[index][at % len(frames[index])] ^= 1 << bit
    with pytest.raises(ProtocolError, match="checksum"):
        decode([bytes(frame) for frame in frames])


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_random_bytes_raise_nothing_but_protocol_errors(frames):
    with pytest.raises(ProtocolError):
        decode(frames)
