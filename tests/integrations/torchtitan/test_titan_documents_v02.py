"""Documents packed by torchtitan do not see each other, and our modules compute what torchtitan's own do."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from titan_v02 import build_model, converter

from lowbit_attn.integrations.torchtitan import AttentionOptions
from lowbit_attn.integrations.torchtitan.documents import (
    MAX_FILE_BYTES,
    TRAINING,
    VALIDATION,
    ByteTokenizer,
    load_documents,
    source_files,
)

DOCUMENTS = (slice(0, 20), slice(20, 21), slice(21, 60), slice(60, 96))


def _packed_tokens() -> torch.Tensor:
    tokens = torch.randint(0, 256, (2, 96), generator=torch.Generator().manual_seed(1))
    for document in DOCUMENTS:
        tokens[:, document.stop - 1] = ByteTokenizer.eos_id
    return tokens


def _losses(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    masks = model.get_attention_masks(tokens, ByteTokenizer()) if model.model_args.attn_type == "varlen" else None
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens, attention_masks=masks)
    targets = F.pad(tokens[:, 1:], (0, 1), value=ByteTokenizer.eos_id)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(tokens)


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
@pytest.mark.parametrize("changed", [0, 2])
def test_a_document_changes_no_other_documents_loss(recipe: str, changed: int, on_cpu: None) -> None:
    model = build_model("llama3_bytes", "tiny")
    converter(AttentionOptions(recipe)).convert(model)
    tokens, other = _packed_tokens(), _packed_tokens()
    inside = slice(DOCUMENTS[changed].start, DOCUMENTS[changed].stop - 1)
    other[0, inside] = (other[0, inside] + 7) % 256
    before, after = _losses(model, tokens), _losses(model, other)
    changed_rows = torch.zeros_like(tokens, dtype=torch.bool)
    changed_rows[0, DOCUMENTS[changed]] = True
    if inside.start:
        changed_rows[0, inside.start - 1] = True  # its target is the first changed token
    assert torch.equal(before[~changed_rows], after[~changed_rows])
    assert not torch.equal(before[changed_rows], after[changed_rows])


def test_without_boundaries_the_same_change_is_seen(on_cpu: None) -> None:
    """The control of the test above: plain causal attention carries the change into later documents."""
    model = build_model("llama3_bytes", "tiny_sdpa")
    converter(AttentionOptions("mxfp8"), flavor="tiny_sdpa").convert(model)
    tokens, other = _packed_tokens(), _packed_tokens()
    other[0, :19] = (other[0, :19] + 7) % 256
    assert not torch.equal(_losses(model, tokens)[0, 21:], _losses(model, other)[0, 21:])


@pytest.mark.parametrize("name", ["llama3", "llama4", "qwen3"])
def test_the_exact_recipe_equals_torchtitans_own_attention(name: str, on_cpu: None) -> None:
    """Layout, scale, masks and grouped heads of every supported model are taken over unchanged."""
    model = build_model(name, "debugmodel")
    layer, rope = model.layers["0"].attention, getattr(model, "freqs_cis", getattr(model, "rope_cache", None))
    x = torch.randn(2, 64, model.model_args.dim, generator=torch.Generator().manual_seed(2))
    expected = layer(x, rope, None)
    converter(AttentionOptions("bf16"), name=name, flavor="debugmodel", param_dtype="float32").convert(model)
    torch.testing.assert_close(layer(x, rope, None), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama3", "llama4", "qwen3"])
def test_conversion_leaves_the_state_dict_alone(name: str, on_cpu: None) -> None:
    model = build_model(name, "debugmodel")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    converter(name=name, flavor="debugmodel").convert(model)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_activations_in_another_dtype_are_cast_and_cast_back(on_cpu: None) -> None:
    """Tensor parallelism alone passes float32 activations."""
    model = build_model("llama3_bytes", "tiny_sdpa")
    converter(AttentionOptions("mxfp8"), flavor="tiny_sdpa").convert(model)
    module = model.layers["0"].attention.inner_attention
    query, key = torch.randn(1, 2, 40, 64), torch.randn(1, 1, 40, 64)
    output = module(query, key, key)
    assert output.dtype == torch.float32
    assert torch.equal(output, module(query.bfloat16(), key.bfloat16(), key.bfloat16()).float())


def test_documents_are_files_in_a_fixed_order_with_a_held_out_split(tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"m{index:02}.py").write_text(f"x = {index}\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "skipped.py").write_text("x = -1\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "long.py").write_text("#" * 9000)
    training, validation = (load_documents(tmp_path, split)["text"][:] for split in (False, True))
    assert training == load_documents(tmp_path, False)["text"][:]
    assert sorted([*training, *validation]) == sorted(path.read_text() for path in source_files(tmp_path))
    assert len(source_files(tmp_path)) == 40
    assert len(validation) == 4
    assert training != sorted(training)


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dataset_path: found no Python source"):
        load_documents(tmp_path, False)


def test_torchtitans_dataloader_packs_the_documents() -> None:
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

    tokenizer = ByteTokenizer()
    for name in (TRAINING, VALIDATION):
        # Two of the longest files fit into a row: it holds at least one whole document.
        inputs, label = next(iter(HuggingFaceTextDataset(name, None, tokenizer, seq_len=2 * MAX_FILE_BYTES + 8)))
        row = inputs["input"]
        assert row[0] == tokenizer.bos_id
        assert torch.equal(row[1:], label[:-1])
        ends = (row[:-1] == tokenizer.eos_id).nonzero().flatten()
        assert len(ends) > 0
        assert (row[ends + 1] == tokenizer.bos_id).all()


def test_tokenizer_is_bytes_and_specials() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é", add_bos=True, add_eos=True) == [256, 0xC3, 0xA9, 257]
    assert tokenizer.decode(tokenizer.encode("a = 'é'")) == "a = 'é'"
    assert max(tokenizer.encode("é")) < tokenizer.get_vocab_size()
