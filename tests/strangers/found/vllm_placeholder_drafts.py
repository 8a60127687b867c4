"""vllm 0.32.0 on a CPU: a request with one token left to prefill emits a token that its law does not have.

Beside a request that drafts it is padded with drafted tokens of -1, which stand for none. The kernel of a CPU reads
their probability in front of the row and may accept them: the text then goes on behind a token that nobody wrote. The
kernel in Triton rejects them (vllm-project/vllm#46533). Found by lossless.logprobs. Exit code 1 where the kernel
accepts a placeholder, 0 otherwise.
"""

import sys

import torch
import vllm
from vllm.platforms import current_platform

VOCABULARY = 4

if __name__ == "__main__":
    current_platform.import_kernels()
    texts = torch.full((2, 2), -1)
    torch.ops._C.rejection_random_sample_kernel_impl(
        texts,
        torch.tensor([1, 2]),  # where the drafted tokens of each request end
        torch.tensor([3, -1]),  # drafted tokens
        None,
        torch.tensor([[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]]),  # laws of the target
        torch.tensor([[2], [2]]),  # tokens behind accepted ones
        torch.tensor([0, 0]),  # tokens in place of rejected ones
        torch.tensor([0.5, 0.5]),  # coins
        torch.tensor([False, False]),  # requests that are greedy
        1,
        VOCABULARY,
        True,
    )
    print("vllm", vllm.__version__, "behind a placeholder:", texts[1].tolist(), "where it has to be [0, -1]")
    sys.exit(int(texts[1].tolist() != [0, -1]))
