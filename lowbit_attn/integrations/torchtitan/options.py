"""What a training configuration may say about attention, and the recipe of every layer that follows from it.

Nothing here imports torchtitan: both release lines share it.
"""

from dataclasses import dataclass

from lowbit_attn.recipes import RECIPES, UNQUANTIZED, canonical_text, resolve


@dataclass(frozen=True)
class AttentionOptions:
    """The `[lowbit_attn]` section of a 0.2.x TOML; the keywords of `v03.attention` and `v03.enable`."""

    recipe: str = "mxfp8"
    """Numerics: a name, or a name with options ("mxfp8:max_threshold=2"). "bf16" is torch SDPA under the same mask."""

    layers: str = ""
    """Layers that run another recipe: a list of rules in the schedule language, in YAML, on one line or several:
    "[{blocks: {first: 2}, recipe: bf16}, {blocks: {last: 1}, recipe: bf16}]". A block is a layer; later rules win."""

    deterministic: bool = False
    """Ask for a bitwise reproducible backward (also implied by debug.deterministic, which layers in bf16 need on a GPU)."""

    backend: str | None = None
    """Which implementation runs: None chooses; or "reference", "hopper", "triton"."""

    probe_every: int = 0
    """Every so many steps, measure one layer's numerics (saturation, flushed dS, cosine to exact attention) on its real
    tensors and write them to torchtitan's metrics log; a multiple of metrics.log_freq, 0 for never."""

    probe_layer: int = 0
    """The layer that `probe_every` measures."""


def training_recipes() -> list[str]:
    """Names of the recipes that train under a causal mask."""
    return [UNQUANTIZED, *(name for name, recipe in RECIPES.items() if recipe.trains and recipe.causal)]


def check_options(options: AttentionOptions) -> None:
    """ValueError unless causal pretraining can run with these options, the number of layers aside."""
    recipe = _checked_recipe("recipe", options.recipe)
    if recipe == UNQUANTIZED and options.backend is not None:
        raise ValueError(f"lowbit_attn.backend: got {options.backend!r} with recipe 'bf16', which is torch SDPA; "
                         "accepted: leave it out")
    if options.probe_every < 0:
        raise ValueError(f"lowbit_attn.probe_every: got {options.probe_every}; accepted: a number of steps, or 0 for never")


def _checked_recipe(option: str, text: str) -> str:
    """Its canonical text, if it trains under a causal mask."""
    try:
        canonical = canonical_text(text)
    except (TypeError, ValueError) as error:
        came = str(error).removeprefix("recipe: ")
        raise ValueError(f"lowbit_attn.{option}: {came}; of these train {', '.join(training_recipes())}") from None
    if canonical == UNQUANTIZED:
        return canonical
    recipe = resolve(canonical)
    refusal = recipe.training_refusal
    problem = f"is for inference only ({refusal})" if refusal else "" if recipe.causal else "cannot run under a causal mask"
    if problem:
        raise ValueError(f"lowbit_attn.{option}: got {text!r}, which {problem}; accepted: {', '.join(training_recipes())}")
    return canonical


def layer_recipes(options: AttentionOptions, layers: int) -> list[str]:
    """Canonical recipe of each of a model's layers; ValueError for rules that do not fit, do not train or never apply."""
    if not options.layers.strip():
        return [_checked_recipe("recipe", options.recipe)] * layers
    from lowbit_attn.schedules import ScheduleError, load

    text = "version: 1\nname: layers\nattention:\n  default: " + _quoted(options.recipe) + "\n  rules:\n"
    rules = "\n".join(f"    {line}" for line in options.layers.strip().splitlines())
    try:
        schedule = load(text + rules)
        for number, rule in enumerate(schedule.attention.rules):
            foreign = sorted(rule.model_fields_set - {"blocks", "recipe"})
            if foreign:
                raise ScheduleError(f"rules[{number}].{foreign[0]}: belongs to video models; accepted keys: blocks, recipe")
        recipes = schedule.bind(1, layers).grid()[0]
    except ScheduleError as error:
        raise ValueError(f"lowbit_attn.layers: {error}") from None
    return [_checked_recipe("layers", recipe) for recipe in recipes]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def check_probe(options: AttentionOptions, recipes: list[str], log_freq: int) -> None:
    """ValueError unless the numerics probe, if asked for, has a quantized layer to measure and is logged when it does."""
    if not options.probe_every:
        if options.probe_layer:
            raise ValueError(f"lowbit_attn.probe_layer: got {options.probe_layer} without lowbit_attn.probe_every, so that nothing "
                             "is measured; accepted: both or neither")
        return
    if not 0 <= options.probe_layer < len(recipes):
        raise ValueError(f"lowbit_attn.probe_layer: got {options.probe_layer}; accepted: 0 to {len(recipes) - 1}")
    if recipes[options.probe_layer] == UNQUANTIZED:
        raise ValueError(f"lowbit_attn.probe_layer: got {options.probe_layer}, which runs 'bf16': there is nothing to measure; "
                         "accepted: a layer with a low-bit recipe")
    if options.probe_every % log_freq:
        raise ValueError(f"lowbit_attn.probe_every: got {options.probe_every} with metrics.log_freq {log_freq}; accepted: a "
                         "multiple of it, since the probe is written to the same log")


__all__ = ["AttentionOptions", "check_options", "check_probe", "layer_recipes", "training_recipes"]
