"""The launch that skips Triton's Python writes what Triton's own runner writes, on any stream and in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from preattn import dispatch
from preattn.cases import CASES
from preattn.cases.base import Case, as_bytes
from preattn.kernels.launch import Kernel, Launch, Tile

TOKENS = 33


def _launches(case: Case) -> list[Launch]:
    """The launches of a call, compiled and not made; what the call allocated is zeroed."""
    call = case.build(TOKENS, "cuda")
    with dispatch.hold() as launches:
        call.function(**call.arguments)
    given = {value.data_ptr() for value in call.arguments.values() if isinstance(value, Tensor)}
    for launch in launches:
        launch.prepare(_device())
        for tensor in _tensors(launch):
            if tensor.data_ptr() not in given:
                tensor.zero_()
    return launches


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _tensors(launch: Launch) -> list[Tensor]:
    tensors = [tensor.matrix if isinstance(tensor, Tile) else tensor for tensor in launch.tensors]
    return [tensor for tensor in tensors if tensor is not None]


def _one_of_each_kernel() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for case in CASES if torch.cuda.is_available() else ():
        call = case.build(TOKENS, "cuda")
        with dispatch.hold() as launches:
            call.function(**call.arguments)
        for launch in launches:
            found.setdefault(launch.kernel.name, case)
    return found


FIRST = _one_of_each_kernel()
NAMES = [kernel.name for kernel in Kernel.kernels if "torch" not in kernel.name] if FIRST else ["any"]


def _put(launch: Launch, memory: list[Tensor]) -> None:
    for tensor, before in zip(_tensors(launch), memory, strict=True):
        tensor.copy_(before)


def _by_triton(launch: Launch, memory: list[Tensor]) -> None:
    _put(launch, memory)
    tensors = [tensor.descriptor() if isinstance(tensor, Tile) else tensor for tensor in launch.tensors]
    variant = launch._variant(_device())
    variant[(launch.grid, 1, 1)](*tensors, *launch.scalars, *launch.constants)


def _ours(launch: Launch, memory: list[Tensor]) -> None:
    _put(launch, memory)
    launch.run(_device())


def _on_a_side_stream(launch: Launch, memory: list[Tensor]) -> None:
    """The inputs arrive late, on that stream: a launch on another one would read zeros."""
    for tensor in _tensors(launch):
        tensor.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        _ours(launch, memory)


def _in_a_graph(launch: Launch, memory: list[Tensor]) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run(_device())
    _put(launch, memory)
    graph.replay()
    torch.cuda.synchronize()


def _written(run: Callable[[Launch, list[Tensor]], None], launch: Launch, memory: list[Tensor]) -> list[Tensor]:
    """Bytes of every argument after a run that found ``memory`` in them."""
    run(launch, memory)
    torch.cuda.synchronize()
    return [as_bytes(tensor) for tensor in _tensors(launch)]


@pytest.mark.parametrize("run", [_ours, _on_a_side_stream, _in_a_graph])
@pytest.mark.parametrize("name", NAMES)
def test_a_direct_launch_writes_what_tritons_runner_writes(
    name: str, run: Callable[[Launch, list[Tensor]], None]
) -> None:
    for launch in _launches(FIRST[name]):
        memory = [tensor.clone() for tensor in _tensors(launch)]
        expected = _written(_by_triton, launch, memory)
        assert any(not torch.equal(one, as_bytes(other)) for one, other in zip(expected, memory, strict=True))
        found = _written(run, launch, memory)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_hooks_hear_of_a_launch(name: str) -> None:
    heard: list[Any] = []
    launch = next(launch for launch in _launches(FIRST[name]) if launch.kernel.name == name)

    def enter(metadata: Any) -> None:
        heard.append(metadata.get()["name"])

    def leave(metadata: Any) -> None:
        heard.append(metadata.get()["stream"])

    runtime = triton.knobs.runtime
    runtime.launch_enter_hook.add(enter)
    runtime.launch_exit_hook.add(leave)
    try:
        launch.run(_device())
    finally:
        runtime.launch_enter_hook.remove(enter)
        runtime.launch_exit_hook.remove(leave)
    torch.cuda.synchronize()
    assert len(heard) == 2 and name in heard[0] and heard[1] == torch.cuda.current_stream().cuda_stream
