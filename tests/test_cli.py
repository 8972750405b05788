"""Every verb as a person runs it: what it prints, and the status it ends with."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from preattn import cli, golden
from preattn.golden import RECORDED

GPU = torch.cuda.is_available()
KERNELS = "triton" if GPU else "interpreter"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """The one line that a wrong call is told."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.fixture
def one_case(tmp_path: Path) -> Path:
    """A folder with one small recorded case."""
    with np.load(RECORDED / "v4.npz") as file:
        arrays = {key: file[key] for key in file.files if key == "rope_table" or key.startswith("kvonly.0.")}
        manifest = json.loads(file["__meta__"].tobytes())["manifest"]
    entries = [entry for entry in manifest if entry["case"] == "kvonly.0"]
    arrays["__meta__"] = np.frombuffer(json.dumps({"manifest": entries}).encode(), np.uint8)
    np.savez_compressed(tmp_path / "v4.npz", **arrays)
    return tmp_path


def damage(folder: Path) -> None:
    """Change one recorded byte."""
    with np.load(folder / "v4.npz") as file:
        arrays = dict(file)
    arrays["kvonly.0.cache_out"][0, 7] ^= 1
    np.savez_compressed(folder / "v4.npz", **arrays)


# -- check --------------------------------------------------------------------------------------------------------


def test_check_prints_a_line_for_every_case() -> None:
    result = run("check", "--family", "v4", "--backend", "reference")
    assert result.exit_code == 0, result.output
    _machine, *lines, summary = result.stdout.splitlines()
    pattern = r"(\S+) +(v4_query_kv|v4_query_kv_bf16|v4_query_kv_fp8|kv_insert) +(\S+) +reference +[\d,]+ bytes  (.*)"
    found = [match.groups() for line in lines if (match := re.fullmatch(pattern, line))]
    assert len(found) == len(lines) == 19
    assert {verdict for *_, verdict in found} == {"identical", "identical but for 5 norm roundings in 557,056"}
    assert {record for _, _, record, _ in found} == {"v41_mxfp8", "v4_fp8", "bf16", "fp8"}
    assert re.fullmatch(r"19 of 19 identical \(19 cases, 1 backend\), 15,693,520 bytes compared, [\d.]+ s", summary)


def test_check_runs_every_backend(one_case: Path) -> None:
    result = run("check", "--golden", one_case)
    assert result.exit_code == 0, result.output
    assert [line.split()[3] for line in result.stdout.splitlines()[1:-1]] == ["reference", KERNELS]
    assert "2 of 2 identical (1 cases, 2 backends)" in result.stdout


def test_check_finds_a_byte(one_case: Path) -> None:
    damage(one_case)
    result = run("check", "--golden", one_case, "--backend", "reference")
    assert result.exit_code == 1
    assert re.search(r"1 bytes differ, the first: pool\[263\], expected 0x\w\w, got 0x\w\w", result.stdout)
    assert "0 of 1 identical" in result.stdout


def test_check_goes_on_past_a_case_that_fails(one_case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = golden.load(one_case)
    damaged = golden.GoldenCase("broken", "v4", "kv_insert", case.path, {**case.entry, "block_size": 0}, case.arrays)
    monkeypatch.setattr(golden, "load", lambda *_: [damaged, case])
    result = run("check", "--backend", "reference")
    assert result.exit_code == 1
    assert "failed: ValueError: " in result.stdout and "block_size: expected 1 to 1048576; got 0" in result.stdout
    assert "1 of 2 identical" in result.stdout


def test_check_prints_names_as_they_are(one_case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = golden.load(one_case)
    odd = golden.GoldenCase("[/red]", "v4", "[b]", case.path, case.entry, case.arrays)
    monkeypatch.setattr(golden, "load", lambda *_: [odd])
    assert re.search(r"^\[/red\] +\[b\] +v41_mxfp8", run("check", "--backend", "reference").stdout, re.M)


def test_check_says_what_it_skips(one_case: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda _: None)
    result = run("check", "--golden", one_case)
    assert result.exit_code == 0
    assert "skipped triton: Triton is not installed" in result.stdout
    assert "1 of 1 identical (1 cases, 1 backend)" in result.stdout
    message = "backend: triton cannot run here: Triton is not installed"
    assert refused("check", "--golden", one_case, "--backend", "triton") == message


def test_check_refuses(tmp_path: Path) -> None:
    assert refused("check", "--golden", tmp_path) == f"{tmp_path}: expected a folder with v4.npz or dsa.npz"
    (tmp_path / "v4.npz").write_bytes(b"no archive")
    assert refused("check", "--golden", tmp_path) == f"{tmp_path / 'v4.npz'}: File is not a zip file"
    result = run("check", "--backend", "cuda")
    assert result.exit_code == 2 and "cuda" in result.stderr and "Traceback" not in result.stderr


# -- demo ---------------------------------------------------------------------------------------------------------


def test_demo() -> None:
    result = run("demo")
    assert result.exit_code == 0, result.output
    for step in cli.STEPS:
        assert f"{step.model}, 1 of {step.tp} ranks: {step.what}" in result.stdout
    verified = re.findall(rf"  (reference|{KERNELS}) +[\d,]+ bytes, identical$", result.stdout, re.M)
    assert verified == ["reference", KERNELS] * len(cli.STEPS)
    whole = [step for step in cli.STEPS if "-v4" in step.model]
    assert result.stdout.count("  plan       one_launch: ") == result.stdout.count("  plan ") == len(whole) > 0
    assert ("the times say nothing about" in result.stdout) == (not GPU)
    assert "GB/s" in result.stdout


def test_demo_times_nothing_when_bytes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = cli.Result("v41_mxfp8", 10, False, "1 bytes differ")
    monkeypatch.setattr(cli, "_run_recorded", lambda *_: wrong)
    result = run("demo")
    assert result.exit_code == 1
    assert "bytes differ from the recorded ones: nothing is timed" in result.stdout
    assert "GB/s" not in result.stdout


# -- explain ------------------------------------------------------------------------------------------------------


def test_explain() -> None:
    arguments = ("explain", "--model", "deepseek-v4.1-flash", "--tp", 2, "--tokens", 8192)
    result = run(*arguments, "--device", "NVIDIA H200")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == ("deepseek-v4.1-flash, 1 of 2 ranks: 32 heads; 8,192 tokens, record v41_mxfp8")
    assert lines[1] == "reads   flashmla-mega: chunk_interleaved query, bf16, 64 heads"
    assert lines[2] == "plan    one_launch"
    assert lines[3].startswith("reason  ")
    assert re.search(r"^query written +536,870,912 +65,536 +65\.5%$", result.stdout, re.M)
    assert re.search(r"^total +820,248,576 +100,128 *$", result.stdout, re.M)
    assert re.fullmatch(r"time    [\d.]+ us at the copy rate of NVIDIA H200, [\d,]+ GB/s", lines[-1])
    unknown = run(*arguments, "--device", "Abacus")
    assert unknown.stdout.splitlines()[-1] == "time    not known: no measurements of Abacus are committed"


def test_explain_other_plans() -> None:
    assert "plan    kv_only" in run("explain", "--model", "deepseek-v4.1-flash", "--tp", 1).stdout
    assert "record v4_fp8" in run("explain", "--model", "DeepSeek-V4-Flash", "--tp", 8, "--tokens", 0).stdout
    shared = run("explain", "--model", "deepseek-v3.2", "--tp", 8).stdout
    assert "reads   flashmla-sparse: packed query, bf16, 64 heads" in shared and "nothing is concatenated" in shared
    pair = run("explain", "--model", "deepseek-v3.2", "--backend", "flashinfer-sparse-sm90").stdout
    assert "reads   flashinfer-sparse-sm90: pair query, bf16, 128 heads" in pair
    assert "in a graph" in run("explain", "--tp", 2, "--graph", "--device", "NVIDIA H200").stdout


def test_explain_refuses() -> None:
    assert refused("explain", "--model", "none").startswith("name: expected one of deepseek-v3.2, ")
    message = "tp: expected a divisor of the 64 heads of deepseek-v4.1-flash; got 3"
    assert refused("explain", "--model", "deepseek-v4.1-flash", "--tp", 3) == message
    message = "record: deepseek-v4.1-flash with flashmla-mega: expected v41_mxfp8; got v4_fp8"
    assert refused("explain", "--model", "deepseek-v4.1-flash", "--record", "v4_fp8") == message
    assert refused("explain", "--tp", 0) == "tp: expected at least 1; got 0"
    assert refused("explain", "--tokens", -1) == "tokens: expected at least 0; got -1"


# -- warmup, bench ------------------------------------------------------------------------------------------------


def test_warmup_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["preattn.warmup"]
    real = inspect.signature(module.warmup)
    seen = {}

    def compile_all(*arguments: object, progress: Callable[[int, int], None], **options: object) -> int:
        seen.update(real.bind(*arguments, progress=progress, **options).arguments)
        for done in range(1, 4):
            progress(done, 3)
        return 3

    monkeypatch.setattr(module, "warmup", compile_all)
    monkeypatch.setattr(cli, "_has_gpu", lambda: True)
    result = run("warmup", "--model", "deepseek-v4-flash", "--tp", 4, "--block-size", 128, "--dtype", "fp16")
    assert result.exit_code == 0, result.output
    assert (seen["geometry"].name, seen["geometry"].heads) == ("deepseek-v4-flash", 16)
    assert (seen["record"], seen["block_size"], seen["dtype"]) == ("v4_fp8", 128, torch.float16)
    assert "3/3" in result.stdout
    assert result.stdout.splitlines()[-1] == "3 variants compiled"


def test_bench_shows_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from preattn.bench import run as bench

    seen = []
    row = {"case": "v4/x", "arm": "preattn", "tokens": 512, "cache": "cold", "median_us": 16.7, "share_of_copy": 0.95}

    def main(options: bench.Options, report: Callable[[dict[str, object]], None]) -> Path:
        seen.append(options)
        report(row)
        return tmp_path

    monkeypatch.setattr(cli, "_has_gpu", lambda: True)
    monkeypatch.setattr(bench, "main", main)
    result = run("bench", "--quick", "--family", "v4", "--suites", "pad,graph", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    assert seen == [bench.Options(tmp_path, None, "v4", ("pad", "graph"), None, True)]
    assert re.search(r"^v4/x +512 tokens  preattn +cold +16\.7 us +95% of copy$", result.stdout, re.M)
    unseen = run("bench", "--arms", "vllm,nothing")
    assert (unseen.exit_code, unseen.stderr) == (2, "error: arms: expected some of preattn; got nothing, vllm\n")
    assert refused("bench", "--suites", "pad,none").startswith("suites: expected some of pad, ")

    def fail(*_: object) -> Path:
        raise bench.CheckFailed("v4/x, 512 tokens: pool differs")

    monkeypatch.setattr(bench, "main", fail)
    failed = run("bench")
    assert failed.exit_code == 1
    assert failed.stdout == "nothing is reported: v4/x, 512 tokens: pool differs\n"


@pytest.mark.skipif(GPU, reason="this machine can")
def test_what_needs_a_gpu_says_so() -> None:
    assert refused("warmup", "--tp", 2) == "device: expected a GPU to compile for; got none"
    assert refused("tune") == "device: expected a GPU to measure; got none"
    assert refused("bench") == "device: expected a GPU to measure; got none"


# -- inspect ------------------------------------------------------------------------------------------------------

PAGE = (RECORDED / "v4.npz", "--key", "v4.9.cache_out", "--record", "v4_fp8", "--block-size", 64, "--fill", "0xA5")


def test_inspect() -> None:
    result = run("inspect", *PAGE)
    assert result.exit_code == 0, result.output
    assert re.search(r"^ +154 +2:26 +2\^-1 \.\. 2\^1 +672 +0 +0 +0 +0$", result.stdout, re.M)
    assert re.search(r"^tokens +16 written, 176 never \(all bytes 0xa5\)", result.stdout, re.M)


def test_inspect_as_json_and_picture(tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    result = run("inspect", *PAGE, "--json", "--png", picture)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["written"], data["never_written"], data["block_stride"]) == (16, 176, 37952)
    assert [token["slot"] for token in data["token_list"]][:3] == [4, 37, 74]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_inspect_refuses(tmp_path: Path) -> None:
    options = ("--record", "v4_fp8", "--block-size", 64)
    assert refused("inspect", tmp_path / "x.npy", *options) == f"{tmp_path / 'x.npy'}: expected a file; got none"
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00junk")
    assert refused("inspect", tmp_path / "x.npy", *options).startswith(f"{tmp_path / 'x.npy'}: ")
    assert refused("inspect", *PAGE, "--record", "v5").startswith("record: expected one of v41_mxfp8, v4_fp8, ")
    assert refused("inspect", *PAGE, "--fill", "A5") == "fill: expected a byte such as 0 or 0xA5; got 'A5'"
    assert refused("inspect", *PAGE, "--record", "bf16", "--dim", 7).startswith("dim: expected a positive multiple of")
    assert "Missing option '--record'" in run("inspect", "x.npy", "--block-size", 4).stderr


# -- the command ---------------------------------------------------------------------------------------------------


def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with nothing decided for it."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(Path(cli.__file__).parents[1])
    return subprocess.run([sys.executable, "-m", "preattn", *arguments], capture_output=True, text=True, env=env)


def test_the_command_chooses_the_interpreter_itself(one_case: Path) -> None:
    result = shell("check", "--golden", str(one_case))
    assert result.returncode == 0, result.stderr
    assert [line.split()[3] for line in result.stdout.splitlines()[1:-1]] == ["reference", KERNELS]
    assert result.stderr == ""


def test_help_lists_the_verbs() -> None:
    result = shell("--help")
    assert result.returncode == 0
    assert all(verb in result.stdout for verb in ("demo", "check", "bench", "tune", "explain", "warmup", "inspect"))
    assert run("nonsense").exit_code == 2
