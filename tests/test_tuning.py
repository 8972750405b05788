"""The search of launch configurations, as far as no GPU is needed."""

from __future__ import annotations

import pytest

from preattn import policy, tuning
from preattn.dispatch import hold


@pytest.mark.parametrize("path", tuning.PATHS)
def test_every_path_has_a_dozen_candidates_that_reach_its_kernel(path: str) -> None:
    candidates = tuning.CANDIDATES[path]
    assert len(set(candidates)) == len(candidates) >= 12
    call = tuning.PATHS[path].build(129)  # more than few tokens, for which a projection narrows its tiles
    launches = []
    for arm in tuning.arms(path, call).values():
        with hold() as held:
            arm()
        launches += [(launch.constants, launch.num_warps) for launch in held]
    assert len(set(launches)) == len(candidates)  # the path's name is the one that its op looks up


def test_winners_are_kept_for_large_and_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "search", lambda path, tokens: [(1.5, policy.LaunchConfig(1, 1, min(tokens, 8)))])
    heard: list[str] = []
    device = tuning.tune(policy.Device("x", copy_gbps=1.0), lambda path, time, config: heard.append(path))
    assert heard == [path + suffix for path in tuning.PATHS for suffix in tuning.steps(path)]
    bounds = {int(key.partition("@")[2]) for key in heard if "@" in key}
    assert bounds <= set(policy.STEP_BOUNDS)
    assert device.measured and device.launch.keys() == set(heard)
