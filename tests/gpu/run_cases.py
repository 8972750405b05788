"""One pass over the registry on the GPU, for a sanitizer to watch (``make sanitize``)."""

from __future__ import annotations

import sys

import torch

from preattn.cases import CASES


def main() -> None:
    """Run every case once at 17 tokens, or with ``I/N`` every N-th from the I-th on."""
    first, step = map(int, (sys.argv[1] if len(sys.argv) > 1 else "0/1").split("/"))
    cases = CASES[first::step]
    for case in cases:
        call = case.build(17, "cuda")
        call.function(**call.arguments)
    torch.cuda.synchronize()
    print(f"{len(cases)} cases run on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
