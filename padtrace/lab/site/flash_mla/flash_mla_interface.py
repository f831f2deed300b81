"""Where newer releases import the schedule object from."""

from sgl_kernel.flash_mla import FlashMLASchedMeta

__all__ = ["FlashMLASchedMeta"]
