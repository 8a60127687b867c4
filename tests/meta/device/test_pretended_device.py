"""The pretended device keeps CUDA's rules: each thing that CUDA refuses is refused, and what it allows runs."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from specverify.backends.engine.model.graphs import CudaRecorder
from tests.pretended.install import GENERATOR, pretended_device
from tests.pretended.ledger import Ledger
from tests.pretended.tensor import MixedDevices, NotCapturable, Race, Unsynchronised


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with pretended_device() as ledger:
        yield ledger


def on_device(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32).to("cuda")


def test_it_is_a_cuda_device_to_the_program_and_gone_afterwards() -> None:
    with pretended_device():
        tensor = on_device(1, 2)
        assert (tensor.device, tensor.is_cuda, torch.cuda.is_available()) == (torch.device("cuda", 0), True, True)
        assert torch.zeros(2, device="cuda").device == tensor.device
        assert torch.nn.Linear(2, 2).to("cuda").weight.is_cuda
        assert (tensor + 1).tolist() == [2, 3]
    assert not torch.cuda.is_available()
    assert type(torch.zeros(1)) is Tensor
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_operands_of_two_devices_are_refused(ledger: Ledger) -> None:
    tensor = on_device(1, 2)
    with pytest.raises(MixedDevices, match=r"Expected all tensors to be on the same device.*test_pretended_device\.py"):
        tensor + torch.ones(2)
    with pytest.raises(MixedDevices):
        torch.cat([tensor, torch.ones(2)])
    with pytest.raises(MixedDevices):
        torch.ones(2).add_(tensor)
    with pytest.raises(MixedDevices):
        torch.ones(3)[torch.tensor([0, 1]).to("cuda")]
    with pytest.raises(MixedDevices):
        tensor[torch.tensor([0, 1]).to("cuda")] = torch.ones(2)
    # A number that lies in a CPU tensor is passed to a pointwise kernel, as torch does.
    assert (tensor * torch.tensor(2.0)).tolist() == [2, 4]


def test_the_host_reads_by_copies_alone_and_each_wait_is_charged_to_its_line(ledger: Ledger) -> None:
    tensor = on_device(1, 2)
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        tensor.numpy()
    assert ledger.count("read", "download") == 0
    tensor.sum().item()
    bool(tensor[0] > 0)
    tensor.cpu()
    tensor[tensor > 1]
    tensor.nonzero()
    assert [ledger.count(kind) for kind in ("upload", "read", "download", "shape")] == [1, 2, 1, 2]
    (line,) = ledger.lines("upload")
    assert line.startswith("tests/meta/device/test_pretended_device.py:")


def test_a_softmax_may_widen_float16_at_once(ledger: Ledger) -> None:
    """torch asks this of a CUDA device alone."""
    tensor = on_device(1, 2).half()
    for function in (torch.softmax, torch.log_softmax):
        wide = function(tensor, -1, dtype=torch.float32)
        assert wide.dtype == torch.float32
        assert wide.tolist() == function(torch.tensor([1.0, 2.0]), -1).tolist()


def test_an_index_on_the_cpu_costs_a_wait(ledger: Ledger) -> None:
    tensor = torch.zeros(3, device="cuda")
    tensor[torch.tensor([0, 1])]
    assert ledger.count("upload") == 1


def test_torch_warns_of_waits_where_it_is_asked_to(ledger: Ledger) -> None:
    tensor = torch.zeros(3, device="cuda")
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
        tensor.sum().item()
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        tensor.cpu()


def test_a_copy_without_a_wait_may_be_read_behind_one_alone(ledger: Ledger) -> None:
    arriving = on_device(1, 2).to("cpu", non_blocking=True)
    for read in (lambda: arriving.tolist(), lambda: arriving.numpy(), lambda: arriving + 1):
        with pytest.raises(Unsynchronised):
            read()
    torch.cuda.current_stream().synchronize()
    assert arriving.tolist() == [1, 2]
    assert (arriving + 1).tolist() == [2, 3]


def test_streams_are_ordered_by_waits_alone(ledger: Ledger) -> None:
    tensor = torch.zeros(2, device="cuda")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side), pytest.raises(Race, match="reads memory that stream 0 writes"):
        tensor + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        shifted = tensor + 1
        event = side.record_event()
    with pytest.raises(Race, match=r"writes memory that stream .* uses"):
        tensor.add_(1)
    with pytest.raises(Race, match="reads memory"):
        shifted * 2
    torch.cuda.current_stream().wait_event(event)
    tensor.add_(1)
    assert (shifted * 2).tolist() == [2, 2]


def test_what_the_host_has_waited_for_is_over_for_every_stream(ledger: Ledger) -> None:
    tensor = torch.zeros(2, device="cuda")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        shifted = tensor + 1
    side.synchronize()
    assert shifted.tolist() == [1, 1]


def test_a_capture_runs_nothing_and_a_replay_computes_in_place(ledger: Ledger) -> None:
    source, total = on_device(1, 2), torch.zeros(2, device="cuda")

    def run() -> list[Tensor]:
        total.add_(source)
        return [source * 10]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (product,) = run()
    torch.cuda.synchronize()
    assert total.tolist() == [0, 0]
    assert bool(product.isnan().all())
    graph.replay()
    assert (total.tolist(), product.tolist()) == ([1, 2], [10, 20])
    source.copy_(on_device(3, 4))
    copy = product.clone()
    graph.replay()
    assert (total.tolist(), product.tolist(), copy.tolist()) == ([4, 6], [30, 40], [10, 20])
    assert ledger.count("replay") == 2


def test_a_replay_over_memory_that_was_freed_is_refused(ledger: Ledger) -> None:
    source = on_device(1, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        source * 10
    del source
    with pytest.raises(RuntimeError, match="a replay uses 1 allocations that were freed since its capture"):
        graph.replay()


FORBIDDEN: dict[str, Callable[[Tensor], object]] = {
    "read": lambda tensor: tensor.sum().item(),
    "shape": lambda tensor: tensor.nonzero(),
    "mask": lambda tensor: tensor[tensor > 1],
    "download": lambda tensor: tensor.cpu(),
    "download without a wait": lambda tensor: tensor.to("cpu", non_blocking=True),
    "upload": lambda tensor: torch.tensor([1.0], device="cuda"),
    "upload without a wait": lambda tensor: torch.ones(2).to("cuda", non_blocking=True),
    "upload in place": lambda tensor: tensor.copy_(torch.ones(2)),
    "index": lambda tensor: tensor[torch.tensor([0])],
    "synchronize": lambda _: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_capture_refuses_what_no_graph_records(ledger: Ledger, what: str) -> None:
    tensor = on_device(1, 2)
    FORBIDDEN[what](tensor)  # outside a capture it may be done
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError) as caught, torch.cuda.graph(graph):
        FORBIDDEN[what](tensor)
    # torch tells the end of the capture, and the refusal as its cause.
    assert isinstance(caught.value.__context__, NotCapturable)
    torch.cuda.set_stream(torch.cuda.default_stream())


def test_work_of_another_stream_is_in_no_capture(ledger: Ledger) -> None:
    tensor = torch.zeros(2, device="cuda")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()), torch.cuda.stream(side):
        tensor + 1
    torch.cuda.set_stream(torch.cuda.default_stream())


def test_an_aborted_capture_leaves_stream_and_generator_as_they_were(ledger: Ledger) -> None:
    """torch itself leaves its own stream current, and the generator marked."""
    tensor = on_device(1, 2)
    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="previous error during capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        tensor.tolist()
    assert torch.cuda.current_stream() is not before
    assert GENERATOR.state.capturing
    torch.cuda.set_stream(before)
    GENERATOR.graphsafe_set_state(GENERATOR.clone_state())
    torch.cuda.synchronize()

    calls = 0

    def run() -> list[Tensor]:
        nonlocal calls
        calls += 1
        return [tensor + 1] if calls < 3 else [on_device(1, 2)]  # the capture alone asks for what it may not

    with pytest.raises(RuntimeError):
        CudaRecorder().record(run)
    assert calls == 3
    assert torch.cuda.current_stream() is before
    assert not GENERATOR.state.capturing
    assert (tensor + 1).tolist() == [2, 3]


def test_the_recorder_of_the_engine_records_on_it(ledger: Ledger) -> None:
    tensor = on_device(1, 2)
    (doubled,), replay = CudaRecorder().record(lambda: [tensor * 2])
    tensor.copy_(on_device(5, 6))
    replay()
    assert doubled.tolist() == [10, 12]
