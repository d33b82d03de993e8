"""Precision schedules: a YAML file that says which recipe runs at which denoising step and block.

`load` validates a file, `PrecisionSchedule.bind` resolves it for a number of steps, blocks and experts, `render_schedule`
draws the result.
"""

from lowbit_attn.schedules.families import FAMILIES, KINDS, STREAMS, Place, published_blocks
from lowbit_attn.schedules.grid import BoundSchedule, Grid, Layout
from lowbit_attn.schedules.render import render_grids, render_schedule
from lowbit_attn.schedules.schema import UNCHANGED, PrecisionSchedule, load
from lowbit_attn.schedules.source import ScheduleError

__all__ = ["FAMILIES", "KINDS", "STREAMS", "UNCHANGED", "BoundSchedule", "Grid", "Layout", "Place", "PrecisionSchedule",
           "ScheduleError", "load", "published_blocks", "render_grids", "render_schedule"]
