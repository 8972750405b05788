"""Plans: what is chosen, why, and how many bytes it says it moves."""

from __future__ import annotations

import pytest

from preattn import policy
from preattn.formats import record
from preattn.geometry import geometry
from preattn.policy import Form

V41 = geometry("deepseek-v4.1-flash")


def test_bytes_of_a_token() -> None:
    moved = policy.v4_bytes(1, 32, 64, record("v41_mxfp8"))
    assert moved == {
        "query read": 32 * 1024,
        "query written": 64 * 1024,
        "latent read": 1024,
        "record written": 528,
        "RoPE table, slots, positions": 272,
    }
    assert policy.v4_bytes(3, 32, 64, record("v41_mxfp8"), in_place=True)["query written"] == 3 * 32 * 128
    assert sum(policy.v4_bytes(10, 64, 0, record("v4_fp8")).values()) == 10 * (1024 + 584 + 272)


def test_a_shard_pads_in_one_launch_on_the_measured_device() -> None:
    plan = policy.choose(V41.shard(2), tokens=8192)
    assert plan.form == Form.ONE_LAUNCH and "measured" in plan.reason
    assert plan.total_bytes == 8192 * (96 * 1024 + 1024 + 528 + 272)
    assert plan.expected_us is not None and 150 < plan.expected_us < 250


def test_whole_heads_leave_the_query_alone() -> None:
    plan = policy.choose(V41, tokens=100)
    assert plan.form == Form.KV_ONLY and plan.bytes["query written"] == 0
    rotating = policy.choose(geometry("deepseek-v4-flash"), tokens=100)
    assert rotating.form == Form.ONE_LAUNCH  # the head norm and RoPE have to run


def test_an_unmeasured_device_says_so() -> None:
    plan = policy.choose(V41.shard(2), tokens=8, device_name="NVIDIA B200")
    assert plan.form == Form.ONE_LAUNCH and "not measured" in plan.reason and plan.expected_us is None
    shard = geometry("deepseek-v3.2").shard(8)
    fp8 = policy.choose(shard, tokens=8192, backend="flashinfer-sparse-trtllm", record="fp8", device_name="NVIDIA B200")
    assert fp8.absorb == "bmm" and fp8.reason.endswith("this device is not measured")


def test_a_dsa_layer_packs_in_place_or_hands_over_the_pair() -> None:
    shard = geometry("deepseek-v3.2").shard(8)
    plan = policy.choose(shard, tokens=1000)
    assert plan.agreement.form == "packed" and "nothing is concatenated" in plan.reason
    assert plan.bytes["query written"] == 1000 * 16 * 2 * 64
    assert plan.bytes["indexer query read"] == 1000 * 64 * 2 * 128
    assert plan.bytes["record written"] == 1000 * 656 and plan.bytes["top-k buffer"] == 1000 * 4 * 2048
    pair = policy.choose(shard, tokens=1000, backend="flashinfer-sparse-sm90")
    assert pair.agreement.form == "pair" and "flashinfer-sparse-sm90 reads" in pair.reason


def test_an_e4m3_query_is_absorbed_where_that_was_measured_faster() -> None:
    shard = geometry("deepseek-v3.2").shard(8)
    arguments = {"backend": "flashinfer-sparse-trtllm", "record": "fp8"}
    large = policy.choose(shard, tokens=1024, **arguments)  # type: ignore[arg-type]
    assert large.absorb == "kernel" and "the absorb kernel casts to e4m3" in large.reason
    assert large.bytes["query written"] == 1024 * 16 * 64
    small = policy.choose(shard, tokens=64, **arguments)  # type: ignore[arg-type]
    assert small.absorb == "bmm" and small.reason.startswith("bmm, then one pass")
    assert small.bytes["query written"] == 64 * 16 * 576


def test_refusals() -> None:
    with pytest.raises(
        ValueError, match=r"record: deepseek-v4\.1-flash with flashmla-mega: expected v41_mxfp8; got bf16"
    ):
        policy.choose(V41, tokens=1, record="bf16")
    with pytest.raises(ValueError, match="tokens: expected at least 0; got -1"):
        policy.choose(V41, tokens=-1)


def test_assumed_devices_end_with_their_context() -> None:
    config = policy.LaunchConfig(2, 2, 2)
    with policy.assume(policy.Device("x", launch={"kv": config})):
        assert policy.launch_config(None, "kv", 1) == config
    assert policy.launch_config(None, "kv", 1) != config


def test_configs_survive_a_round_trip(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from preattn import tuning

    device = policy.device("NVIDIA H200")
    path = tuning.save(device, tmp_path)
    assert path.name == "nvidia-h200.json"
    committed = policy.resources.files("preattn").joinpath("configs", path.name)
    assert path.read_text() == committed.read_text()


def test_small_steps_have_configurations_of_their_own() -> None:
    small, large = policy.LaunchConfig(1, 1, 4), policy.LaunchConfig(2, 4, 1)
    device = policy.Device("x", launch={"copy": large, "copy@512": small})
    assert device.config("copy", policy.SMALL_STEP) == small
    assert device.config("copy", policy.SMALL_STEP + 1) == large
    assert device.config("rows", 1) == policy.device("NVIDIA H200").launch["rows@512"]
    with pytest.raises(KeyError, match="nothing"):
        device.config("nothing", 1)
