"""A whole Wan checkpoint folder of small size: tokenizer, text encoder, transformer, autoencoder, scheduler; no download."""

from pathlib import Path

import torch


def save_wan(folder: Path) -> Path:
    """Write it, return it."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    words = ("<pad>", "</s>", "<unk>", "dance", "monkey")
    words_to_ids = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    words_to_ids.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_to_ids, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
                                        model_max_length=64)
    torch.manual_seed(0)
    pipe = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=T5EncoderModel(T5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)),
        transformer=WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=16, out_channels=16, text_dim=32,
            freq_dim=32, ffn_dim=64, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32),
        vae=AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                             temperal_downsample=[False, True, True]),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0))
    pipe.save_pretrained(folder)
    return folder
