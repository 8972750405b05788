"""What is agreed between models and backends, and what is refused before a layer exists."""

from __future__ import annotations

import pytest

from preattn.backends import BACKENDS, backend, negotiate
from preattn.geometry import geometry

V32 = geometry("deepseek-v3.2")
V41 = geometry("deepseek-v4.1-flash")
V4 = geometry("deepseek-v4-flash")


def test_flashmla_sparse_takes_packed_heads_padded_to_what_it_is_compiled_for() -> None:
    agreed = negotiate(V32.shard(8), "flashmla-sparse")
    assert (agreed.form, agreed.padded_heads, agreed.record, agreed.query_dtype) == ("packed", 64, "dsa_fp8", "bf16")
    assert agreed.rotates and not agreed.norms
    pair = negotiate(V32.shard(2), "flashmla-sparse", form="pair")
    assert (pair.form, pair.padded_heads) == ("pair", 64)
    with pytest.raises(ValueError, match=r"form: .* with flashmla-sparse: expected packed, which pads 16 heads to 64"):
        negotiate(V32.shard(8), "flashmla-sparse", form="pair")


@pytest.mark.parametrize("name", ["flashinfer-sparse-sm90", "flashattention-mla-sparse"])
def test_backends_that_demand_the_pair_get_it(name: str) -> None:
    agreed = negotiate(V32.shard(4), name)
    assert (agreed.form, agreed.padded_heads, agreed.record) == ("pair", 32, "bf16")
    with pytest.raises(
        ValueError, match=rf"form: deepseek-v3\.2 with {name}: expected pair; got packed; packed works with"
    ):
        negotiate(V32.shard(4), name, form="packed")


def test_trtllm_takes_packed_and_e4m3_for_fp8_records() -> None:
    agreed = negotiate(V32.shard(8), "flashinfer-sparse-trtllm", record="fp8")
    assert (agreed.form, agreed.query_dtype, agreed.padded_heads) == ("packed", "e4m3", 16)
    assert negotiate(V32.shard(8), "flashinfer-sparse-trtllm").query_dtype == "bf16"
    with pytest.raises(
        ValueError,
        match=r"form: .* with flashinfer-sparse-trtllm: expected packed; got pair; pair works with flashmla-sparse",
    ):
        negotiate(V32, "flashinfer-sparse-trtllm", form="pair")


def test_fa4_takes_both_forms() -> None:
    assert negotiate(V32, "flashattention4-mla-sparse").form == "packed"
    assert negotiate(V32, "flashattention4-mla-sparse", form="pair").form == "pair"


def test_mega_attention_rotates_itself() -> None:
    agreed = negotiate(V41.shard(2), "flashmla-mega")
    assert (agreed.form, agreed.padded_heads, agreed.record) == ("chunk_interleaved", 64, "v41_mxfp8")
    assert not agreed.rotates and not agreed.norms
    assert agreed.compressed_record == "v41_mxfp8"
    with pytest.raises(
        ValueError, match=r"backend: deepseek-v4-flash with flashmla-mega: expected one that takes a normed query"
    ):
        negotiate(V4, "flashmla-mega")


def test_v4_norms_and_rotates_before_attention() -> None:
    agreed = negotiate(V4.shard(4), "flashmla-v4")
    assert (agreed.form, agreed.padded_heads, agreed.record) == ("head_major", 64, "v4_fp8")
    assert agreed.norms and agreed.rotates


def test_a_model_without_rope_has_no_record_with_rope_dims() -> None:
    with pytest.raises(ValueError, match=r"record: glm-5-next with flashmla-sparse: expected bf16; got fp8"):
        negotiate(geometry("glm-5-next"), "flashmla-sparse", record="fp8")
    assert negotiate(geometry("glm-5-next"), "flashmla-sparse").record == "bf16"


def test_a_model_without_rope_does_not_rotate() -> None:
    assert not negotiate(geometry("glm-5-next"), "flashinfer-sparse-trtllm").rotates


@pytest.mark.parametrize("name", BACKENDS)
def test_the_other_family_is_refused_with_what_would_work(name: str) -> None:
    model = V41 if backend(name).family == "dsa" else V32
    with pytest.raises(
        ValueError, match=rf"backend: {model.name} with {name}: expected one for the {model.family} family"
    ):
        negotiate(model, name)


def test_other_refusals() -> None:
    with pytest.raises(ValueError, match=r"record: .* with flashmla-sparse: expected dsa_fp8 or bf16; got fp8"):
        negotiate(V32, "flashmla-sparse", record="fp8")
    with pytest.raises(ValueError, match=r"query_dtype: .* with flashmla-sparse: expected bf16; got e4m3"):
        negotiate(V32, "flashmla-sparse", query_dtype="e4m3")
    with pytest.raises(ValueError, match=r"backend: expected one of flashmla-sparse, .*; got 'flashmla'"):
        backend("flashmla")
    import dataclasses

    wide = dataclasses.replace(V32, heads=256)
    with pytest.raises(ValueError, match=r"heads: .* with flashmla-sparse: expected at most 128 heads a rank; got 256"):
        negotiate(wide, "flashmla-sparse")
