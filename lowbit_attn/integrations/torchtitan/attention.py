"""The module that runs our operator in the place of torchtitan's inner attention; both release lines subclass it.

Nothing here imports torchtitan. A release line's adapter adds the call signature that its models use.
"""

import torch
from torch import Tensor, nn

from lowbit_attn.api import attention, varlen_attention
from lowbit_attn.integrations.torchtitan.options import AttentionOptions
from lowbit_attn.ops.observe import observe


class LowbitAttention(nn.Module):
    """Causal attention through `lowbit_attn`, without parameters or buffers, so a state_dict does not see it.

    Args:
        options: of the whole model.
        compute_dtype: dtype that attention computes in. Inputs of another dtype (tensor parallelism alone leaves activations
            in float32) are cast to it, the output is cast back.

    Attributes:
        recipe: of this layer; `options.recipe` until the start-up says otherwise.
        probe: number of the `ops.observe` record that this layer fills, None for a layer that is not probed.
    """

    def __init__(self, options: AttentionOptions, compute_dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # not super(): a release line's class may have a base with arguments of its own
        self.options = options
        self.compute_dtype = compute_dtype
        self.recipe = options.recipe
        self.probe: int | None = None

    def extra_repr(self) -> str:
        """The options, for torchtitan's `model.print_after_conversion`."""
        return f"recipe={self.recipe!r}, {self.options}, compute_dtype={self.compute_dtype}"

    @property
    def backend(self) -> str | None:
        """The backend that this layer's recipe is asked of; bf16 layers among low-bit ones have none."""
        return None if self.recipe == "bf16" else self.options.backend

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None) -> Tensor:
        """[B, H, L, D] in and out; every row of the batch is one document."""
        q, k, v = self._inputs(query, key, value, None)
        output = attention(q, k, v, recipe=self.recipe, is_causal=is_causal, scale=scale, enable_gqa=True,
                           deterministic=self.options.deterministic, backend=self.backend)
        assert isinstance(output, Tensor)
        return self._output(output, query.dtype)

    def attend_packed(self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
                      max_k: int, *, scale: float | None) -> Tensor:
        """Packed [T, H, D] in and out, causal inside each document."""
        q, k, v = self._inputs(query, key, value, cu_seq_q)
        output = varlen_attention(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, recipe=self.recipe, is_causal=True, scale=scale,
                                  enable_gqa=True, deterministic=self.options.deterministic, backend=self.backend)
        assert isinstance(output, Tensor)
        return self._output(output, query.dtype)

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor, cu_seq: Tensor | None) -> list[Tensor]:
        inputs = [x.to(self.compute_dtype) for x in (query, key, value)]
        if self.probe is None:
            return inputs
        return [observe(x, cu_seq, self.probe, name) for x, name in zip(inputs, ("query", "key", "value"), strict=True)]

    def _output(self, output: Tensor, dtype: torch.dtype) -> Tensor:
        if self.probe is not None:
            output = observe(output, None, self.probe, "output")
        return output.to(dtype)


__all__ = ["LowbitAttention"]
