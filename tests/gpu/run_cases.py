"""One pass over the registry on the GPU, for a sanitizer to watch (``make sanitize``)."""

from __future__ import annotations

import torch

from preattn.cases import CASES


def main() -> None:
    """Run every case once at 17 tokens."""
    for case in CASES:
        call = case.build(17, "cuda")
        call.function(**call.arguments)
    torch.cuda.synchronize()
    print(f"{len(CASES)} cases run on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
