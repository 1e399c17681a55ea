"""Starting ranks: on this machine or over a hostfile, through the deepspeed launcher, with one exit code at the end."""

from trainer.launcher.speech import say

__all__ = ["say"]
