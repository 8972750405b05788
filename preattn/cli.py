"""The command line: ``preattn demo | check | bench | explain | warmup | inspect``.

What a verb needs is imported inside it, so that ``preattn --help`` answers at once. What a user got wrong is
told in one line, with exit status 2; bytes that differ are exit status 1.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from .cases.base import Call, Case
    from .dispatch import Backend
    from .geometry import Geometry
    from .golden import GoldenCase
    from .policy import Form, Plan

app = typer.Typer(
    help="Attention prologues for DeepSeek's sparse-attention models: query and KV, ready to read, in one pass.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class BackendName(StrEnum):
    """``--backend``."""

    reference = "reference"
    triton = "triton"


class Family(StrEnum):
    """``--family``."""

    v4 = "v4"
    dsa = "dsa"


class Results(StrEnum):
    """``bench --family``: a file of results."""

    v4 = "v4"
    dsa = "dsa"
    projection = "projection"


class Weight(StrEnum):
    """``--weight``."""

    bf16 = "bf16"
    e4m3 = "e4m3"
    mx = "mx"


class Activation(StrEnum):
    """``--dtype``."""

    bf16 = "bf16"
    fp16 = "fp16"


Model = Annotated[str, typer.Option(help="A model preset, for example deepseek-v4.1-flash.")]
TensorParallel = Annotated[int, typer.Option(help="Tensor-parallel ranks that the heads are divided by.")]
RecordName = Annotated[str | None, typer.Option(help="The KV record; the model's usual one by default.")]


def main() -> None:
    """What ``preattn`` and ``python -m preattn`` run; exits the process."""
    app()


def _say(line: str = "", style: str | None = None) -> None:
    """Print one line of markup, never folded: it may be piped."""
    out.print(line, style=style, soft_wrap=True)


@contextmanager
def _telling(*kinds: type[Exception]) -> Iterator[None]:
    """Tell what a user got wrong in one line, and exit with status 2; other kinds of exceptions are ours to see."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        if kinds and not isinstance(error, kinds):
            raise
        err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None


# -- this machine --------------------------------------------------------------------------------------------


class Runner(NamedTuple):
    """A backend that can run here."""

    backend: Backend
    device: str
    label: str


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def _machine() -> str:
    import torch

    device = _gpu_name() if _has_gpu() else f"no GPU, {platform.machine()} CPU with {os.cpu_count()} cores"
    return f"{device}; torch {torch.__version__}, Python {platform.python_version()}"


def _runners() -> tuple[list[Runner], dict[str, str]]:
    """The backends of this machine, and why others are not among them."""
    runners = [Runner("reference", "cpu", "reference")]
    if not find_spec("triton"):
        return runners, {"triton": "Triton is not installed"}
    if _has_gpu():
        return [*runners, Runner("triton", "cuda", "triton")], {}
    reason = _interpret()
    if reason:
        return runners, {"triton": reason}
    return [*runners, Runner("triton", "cpu", "interpreter")], {}


def _interpret() -> str | None:
    """Let kernels run in Triton's interpreter, on a machine without a GPU; why not, if they cannot."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        if "preattn.kernels" in sys.modules:
            return "there is no GPU, and the kernels were imported without TRITON_INTERPRET=1"
        os.environ["TRITON_INTERPRET"] = "1"
    return None


# -- check -----------------------------------------------------------------------------------------------------


@app.command()
def check(
    golden: Annotated[
        Path | None, typer.Option(help="A folder with v4.npz or dsa.npz in the recorded format, instead of our own.")
    ] = None,
    backend: Annotated[BackendName | None, typer.Option(help="One backend; by default all that run here.")] = None,
    family: Annotated[Family | None, typer.Option(help="One family of ops; by default both.")] = None,
) -> None:
    """Run every recorded call on this machine and compare the bytes: status 0 if all are identical, else 1."""
    from . import golden as recorded

    with _telling():
        cases = recorded.load(golden, [family] if family else recorded.FAMILIES)
    runners, skipped = _runners()
    if backend in skipped:
        with _telling():
            raise ValueError(f"backend: {backend} cannot run here: {skipped[backend]}")
    if backend:
        runners = [runner for runner in runners if runner.backend == backend]
    _say(escape(_machine()))
    for name, reason in skipped.items() if backend is None else ():
        _say(f"[yellow]skipped {name}: {escape(reason)}[/yellow]")
    start, total, wrong = time.perf_counter(), 0, 0
    for runner in runners:
        for case in cases:
            result = _run_recorded(case, runner)
            total, wrong = total + result.bytes, wrong + (not result.identical)
            _say(
                f"{escape(f'{case.name:<12} {case.op:<21} {result.record:<10}')} {runner.label:<12} "
                f"{result.bytes:>9,} bytes  "
                f"[{'green' if result.identical else 'bold red'}]{escape(result.verdict)}[/]"
            )
    runs = len(cases) * len(runners)
    _say(
        f"{runs - wrong} of {runs} identical ({len(cases)} cases, {_plural(len(runners), 'backend')}), "
        f"{total:,} bytes compared, {time.perf_counter() - start:.1f} s",
        style="bold red" if wrong else "bold green",
    )
    raise typer.Exit(1 if wrong else 0)


class Result(NamedTuple):
    """One recorded call on one backend."""

    record: str
    bytes: int
    identical: bool
    verdict: str


def _run_recorded(case: GoldenCase, runner: Runner, form: Form | None = None) -> Result:
    """Run a recorded call (with a plan's form, if given) and compare; what goes wrong in it is its verdict."""
    from .golden import compare

    try:
        call, expected, norms = case.recorded(runner.device)
        if form is not None:
            call.arguments["form"] = form
        comparison = compare(expected, call.run(runner.backend), norms)
    except Exception as error:  # the other cases still run
        return Result("-", 0, False, f"failed: {type(error).__name__}: {error}")
    return Result(call.arguments.get("record", "-"), comparison.bytes, comparison.identical, str(comparison))


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# -- demo ------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A step that the demo shows: a recorded case, and the model and shard it was taken from."""

    case: str
    model: str
    tp: int
    what: str


STEPS = (
    Step("v4.1", "deepseek-v4.1-flash", 2, "chunk-interleaved query, 5 rows of data-parallel padding"),
    Step("v4.8", "deepseek-v4-flash", 8, "head norm and RoPE, head-major query"),
    Step("norm_rope.2", "deepseek-v3.2", 8, "norms, RoPE, latent and indexer key to their caches"),
    Step("fused_q.2", "deepseek-v3.2", 8, "packed e4m3 query, indexer query and head weights"),
)


@app.command()
def demo() -> None:
    """Run real steps on recorded inputs, verify every byte, and time them on this machine."""
    from . import golden, policy
    from .geometry import geometry

    with _telling():
        cases = {case.name: case for case in golden.load()}
    runners, skipped = _runners()
    gpu = _has_gpu()
    _say(f"[bold]preattn on {escape(_machine())}[/bold]")
    if any(runner.label == "interpreter" for runner in runners):
        _say(
            "Kernels run in Triton's interpreter and the reference in plain torch: the bytes are those of a GPU, "
            "the times say nothing about one."
        )
    for name, reason in skipped.items():
        _say(f"[yellow]skipped {name}: {escape(reason)}[/yellow]")
    wrong = 0
    for step in STEPS:
        case = cases[step.case]
        shard = geometry(step.model).shard(step.tp)
        call = case.call()
        tokens, record = call.arguments["positions"].shape[0], call.arguments.get("record")
        _say(f"\n[bold]{step.model}[/bold], 1 of {step.tp} ranks: {step.what}")
        _say(f"  recorded   {case.name}: {tokens} tokens, {shard.heads} heads" + (f", {record}" if record else ""))
        plan = policy.choose(shard, tokens=tokens, record=record, device_name=_gpu_name() if gpu else "this CPU")
        form = plan.form if shard.family == "v4" else None
        if form is not None:  # what is recorded of DSA are its parts, and a plan is of the whole
            _say(f"  plan       {plan.form}: {plan.reason}")
        _say(f"  moves      {call.moved:,} bytes")
        for runner in runners:
            result = _run_recorded(case, runner, form)
            wrong += not result.identical
            style = "green" if result.identical else "bold red"
            count = f"{result.bytes:,} bytes"
            _say(f"  {runner.label:<11} [{style}]{count}, {escape(result.verdict)}[/]")
    _say()
    if wrong:
        _say("[bold red]bytes differ from the recorded ones: nothing is timed[/]")
        raise typer.Exit(1)
    out.print(_gpu_times() if gpu else _cpu_times(runners))


def _gpu_times() -> Table:
    from .bench import timing
    from .cases.dsa import DsaQueryCase, NormRopeCase
    from .cases.v4 import V4Case
    from .policy import Form

    copy = timing.copy_rate(0)
    table = Table(title=f"one step, cold L2; a copy on this GPU: {copy:,.0f} GB/s", title_justify="left")
    for title in ("prologue", "tokens", "launches", "time", "GB/s", "of copy"):
        table.add_column(title, justify="left" if title == "prologue" else "right")
    cases: tuple[tuple[str, dict[str, Case]], ...] = (
        ("V4.1, 32 of 64 heads, interleaved", {"1": V4Case(32, 64), "2": V4Case(32, 64, form=Form.TWO_LAUNCHES)}),
        ("V4, 64 of 128 heads, norm, RoPE", {"1": V4Case(64, 128, "v4_fp8", "head_major", norm=True, rope=True)}),
        ("DSA query, 16 heads, packed in place", {"1": DsaQueryCase(16)}),
        ("DSA norms, RoPE, inserts, top-k", {"1": NormRopeCase()}),
    )
    for name, forms in cases:
        for tokens in (512, 4096, 16384):
            calls = {launches: case.build(tokens, "cuda") for launches, case in forms.items()}
            arms = {launches: partial(call.function, **call.arguments) for launches, call in calls.items()}
            for launches, times in timing.cold(arms).items():
                rate = calls[launches].moved / times.median_us / 1e3
                table.add_row(
                    name, f"{tokens:,}", launches, f"{times.median_us:,.1f} us", f"{rate:,.0f}", f"{rate / copy:.0%}"
                )
    return table


def _cpu_times(runners: list[Runner]) -> Table:
    from .cases.v4 import V4Case

    table = Table(title="V4.1, 32 of 64 heads, on this CPU", title_justify="left")
    for title in ("backend", "tokens", "time", "GB/s"):
        table.add_column(title, justify="left" if title == "backend" else "right")
    for runner in runners:
        for tokens in (16,) if runner.backend == "triton" else (16, 256, 1024):
            call = V4Case(32, 64).build(tokens)
            seconds = _seconds(call, runner, 1 if runner.backend == "triton" else 3)
            table.add_row(runner.label, f"{tokens:,}", f"{seconds * 1e3:,.2f} ms", f"{call.moved / seconds / 1e9:.3f}")
    return table


def _seconds(call: Call, runner: Runner, repeats: int) -> float:
    from .dispatch import backend

    samples = []
    with backend(runner.backend):
        for _ in range(repeats):
            start = time.perf_counter()
            call.function(**call.arguments)
            samples.append(time.perf_counter() - start)
    return statistics.median(samples)


# -- explain, warmup, bench ------------------------------------------------------------------------------------


@app.command()
def explain(
    model: Model = "deepseek-v4.1-flash",
    tp: TensorParallel = 1,
    tokens: Annotated[int, typer.Option(help="Tokens of the step.")] = 8192,
    record: RecordName = None,
    backend: Annotated[
        str | None, typer.Option(help="The attention backend; the model's usual one by default.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="A GPU by name; this machine's, or NVIDIA H200.")] = None,
    graph: Annotated[bool, typer.Option("--graph", help="The step is captured in a CUDA graph.")] = False,
    workspace: Annotated[
        bool | None, typer.Option(help="Projections write into a query workspace; DSA only by default.")
    ] = None,
    weight: Annotated[Weight, typer.Option(help="What V4's wq_b is made of.")] = Weight.bf16,
) -> None:
    """Say what a step would run and why, what it moves and does not copy, and how long that takes."""
    from . import policy
    from .geometry import geometry

    with _telling():
        shard = geometry(model).shard(tp)
        where = device or (_gpu_name() if _has_gpu() else "NVIDIA H200")
        plan = policy.choose(
            shard,
            tokens=tokens,
            backend=backend,
            record=record,
            device_name=where,
            captured=graph,
            workspace=workspace,
            weight=weight.value,
        )
    agreed = plan.agreement
    _say(f"[bold]{shard.name}[/bold], 1 of {tp} ranks: {shard.heads} heads; {tokens:,} tokens, record {agreed.record}")
    _say(f"reads   {agreed.backend.name}: {agreed.form} query, {agreed.query_dtype}, {agreed.padded_heads} heads")
    how = f", projected by the {plan.projection}" if plan.projection else ""
    _say(f"plan    [bold]{plan.form}[/bold]{how}")
    _say(f"reason  {escape(plan.reason)}")
    if plan.workspace_bytes:
        _say(f"buffer  {plan.workspace_bytes:,} bytes for {tokens:,} tokens, shared by the layers of a stream")
    out.print(_bytes_table(plan))
    rate = policy.device(where).copy_gbps
    if plan.expected_us is None or rate is None:
        _say(f"time    not known: no measurements of {escape(where)} are committed")
    else:
        _say(f"time    {plan.expected_us:,.1f} us at the copy rate of {escape(where)}, {rate:,.0f} GB/s")


def _shard(model: str, tp: int, record: str | None) -> tuple[Geometry, str]:
    """The sharded model, and its record checked against what its caches take."""
    from .geometry import geometry

    shard = geometry(model).shard(tp)
    fitting = shard.records.window or shard.records.latent
    if record is not None and record not in fitting:
        raise ValueError(f"record: expected one of {', '.join(fitting)} for {shard.name}; got {record!r}")
    return shard, record or fitting[0]


def _bytes_table(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, show_footer=True, header_style="bold", footer_style="bold")
    table.add_column("moved", "total")
    table.add_column("bytes", f"{plan.total_bytes:,}", justify="right")
    table.add_column("a token", f"{plan.total_bytes // plan.tokens:,}" if plan.tokens else "-", justify="right")
    table.add_column("share", justify="right")
    spared = sum(plan.copied.values()) - plan.total_bytes
    if spared:
        table.add_column("not copied", f"{spared:,}", justify="right")
    for part, count in plan.bytes.items():
        each = f"{count // plan.tokens:,}" if plan.tokens else "-"
        share = f"{count / plan.total_bytes:.1%}" if plan.total_bytes else "-"
        less = plan.copied.get(part, count) - count
        table.add_row(part, f"{count:,}", each, share, *([f"{less:,}" if less else ""] if spared else []))
    return table


@app.command()
def warmup(
    model: Model = "deepseek-v4.1-flash",
    tp: TensorParallel = 1,
    record: RecordName = None,
    block_size: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    dtype: Annotated[Activation, typer.Option(help="Of the activations.")] = Activation.bf16,
) -> None:
    """Compile what a deployment of a model can meet, so that no request waits for a compiler."""
    import torch

    with _telling():
        shard, name = _shard(model, tp, record)
        if not _has_gpu():
            raise ValueError("device: expected a GPU to compile for; got none")
    from .warmup import warmup as compile_all

    with (
        Progress(
            TextColumn(f"{shard.name}, {shard.heads} heads, {name}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=out,
        ) as bar,
        _telling(ValueError),
    ):
        task = bar.add_task("", total=None)
        compiled = compile_all(
            shard,
            name,
            block_size=block_size,
            dtype=torch.bfloat16 if dtype == Activation.bf16 else torch.float16,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    _say(f"{_plural(compiled, 'variant')} compiled")


@app.command()
def tune(
    output: Annotated[Path, typer.Option(help="Folder for <device>.json: in a checkout, the package's own.")] = Path(
        "preattn/configs"
    ),
) -> None:
    """Search launch configurations on this GPU and keep the winners, with its copy rate."""
    with _telling():
        if not _has_gpu():
            raise ValueError("device: expected a GPU to measure; got none")
        if not output.is_dir():
            raise ValueError(f"output: expected a folder; got {output}")
    from dataclasses import replace

    from . import policy, tuning
    from .bench import timing

    device = replace(policy.device(_gpu_name()), copy_gbps=round(timing.copy_rate(0), 1))

    def report(path: str, microseconds: float, config: policy.LaunchConfig) -> None:
        shape = f"{config.rows} x {config.tokens}, {config.num_warps} warps"
        _say(f"{path:<22} {microseconds:>9,.1f} us  {shape}")

    _say(f"written to {escape(str(tuning.save(tuning.tune(device, report), output)))}")


@app.command()
def bench(
    output: Annotated[Path, typer.Option(help="Folder for <device>/<family>.json.")] = Path("results"),
    peers: Annotated[Path | None, typer.Option(help="A folder with vllm_peer.py; an installed vLLM otherwise.")] = None,
    family: Annotated[Results | None, typer.Option(help="One family of suites; by default all.")] = None,
    suites: Annotated[str | None, typer.Option(help="Comma-separated suites; by default all.")] = None,
    arms: Annotated[str | None, typer.Option(help="Comma-separated arms beside ours; by default all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The largest step of each suite alone.")] = False,
) -> None:
    """Check every arm, then time it beside the copy rate of this GPU; needs a GPU."""
    with _telling():
        if not _has_gpu():
            raise ValueError("device: expected a GPU to measure; got none")
    from .bench import run

    seen = set()

    def report(row: dict[str, Any]) -> None:
        seen.add(row["arm"])
        _say(
            f"{escape(row['case']):<52} {row['tokens']:>6,} tokens  {row['arm']:<13} {row['cache']:<5}"
            f"{row['median_us']:>10,.1f} us {row['share_of_copy']:>5.0%} of copy"
        )

    wanted = tuple(arms.split(",")) if arms else None
    chosen = tuple(suites.split(",")) if suites else None
    with _telling():
        known = [suite.name for suite in run.SUITES]
        if unknown := [name for name in chosen or () if name not in known]:
            raise ValueError(f"suites: expected some of {', '.join(known)}; got {', '.join(unknown)}")
    options = run.Options(output, peers, str(family) if family else None, chosen, wanted, quick)
    try:
        with _telling(OSError):
            folder = run.main(options, report)
    except run.CheckFailed as error:
        _say(f"[bold red]nothing is reported: {escape(str(error))}[/]")
        raise typer.Exit(1) from None
    with _telling():
        if unseen := sorted(set(wanted or ()) - seen):
            raise ValueError(f"arms: expected some of {', '.join(sorted(seen))}; got {', '.join(unseen)}")
    _say(f"written to {escape(str(folder))}; python -m preattn.bench.report puts it into the README")


# -- inspect -----------------------------------------------------------------------------------------------------


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A dumped page or cache: .npy, .npz or .safetensors.")],
    record: Annotated[str, typer.Option(help="The record that it holds, for example v41_mxfp8.")],
    block_size: Annotated[int, typer.Option(help="Tokens a page.")],
    key: Annotated[str | None, typer.Option(help="Which array, where the file holds several.")] = None,
    dim: Annotated[int, typer.Option(help="Values a token, of bf16 and fp8 records.")] = 512,
    block_stride: Annotated[
        int | None, typer.Option(help="Bytes from page to page; from the file's first dimension by default.")
    ] = None,
    offset: Annotated[int, typer.Option(help="Byte of page 0.")] = 0,
    fill: Annotated[str, typer.Option(help="Byte of slots never written: 0, 0xA5, ...")] = "0",
    png: Annotated[Path | None, typer.Option(help="Draw tokens x blocks into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Print every token.")] = False,
) -> None:
    """Decode a dumped page or cache: scales, magnitudes, saturated codes, NaNs, slots never written."""
    from . import formats
    from . import inspect as inspection

    with _telling():
        try:
            byte = int(fill, 0)
        except ValueError:
            raise ValueError(f"fill: expected a byte such as 0 or 0xA5; got {fill!r}") from None
        found = inspection.inspect(
            inspection.read(file, key),
            formats.record(record, dim),
            block_size=block_size,
            block_stride=block_stride,
            offset=offset,
            fill=byte,
        )
        if png is not None:
            inspection.picture(found, png, f"{file.name} {key or ''}")
    if as_json:
        slots = found.written.nonzero().flatten().tolist()
        out.print_json(json.dumps({**found.summary(), "token_list": [found.token(slot) for slot in slots]}))
        return
    out.print(inspection.report(found, every=every))
    if png is not None:
        _say(f"picture      {escape(str(png))}")
