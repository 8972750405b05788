"""What the plug-in for SGLang relies on, read from SGLang's own sources: names, signatures, call sites, the registry.

Nothing of SGLang is imported: its files are parsed. A release that moves something fails here with what moved. To ask
another release:

    PREATTN_SGLANG=0.5.24 python -m pytest tests/test_sglang_contract.py tests/test_sglang_plugin.py
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import release_sources

from preattn.integrations import sglang as plugin

VERSION = os.environ.get("PREATTN_SGLANG", plugin.VERSIONS[-1])

NORM_ROPE = "sglang/kernels/ops/attention/dsv4/norm_rope.py"
REGISTRY = "sglang/srt/plugins/hook_registry.py"
LOADER = "sglang/srt/plugins/__init__.py"
V4_MODEL, DSPARK = "sglang/srt/models/deepseek_v4.py", "sglang/srt/models/deepseek_v4_dspark.py"
HIP = "sglang/srt/layers/attention/hip_flash_mla.py"

CALLS = {
    "fused_q_norm_rope": {
        (V4_MODEL, "_compute_q_b", "q, q_out, None, self.freqs_cis, positions"),
        (V4_MODEL, "_compute_q_b", "q, q_out, self.eps, self.freqs_cis, positions"),
        (DSPARK, "_compute_q", "q, q_out, None, self.freqs_cis, positions"),
        (DSPARK, "_compute_q", "q, q_out, self.eps, self.freqs_cis, positions"),
    },
    "fused_rope_inplace": {
        (V4_MODEL, "_compute_q_b", "q[..., -self.qk_rope_head_dim:], None, self.freqs_cis, positions=positions"),
        (
            V4_MODEL,
            "forward",
            "o[..., -self.qk_rope_head_dim:], None, self.freqs_cis, positions=positions, inverse=True",
        ),
        (DSPARK, "_compute_q", "q[..., -self.rope_head_dim:], None, self.freqs_cis, positions=positions"),
        (DSPARK, "forward", "o[..., -rd:], None, self.freqs_cis, positions=positions, inverse=True"),
    },
}
"""Who calls a hooked function, and how. The hooks were written for these calls."""

NOT_CALLED_ON_CUDA = {HIP}


CUDA = {
    "sglang/kernels/jit/csrc/deepseek_v4/main_norm_rope.cuh": "c4804fc56cb17e3c",
    "sglang/kernels/jit/csrc/deepseek_v4/rope.cuh": "c599b6d5bce1f3e7",
}
"""The CUDA sources whose bits were compared on a GPU, by a hash of their text."""

FOLDERS = ("sglang/kernels/ops/", "sglang/srt/layers/", "sglang/srt/models/")
"""Where the hooked and the untouched functions are, and whatever may call them."""


def sources() -> Path:
    """The folder with the release's sources; skips, with the reason, where they cannot be had."""
    return release_sources.sources("sglang", VERSION, (*FOLDERS, "sglang/srt/plugins/", "sglang/srt/environ.py", *CUDA))


# -- reading sources --------------------------------------------------------------------------------------------------


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def definition(root: Path, dotted: str) -> ast.FunctionDef | None:
    """A module's or class's function, by its dotted name."""
    module, _, name = dotted.rpartition(".")
    path = root / (module.replace(".", "/") + ".py")
    body = parsed(path).body if path.is_file() else []
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def where(root: Path, name: str) -> str:
    """Where else a function of this name is defined, for messages."""
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.glob("sglang/**/*.py"))
        if f"def {name}(" in path.read_text()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    return f"it is now in {', '.join(found)}" if found else f"nothing of that name is left in {', '.join(FOLDERS)}"


def parameters(function: ast.FunctionDef) -> list[str]:
    """``name`` or ``name=default``, keyword-only ones after a ``*``."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + [ast.unparse(value) for value in given.defaults]
    listed = [arg.arg + (f"={value}" if value else "") for arg, value in zip(plain, defaults, strict=True)]
    if given.vararg or given.kwonlyargs:
        listed.append("*" + (given.vararg.arg if given.vararg else ""))
    for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        listed.append(arg.arg + (f"={ast.unparse(default)}" if default else ""))
    return listed + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def of_hook(target: str) -> list[str]:
    """A hook's parameters in the same form, without the function beneath."""
    every = list(inspect.signature(plugin.HOOKS[target]).parameters.values())[1:]
    return [p.name + ("" if p.default is p.empty else f"={p.default!r}") for p in every]


def calls(root: Path, name: str) -> Iterator[tuple[str, str, str]]:
    """(file, function around, arguments) of every call by that name."""
    for path in sorted(root.glob("sglang/**/*.py")):
        if f"{name}(" in path.read_text():
            for around in ast.walk(parsed(path)):
                if isinstance(around, ast.FunctionDef) and around.name != name:
                    for node in ast.walk(around):
                        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
                            given = [ast.unparse(x) for x in (*node.args, *node.keywords)]
                            yield str(path.relative_to(root)), around.name, ", ".join(given)


def moved(root: Path) -> list[str]:
    """What is not where, or not as, the plug-in expects it; empty where everything is."""
    problems = []
    for target in plugin.HOOKS:
        name = target.rpartition(".")[2]
        function = definition(root, target)
        if function is None:
            problems.append(f"{target}: expected there; {where(root, name)}")
            continue
        if parameters(function) != of_hook(target):
            problems.append(f"{target}: expected parameters {of_hook(target)}; got {parameters(function)}")
        found = {call for call in calls(root, name) if call[0] not in NOT_CALLED_ON_CUDA}
        problems += [f"{name}: call gone: {call}" for call in sorted(CALLS[name] - found)]
        problems += [f"{name}: call not known: {call}" for call in sorted(found - CALLS[name])]
    for target in plugin.UNTOUCHED:
        if definition(root, target) is None:
            problems.append(f"{target} (left untouched): expected there; {where(root, target.rpartition('.')[2])}")
    return problems


# -- tests ------------------------------------------------------------------------------------------------------------


def test_nothing_has_moved() -> None:
    problems = moved(sources())
    assert not problems, "\n".join(problems)


def test_a_hooked_function_runs_the_kernel_whose_arithmetic_was_compared() -> None:
    """The compiled kernels: ``fma(e, cos, -(o*sin))``, ``fma(e, sin, o*cos)``, and a copy of the other dims."""
    text = (sources() / NORM_ROPE).read_text()
    assert 'cuda_files=["deepseek_v4/main_norm_rope.cuh"]' in text and "FusedQNormRopeKernel" in text
    assert 'cuda_files=["deepseek_v4/rope.cuh"]' in text and "FusedQKRopeKernel" in text
    assert "eps is not None" in text  # None stands for: no norm


@pytest.mark.parametrize("path", CUDA)
def test_a_kernel_is_the_one_that_was_compared(path: str) -> None:
    found = sources() / path
    assert found.is_file(), f"SGLang {VERSION} has no {path}"
    digest = hashlib.sha256(found.read_bytes()).hexdigest()[:16]
    assert digest == CUDA[path], f"{path} has changed: compare its bits on a GPU, then record {digest}"


def test_the_registry_is_the_one_that_hooks_are_verified_in() -> None:
    """The plug-in reads ``_hooks`` and ``_patched``, and a hook's cell in the closure of its wrapper."""
    tree = parsed(sources() / REGISTRY)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    registry = {node.name: node for node in classes["HookRegistry"].body if isinstance(node, ast.FunctionDef)}
    assert parameters(registry["register"]) == [
        "cls",
        "target",
        "hook",
        "hook_type=HookType.AFTER",
        "*",
        "source=None",
    ]
    assert parameters(registry["apply_hooks"]) == ["cls"]
    for name in ("register", "apply_hooks"):
        assert [ast.unparse(decorator) for decorator in registry[name].decorator_list] == ["classmethod"]
    text = ast.unparse(classes["HookRegistry"])
    assert "cls._hooks[target].append((hook_type, hook, resolved_source))" in text
    assert "logger.exception('Failed to apply hooks to %s', target)" in text, "does the registry raise now?"
    types = {ast.unparse(node) for node in classes["HookType"].body if isinstance(node, ast.Assign)}
    assert {"AROUND = 'around'", "REPLACE = 'replace'"} <= types
    source = [node.target.id for node in classes["HookSource"].body if isinstance(node, ast.AnnAssign)]
    assert source == ["plugin_name", "dist_name"]
    wrap = definition(sources(), "sglang.srt.plugins.hook_registry._wrap_fn")
    assert wrap is not None and "return hook(original_fn, *args, **kwargs)" in ast.unparse(wrap)
    assert "wrapper.__wrapped__ = original_fn" in ast.unparse(wrap)


def test_the_loader_applies_hooks_outside_of_what_it_catches() -> None:
    """So an error raised by the verification ends the process, where one of the entry point would be logged."""
    path = sources() / LOADER
    assert "GENERAL_PLUGINS_GROUP = 'sglang.srt.plugins'" in ast.unparse(parsed(path))
    load = next(x for x in parsed(path).body if isinstance(x, ast.FunctionDef) and x.name == "load_plugins")
    assert ast.unparse(load.body[-1]) == "HookRegistry.apply_hooks()"
    assert any(isinstance(node, ast.Try) and "func()" in ast.unparse(node) for node in ast.walk(load))


def altered(tmp_path: Path, **files: str) -> Path:
    """A small package with the hooked functions and their calls, as known, and some files changed."""
    bodies = {path: "" for path in (V4_MODEL, DSPARK)}
    heads = {}
    for target in plugin.HOOKS:
        name = target.rpartition(".")[2]
        heads[name] = f"def {name}({', '.join(of_hook(target))}): pass\n"
        for at, (path, around, arguments) in enumerate(sorted(CALLS[name])):
            bodies[path] += f"class C{name}{at}:\n    def {around}(self):\n        {name}({arguments})\n"
    texts = {NORM_ROPE: "".join(heads.values()), **bodies}
    for target in plugin.UNTOUCHED:
        module, _, name = target.rpartition(".")
        path = module.replace(".", "/") + ".py"
        texts[path] = texts.get(path, "") + f"def {name}(): pass\n"
    for path, change in files.items():
        old, new = change.split(" -> ")
        key = {"norm_rope": NORM_ROPE, "model": V4_MODEL}[path]
        assert old in texts[key]
        texts[key] = texts[key].replace(old, new)
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "sglang/elsewhere.py").write_text("def fused_new_rope(): pass\ndef pack_query(): pass\n")
    return tmp_path


def test_the_small_package_is_as_expected(tmp_path: Path) -> None:
    assert moved(altered(tmp_path)) == []


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (
            "norm_rope",
            "fused_q_norm_rope( -> fused_new_rope(",
            r"norm_rope.fused_q_norm_rope: expected there; nothing of that name is left",
        ),
        (
            "norm_rope",
            "def fused_q_norm_rope(q_input, -> def fused_q_norm_rope(q_in,",
            r"expected parameters \['q_input', .*; got \['q_in', ",
        ),
        (
            "norm_rope",
            "inverse=False -> inverse=True",
            r"expected parameters .*'inverse=False'\]; got .*'inverse=True'\]",
        ),
        (
            "model",
            "(q, q_out, None, self.freqs_cis -> (q, q_out, None, self.frequencies",
            r"call gone: .*_compute_q_b.*self.freqs_cis, positions'\)\n.*call not known: .*self.frequencies",
        ),
        ("model", "def forward( -> def forward_attention(", r"call not known: .*'forward_attention'"),
    ],
)
def test_what_moved_is_said(tmp_path: Path, path: str, change: str, message: str) -> None:
    said = "\n".join(moved(altered(tmp_path, **{path: change})))
    assert re.search(message, said, re.DOTALL), said


def test_where_a_name_went_is_said(tmp_path: Path) -> None:
    root = altered(tmp_path)
    (root / "sglang/srt/layers/attention/deepseek_v4_mega_backend.py").write_text("")
    name = "sglang.srt.layers.attention.deepseek_v4_mega_backend.pack_query"
    assert moved(root) == [f"{name} (left untouched): expected there; it is now in sglang/elsewhere.py:2"]
