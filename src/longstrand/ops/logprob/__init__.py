"""Log-probabilities of the next tokens, without a [T, vocabulary] matrix."""

from longstrand.ops.logprob.chunked import LOGPROBS, token_logprobs
from longstrand.ops.logprob.reference import token_logprobs_reference

__all__ = ["LOGPROBS", "token_logprobs", "token_logprobs_reference"]
