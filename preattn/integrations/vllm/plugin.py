"""When the plug-in acts, and when it leaves the engine alone.

What cannot be replaced is left as it was, all of its group, with one line that says why: an engine of another version,
a device that the kernels are not for, a name that another plug-in holds, an exception while patching, while a layer is
built or while its kernels are compiled. In a step nothing is caught.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from importlib.metadata import entry_points
from types import ModuleType

from . import dsa, layers, report, v4
from .patching import AfterImport, Occupied, Patches

GROUP, NAME = "vllm.general_plugins", "preattn"
VERSIONS = ("0.33.0",)
"""Engine versions whose names, signatures and call sites were checked: ``tests/vllm_contract.json``."""

Patcher = Callable[[ModuleType, Patches], None]
MODULES: dict[str, Patcher] = {
    layers.KERNELS: dsa.patch_kernels,
    layers.FLASHMLA: dsa.patch_flashmla,
    layers.ATTENTION: dsa.patch_attention,
    **dict.fromkeys(v4.MODELS, v4.patch_model),
}
"""What is done to a module once it is imported, in the order in which loaded modules are patched."""

_patches = Patches()
_watch: AfterImport | None = None
_refused: str | None = None


def register() -> None:
    """Watch for the models that have a prologue of ours; once in a process, whatever calls it again."""
    global _watch
    if _watch is not None or _refused is not None:
        return
    try:
        reason = _refusal()
        if reason is not None:
            refuse(reason, level=logging.INFO)
            return
        _watch = AfterImport({name: _guarded(patch) for name, patch in MODULES.items()})
        _watch.install()
    except Exception as error:
        refuse(f"{type(error).__name__} at start-up: {error}", trace=True)


def unregister() -> None:
    """Put the engine back as it was, and forget every count; :func:`register` may be called again."""
    global _watch, _refused
    _undo()
    _watch, _refused = None, None
    report.forget()


def _undo() -> None:
    if _watch is not None:
        _watch.remove()
    v4.restore()
    _patches.restore()


def refuse(reason: str, *, level: int = logging.WARNING, trace: bool = False) -> None:
    """Leave the engine as it was, for good, and say why once."""
    global _refused
    _refused = reason
    _undo()
    report.logger.log(level, "preattn is not active: %s", reason, exc_info=trace)


def refused() -> bool:
    """Whether this process's engine is left as it was."""
    return _refused is not None


def _refusal() -> str | None:
    """Why this process's engine is left alone, as far as can be told without importing any of it."""
    if report.asked("PREATTN_DISABLE"):
        return "PREATTN_DISABLE is set"
    copies = sorted({str(point.dist.locate_file("")) if point.dist else "?" for point in _copies()})
    if len(copies) > 1:
        report.once(
            f"preattn is installed {len(copies)} times, in {', '.join(copies)}: {__file__} is used",
            level=logging.WARNING,
        )
    version = str(importlib.import_module("vllm").__version__)
    if version.partition("+")[0] not in VERSIONS:
        return f"it knows vLLM {', '.join(VERSIONS)}, and this is {version}"
    return None


def _copies() -> list[importlib.metadata.EntryPoint]:
    return [point for point in entry_points(group=GROUP) if point.name == NAME]


def _guarded(patch: Patcher) -> Callable[[ModuleType], None]:
    """A patcher that checks the device first, and undoes everything where it fails."""

    def act(module: ModuleType) -> None:
        if _refused is not None:
            return
        try:
            reason = _unsupported_device()
            if reason is not None:
                refuse(reason, level=logging.INFO)
                return
            patch(module, _patches)
        except Occupied as occupied:
            refuse(str(occupied))
        except Exception as error:
            refuse(f"{type(error).__name__} while patching {module.__name__}: {error}", trace=True)
        else:
            report.once(f"preattn: {module.__name__} is patched")

    return act


def _unsupported_device() -> str | None:
    """Why this machine's device is not one for the kernels; asks the engine, which does not initialise CUDA for it."""
    platform = importlib.import_module("vllm.platforms").current_platform
    if not platform.is_cuda():
        return f"its kernels are for CUDA devices, and this platform is {platform.device_name or 'none'}"
    if not platform.has_device_capability(90):
        return f"its kernels are for compute capability 9.0 and newer, and this is {platform.get_device_capability()}"
    return None


def taken() -> list[str]:
    """Names that another plug-in has replaced since, each with where from."""
    return _patches.taken()


def active() -> bool:
    """Whether something is patched in this process, and all of it still is."""
    return len(_patches) > 0 and not taken()
