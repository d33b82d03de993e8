"""Low-bit attention in torchtitan's own trainer: the adapter of the release line that is installed.

0.2.x, in a training TOML:

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

0.3.x: `--override.imports` or a config function, see `v03`.
"""

from lowbit_attn.integrations.torchtitan.versions import release_line

if release_line() == "0.2":
    from lowbit_attn.integrations.torchtitan.v02 import JobConfig, LowbitConverter, build_metrics_processor

    __all__ = ["JobConfig", "LowbitConverter", "build_metrics_processor"]
else:
    from lowbit_attn.integrations.torchtitan.v03 import enable

    __all__ = ["enable"]

from lowbit_attn.integrations.torchtitan.attention import LowbitAttention
from lowbit_attn.integrations.torchtitan.options import AttentionOptions

__all__ += ["AttentionOptions", "LowbitAttention"]
