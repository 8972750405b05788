"""The tensor-parallel script: two processes under torchrun, and comparisons that have to fail."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from preattn.bench import tensor_parallel
from preattn.bench.tensor_parallel import ATTENDED, Layer, Shard, compare, output_bound, passed
from preattn.dispatch import backend
from preattn.geometry import geometry

TOKENS = 3
ROOT = Path(__file__).resolve().parents[1]
needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with backend("reference"):
        yield
    torch.set_num_threads(threads)


@functools.cache
def layer() -> Layer:
    small = dataclasses.replace(geometry("deepseek-v4.1-flash"), heads=16, q_rank=32, hidden=48)
    return Layer.random(small, "flashmla-mega", output_rank=8)


@functools.cache
def shards() -> tuple[Shard, list[Shard]]:
    """The whole layer, and two ranks'."""
    ranks = [tensor_parallel.run_shard(layer(), 2, rank, TOKENS) for rank in range(2)]
    return tensor_parallel.run_shard(layer(), 1, 0, TOKENS), ranks


def summed(ranks: list[Shard]) -> Tensor:
    return torch.stack([shard.partial.bfloat16().float() for shard in ranks]).sum(0).bfloat16()


def test_honest_ranks_pass() -> None:
    whole, ranks = shards()
    rows = compare(whole, ranks, [summed(ranks)] * 2)
    assert [row["rank"] for row in rows] == [0, 1]
    assert all(passed(row) for row in rows)
    assert all(0 < row["of_bound"] <= 1 for row in rows)
    assert output_bound(whole.partial, [shard.partial for shard in ranks]).max() < 0.1 * whole.partial.abs().max()


def _swapped(ranks: list[Shard]) -> list[Shard]:
    return [shard._replace(groups=other.groups) for shard, other in zip(ranks, ranks[::-1], strict=True)]


@pytest.mark.parametrize(
    ("lie", "found"),
    [
        (_swapped, {"query_equal", "attention_equal"}),
        (lambda ranks: [ranks[0], ranks[1]._replace(cache=ranks[1].groups[0].query)], {"cache_equal"}),
        (
            lambda ranks: [ranks[0], ranks[1]._replace(groups=[ranks[1].groups[0]._replace(latent="")])],
            {"attention_equal"},
        ),
    ],
    ids=["ranks swapped", "a cache that differs", "wo_a differs"],
)
def test_a_shard_that_differs_is_found(lie: Any, found: set[str]) -> None:
    whole, ranks = shards()
    rows = compare(whole, lie(ranks), [summed(ranks)] * 2)
    assert {name for row in rows for name, value in row.items() if value is False} == found
    assert not passed(rows[1])


@pytest.mark.parametrize("error", [1.5, torch.nan])
def test_one_output_beyond_the_bound_is_found(error: float) -> None:
    whole, ranks = shards()
    wrong = whole.partial.bfloat16().float()  # not rounded: the error is what is said here
    wrong[1, 5] += error * output_bound(whole.partial, [shard.partial for shard in ranks])[1, 5].float()
    rows = compare(whole, ranks, [summed(ranks), wrong])
    assert [row["within_bound"] for row in rows] == [True, False]
    assert not rows[1]["of_bound"] <= 1
    assert not passed(rows[1]) and not rows[1]["output_equals_rank_0"]


def test_a_rank_left_out_of_the_all_reduce_is_found() -> None:
    whole, ranks = shards()
    assert not any(row["within_bound"] for row in compare(whole, ranks, [summed(ranks[:1]), summed(ranks[1:])]))


def test_attention_reads_the_first_and_the_last_of_many_tokens() -> None:
    tokens = 2 * ATTENDED + 1
    shard = tensor_parallel.run_shard(layer(), 2, 0, tokens)
    assert shard.partial.shape == (ATTENDED, 48)
    assert shard.prologue is None  # nothing is timed on a CPU


def test_more_ranks_than_output_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="tp: expected a divisor of the 2 output groups"):
        tensor_parallel.run_shard(layer(), 4, 0, TOKENS)


def test_without_torchrun_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        tensor_parallel.main([])
    assert "RANK: expected one, as torchrun gives it to each process; got none" in capsys.readouterr().err


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PREATTN_COMMIT": "as given", "OMP_NUM_THREADS": "1"}
    module = ["-m", "preattn.bench.tensor_parallel", "--backend", "gloo", *arguments]
    return subprocess.run([*command, *module], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@needs_gloo
@pytest.mark.parametrize(
    ("model", "attention"), [("deepseek-v4.1-flash", "flashmla-mega"), ("deepseek-v4-flash", "flashmla-v4")]
)
def test_two_processes(model: str, attention: str, tmp_path: Path) -> None:
    output = tmp_path / "new" / "found.json"
    arguments = ("--tokens", "1", "4", "--model", model, "--attention", attention)
    done = torchrun("--output", str(output), *arguments)
    assert done.returncode == 0, done.stderr
    assert f"{model}, {attention}: 64 heads over 2 x cpu" in done.stdout
    assert done.stdout.count("equal") == 2 * 2 * 3  # sizes, ranks, comparisons: rank 0 alone prints
    found = json.loads(output.read_text())
    header = found["header"]
    assert (header["world_size"], header["backend"], header["commit"]) == (2, "gloo", "as given")
    assert [result["tokens"] for result in found["results"]] == [1, 4]
    for result in found["results"]:
        assert result["attended"] == result["tokens"]
        assert [row["rank"] for row in result["ranks"]] == [0, 1]
        assert all(passed(row) and row["of_bound"] <= 1 for row in result["ranks"])


@needs_gloo
@pytest.mark.parametrize("honest", [True, False])
def test_one_process_and_the_exit_status(
    honest: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not honest:
        monkeypatch.setattr(tensor_parallel, "all_reduced", lambda partial, device: (1.1 * partial).bfloat16())
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    output = tmp_path / "found.json"
    assert tensor_parallel.main(["--backend", "gloo", "--tokens", "2", "--output", str(output)]) == (not honest)
    assert json.loads(output.read_text())["results"][0]["ranks"][0]["within_bound"] is honest
    assert ("FAILED" in capsys.readouterr().out) is not honest


@needs_gloo
def test_what_does_not_fit_ends_the_run(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    done = torchrun("--output", str(output), "--model", "deepseek-v4-flash", "--attention", "flashmla-mega")
    assert done.returncode != 0
    assert "deepseek-v4-flash with flashmla-mega" in done.stderr
    assert not output.exists()
