"""Learned perceptual image patch similarity (Zhang et al., 2018), AlexNet version, from weights that the user has.

Nothing is downloaded. The file is the state dict of the `lpips` package's `LPIPS(net="alex")`, which holds backbone and heads:
`torch.save(lpips.LPIPS(net="alex").state_dict(), path)`.
"""

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

_CONVOLUTIONS = (("net.slice1.0", 4, 2, False), ("net.slice2.3", 1, 2, True), ("net.slice3.6", 1, 1, True),
                 ("net.slice4.8", 1, 1, False), ("net.slice5.10", 1, 1, False))
"""Of AlexNet: name of the weights, stride, padding, whether a 3 × 3 pooling with stride 2 comes before."""

_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""The package's normalization of pictures in -1..1."""


class Lpips:
    """`lpips(a, b)` is the distance of pictures `[F, 3, H, W]` in 0..1, `[F]`."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ValueError(f"--lpips: got {str(path)!r}, which is no file; accepted: a state dict of lpips.LPIPS(net='alex')")
        weights = torch.load(path, map_location="cpu", weights_only=True)
        names = [f"{name}.{part}" for name, *_ in _CONVOLUTIONS for part in ("weight", "bias")]
        names += [f"lin{level}.model.1.weight" for level in range(len(_CONVOLUTIONS))]
        missing = [name for name in names if not isinstance(weights, dict) or name not in weights]
        if missing:
            raise ValueError(f"--lpips: {path} has no {missing[0]!r}; accepted: a state dict of lpips.LPIPS(net='alex')")
        self._weights: dict[str, Tensor] = {name: weights[name].float() for name in names}

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Distances, frame by frame."""
        with torch.no_grad():
            return torch.stack([self._distance(x[None], y[None]) for x, y in zip(a, b, strict=True)])

    def _distance(self, a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(())
        for level, (x, y) in enumerate(zip(self._features(a), self._features(b), strict=True)):
            difference = (_unit(x) - _unit(y)).square()
            total = total + functional.conv2d(difference, self._weights[f"lin{level}.model.1.weight"]).mean()
        return total

    def _features(self, picture: Tensor) -> list[Tensor]:
        shift, scale = (torch.tensor(values)[None, :, None, None] for values in (_SHIFT, _SCALE))
        x = (picture * 2 - 1 - shift) / scale
        features = []
        for name, stride, padding, pooled in _CONVOLUTIONS:
            if pooled:
                x = functional.max_pool2d(x, 3, 2)
            weight, bias = (self._weights[f"{name}.{part}"] for part in ("weight", "bias"))
            x = functional.relu(functional.conv2d(x, weight, bias, stride, padding))
            features.append(x)
        return features


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(dim=1, keepdim=True).sqrt() + 1e-10)
