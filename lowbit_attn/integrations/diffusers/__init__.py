"""Low-bit attention in diffusers video pipelines: `patch(pipe, "schedule.yaml")`, `report(pipe)`, `unpatch(pipe)`."""

from lowbit_attn.integrations.diffusers.patch import patch, report, unpatch
from lowbit_attn.integrations.diffusers.record import Call, RunReport

__all__ = ["Call", "RunReport", "patch", "report", "unpatch"]
