"""Compile the launches of the registry for every architecture, on any machine, and report what the compiler did.

Run as a script (kernels must not be in the interpreter): one JSON object a line with kernel, target,
registers, spills, the widths of the global accesses in the PTX, and where it makes NaNs one NaN.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from preattn import policy
from preattn.cases import CASES
from preattn.dispatch import hold
from preattn.kernels.launch import OPTIONS, Launch, Tile

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def source(launch: Launch) -> ASTSource:
    """The launch as a compile unit, specialised exactly as ``Kernel.compile`` specialises it."""
    function = launch.kernel.function
    signature: dict[str, str] = {}
    constants: dict[tuple[int], object] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    arguments = (*launch.tensors, *launch.scalars, *launch.constants)
    for index, (parameter, value) in enumerate(zip(function.params, arguments, strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        elif isinstance(value, Tile):
            block = ",".join(map(str, value.block))
            signature[parameter.name] = f"tensordesc<{POINTERS[value.dtype][1:]}[{block}]>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = parameter.annotation_type
    return ASTSource(function, signature, constants, attributes)


def ptxas_report(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory of a cubin (cuobjdump comes with Triton)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text))
    return {name.lower(): int(value) for name, value in usage.items()}


def accesses(ptx: str) -> dict[str, int]:
    """How many global loads and stores there are of each width in bits."""
    counts: Counter[str] = Counter()
    for size in re.findall(r"\bcp\.async\.\S+\.shared\.global\S* \[[^]]*\], \[[^]]*\], (\w+)", ptx):
        counts[f"ld{8 * int(size, 0)}"] += 1
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global\S*?(?:\.(v\d))?\.[bu](\d+)", ptx):
        counts[f"{kind}{int(vector[1:] or 1) * int(bits) if vector else int(bits)}"] += 1
    return dict(counts)


def nans(ptx: str) -> int:
    """How many values are replaced by the bf16 NaN, in words of the kernel's own and not within a conversion."""
    return len(re.findall(r"\bselp\.b16\s.*\b(?:32767|0x7FFF)\b", ptx))


def report(name: str, launch: Launch, target: str) -> dict[str, object]:
    """Compile one launch for one target."""
    compiled = triton.compile(
        source(launch), target=TARGETS[target], options={"num_warps": launch.num_warps, **OPTIONS}
    )
    row: dict[str, object] = {"case": name, "kernel": launch.kernel.name, "target": target, "warps": launch.num_warps}
    if "cubin" in compiled.asm:
        ptx = compiled.asm["ptx"]
        row |= ptxas_report(compiled.asm["cubin"]) | {"accesses": accesses(ptx), "nans": nans(ptx)}
    else:
        text = compiled.asm["amdgcn"]
        for key in ("vgpr_spill_count", "sgpr_spill_count", "vgpr_count"):
            found = re.search(rf"\.{key}:\s*(\d+)", text)
            row[key] = int(found.group(1)) if found else None
    return row


def launches(*, small: bool) -> Iterator[tuple[str, Launch]]:
    """What every case of the registry launches on an H200, once per variant, in small steps or in large ones."""
    device = policy.device("NVIDIA H200")
    if not small:
        large = {path: config for path, config in device.launch.items() if "@" not in path}
        device = dataclasses.replace(device, launch=large)
    seen = set()
    steps = [size for size in policy.STEP_SIZES if size <= policy.SMALL_STEP] if small else [2]
    for case, tokens in itertools.product(CASES, steps):
        call = case.build(tokens)
        with policy.assume(device), hold() as held:
            call.function(**call.arguments)
        for launch in held:
            dtypes = tuple(None if tensor is None else tensor.dtype for tensor in launch.tensors)
            key = (launch.kernel.name, launch.constants, launch.num_warps, dtypes)
            if key not in seen:
                seen.add(key)
                yield case.name, launch


def main() -> None:
    """``static_compile.py TARGET...``; ``--small`` compiles the configurations of small steps."""
    targets = [argument for argument in sys.argv[1:] if argument != "--small"] or list(TARGETS)
    for name, launch in launches(small="--small" in sys.argv):
        for target in targets:
            print(json.dumps(report(name, launch, target)), flush=True)


if __name__ == "__main__":
    main()
