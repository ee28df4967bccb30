"""The data plane of a weight update: the plan, the manifest, and bytes over two gloo ranks."""

import contextlib
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ProtocolError
from protocol import weights
from protocol.weights import TensorSpec, decode_manifest, encode_manifest, plan_buckets

specs = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(max_size=8),
        dtype=st.sampled_from(sorted(weights.DTYPE_BYTES)),
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    max_size=30,
)


@given(specs, st.integers(1, 500))
def test_a_plan_has_every_tensor_once_in_order_and_no_full_bucket_holds_two(tensors, bucket_bytes):
    buckets = plan_buckets(tensors, bucket_bytes)
    assert [spec for bucket in buckets for spec in bucket] == tensors
    for bucket in buckets:
        assert bucket, "no bucket is empty"
        sizes = [spec.num_bytes for spec in bucket]
        assert sum(sizes) <= bucket_bytes or sum(sizes) == max(sizes), (
            "only a tensor that is too large is over the bound"
        )


@given(specs, st.integers(1, 500))
def test_no_two_neighbours_of_a_plan_would_fit_in_one_bucket(tensors, bucket_bytes):
    buckets = plan_buckets(tensors, bucket_bytes)
    for left, right in itertools.pairwise(buckets):
        assert sum(spec.num_bytes for spec in left) + right[0].num_bytes > bucket_bytes


@given(specs, st.integers(1, 500))
def test_a_manifest_comes_back_as_it_was(tensors, bucket_bytes):
    buckets = plan_buckets(tensors, bucket_bytes)
    assert decode_manifest(encode_manifest(buckets)) == buckets


@given(st.binary(max_size=200))
def test_a_garbled_manifest_raises_nothing_but_protocol_errors(data):
    with contextlib.suppress(ProtocolError):
        decode_manifest(data)


@pytest.mark.parametrize(
    "raw",
    [
        5,
        [5],
        [[5]],
        [[["w", "float32"]]],
        [[["w", "object", [1]]]],
        [[["w", "float32", [-1]]]],
        {"a": 1},
        [[["w", "float32", None]]],
    ],
)
def test_a_manifest_of_the_wrong_form_is_refused(raw):
    with pytest.raises(ProtocolError):
        decode_manifest(msgpack.packb(raw))


# ---- bytes over gloo ----


@pytest.fixture
def store():
    served, address = weights.serve_store("127.0.0.1", timeout_s=60)
    yield served, address
    del served


def two_ranks(store, sender, receiver):
    """Run both sides with a group each; returns their results or exceptions."""

    def side(rank, body):
        own = store[0] if rank == 0 else weights.connect_store(store[1], timeout_s=60)
        try:
            group = weights.BroadcastGroup(
                weights.group_store(own, "k"), rank=rank, world_size=2, device=torch.device("cpu"), timeout_s=60
            )
        except RuntimeError as error:
            return error
        try:
            return body(group)
        except (RuntimeError, ProtocolError) as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(side, rank, body) for rank, body in ((0, sender), (1, receiver))]
        return [job.result() for job in jobs]


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [
        ("odd", torch.randn(3, generator=generator).to(torch.bfloat16)),
        ("a", torch.randn(5, 7, generator=generator)),
        ("b", torch.randn(11, generator=generator).to(torch.float16)),
        ("empty", torch.zeros(0)),
        ("scalar", torch.tensor(2.5)),
    ]


def plan_of(named):
    return [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in named]


@pytest.mark.parametrize("bucket_bytes", [1, 16, 1 << 20])
def test_weights_arrive_bit_for_bit(store, bucket_bytes):
    sent, kept = tensors(), {}
    num_sent, num_received = two_ranks(
        store,
        lambda group: weights.send_weights(group, plan_of(sent), sent, bucket_bytes=bucket_bytes),
        lambda group: weights.receive_weights(group, kept.__setitem__),
    )
    assert num_sent == num_received == sum(spec.num_bytes for spec in plan_of(sent))
    assert list(kept) == [name for name, _ in sent]
    for name, tensor in sent:
        assert kept[name].dtype == tensor.dtype
        assert kept[name].shape == tensor.shape
        assert torch.equal(kept[name], tensor)


def test_a_damaged_bucket_is_noticed_before_anything_is_kept(store, monkeypatch):
    sent, kept, liars = tensors(), {}, set()
    crc32 = weights.zlib.crc32
    monkeypatch.setattr(weights.zlib, "crc32", lambda data: crc32(data) ^ (threading.get_ident() in liars))

    def sender(group):
        liars.add(threading.get_ident())
        return weights.send_weights(group, plan_of(sent), sent, bucket_bytes=16)

    _, error = two_ranks(store, sender, lambda group: weights.receive_weights(group, kept.__setitem__))
    assert isinstance(error, ProtocolError)
    assert "Bucket 0" in str(error)
    assert kept == {}


def test_tensors_that_do_not_follow_their_plan_are_not_sent(store):
    sent = tensors()
    wrong = [("odd", torch.zeros(4))]
    error, other = two_ranks(
        store,
        lambda group: weights.send_weights(group, plan_of(sent), wrong, bucket_bytes=16),
        lambda group: weights.receive_weights(group, lambda *_: None),
    )
    assert isinstance(error, ProtocolError)
    assert "odd (4,) came where" in str(error)
    assert isinstance(other, RuntimeError), "the receiver loses its peer and doesn't wait for it"


def test_a_manifest_out_of_bounds_is_refused_before_memory_is_taken(store):
    _, error = two_ranks(
        store,
        lambda group: group.broadcast(torch.tensor([1 << 60])),
        lambda group: weights.receive_weights(group, lambda *_: None),
    )
    assert isinstance(error, ProtocolError)


def test_an_abort_ends_a_broadcast_whose_peer_is_silent(store):
    over = threading.Event()

    def silent(group):
        weights.abort_group([store[1]], "k", "node n went away", timeout_s=60)
        over.wait(60)

    def waiting(group):
        try:
            weights.receive_weights(group, lambda *_: None)
        finally:
            over.set()

    _, error = two_ranks(store, silent, waiting)
    assert isinstance(error, RuntimeError)
    assert "node n went away" in str(error)


def test_an_abort_ends_the_forming_of_a_group(store):
    timer = threading.Timer(0.3, lambda: weights.abort_group([store[1]], "k", "the other node died", timeout_s=60))
    timer.start()
    with pytest.raises(RuntimeError, match="the other node died"):
        weights.BroadcastGroup(
            weights.group_store(store[0], "k"), rank=0, world_size=2, device=torch.device("cpu"), timeout_s=60
        )
    timer.join()


def test_a_rank_that_does_not_come_is_named(store):
    with pytest.raises(RuntimeError, match="rank 1 of 2 did not come"):
        weights.BroadcastGroup(
            weights.group_store(store[0], "k"), rank=0, world_size=2, device=torch.device("cpu"), timeout_s=0.1
        )


def test_closing_a_group_that_sits_in_a_broadcast_holds_nobody_up(store):
    closed = threading.Event()

    def silent(group):
        assert closed.wait(30), "the whole interpreter stood still"

    def leaves_while_it_receives(group):
        receiving = ThreadPoolExecutor(1).submit(weights.receive_weights, group, lambda *_: None)
        while group._in_flight is None:
            time.sleep(0.01)
        group.close()
        closed.set()
        return receiving.exception(30)

    silent_error, error = two_ranks(store, silent, leaves_while_it_receives)
    assert silent_error is None
    assert isinstance(error, RuntimeError)
