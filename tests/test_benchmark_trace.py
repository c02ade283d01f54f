"""What a trace says about time and memory, on traces that were made by hand: a GPU's needs no GPU here."""

from itertools import count

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.trace import read_trace, time_shares

_ids = count(1)


def _event(name, start, end, *, cat="cpu_op", tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start, "args": args}


def _launch(operator, kernel, start, end, *, at, tid=1):
    """An operator of the host, and the kernel that it launched."""
    number = next(_ids)
    return [
        _event(operator, at, at + 1, tid=tid, **{"External id": number}),
        _event(kernel, start, end, cat="kernel", tid=7, **{"External id": number}),
    ]


def _range(name, start, end):
    return _event(name, start, end, cat="user_annotation")


def test_on_a_cpu_each_instant_counts_for_the_innermost_operator():
    events = [
        _range("step 3: data", 0, 10),
        _event("aten::stack", 2, 4),  # the loader's work is time in which the step does not go on
        _range("step 3: training", 10, 100),
        _event("aten::linear", 20, 60),
        _event("aten::addmm", 25, 55),
        _event("aten::copy_", 30, 35),
        _event("aten::_scaled_dot_product_attention", 60, 80),
        _event("aten::bmm", 62, 70),
        _range("Optimizer.step#AdamW.step", 85, 95),
        _event("aten::mul_", 86, 90),
        _event("aten::mm", 0, 100, tid=2),  # another thread
        _range("step 3: evaluation", 100, 500),
        _event("aten::mm", 110, 400),
    ]
    found = time_shares({"traceEvents": events})
    assert found.steps == (3, 3)
    assert found.seconds_per_step == pytest.approx(100e-6)
    assert not found.has_kernels
    assert {kind: round(100 * share) for kind, share in found.shares.items()} == {
        "matrix products": 25,
        "attention": 20,
        "Python and launches": 20,
        "elementwise and along rows": 10,
        "optimizer": 10,
        "waiting for data": 8,
        "copies and gathers": 7,
    }


def test_on_a_gpu_kernels_count_and_gaps_have_a_name():
    events = [
        _range("step 1: data", 0, 20),
        _range("step 1: training", 20, 120),
        *_launch("aten::mm", "nvjet_tst_128x64", 30, 60, at=21),
        *_launch("_BlockAttention", "elementwise_kernel", 60, 70, at=23),
        *_launch("c10d::allreduce_", "ncclDevKernel_AllReduce", 55, 90, at=25),  # beside the products until 70
        *_launch("triton_poi_fused_mul", "triton_poi_fused_mul", 90, 95, at=27, tid=9),
        _event("Memcpy DtoH", 95, 100, cat="gpu_memcpy", tid=7),
        _event("sm90_xmma_gemm", 130, 900, cat="kernel", tid=7),  # of a validation
    ]
    found = time_shares({"traceEvents": events})
    assert found.has_kernels
    micros = {kind: round(share * 120) for kind, share in found.shares.items()}
    assert micros == {
        "matrix products": 30,
        "GPU idle": 30,
        "exchange with other ranks": 20,
        "waiting for data": 20,
        "attention": 10,
        "elementwise and along rows": 5,
        "copies and gathers": 5,
    }


def test_a_kernel_that_no_operator_launched_takes_the_kind_of_none():
    events = [
        _range("step 1: training", 0, 100),
        _event("aten::mm", 0, 10),
        _event("other_kernel", 10, 100, cat="kernel", tid=7),
    ]
    assert time_shares({"traceEvents": events}).shares.get("matrix products") is None


def test_a_trace_of_another_program_needs_no_ranges_of_ours():
    alone = {"traceEvents": [_event("aten::mm", 0, 75), _event("aten::mul", 75, 100)]}
    assert time_shares(alone).shares == {"matrix products": 0.75, "elementwise and along rows": 0.25}
    ranges = [_range("ProfilerStep#4", 0, 100), _range("ProfilerStep#5", 100, 200)]
    found = time_shares({"traceEvents": [*ranges, *alone["traceEvents"]]})
    assert found.steps == (4, 5)
    kinds = {"Python and launches": 0.5, "matrix products": 0.375, "elementwise and along rows": 0.125}
    assert found.shares == kinds


def test_a_real_trace_is_read_from_its_file(tmp_path):
    weight = torch.randn(64, 64, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("step 9: training"):
        (weight @ weight).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = time_shares(read_trace(tmp_path / "trace.json"))
    assert found.steps == (9, 9)
    assert found.shares["matrix products"] > 0
    assert sum(found.shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "Expecting value"),
        (b'{"traceEvents": [', "Expecting value"),
        (b"[]", "traceEvents"),
        (b"{}", "traceEvents"),
    ],
)
def test_what_is_no_whole_trace_is_refused(tmp_path, data, why):
    (tmp_path / "torn.json").write_bytes(data)
    with pytest.raises(ValueError, match=why):
        read_trace(tmp_path / "torn.json")


def test_a_trace_without_operators_is_refused():
    with pytest.raises(ValueError, match="no operator and no kernel"):
        time_shares({"traceEvents": []})
