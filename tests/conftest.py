"""Without a GPU the kernels run in Triton's interpreter, which has to be chosen before they are imported."""

from __future__ import annotations

import os
import zlib

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

DEVICE = "cuda" if GPU else "cpu"


@pytest.fixture
def device() -> str:
    """Where kernels run here: the GPU, or the CPU in Triton's interpreter."""
    return DEVICE


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of the test's own name: the same in every run, another in every test."""
    return zlib.crc32(request.node.nodeid.encode()) % 2**31


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests under tests/gpu run only where a GPU is."""
    for item in items:
        if "gpu" in item.path.parts and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and this machine has none"))
