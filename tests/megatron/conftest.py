from __future__ import annotations

from tests.megatron.on_cpu import megatron_on_cpu

__all__ = ["megatron_on_cpu"]
