"""Low-bit attention in torchtitan's own trainer.

In a training TOML:

    [job]
    custom_config_module = "lowbit_attn.integrations.torchtitan"   # makes the [lowbit_attn] section legal
    [experimental]
    custom_import = "lowbit_attn.integrations.torchtitan"          # registers the model converter
    [model]
    converters = ["lowbit_attn"]
    [lowbit_attn]
    recipe = "mxfp8"

Without `custom_config_module` there is no `[lowbit_attn]` section and the defaults of `AttentionOptions` apply. A project with
a config module of its own adds `lowbit_attn: AttentionOptions = field(default_factory=AttentionOptions)` to its JobConfig.
"""

import re
from importlib.metadata import PackageNotFoundError, version

_ACCEPTED = "0.2.x from 0.2.2"


def _require_supported_torchtitan() -> None:
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        raise ImportError(f"torchtitan: not installed; accepted: {_ACCEPTED} (pip install 'lowbit-attn[torchtitan]')") from None
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if not (0, 2, 2) <= numbers < (0, 3):
        raise ImportError(f"torchtitan: found version {found}; accepted: {_ACCEPTED}")


_require_supported_torchtitan()

from lowbit_attn.integrations.torchtitan.attention import AttentionOptions, LowbitAttention  # noqa: E402
from lowbit_attn.integrations.torchtitan.v02 import JobConfig, LowbitConverter  # noqa: E402

__all__ = ["AttentionOptions", "JobConfig", "LowbitAttention", "LowbitConverter"]
