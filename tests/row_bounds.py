"""How near a forward whose matrix products are exact must come to the reference: a CPU that runs a Hopper kernel's own source."""

import torch


def assert_close(output, lse, wanted):
    """But for a row in fifty whose codes of P a score's last bit flipped."""
    reference = wanted.output.transpose(-3, -2) if output.ndim == 4 else wanted.output
    assert output.dtype == torch.float32
    assert output.is_contiguous()
    assert torch.equal(lse.isneginf(), wanted.lse.isneginf())
    torch.testing.assert_close(lse, wanted.lse, rtol=2.0**-20, atol=2.0**-18)
    size = reference.norm(dim=-1)
    rows = (output - reference).norm(dim=-1) / torch.where(size == 0, 1.0, size)
    assert (rows > 2.0**-17).float().mean() < 0.02
    assert rows.max() < 2.0**-6
