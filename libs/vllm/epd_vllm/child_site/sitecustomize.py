"""Runs first in each child process of vLLM's CPU build; see ``epd_vllm.compat``."""

from epd_vllm.compat import mend_torchvision

mend_torchvision()
