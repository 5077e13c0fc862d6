"""The short causal convolution before a linear-attention layer."""

from longstrand.ops.short_conv.reference import short_conv_reference
from longstrand.ops.short_conv.step import short_conv_step
from longstrand.ops.short_conv.taps import SHORT_CONV, short_conv

__all__ = ["SHORT_CONV", "short_conv", "short_conv_reference", "short_conv_step"]
