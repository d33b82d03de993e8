"""The public calls: what they refuse and how they say it, layouts, warnings, explain, and recipe bf16 being torch SDPA."""

import warnings
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from oracle import ALIGNMENTS, boundaries, exact_attention, relative_error, visible

import lowbit_attn
from lowbit_attn import RECIPES, Recipe, attention, explain, varlen_attention
from lowbit_attn.ops import LowbitFallbackWarning, dispatch
from lowbit_attn.recipes import Operand

REFERENCE = {"backend": "reference"}


def dense(batch=2, heads=4, kv_heads=4, queries=20, keys=20, channels=16, dtype=torch.float32):
    shapes = [(batch, heads, queries, channels), (batch, kv_heads, keys, channels), (batch, kv_heads, keys, channels)]
    return [torch.randn(s).to(dtype) for s in shapes]


def packed(tokens=40, heads=4, kv_heads=4, channels=16, dtype=torch.float32):
    return [torch.randn(tokens, h, channels).to(dtype) for h in (heads, kv_heads, kv_heads)]


def changed(tensors, index, function):
    return [function(x) if i == index else x for i, x in enumerate(tensors)]


MASK = torch.ones(2, 1, 20, 20, dtype=torch.bool)
SEED = torch.tensor(5)
BAD_DENSE = {
    "unknown recipe": (dense, {"recipe": "mxfp7"}, ValueError, "recipe: got 'mxfp7'; accepted names: bf16, mxfp8"),
    "recipe in capitals": (dense, {"recipe": "MXFP8"}, ValueError, "recipe: got 'MXFP8'"),
    "empty recipe": (dense, {"recipe": ""}, ValueError, "recipe: got ''"),
    "recipe of a wrong type": (dense, {"recipe": 8}, TypeError, "recipe: got int"),
    "no recipe": (dense, {"recipe": None}, TypeError, "recipe: got NoneType"),
    "unknown option": (dense, {"recipe": "mxfp8:tile=64"}, ValueError, "recipe option: got 'tile=64'"),
    "option without value": (dense, {"recipe": "mxfp8:rotation"}, ValueError, "recipe option: got 'rotation'"),
    "bad option value": (dense, {"recipe": "mxfp8:max_threshold=lots"}, ValueError, "max_threshold: got 'lots'"),
    "negative threshold": (dense, {"recipe": "mxfp8:max_threshold=-1"}, ValueError, "max_threshold: got -1"),
    "saturating P": (dense, {"recipe": "mxfp8:p_log2_scale=8,max_threshold=2"}, ValueError, "saturate"),
    "bf16 with options": (dense, {"recipe": "bf16:rotation=none"}, ValueError, "recipe: got"),
    "rank 3": (lambda: changed(dense(), 0, lambda x: x[0]), {}, ValueError, r"query: got rank 3.*accepted: \[B, H, S, D\]"),
    "rank 5": (lambda: changed(dense(), 2, lambda x: x[None]), {}, ValueError, "value: got rank 5"),
    "not a tensor": (lambda: changed(dense(), 1, lambda x: x.tolist()), {}, TypeError, "key: got list"),
    "missing value": (lambda: changed(dense(), 2, lambda x: None), {}, TypeError, "value: got NoneType"),
    "float64": (lambda: dense(dtype=torch.float64), {}, TypeError, "query: got dtype torch.float64.*accepted: bfloat16"),
    "int32": (lambda: dense(dtype=torch.int32), {}, TypeError, "query: got dtype torch.int32"),
    "float8": (lambda: dense(dtype=torch.float8_e4m3fn), {}, TypeError, "query: got dtype torch.float8_e4m3fn"),
    "mixed dtypes": (lambda: changed(dense(), 1, torch.Tensor.half), {}, TypeError, "key: got dtype torch.float16, query has"),
    "mixed devices": (lambda: changed(dense(), 2, lambda x: x.to("meta")), {}, ValueError, "value: got device meta"),
    "sparse": (lambda: changed(dense(), 0, torch.Tensor.to_sparse), {}, TypeError, "query: got layout torch.sparse"),
    "head_dim of key": (lambda: changed(dense(), 1, lambda x: x[..., :8]), {}, ValueError, "head_dim: got query 16, key 8"),
    "head_dim of value": (lambda: changed(dense(), 2, lambda x: x[..., :8]), {}, ValueError, "head_dim:.*value 8.*one head_dim"),
    "head_dim 0": (lambda: dense(channels=0), {}, ValueError, "head_dim: got 0; accepted: 1 to 256"),
    "head_dim 257": (lambda: dense(channels=257), {}, ValueError, "head_dim: got 257"),
    "value length": (lambda: changed(dense(), 2, lambda x: x[:, :, 1:]), {}, ValueError, "value: got shape"),
    "batch": (lambda: [dense()[0], *dense(batch=3)[1:]], {}, ValueError, "key: got batch 3, query has 2"),
    "heads not a multiple": (lambda: dense(heads=6), {"enable_gqa": True}, ValueError, "heads: got 6 query heads and 4"),
    "more key heads": (lambda: dense(kv_heads=8), {"enable_gqa": True}, ValueError, "heads: got 4 query heads and 8"),
    "no key heads": (lambda: dense(kv_heads=0), {"enable_gqa": True}, ValueError, "heads: got 4 query heads and 0"),
    "grouped heads unasked": (lambda: dense(kv_heads=2), {}, ValueError, "enable_gqa: got False"),
    "no alignment": (lambda: dense(keys=30), {"is_causal": True}, ValueError, "causal_align: got None.*top_left.*bottom_right"),
    "unknown alignment": (dense, {"causal_align": "right"}, ValueError, "causal_align: got 'right'"),
    "a mask as is_causal": (dense, {"is_causal": MASK}, TypeError, "is_causal: got a tensor"),
    "a mask as key_lengths": (dense, {"key_lengths": MASK}, TypeError, "key_lengths: got torch.bool of shape"),
    "attn_mask": (dense, {"attn_mask": MASK}, TypeError, "attn_mask: got a tensor.*accepted: None.*is_causal.*varlen_attention"),
    "dropout": (dense, {"dropout_p": 0.1}, ValueError, "dropout_p: got 0.1; accepted: 0"),
    "dropout that is a word": (dense, {"dropout_p": "no"}, ValueError, "dropout_p: got 'no'; accepted: 0"),
    "a flag that is a number": (dense, {"return_lse": 1}, TypeError, "return_lse: got 1"),
    "a tensor as scale": (dense, {"scale": torch.tensor(0.1)}, TypeError, "scale: got a tensor"),
    "a word as scale": (dense, {"scale": "0.1"}, TypeError, "scale: got '0.1'"),
    "scale true": (dense, {"scale": True}, TypeError, "scale: got True"),
    "scale NaN": (dense, {"scale": float("nan")}, ValueError, "scale: got nan"),
    "infinite scale": (dense, {"scale": float("inf")}, ValueError, "scale: got inf"),
    "a scale that no float holds": (dense, {"scale": 10**5000}, ValueError, "scale: got an int beyond the range of floats"),
    "int64 lengths": (dense, {"key_lengths": torch.tensor([1, 2])}, TypeError, "key_lengths: got torch.int64"),
    "a list of lengths": (dense, {"key_lengths": [1, 2]}, TypeError, "key_lengths: got list"),
    "too few lengths": (dense, {"key_lengths": boundaries(1)}, ValueError, "key_lengths: got 1 entries; accepted: 2"),
    "lengths elsewhere": (dense, {"key_lengths": boundaries(1, 2).to("meta")}, ValueError, "key_lengths: got device meta"),
    "negative length": (dense, {"key_lengths": boundaries(1, -1)}, ValueError, "key_lengths: got -1 at entry 1"),
    "length past the keys": (dense, {"key_lengths": boundaries(1, 21)}, ValueError, "key_lengths: got 21 .*accepted: 0 to 20"),
    "unknown backend": (dense, {"backend": "cuda"}, ValueError, "backend: got 'cuda'; accepted: None"),
    "a backend of other hardware": (dense, {"backend": "hopper"}, ValueError, "backend: got 'hopper', which cannot run.*sm_90"),
    "causal with a leaking recipe": (dense, {"recipe": "fused_mxfp4", "is_causal": True}, ValueError, "is_causal: got True"),
    "grad with an inference recipe": (lambda: changed(dense(), 1, torch.Tensor.requires_grad_), {"recipe": "fused_mxfp6"},
                                      ValueError, "fused_mxfp6.*inference only"),
    "a number as seed": (lambda: changed(dense(), 1, torch.Tensor.requires_grad_), {"seed": 3}, TypeError, "seed: got 3"),
    "a number as seed without grad": (dense, {"recipe": "nvfp4", "seed": 3}, TypeError, "seed: got 3; accepted: an int64 scalar"),
    "a seed of a wrong dtype": (dense, {"recipe": "nvfp4", "seed": torch.tensor(3.0)}, ValueError, "seed: got torch.float32"),
    "a vector as seed": (dense, {"recipe": "nvfp4", "seed": torch.zeros(2, dtype=torch.int64)}, ValueError, r"of shape \(2,\)"),
    "a seed elsewhere": (dense, {"recipe": "nvfp4", "seed": torch.tensor(3, device="meta")}, ValueError, "seed: got .* on meta"),
    "a seed that nothing reads": (dense, {"seed": SEED}, ValueError, "seed: got a tensor with recipe 'mxfp8', which rounds"),
    "a seed that nothing reads, inference": (dense, {"recipe": "fused_mxfp4", "seed": SEED}, ValueError, "rounds nothing stochast"),
    "seed of bf16": (dense, {"recipe": "bf16", "seed": SEED}, ValueError, "seed: got a value with recipe 'bf16'"),
    "deterministic bf16 on a GPU": (lambda: [x.to("meta") for x in dense()], {"recipe": "bf16", "deterministic": True}, ValueError,
                                    "deterministic: got True with recipe 'bf16' on meta"),
    "trailing colon": (dense, {"recipe": "mxfp8:"}, ValueError, "recipe option: got ''"),
    "bf16 with a trailing colon": (dense, {"recipe": "bf16:"}, ValueError, "recipe: got 'bf16:'; accepted: 'bf16' alone"),
    "lse of bf16": (dense, {"recipe": "bf16", "return_lse": True}, ValueError, "return_lse: got True with recipe 'bf16'"),
    "backend of bf16": (dense, {"recipe": "bf16", "backend": "reference"}, ValueError, "backend: got 'reference' with recipe"),
    "length past the keys, bf16": (dense, {"key_lengths": boundaries(1, 21), "recipe": "bf16"}, ValueError, "key_lengths: got 21"),
}

FULL = boundaries(0, 40)
BAD_PACKED = {
    "rank 4": (lambda: [x[None] for x in packed()], {}, ValueError, r"query: got rank 4.*accepted: \[T, H, D\]"),
    "grouped heads unasked": (lambda: packed(kv_heads=2), {}, ValueError, "enable_gqa: got False"),
    "heads not a multiple": (lambda: packed(heads=6), {"enable_gqa": True}, ValueError, "heads: got 6"),
    "int64 boundaries": (packed, {"cu_seq_q": FULL.long()}, TypeError, "cu_seq_q: got torch.int64"),
    "a list of boundaries": (packed, {"cu_seq_k": [0, 40]}, TypeError, "cu_seq_k: got list"),
    "boundaries of rank 2": (packed, {"cu_seq_q": FULL[None]}, TypeError, r"cu_seq_q: got .*\(1, 2\)"),
    "no boundaries": (packed, {"cu_seq_q": FULL[:0], "cu_seq_k": FULL[:0]}, ValueError, "cu_seq_k: got 0 entries"),
    "unequal boundaries": (packed, {"cu_seq_k": boundaries(0, 20, 40)}, ValueError, "cu_seq_k: got 3 entries, cu_seq_q has 2"),
    "boundaries elsewhere": (packed, {"cu_seq_q": FULL.to("meta")}, ValueError, "cu_seq_q: got device meta"),
    "decreasing": (packed, {"cu_seq_q": boundaries(0, 30, 20), "cu_seq_k": boundaries(0, 30, 40)}, ValueError,
                   "cu_seq_q: got 20 after 30 at entry 2"),
    "past the rows": (packed, {"cu_seq_k": boundaries(0, 41)}, ValueError, "cu_seq_k: got boundaries 0 to 41; accepted: 0 to 40"),
    "negative start": (packed, {"cu_seq_q": boundaries(-1, 40)}, ValueError, "cu_seq_q: got boundaries -1 to 40"),
    "max_q too small": (packed, {"max_q": 39}, ValueError, "max_q: got 39, but cu_seq_q holds a document of 40"),
    "max_k negative": (packed, {"max_k": -1}, ValueError, "max_k: got -1"),
    "max_q a tensor": (packed, {"max_q": torch.tensor(40)}, TypeError, "max_q: got a tensor"),
    "max_k a float": (packed, {"max_k": 40.0}, TypeError, "max_k: got 40.0"),
    "max_q None": (packed, {"max_q": None}, TypeError, "max_q: got None"),
    "sliding window": (packed, {"window_size": (128, 0)}, ValueError, r"window_size: got \(128, 0\); accepted: \(-1, -1\) full"),
    "right window": (packed, {"window_size": (-1, 1)}, ValueError, "window_size: got"),
    "a number as window": (packed, {"window_size": 5}, ValueError, "window_size: got 5"),
    "no window": (packed, {"window_size": None}, ValueError, "window_size: got None"),
    "return_aux": (packed, {"return_aux": True}, TypeError, "return_aux"),
    "key_lengths": (packed, {"key_lengths": boundaries(40)}, TypeError, "key_lengths"),
    "causal window with a leaking recipe": (packed, {"recipe": "fused_mxfp4", "window_size": (-1, 0)}, ValueError, "is_causal"),
    "a seed that nothing reads": (packed, {"seed": SEED}, ValueError, "seed: got a tensor with recipe 'mxfp8'"),
    "seed of bf16": (packed, {"recipe": "bf16", "seed": SEED}, ValueError, "seed: got a value with recipe 'bf16'"),
    "decreasing, bf16": (packed, {"cu_seq_q": boundaries(0, 30, 20), "cu_seq_k": boundaries(0, 30, 40), "recipe": "bf16"},
                         ValueError, "cu_seq_q: got 20 after 30"),
    "past the rows, bf16": (packed, {"cu_seq_k": boundaries(0, 41), "recipe": "bf16"}, ValueError, "cu_seq_k: got boundaries"),
}


@pytest.mark.filterwarnings("ignore::lowbit_attn.ops.LowbitFallbackWarning")
def test_nested_tensors_are_refused_by_name():
    nested = [torch.nested.nested_tensor(list(x)) for x in dense()]
    with pytest.raises(TypeError, match=r"query: got a nested tensor; accepted: a strided tensor \[B, H, S, D\], or packed"):
        lowbit_attn.attention(*nested)


class TestBadInput:
    """Each is refused before any attention is computed, and leaves the caller's tensors as they were."""

    @pytest.fixture(autouse=True)
    def _no_work(self, monkeypatch):
        def computed(*args, **kwargs):
            raise AssertionError("attention was computed")

        monkeypatch.setattr("lowbit_attn.ops.dense.forward", computed)
        monkeypatch.setattr("lowbit_attn.ops.varlen.varlen_forward", computed)
        monkeypatch.setattr(F, "scaled_dot_product_attention", computed)

    def refuse(self, call, build, error, message):
        tensors = build()
        dense_ones = [x for x in tensors if isinstance(x, torch.Tensor) and x.device.type == "cpu" and not x.is_sparse]
        before = [(x.clone(), x._version, x.requires_grad) for x in dense_ones]
        with pytest.raises(error, match=message):
            call(tensors)
        for x, (values, version, requires_grad) in zip(dense_ones, before, strict=True):
            assert torch.equal(x, values)
            assert (x._version, x.requires_grad) == (version, requires_grad)

    @pytest.mark.parametrize("case", BAD_DENSE)
    def test_attention(self, case):
        build, options, error, message = BAD_DENSE[case]
        self.refuse(lambda tensors: attention(*tensors, **options), build, error, message)

    @pytest.mark.parametrize("case", BAD_PACKED)
    def test_varlen_attention(self, case):
        build, options, error, message = BAD_PACKED[case]
        arguments = {"cu_seq_q": FULL, "cu_seq_k": FULL, "max_q": 40, "max_k": 40, **options}
        self.refuse(lambda tensors: varlen_attention(*tensors, **arguments), build, error, message)

    def test_a_positional_mask(self):
        with pytest.raises(TypeError, match="positional"):
            attention(*dense(), MASK)

    def test_an_unnamed_recipe(self):
        custom = Recipe("mine", qk=Operand("e4m3", "mx32"))
        with pytest.raises(ValueError, match="recipe name: got 'mine'"):
            attention(*dense(), recipe=custom)


class TestLayouts:
    """The result is a transposed view of [B, S, H, D] memory, and equal for every layout of the inputs."""

    @pytest.mark.parametrize("recipe", ["mxfp8", "fused_mxfp4"])
    def test_views_give_what_contiguous_tensors_give(self, recipe):
        fused = torch.randn(2, 20, 3, 4, 16)
        views = [x.transpose(1, 2) for x in fused.unbind(2)]
        copies = [x.contiguous() for x in views]
        offset = [torch.cat([torch.randn(1, *x.shape[1:]), x])[1:] for x in copies]
        outputs = [attention(*tensors, recipe=recipe, **REFERENCE) for tensors in (views, copies, offset)]
        assert all(torch.equal(x, outputs[0]) for x in outputs)
        assert all(x.transpose(1, 2).is_contiguous() for x in outputs)

    def test_flattening_heads_afterwards_costs_no_copy(self):
        output = attention(*dense(), **REFERENCE)
        assert output.transpose(1, 2).flatten(2).data_ptr() == output.data_ptr()

    def test_expanded_keys_are_read_as_copies(self):
        query, key, value = dense()
        key, value = (x[:1, :1].expand(2, 4, -1, -1) for x in (key, value))
        assert torch.equal(attention(query, key, value, **REFERENCE),
                           attention(query, key.contiguous(), value.contiguous(), **REFERENCE))

    def test_packed_output_is_contiguous(self):
        query, key, value = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in packed())
        output, lse = varlen_attention(query, key, value, FULL, FULL, 40, 40, return_lse=True, **REFERENCE)
        assert output.is_contiguous()
        assert lse.shape == (4, 40)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_dtype_in_dtype_out(self, dtype):
        output, lse = attention(*dense(dtype=dtype), return_lse=True, **REFERENCE)
        assert output.dtype == dtype
        assert lse.dtype == torch.float32


class TestPackedEqualsDense:
    CU = (0, 5, 5, 6, 140)

    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_every_document_bit_for_bit(self, recipe, is_causal):
        if is_causal and not RECIPES[recipe].causal:
            is_causal = False
        query, key, value = packed(tokens=150, heads=4, kv_heads=2, channels=32)
        cu_seq = boundaries(*self.CU)
        options = {"recipe": recipe, "is_causal": is_causal, "enable_gqa": True, "return_lse": True, **REFERENCE}
        output, lse = varlen_attention(query, key, value, cu_seq, cu_seq, 134, 134, **options)
        for start, stop in pairwise(self.CU):
            rows = (x[start:stop].transpose(0, 1)[None] for x in (query, key, value))
            expected, expected_lse = attention(*rows, **options)
            assert torch.equal(output[start:stop], expected[0].transpose(0, 1))
            assert torch.equal(lse[:, start:stop], expected_lse[0])
        assert (output[140:] == 0).all()

    def test_loose_bounds_and_strided_boundaries_change_nothing(self):
        tensors = packed()
        cu_seq = boundaries(0, 9, 7, 9, 30, 9)[::2]
        tight = varlen_attention(*tensors, cu_seq.contiguous(), cu_seq.contiguous(), 23, 23, **REFERENCE)
        assert torch.equal(tight, varlen_attention(*tensors, cu_seq, cu_seq, 10**6, 2**40, **REFERENCE))

    def test_the_causal_window_is_is_causal(self):
        tensors = packed()
        by_window = varlen_attention(*tensors, FULL, FULL, 40, 40, window_size=(-1, 0), **REFERENCE)
        assert torch.equal(by_window, varlen_attention(*tensors, FULL, FULL, 40, 40, is_causal=True, **REFERENCE))
        assert not torch.equal(by_window, varlen_attention(*tensors, FULL, FULL, 40, 40, **REFERENCE))

    def test_no_documents_and_no_tokens(self):
        for cu_seq in (boundaries(0), boundaries(0, 0), boundaries(0, 0, 0)):
            output, lse = varlen_attention(*packed(), cu_seq, cu_seq, 0, 0, return_lse=True, **REFERENCE)
            assert (output == 0).all()
            assert (lse == -torch.inf).all()
            assert varlen_attention(*packed(tokens=0), cu_seq, cu_seq, 0, 0, **REFERENCE).shape == (0, 4, 16)


class TestOptions:
    def test_sdpas_arguments_that_say_no_change_nothing(self):
        tensors = dense()
        asked = attention(*tensors, attn_mask=None, dropout_p=0.0, **REFERENCE)
        assert torch.equal(asked, attention(*tensors, **REFERENCE))

    def test_a_recipe_is_its_text(self):
        tensors = dense(channels=64, queries=150, keys=150)
        for text in ("mxfp8", "mxfp8:causal_safety=exact", "mxfp8:max_threshold=2,rotation=always"):
            recipe = lowbit_attn.recipes.resolve(text)
            assert torch.equal(attention(*tensors, recipe=recipe, **REFERENCE), attention(*tensors, recipe=text, **REFERENCE))
            assert lowbit_attn.recipes.resolve(recipe.canonical) == recipe

    def test_options_reach_the_numbers(self):
        tensors = dense(channels=64, queries=150, keys=150)
        plain = attention(*tensors, **REFERENCE)
        assert not torch.equal(plain, attention(*tensors, recipe="mxfp8:rotation=always", **REFERENCE))

    @pytest.mark.parametrize(("text", "plain"), [(" mxfp8\n", "mxfp8"), (" bf16 ", "bf16")])
    def test_spaces_around_a_recipe_are_no_part_of_it(self, text, plain):
        tensors, backend = dense(), {} if plain == "bf16" else REFERENCE
        assert torch.equal(attention(*tensors, recipe=text, **backend), attention(*tensors, recipe=plain, **backend))
        assert explain(text, "cpu").recipe == plain

    def test_a_seed_is_not_needed_without_gradients_to_come(self):
        tensors = dense()
        seeded = attention(*tensors, recipe="nvfp4", seed=SEED, **REFERENCE)
        assert torch.equal(seeded, attention(*tensors, recipe="nvfp4", **REFERENCE))

    def test_bf16_is_deterministic_where_torch_is(self):
        tensors = dense()
        expected = attention(*tensors, recipe="bf16")
        assert torch.equal(attention(*tensors, recipe="bf16", deterministic=True), expected)
        torch.use_deterministic_algorithms(True)
        try:
            assert attention(*[x.to("meta") for x in tensors], recipe="bf16", deterministic=True).is_meta
        finally:
            torch.use_deterministic_algorithms(False)

    def test_the_default_scale_is_one_over_the_root_of_head_dim(self):
        tensors = dense()
        assert torch.equal(attention(*tensors, **REFERENCE), attention(*tensors, scale=0.25, **REFERENCE))
        assert torch.equal(attention(*tensors, scale=1, **REFERENCE), attention(*tensors, scale=1.0, **REFERENCE))

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_scale_zero_averages_and_a_negative_scale_is_a_negated_query(self, recipe):
        query, key, value = dense()
        average = attention(query, key, value, scale=0.0, recipe=recipe, **REFERENCE)
        assert relative_error(average, value.mean(2, keepdim=True).expand_as(query)) < 0.6
        negative = attention(query, key, value, scale=-0.25, recipe=recipe, **REFERENCE)
        assert torch.equal(negative, attention(-query, key, value, scale=0.25, recipe=recipe, **REFERENCE))

    def test_alignment_without_a_causal_mask_changes_nothing(self):
        tensors = dense(keys=30)
        assert torch.equal(attention(*tensors, **REFERENCE), attention(*tensors, causal_align="bottom_right", **REFERENCE))

    def test_one_row_over_many_keys(self):
        tensors = dense(batch=1, queries=1, keys=5000)
        expected, _ = exact_attention(*tensors)
        assert relative_error(attention(*tensors, **REFERENCE), expected) < 0.1

    @pytest.mark.parametrize("recipe", [*RECIPES, "bf16"])
    def test_nothing_in_nothing_out(self, recipe):
        backend = {} if recipe == "bf16" else REFERENCE
        for sizes in ({"batch": 0}, {"queries": 0}, {"queries": 0, "keys": 0}, {"heads": 0}):
            tensors = dense(**sizes)
            assert attention(*tensors, recipe=recipe, enable_gqa=True, **backend).shape == tensors[0].shape
        assert (attention(*dense(keys=0), recipe=recipe, **backend) == 0).all()

    def test_merging_two_halves_by_their_lse_is_attention_over_both(self):
        query, key, value = dense(queries=50, keys=256, channels=64)
        whole, whole_lse = attention(query, key, value, return_lse=True, **REFERENCE)
        parts = [attention(query, key[:, :, half], value[:, :, half], return_lse=True, **REFERENCE)
                 for half in (slice(0, 128), slice(128, 256))]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        merged = sum(output * torch.exp(part - lse)[..., None] for output, part in parts)
        torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)
        # P is rounded relative to another maximum and V reference: E4M3's rounding error, 2^-4 at most, averaged.
        assert relative_error(merged, whole) < 0.04


class TestWarnings:
    @pytest.fixture(autouse=True)
    def _forget(self):
        dispatch._warn_once.cache_clear()
        yield
        dispatch._warn_once.cache_clear()

    def test_an_emulated_path_warns_once_by_name(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                attention(*dense())
                varlen_attention(*packed(), FULL, FULL, 40, 40)
        ours = [w for w in caught if issubclass(w.category, LowbitFallbackWarning)]
        assert len(ours) == 1
        assert "mxfp8 on cpu" in str(ours[0].message)

    def test_each_recipe_warns_for_itself(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for recipe in ("mxfp8", "fused_mxfp4", "mxfp8"):
                attention(*dense(), recipe=recipe)
        assert sum(issubclass(w.category, LowbitFallbackWarning) for w in caught) == 2

    @pytest.mark.parametrize("options", [REFERENCE, {"recipe": "bf16"}], ids=["asked for", "bf16"])
    def test_what_was_asked_for_does_not_warn(self, options):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attention(*dense(), **options)


class TestExplain:
    @pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8:causal_safety=exact"])
    def test_on_a_cpu_every_backend_before_the_reference_says_why_not(self, recipe):
        explanation = explain(recipe, "cpu")
        assert explanation.backend == "reference"
        assert explanation.recipe == recipe
        reasons = dict(explanation.passed_over)
        assert list(reasons) == [name for name in dispatch.BACKENDS if name != "reference"]
        assert all("this device is cpu" in reason for reason in reasons.values())
        assert "emulated" in str(explanation)
        assert all(name in str(explanation) for name in reasons)

    def test_bf16_is_torch(self):
        assert explain("bf16", "cpu").backend == "torch"

    def test_an_unknown_recipe_is_refused(self):
        with pytest.raises(ValueError, match="recipe: got 'x'"):
            explain("x", "cpu")

    def test_the_default_device_is_the_accelerator_or_the_cpu(self):
        assert explain("mxfp8").device.type == ("cuda" if torch.cuda.is_available() else "cpu")


class TestBf16IsTorchSdpa:
    """Bit for bit where torch has the case, exact attention to float32 rounding elsewhere."""

    def test_full_and_causal(self):
        tensors = dense(dtype=torch.bfloat16)
        for is_causal in (False, True):
            expected = F.scaled_dot_product_attention(*tensors, is_causal=is_causal)
            assert torch.equal(attention(*tensors, recipe="bf16", is_causal=is_causal), expected)

    def test_grouped_heads_and_scale(self):
        tensors = dense(heads=8, kv_heads=2)
        expected = F.scaled_dot_product_attention(*tensors, scale=0.3, enable_gqa=True)
        assert torch.equal(attention(*tensors, recipe="bf16", scale=0.3, enable_gqa=True), expected)

    @pytest.mark.parametrize("lengths", [None, (30, 7), (0, 1)])
    @pytest.mark.parametrize("alignment", ALIGNMENTS)
    @pytest.mark.parametrize(("queries", "keys"), [(20, 30), (40, 30), (30, 30)])
    def test_masks(self, queries, keys, alignment, lengths):
        tensors = [x.requires_grad_() for x in dense(heads=4, kv_heads=2, queries=queries, keys=keys)]
        lengths = None if lengths is None else boundaries(*lengths)
        actual = attention(*tensors, recipe="bf16", is_causal=alignment is not None, causal_align=alignment, enable_gqa=True,
                           key_lengths=lengths)
        expected, _ = exact_attention(*tensors, visible(queries, keys, alignment, lengths))
        torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)
        grad = torch.randn_like(actual)
        for a, e in zip(torch.autograd.grad(actual, tensors, grad), torch.autograd.grad(expected, tensors, grad.double()),
                        strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize(("cu_q", "cu_k"), [((0, 15, 15, 40), (0, 15, 15, 40)), ((0, 1, 9, 9, 30), (0, 4, 4, 5, 38)),
                                                ((3, 20), (0, 40)), ((0,), (0,)), ((0, 0), (0, 0))])
    def test_packed(self, cu_q, cu_k, is_causal):
        tensors = [x.requires_grad_() for x in packed(heads=4, kv_heads=2)]
        actual = varlen_attention(*tensors, boundaries(*cu_q), boundaries(*cu_k), 40, 40, recipe="bf16", is_causal=is_causal,
                                  enable_gqa=True)
        assert actual.shape == tensors[0].shape
        mask = torch.zeros(40, 40, dtype=torch.bool)
        for (q0, q1), (k0, k1) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
            mask[q0:q1, k0:k1] = visible(q1 - q0, k1 - k0, "bottom_right" if is_causal else None)[0, 0]
        expected, _ = exact_attention(*(x.transpose(0, 1)[None] for x in tensors), mask)
        torch.testing.assert_close(actual, expected[0].transpose(0, 1).float(), rtol=1e-5, atol=1e-5)
        actual.sum().backward()
        assert all(x.grad.isfinite().all() for x in tensors)

    def test_padding_garbage_reaches_no_live_row(self):
        query, key, value = dense()
        key[1, :, 7:], value[1, :, 7:] = float("nan"), float("nan")
        assert attention(query, key, value, recipe="bf16", key_lengths=boundaries(20, 7)).isfinite().all()
        rows = packed()
        for x in rows:
            x[30:] = float("nan")
        output = varlen_attention(*rows, boundaries(0, 12, 30), boundaries(0, 12, 30), 40, 40, recipe="bf16")
        assert output.isfinite().all()
        assert (output[30:] == 0).all()
