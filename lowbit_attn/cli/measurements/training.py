"""FLAMIA table 4: cosines of O and dQ to exact attention for the recipes that train."""

import torch
from torch import Tensor

from lowbit_attn.cli.measurements.settings import Comparison, Settings
from lowbit_attn.cli.measurements.table import Line, Table
from lowbit_attn.recipes import Recipe, resolve
from lowbit_attn.reference import Visibility, backward, forward

PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    "mxfp8": {"causal": (0.998, 0.998), "full": (0.998, 0.998)},
    "nvfp4_fp8": {"causal": (0.9920, 0.9906), "full": (0.9899, 0.9890)},
    "nvfp4": {"causal": (0.9810, 0.9456), "full": (0.9800, 0.9509)},
}
"""O and dQ, 4 x 4096 tokens, 16 heads, d=128. For its 8-bit paths the text gives 0.998-0.999."""

SLACK = {"mxfp8": 0.0005, "nvfp4_fp8": 0.001, "nvfp4": 0.003}
"""How far below the published cosine a measured one may fall; mxfp8's is printed to three digits."""


def gradients(tensors: list[Tensor], recipe: Recipe, is_causal: bool) -> dict[str, Tensor]:
    """O, dQ, dK, dV of Q, K, V, dO."""
    query, key, value, grad = tensors
    seen = Visibility.create(query.shape[0], query.shape[2], key.shape[2], is_causal=is_causal, device=query.device)
    result = forward(query, key, value, recipe, seen, save=True)
    if result.saved is None:
        raise ValueError(f"recipe: {recipe.name!r} saved nothing for a backward")
    grads = backward(grad, None, result.saved, result.output, result.lse, recipe, seen)
    return {"O": result.output, "dQ": grads.query, "dK": grads.key, "dV": grads.value}


def exact_gradients(tensors: list[Tensor], is_causal: bool) -> dict[str, Tensor]:
    """The same from exact attention in float32, on the same inputs."""
    query, key, value = (x.detach().float().requires_grad_() for x in tensors[:3])
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    grads = torch.autograd.grad(output, (query, key, value), tensors[3].float())
    return {"O": output.detach(), **dict(zip(("dQ", "dK", "dV"), grads, strict=True))}


def measure(settings: Settings, recipes: list[str] | None = None) -> Table:
    """Cosines of every recipe, causal and full."""
    names = recipes or list(PUBLISHED)
    masks = ("causal", "full")
    cells = {(name, mask): {part: Comparison() for part in ("O", "dQ", "dK", "dV")} for name in names for mask in masks}
    for tensors in settings.normal_inputs(4):
        for mask in masks:
            expected = exact_gradients(tensors, mask == "causal")
            for name in names:
                for part, actual in gradients(tensors, resolve(name), mask == "causal").items():
                    cells[name, mask][part].add(actual, expected[part])
    lines = []
    for (name, mask), parts in cells.items():
        published = PUBLISHED.get(name, {}).get(mask)
        for index, (part, comparison) in enumerate(parts.items()):
            promised = published[index] if published and index < 2 else None
            lines.append(Line(f"{name}, {mask}", f"cosine of {part}", comparison.cosine, promised,
                              None if promised is None else SLACK[name], 4, at_least=promised is not None))
    return Table("Cosine to exact attention", "FLAMIA 4.2, table 4 (4 x 4096 tokens, 16 heads)", str(settings), lines)
