"""A layer whose heads are spread over GPUs: that it gives what one GPU gives, and what each rank's prologue takes.

    torchrun --standalone --nproc-per-node 2 -m preattn.bench.tensor_parallel --output results/tensor_parallel.json

Each rank has its heads' rows of ``wq_b``, its groups' ``wo_a`` and its columns of ``wo_b``; the KV cache is every
rank's own and whole. The prologue runs on the rank's GPU, at true size. What reads it is the reference
(:func:`preattn.reference.attention.mega_attention`, :data:`ATTENDED` tokens of the step) and the output projection in
float64, both on the CPU; the all-reduce is the backend's. Rank 0 then does the whole layer alone, to compare with:

- Query, attention's output and what ``wo_a`` makes of it are equal to the bit, whatever the number of ranks: a group's
  heads are never apart. So is the cache.
- The output differs by where ``wo_b``'s sum is rounded to bf16: :func:`output_bound`.

With ``--backend gloo`` the ranks are processes on the CPU, which run the reference of a small layer and time nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import preattn

from .. import dispatch, formats, weights
from ..cases.base import activations, as_bytes, rope_table
from ..geometry import PRESETS, Geometry, geometry
from ..layers import V4Prologue
from ..reference.attention import Selection, dequantised, mega_attention
from ..workspace import QueryWorkspace
from . import timing
from .run import commit, driver
from .timing import Times

ATTENDED = 64
"""Tokens of a step that attention reads, the first and the last among them: the reference takes its time."""
WINDOW = 128
"""Tokens a token attends to, itself the last (``sliding_window`` of V4)."""
FIRST_POSITION = 7
BLOCK_SIZE = 64
OUTPUT_RANK = 1024
"""Rows of a group's ``wo_a`` (``o_lora_rank`` of V4)."""
TOKENS = {"nccl": (1, 64, 4096), "gloo": (1, 4)}
MODELS = [name for name, model in PRESETS.items() if model.family == "v4"]
U = 2.0**-8
"""bf16 has 8 significant bits: rounding to nearest moves a value by less than U of itself."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A whole layer with random weights, on the CPU, and who reads its query.

    Attributes:
        geometry: with its output groups, of 8 heads each.
        attention: name of the attention backend.
        wq_b: [H * 512, q_rank] bf16.
        wo_a: [groups, output rank, 8 * 512] bf16.
        wo_b: [hidden, groups * output rank] bf16.
        sink: [H] float32.
    """

    geometry: Geometry
    attention: str
    wq_b: Tensor
    wo_a: Tensor
    wo_b: Tensor
    sink: Tensor

    @classmethod
    def random(cls, model: Geometry, attention: str, *, output_rank: int = OUTPUT_RANK) -> Layer:
        """The same in every process."""
        groups = model.heads // weights.GROUP_HEADS
        return cls(
            dataclasses.replace(model, output_groups=groups),
            attention,
            wq_b=_exact(model.heads * weights.HEAD_DIM, model.q_rank, seed=1),
            wo_a=_exact(groups, output_rank, weights.GROUP_HEADS * weights.HEAD_DIM, seed=2),
            wo_b=_exact(model.hidden, groups * output_rank, seed=3),
            sink=activations(model.heads, dtype=torch.float32, seed=4),
        )


def _exact(*shape: int, seed: int) -> Tensor:
    """Small integers times 2**-3: what matmuls make of them is exact in any order.

    ``wq_b`` multiplies the like, and its sums fit float32. ``wo_a`` multiplies e4m3 codes of scales that lie close
    together, ``wo_b`` the result in bf16; those sums fit float64.
    """
    integers = torch.randint(-4, 5, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    return integers.bfloat16() * 2.0**-3


class Group(NamedTuple):
    """Digests of what becomes of one output group's 8 heads."""

    query: str
    """Of all tokens, in the backend's layout."""
    attention: str
    """Codes and scales of the attended tokens."""
    latent: str
    """What ``wo_a`` makes of those."""


class Shard(NamedTuple):
    """What a rank has before the all-reduce."""

    partial: Tensor
    """[attended tokens, hidden] float64 on the CPU: its part of the output, not rounded."""
    groups: list[Group]
    cache: str
    """Digest of its KV cache."""
    prologue: Times | None
    """Of one call, out of a row of them in a CUDA graph; None on the CPU."""


def run_shard(layer: Layer, tp: int, rank: int, tokens: int, *, device: torch.device | str = "cpu") -> Shard:
    """One rank's step, up to the all-reduce.

    Raises:
        ValueError: ``tp`` does not divide the layer's output groups, or its backend does not take the shard.
        RuntimeError: the prologue wrote into the heads that pad the query.
    """
    shard = layer.geometry.shard(tp)
    assert shard.output_groups
    heads = slice(rank * shard.heads, (rank + 1) * shard.heads)
    groups = slice(rank * shard.output_groups, (rank + 1) * shard.output_groups)
    columns = slice(groups.start * layer.wo_a.shape[1], groups.stop * layer.wo_a.shape[1])

    workspace = QueryWorkspace(shard, layer.attention, tokens, device=device)
    record = formats.record(workspace.agreement.record)
    pages = tokens // BLOCK_SIZE + 1
    pool = torch.zeros(pages * record.page_bytes(BLOCK_SIZE), dtype=torch.uint8, device=device)
    positions = torch.arange(tokens) + FIRST_POSITION
    slots = torch.randperm(pages * BLOCK_SIZE, generator=torch.Generator().manual_seed(5))[:tokens]
    table = rope_table(tokens + FIRST_POSITION)
    prologue = V4Prologue(
        geometry=shard,
        backend=layer.attention,
        wq_b=layer.wq_b.unflatten(0, (-1, weights.HEAD_DIM))[heads].flatten(0, 1).to(device),
        cache=formats.cache_view(pool, record, block_size=BLOCK_SIZE),
        rope_table=table.to(device),
        max_tokens=tokens,
        workspace=workspace,
    )
    step = (
        _exact(tokens, shard.q_rank, seed=6).to(device),
        activations(tokens, weights.HEAD_DIM, dtype=torch.bfloat16, seed=7).to(device),
        positions.to(device),
        slots.to(device),
    )
    query = prologue.prepare(*step)
    times = timing.warm({"prologue": lambda: prologue.prepare(*step)})["prologue"] if pool.is_cuda else None
    workspace.verify(f"a step of {tokens} tokens")

    interleaved = workspace.form == "chunk_interleaved"
    attended = torch.linspace(0, tokens - 1, min(tokens, ATTENDED)).long()
    window = attended[:, None] - torch.arange(WINDOW)
    cache = formats.cache_view(pool.cpu(), record, block_size=BLOCK_SIZE)
    codes, scales = mega_attention(
        query[attended.to(device)].cpu(),
        positions[attended],
        table,
        [Selection(cache, record.name, torch.where(window >= 0, slots[window.clamp(min=0)], -1))],
        layer.sink[heads],
        heads=shard.heads,
        layout="chunk_interleaved" if interleaved else "head_major",
        softmax_scale=weights.HEAD_DIM**-0.5,
    )
    values = dequantised(codes, scales).double()
    fused = [weights.interleave_output_columns(one).double() for one in layer.wo_a[groups]]
    latent = torch.stack([values[:, group] @ one.t() for group, one in enumerate(fused)], 1).bfloat16()
    partial = latent.flatten(1).double() @ layer.wo_b[:, columns].double().t()

    by_head = weights.as_chunks(query).transpose(1, 2) if interleaved else query
    own = by_head[:, : shard.heads].unflatten(1, (-1, weights.GROUP_HEADS))
    digests = [
        Group(
            _digest(own[:, group]),
            _digest(torch.cat([codes[:, group].view(torch.uint8), scales[:, group]], -1)),
            _digest(latent[:, group]),
        )
        for group in range(shard.output_groups)
    ]
    return Shard(partial, digests, _digest(pool), times)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor).numpy().tobytes()).hexdigest()


def all_reduced(partial: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """The ranks' partial outputs, rounded to bf16 each, summed in float32, rounded to bf16; on the CPU."""
    total = partial.bfloat16().float().to(device)
    dist.all_reduce(total)
    return total.bfloat16().cpu()


def output_bound(whole: Tensor, partials: Sequence[Tensor]) -> Tensor:
    """How far the bf16 output of several ranks and the bf16 output of one may be apart, element by element.

    S is the sum of the partials P, all of them exact here, and every rounding to bf16 moves a value by at most U of
    itself. One rank's output is off S by U * abs(S). Of several, the addends are off by U * abs(P) each; n - 1
    additions in float32 by 2**-24 of what they add, at most (1 + U) * sum(abs(P)) each; and the last rounding by U of a
    sum that is at most abs(S) and these errors. What one addition's error adds to the next one's is far less than
    the addition too many that is counted below.

    Args:
        whole: S, one rank's output before it is rounded, float64.
        partials: P, the ranks' parts of it before they are rounded, float64.
    """
    magnitude = torch.stack(list(partials)).abs().sum(0)
    before = U * magnitude + len(partials) * 2.0**-24 * (1 + U) * magnitude
    return U * whole.abs() + before + U * (whole.abs() + before)


def compare(whole: Shard, shards: Sequence[Shard], outputs: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Every rank's shard and all-reduced output against one rank's: a row each."""
    bound = output_bound(whole.partial, [shard.partial for shard in shards])
    expected = whole.partial.bfloat16().double()
    rows, first = [], 0
    for rank, (shard, output) in enumerate(zip(shards, outputs, strict=True)):
        own = whole.groups[first : first + len(shard.groups)]
        first += len(shard.groups)
        error = (output.double() - expected).abs()
        rows.append(
            {
                "rank": rank,
                "prologue_us": _microseconds(shard.prologue),
                "query_equal": [group.query for group in shard.groups] == [group.query for group in own],
                "cache_equal": shard.cache == whole.cache,
                "attention_equal": [group[1:] for group in shard.groups] == [group[1:] for group in own],
                "within_bound": bool((error <= bound).all()),
                "of_bound": float(torch.where(error == 0, 0.0, error / bound).max()),
                "output_equals_rank_0": torch.equal(output, outputs[0]),
            }
        )
    return rows


def passed(row: dict[str, Any]) -> bool:
    """Whether nothing in a row of :func:`compare` is as it should not be."""
    return all([value for value in row.values() if isinstance(value, bool)])


def _microseconds(times: Times | None) -> dict[str, float] | None:
    return None if times is None else {name: round(value, 3) for name, value in dataclasses.asdict(times).items()}


def table(results: Sequence[dict[str, Any]]) -> str:
    """The results in a few lines."""
    equalities = ("query", "cache", "attention")
    lines = [f"{'tokens':>7}{'rank':>6}{'prologue us':>13}{'  query    cache    attention':<29}{'output / bound':>16}"]
    for result in results:
        for row in result["ranks"]:
            line = f"{result['tokens']:>7}{row['rank']:>6}{_median(row['prologue_us']):>13}  "
            line += "".join([f"{'equal' if row[f'{what}_equal'] else 'DIFFERS':<9}" for what in equalities])
            lines.append(f"{line}{row['of_bound']:>16.3f}{'' if passed(row) else '  FAILED'}")
        lines.append(f"{result['tokens']:>7}{'alone':>6}{_median(result['alone_us']):>13}")
    return "\n".join(lines)


def _median(times: dict[str, float] | None) -> str:
    return "-" if times is None else f"{times['median_us']:.2f}"


def header(layer: Layer, backend: str, devices: Sequence[str]) -> dict[str, Any]:
    """What the results were taken with; ``devices`` of the ranks in order."""
    model, gpu = layer.geometry, backend == "nccl"
    return {
        "device": devices[0],
        "devices": list(devices),
        "driver": driver() if gpu else None,
        "torch": torch.__version__,
        "nccl": ".".join([str(part) for part in torch.cuda.nccl.version()]) if gpu else None,
        "python": platform.python_version(),
        "preattn": preattn.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "backend": backend,
        "world_size": len(devices),
        "model": model.name,
        "attention": layer.attention,
        "heads": model.heads,
        "hidden": model.hidden,
        "q_rank": model.q_rank,
        "output_rank": layer.wo_a.shape[1],
    }


def main(arguments: list[str] | None = None) -> int:
    """One rank's part; rank 0 compares, writes the results and prints a table. 1 where a comparison fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/tensor_parallel.json"))
    parser.add_argument("--backend", choices=list(TOKENS), default="nccl" if torch.cuda.is_available() else "gloo")
    parser.add_argument("--tokens", nargs="+", type=int, help="of a step: 1 64 4096, on the CPU 1 4")
    parser.add_argument("--model", choices=MODELS, default="deepseek-v4.1-flash")
    parser.add_argument("--attention", choices=("flashmla-mega", "flashmla-v4"), default="flashmla-mega")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("RANK: expected one, as torchrun gives it to each process; got none")
    gpu = options.backend == "nccl"
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device, model = "cuda" if gpu else "cpu", geometry(options.model)
    small = dataclasses.replace(model, q_rank=32, hidden=48)
    layer = Layer.random(model if gpu else small, options.attention, output_rank=OUTPUT_RANK if gpu else 8)
    sizes = options.tokens or TOKENS[options.backend]

    dist.init_process_group(options.backend)
    try:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        with dispatch.backend(None if gpu else "reference"):
            shards = [run_shard(layer, ranks, rank, tokens, device=device) for tokens in sizes]
        outputs = [all_reduced(shard.partial, device) for shard in shards]
        gathered: list[Any] = [None] * ranks
        name = torch.cuda.get_device_name() if gpu else "cpu"
        dist.all_gather_object(gathered, (name, shards, outputs))
    finally:
        dist.destroy_process_group()
    if rank:
        return 0

    devices, shards_of, outputs_of = zip(*gathered, strict=True)
    results = []
    for index, tokens in enumerate(sizes):
        with dispatch.backend(None if gpu else "reference"):
            whole = run_shard(layer, 1, 0, tokens, device=device)
        rows = compare(whole, [shards[index] for shards in shards_of], [outputs[index] for outputs in outputs_of])
        attended = whole.partial.shape[0]
        alone = _microseconds(whole.prologue)
        results.append({"tokens": tokens, "attended": attended, "alone_us": alone, "ranks": rows})
    found = {"header": header(layer, options.backend, devices), "results": results}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{options.model}, {options.attention}: {layer.geometry.heads} heads over {ranks} x {devices[0]}")
    print(table(results), flush=True)
    return 0 if all([passed(row) for result in results for row in result["ranks"]]) else 1


if __name__ == "__main__":
    sys.exit(main())
